"""What each slot holds, who uses it, and which one a request gets.

All of it runs in the event loop. A slot is *held* by one request or by one save at a time, from before anything is done
to it until the answer has ended. Requests wait for a slot in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from prefixstore.format.keys import NO_TOKENS, Tokens, common_prefix
from prefixstore.server.rates import Rates
from prefixstore.server.turns import Turns

__all__ = [
    "WORTH_A_SAVE",
    "Choice",
    "PoolClosedError",
    "PoolFullError",
    "PoolSlot",
    "Request",
    "SlotPool",
]

# Fewer new tokens are saved only when the server stops.
WORTH_A_SAVE = 32
# A shorter common beginning is no reason to prefer a slot.
WORTH_KEEPING = 32


class PoolFullError(Exception):
    """Too many requests wait for a slot already."""


class PoolClosedError(Exception):
    """The slots no longer exist: the server was replaced."""


@dataclass(frozen=True)
class Request:
    """A chat that a slot has answered.

    Attributes
    ----------
    path
        Of the request.
    turns
        Its messages.
    n_tokens
        Tokens of its prompt.
    """

    path: str
    turns: Turns
    n_tokens: int


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
    n_unsaved
        How many tokens entered it since it was saved.
    is_tainted
        Whether its rows may be other than those of its tokens alone: it is not saved, and emptied before its next use.
    is_unknown
        Whether its rows may be those of anyone: it is tainted, and emptied also before those who would trust it.
    is_held
        Whether a request or a save has it.
    generation
        Which start of the server it belongs to.
    used
        When it was given back, in releases of all slots: the lowest was used longest ago.
    failures
        How many saves of it have failed since the last answer.
    request
        The chat that it has answered last; None if that is not what it holds.
    """

    id: int
    n_ctx: int
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    owner: str | None = None
    n_unsaved: int = 0
    is_tainted: bool = False
    is_unknown: bool = False
    is_held: bool = False
    generation: int = 0
    used: float = 0.0
    failures: int = 0
    request: Request | None = None

    def forget(self) -> None:
        """Note that it is empty, or that its contents are unknown."""
        self.tokens, self.owner, self.request = NO_TOKENS, None, None
        self.n_unsaved = self.failures = 0

    def doubt(self) -> None:
        """Note that neither its rows nor their tenant are known."""
        self.is_tainted = self.is_unknown = True

    def must_empty(self, *, trusts: bool) -> bool:
        """Whether it must be emptied before a use; `trusts` if the user trusts the rows that it left there itself."""
        return self.is_unknown or (self.is_tainted and not trusts)

    @property
    def is_worth_saving(self) -> bool:
        """Whether it holds so much that can be stored, and is not, that all slots may wait for a save."""
        return self.is_dirty and self.n_unsaved >= WORTH_A_SAVE

    @property
    def is_dirty(self) -> bool:
        """Whether it holds what can be stored, and is not."""
        return self.n_unsaved > 0 and not self.is_tainted


@dataclass(frozen=True)
class Choice:
    """The slot chosen for a request.

    Attributes
    ----------
    slot
        The slot, now held.
    n_live
        How many of the tokens of the prompt it is believed to hold.
    n_usable
        How many of them the server can certainly use: all, unless it would have to step back to a state that it may
        not have.
    restore
        Whether to restore what the store has.
    save_first
        Whether it loses what is not stored, and the request waits until that is saved.
    erase_first
        Whether it must be emptied: for another tenant, or since it is tainted.
    """

    slot: PoolSlot
    n_live: int
    n_usable: int
    restore: bool
    save_first: bool
    erase_first: bool


@dataclass(eq=False)
class _Waiting:
    """A request that waits for any slot, or for a certain one."""

    wanted: int | None
    turn: asyncio.Future[None] | None = None


@dataclass
class Foreign:
    """A request that may use any slot.

    Attributes
    ----------
    is_harmless
        Whether it turned out that it used none.
    """

    is_harmless: bool = False


