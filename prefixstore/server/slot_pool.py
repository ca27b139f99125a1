"""The slots of a server: one record for each, and every change of it. ``docs/servers.md`` draws the states.

All of it runs in the event loop, which is the lock. A slot is *busy* from before anything is done to it until the
answer has ended. Requests wait for a slot in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from prefixstore.format.keys import NO_TOKENS, Tokens
from prefixstore.server.chats import Turns

__all__ = [
    "WORTH_A_SAVE",
    "Elsewhere",
    "PoolClosedError",
    "PoolFullError",
    "PoolSlot",
    "Rank",
    "Request",
    "Rows",
    "SlotPool",
]

# Fewer new tokens are saved only when the server stops.
WORTH_A_SAVE = 32
# What orders slots for a request; the lowest is taken.
Rank = Callable[["PoolSlot"], Any]


class PoolFullError(Exception):
    """Too many requests wait for a slot already."""


class PoolClosedError(Exception):
    """The slots no longer exist: the server was replaced."""


@dataclass(frozen=True)
class Request:
    """A chat that a slot has answered: its path, its messages, and the tokens of its prompt."""

    path: str
    turns: Turns
    n_tokens: int


class Rows(IntEnum):
    """Whose rows a slot has. If they are not clean, it is not saved, and it is emptied before its next use."""

    # those of its tokens alone
    CLEAN = 0
    # a request that bypassed the store may have altered them: another such request of its owner may go on there
    ALTERED = 1
    # they may be anyone's
    UNKNOWN = 2


@dataclass(eq=False)
class PoolSlot:
    """What is known of a slot of the server.

    Attributes
    ----------
    id, n_ctx
        Its number, and the length of its context.
    tokens
        What it is believed to hold. The server compares tokens itself, so that an error here costs time only.
    owner
        The tenant whose tokens these are.
    rows
        Whether its rows are those of its tokens alone.
    is_busy
        Whether a request or a save has it.
    is_lost
        Whether the server was restarted while it was busy: what was done to it may belong to either server.
    n_unsaved, unsaved_since
        How many tokens entered it since it was saved, and when the first of them did.
    failures
        How many saves of it have failed since the last answer.
    request
        The chat that it has answered last; None if that is not what it holds.
    used
        When its last answer has ended.
    told
        What was done for its last prompt, as the client was told.
    computing_until
        When its prompt is probably computed; 0 if it is.
    """

    id: int
    n_ctx: int
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    owner: str | None = None
    rows: Rows = Rows.CLEAN
    is_busy: bool = False
    is_lost: bool = False
    n_unsaved: int = 0
    unsaved_since: float = 0.0
    failures: int = 0
    request: Request | None = None
    used: float = 0.0
    told: str | None = None
    computing_until: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether its rows are those of its tokens alone."""
        return self.rows is Rows.CLEAN

    @property
    def is_dirty(self) -> bool:
        """Whether it holds what can be stored, and is not."""
        return self.n_unsaved > 0 and self.is_clean

    @property
    def is_worth_saving(self) -> bool:
        """Whether it holds so much that can be stored, and is not, that all slots may wait for a save."""
        return self.is_dirty and self.n_unsaved >= WORTH_A_SAVE

    def must_empty(self, *, trusts: bool) -> bool:
        """Whether it must be emptied before a use; `trusts` if the user trusts the rows that it left there itself."""
        return self.rows > (Rows.ALTERED if trusts else Rows.CLEAN)

    # -- what is done to it, in this order -----------------------------------------------------------------------------

    def emptied(self) -> None:
        """Note that it holds nothing."""
        self.tokens, self.owner, self.request, self.rows = NO_TOKENS, None, None, Rows.CLEAN
        self.n_unsaved = self.failures = 0

    def filled(self, tokens: Tokens, owner: str | None) -> None:
        """Note that it holds what was restored, and nothing else."""
        self.tokens, self.owner, self.n_unsaved, self.request = tokens, owner, 0, None

    def lent(self, owner: str | None, seconds: float) -> None:
        """Note that a request of this tenant is sent to it: it may hold tokens of that, however the request ends."""
        self.owner, self.request = owner, None
        self.computing_until = time.monotonic() + seconds

    def answering(self) -> None:
        """Note that its prompt is computed: the first byte of the answer has arrived."""
        self.computing_until = 0.0

    def computed(self, tokens: Tokens, n_new: int) -> None:
        """Note that it holds these tokens of its owner, and that so many of them and of an answer are new."""
        self.tokens, self.failures = tokens, 0
        self._add_unsaved(n_new)

    def answered(self, request: Request | None = None) -> None:
        """Note that its answer has ended; `request` if it is that of a chat, and complete."""
        self.used, self.request = time.monotonic(), request

    def saved(self, tokens: Tokens) -> None:
        """Note that it holds these tokens, and that all of them are copied."""
        self.tokens, self.n_unsaved = tokens, 0

    def stored(self) -> None:
        """Note that what was copied is stored."""
        self.failures = 0

    def not_saved(self, n_lost: int = 0) -> None:
        """Note that a save of it has failed, and that so many tokens are not copied, after all."""
        self.failures += 1
        self._add_unsaved(n_lost)

    def doubt(self, rows: Rows = Rows.UNKNOWN) -> None:
        """Note that its rows may be other than those of its tokens."""
        self.rows = max(self.rows, rows)

    def _add_unsaved(self, n: int) -> None:
        if not self.n_unsaved:
            self.unsaved_since = time.monotonic()
        self.n_unsaved += n


@dataclass
class Elsewhere:
    """A request that may use any slot; `is_harmless` if it turned out that it used none."""

    is_harmless: bool = False


@dataclass
class _Waiting:
    """A request that waits for a slot."""

    rank: Rank
    wanted: int | None
    granted: asyncio.Future[PoolSlot]


class SlotPool:
    """The slots of a server.

    Parameters
    ----------
    slots
        Number and length of the context of each.
    max_waiting
        How many requests may wait for a slot.
    separated
        Whether each request may find only what its own tenant has put into a slot.

    Attributes
    ----------
    changed
        Set when a slot may have to be saved, or may be taken.
    n_elsewhere
        How many requests run that have no slot of their own.
    n_tainting, n_tainting_begun
        How many of them may leave any rows in any slot, and how many such requests have begun so far.
    """

    def __init__(self, slots: Sequence[tuple[int, int]], *, max_waiting: int = 1024, separated: bool = False) -> None:
        self.slots = [PoolSlot(id_, n_ctx) for id_, n_ctx in slots]
        self.separated = separated
        self.changed = asyncio.Event()
        self.n_elsewhere = self.n_tainting = self.n_tainting_begun = 0
        self._max_waiting = max_waiting
        self._waiting: list[_Waiting] = []
        self._is_closed = False

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def n_busy(self) -> int:
        """How many slots are in use."""
        return sum(slot.is_busy for slot in self.slots)

    def idle(self, wanted: int | None = None) -> list[PoolSlot]:
        """The slots that nobody uses, or the wanted one if that is so."""
        slots = self.slots if wanted is None else [self.slots[wanted % len(self.slots)]]
        return [slot for slot in slots if not slot.is_busy]

    # -- free, busy, free ----------------------------------------------------------------------------------------------

    async def take(self, rank: Rank, wanted: int | None = None) -> PoolSlot:
        """Take the idle slot of the lowest rank, or the wanted one, when it is this request's turn.

        Raises
        ------
        PoolFullError
            If too many wait already.
        PoolClosedError
            If the slots are no longer there.
        """
        if self._is_closed:
            raise PoolClosedError
        # a slot that is idle is one that nobody waits for
        if (slot := self.take_now(rank, wanted)) is not None:
            return slot
        if len(self._waiting) >= self._max_waiting:
            raise PoolFullError
        waiting = _Waiting(rank, wanted, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            return await waiting.granted
        except BaseException:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.changed.set()
            elif not waiting.granted.cancelled() and waiting.granted.exception() is None:
                # it was granted just now
                self.release(waiting.granted.result())
            raise

    def take_now(self, rank: Rank, wanted: int | None = None) -> PoolSlot | None:
        """Take the idle slot of the lowest rank, or the wanted one; None if there is none."""
        slot = min(self.idle(wanted), key=rank, default=None)
        return self.hold(slot) if slot is not None else None

    def hold(self, slot: PoolSlot) -> PoolSlot:
        """Take this slot, which is idle."""
        assert not slot.is_busy, "a slot has one user at a time"
        slot.is_busy, slot.is_lost = True, False
        return slot

    def exchange(self, slot: PoolSlot, rank: Rank, unusable: Collection[PoolSlot] = ()) -> PoolSlot:
        """A slot of the lowest rank instead of a busy one: an idle one, or the same if none is better."""
        usable = [one for one in (slot, *self.idle()) if one not in unusable]
        best = min(usable, key=rank, default=slot)
        if best is not slot:
            self.hold(best)
            self.release(slot)
        return best

    def release(self, slot: PoolSlot) -> None:
        """Give a slot back, and let the next request have it."""
        # also if its request has gone before the answer began
        slot.is_busy, slot.computing_until = False, 0.0
        if self.n_tainting:
            self._taint(slot)
        for waiting in list(self._waiting):
            if not waiting.granted.done() and (granted := self.take_now(waiting.rank, waiting.wanted)) is not None:
                self._waiting.remove(waiting)
                waiting.granted.set_result(granted)
        self.changed.set()

    def continued(self, path: str, turns: Turns, owner: str | None) -> tuple[PoolSlot, Request] | None:
        """Take the idle slot whose last request this one continues; None if there is none, or others wait."""
        found = [
            (slot, last)
            for slot in self.idle()
            if (last := slot.request) is not None
            and (last.path, slot.owner, slot.is_clean) == (path, owner, True)
            and turns.follow(last.turns)
        ]
        if self._waiting or not found:
            return None
        slot, last = max(found, key=lambda one: len(one[1].turns.messages))
        slot.request = None
        return self.hold(slot), last

    # -- what concerns all of them -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def elsewhere(self, *, taints: bool) -> Iterator[Elsewhere]:
        """While a request runs that may use any slot that is idle in the server; `taints` if it may leave any rows."""
        request = Elsewhere()
        self.n_elsewhere += 1
        self.n_tainting += taints
        self.n_tainting_begun += taints
        try:
            yield request
        finally:
            self.n_elsewhere -= 1
            self.n_tainting -= taints
            for slot in () if request.is_harmless else self.slots:
                # none is certain to hold its last answer; one that is busy here may be idle there already
                slot.request = None
                if taints:
                    self._taint(slot)
            # meanwhile nothing was saved
            self.changed.set()

    def _taint(self, slot: PoolSlot) -> None:
        # they may be those of another tenant
        slot.doubt(Rows.UNKNOWN if self.separated else Rows.ALTERED)

    def restarted(self, *, are_empty: bool = True) -> None:
        """What the slots hold is lost, or unknown if they are not certainly empty: then each is emptied before use."""
        for slot in self.slots:
            slot.emptied()
            slot.is_lost = slot.is_busy
            if not are_empty:
                slot.doubt()

    def close(self) -> None:
        """Note that the slots no longer exist. Waiting requests are refused; those that have a slot are not ended."""
        self._is_closed = True
        for slot in self.slots:
            slot.is_lost = True
        for waiting in self._waiting:
            if not waiting.granted.done():
                waiting.granted.set_exception(PoolClosedError())