class SlotPool:
    """The slots of a server.

    Parameters
    ----------
    slots
        Number and length of the context of each.
    rates
        What work costs, to compare slots.
    max_waiting
        How many requests may wait for a slot.
    separated
        Whether each request may find only what its own tenant has put into a slot.

    Attributes
    ----------
    can_cut
        Whether the server can use any part of what a slot holds, as with full attention. A recurrent state, or the end
        of a sliding window, is of use only to a prompt that goes on from there.
    is_worth_a_wait
        Whether a request waits until what a slot loses to it is saved; asked when slots are compared, and when one is
        taken. Set by who saves.
    n_foreign, n_foreign_begun
        How many requests run that may leave any rows in any slot, and how many have begun so far.
    """

    def __init__(
        self, slots: Sequence[tuple[int, int]], rates: Rates, *, max_waiting: int = 1024, separated: bool = False
    ) -> None:
        self.slots = [PoolSlot(id_, n_ctx) for id_, n_ctx in slots]
        self.rates = rates
        self.generation = 0
        self.can_cut = True
        self.when_free: Callable[[], None] = lambda: None
        self.is_worth_a_wait: Callable[[PoolSlot], bool] = lambda slot: slot.is_worth_saving
        self._max_waiting = max_waiting
        self._separated = separated
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self._clock = 0.0
        # requests that may use any slot: those that run, and how many have begun
        self.n_foreign = 0
        self.n_foreign_begun = 0

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def n_held(self) -> int:
        """How many slots are in use."""
        return sum(slot.is_held for slot in self.slots)

    def continued(self, path: str, turns: Turns, owner: str | None) -> PoolSlot | None:
        """Hold the idle slot whose last request this one continues; None if there is none, or others wait."""
        if self._waiting:
            return None
        best, most = None, 0
        for slot in self.slots:
            last = slot.request
            if last is None or slot.is_held or slot.is_tainted or slot.owner != owner or last.path != path:
                continue
            if len(last.turns.messages) > most and turns.follow(last.turns):
                best, most = slot, len(last.turns.messages)
        if best is not None:
            self.hold(best)
        return best

    def forget_requests(self) -> None:
        """Note that a request has used unknown slots: none is certain to hold its last response."""
        for slot in self.slots:
            slot.request = None

    async def wait_for_slot(self, wanted: int | None = None) -> None:
        """Return when a slot, or the wanted one, is idle, and it is this request's turn.

        Raises
        ------
        PoolFullError
            If too many wait already.
        PoolClosedError
            If the slots are no longer there.
        """
        if self._is_closed:
            raise PoolClosedError
        wanted = None if wanted is None else wanted % len(self.slots)
        if self._is_idle(wanted) and not any(wanted is None or one.wanted in (None, wanted) for one in self._waiting):
            return
        if len(self._waiting) >= self._max_waiting:
            raise PoolFullError
        entry = _Waiting(wanted)
        self._waiting.append(entry)
        try:
            entry.turn = asyncio.get_running_loop().create_future()
            self._next()
            await entry.turn
            # one that wants a certain slot may lose it to one that takes any
            while not self._is_idle(wanted):
                entry.turn = asyncio.get_running_loop().create_future()
                await entry.turn
        except (asyncio.CancelledError, PoolClosedError):
            self._waiting.remove(entry)
            self._next()  # its turn may have come just now
            raise
        self._waiting.remove(entry)

    def choose(
        self,
        tokens: Tokens,
        owner: str | None,
        *,
        wanted: int | None = None,
        trusts: bool = False,
        without: Collection[int] = (),
    ) -> Choice | None:
        """Hold the idle slot with which a response is fastest without the store; None if there is none.

        Parameters
        ----------
        tokens
            The prompt; empty if it is unknown.
        owner
            Its tenant.
        wanted
            The slot that the client wants.
        trusts
            Whether the rows of a tainted slot will do.
        without
            Slots that cannot be used.
        """
        idle = [slot for slot in self._candidates(wanted) if not slot.is_held and slot.id not in without]
        if not idle:
            return None
        slot = min(idle, key=lambda slot: self._cost(slot, tokens, owner, 0, 0, trusts=trusts))
        self.hold(slot)
        return self.weigh(slot, tokens, owner, 0, 0, trusts=trusts)

    def lead(self, slot: PoolSlot, tokens: Tokens, owner: str | None) -> int:
        """How many more tokens of a prompt a slot holds than every idle one."""
        most = max((self._live(other, tokens, owner) for other in self.slots if not other.is_held), default=0)
        return self._live(slot, tokens, owner) - most

    def swap(
        self,
        slot: PoolSlot,
        tokens: Tokens,
        owner: str | None,
        n_found: int,
        n_bytes: int,
        *,
        without: Collection[int] = (),
    ) -> PoolSlot:
        """The held slot, or instead an idle one that costs less, given what the store has."""
        idle = [slot, *(other for other in self.slots if not other.is_held and other.id not in without)]
        best = min(idle, key=lambda slot: self._cost(slot, tokens, owner, n_found, n_bytes))
        if best is not slot:
            self.hold(best)
            slot.is_held = False  # not used, and not by a request that waits: there was an idle one
            self._next()
        return best

    def weigh(
        self,
        slot: PoolSlot,
        tokens: Tokens,
        owner: str | None,
        n_found: int,
        n_bytes: int,
        *,
        trusts: bool = False,
        tries: bool = False,
    ) -> Choice:
        """What to do with a slot for a prompt. With `tries`, what was found is restored even if that is slower."""
        n_live = self._live(slot, tokens, owner, trusts=trusts)
        n_usable = n_live if self.can_cut or n_live == len(slot.tokens) else 0
        is_faster = tries or self.rates.is_faster(self.rates.restoring(n_bytes), n_found - n_usable)
        restore = n_found > n_usable and is_faster
        n_lost = len(slot.tokens) - (0 if restore else n_live)
        is_foreign = self._separated and slot.owner not in (None, owner)
        # the end of an answer is lost, too, but the tokens of that are not known
        save_first = n_lost > 0 and self.is_worth_a_wait(slot)
        must_erase = is_foreign or slot.must_empty(trusts=trusts)
        return Choice(slot, n_live, n_usable, restore, save_first, must_erase)

    def _cost(
        self, slot: PoolSlot, tokens: Tokens, owner: str | None, n_found: int, n_bytes: int, *, trusts: bool = False
    ) -> tuple[float, float]:
        rates, choice = self.rates, self.weigh(slot, tokens, owner, n_found, n_bytes, trusts=trusts)
        kept = n_found if choice.restore else choice.n_live
        if kept < WORTH_KEEPING:
            # the first token of all prompts, say: no reason to take a slot from a conversation
            kept = 0
        seconds = rates.computing(len(tokens) - kept) + (rates.restoring(n_bytes) if choice.restore else 0.0)
        if choice.save_first:
            seconds += rates.saving(len(slot.tokens))
        # who comes back to what is lost here waits for a restore, or for the computing of what was not saved
        n_lost = len(slot.tokens) - (0 if choice.restore else choice.n_live)
        n_unsaved = min(n_lost, slot.n_unsaved) if slot.is_dirty and not choice.save_first else 0
        seconds += 0.5 * (rates.restoring((n_lost - n_unsaved) * rates.token_bytes) + rates.computing(n_unsaved))
        return round(seconds, 4), slot.used

    def _candidates(self, wanted: int | None) -> list[PoolSlot]:
        return self.slots if wanted is None else [self.slots[wanted % len(self.slots)]]

    def _live(self, slot: PoolSlot, tokens: Tokens, owner: str | None, *, trusts: bool = False) -> int:
        if slot.must_empty(trusts=trusts) or slot.owner != owner:
            return 0
        return common_prefix(slot.tokens, tokens)

    def hold(self, slot: PoolSlot) -> None:
        """Take an idle slot."""
        assert not slot.is_held, "a slot is held once"
        slot.is_held, slot.generation = True, self.generation

    def release(self, slot: PoolSlot) -> None:
        """Give a slot back, and let the next request have it."""
        slot.is_held = False
        self._clock += 1
        slot.used = self._clock
        if self.n_foreign:
            self._taint(slot)
        self._next()
        self.when_free()

    def is_current(self, slot: PoolSlot) -> bool:
        """Whether the server in which the slot was taken is still running."""
        return slot.generation == self.generation

    def close(self) -> None:
        """Note that the slots no longer exist. Waiting requests are refused; those that have a slot are not ended."""
        self._is_closed = True
        self.generation += 1
        for one in self._waiting:
            if one.turn is not None and not one.turn.done():
                one.turn.set_exception(PoolClosedError())

    def restarted(self, *, are_empty: bool = True) -> None:
        """What the slots hold is lost, or unknown if they are not certainly empty: then each is emptied before use."""
        self.generation += 1
        for slot in self.slots:
            slot.forget()
            slot.is_tainted = slot.is_unknown = not are_empty

    @contextlib.contextmanager
    def tainting(self) -> Iterator[Foreign]:
        """While a request runs that may leave any rows in any slot that is idle in the server."""
        foreign = Foreign()
        self.n_foreign += 1
        self.n_foreign_begun += 1
        try:
            yield foreign
        finally:
            self.n_foreign -= 1
            if not foreign.is_harmless:
                # one that is held here may be idle there already
                self.forget_requests()
                for slot in self.slots:
                    self._taint(slot)
            # meanwhile nothing was saved
            self.when_free()

    def _taint(self, slot: PoolSlot) -> None:
        slot.is_tainted = True
        # they may be those of another tenant
        slot.is_unknown |= self._separated

    def _is_idle(self, wanted: int | None) -> bool:
        return any(not slot.is_held for slot in self.slots if wanted is None or slot.id == wanted)

    def _next(self) -> None:
        """Wake the first that can have a slot. Each that gives up wakes the next one."""
        n_idle = sum(not slot.is_held for slot in self.slots)
        for one in self._waiting:
            if n_idle == 0:
                return
            if self._is_idle(one.wanted):
                if one.turn is not None and not one.turn.done():
                    one.turn.set_result(None)
                n_idle -= 1
