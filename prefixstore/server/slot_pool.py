"""The slots of a server: which one a request gets, and when one is saved, whatever costs the least time.

All of it runs in the event loop, which is the lock. A slot is *busy* from before anything is done to it until the
answer has ended. Requests wait for a slot in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixstore.format.keys import common_prefix
from prefixstore.server.rates import Rates
from prefixstore.server.slot_record import Claim, PoolSlot, Rows

__all__ = ["Elsewhere", "Plan", "PoolFullError", "SlotPool", "SlotsReplacedError"]

# A shorter common beginning is no reason to prefer a slot.
WORTH_KEEPING = 32
# When slots are saved, in seconds: how long one must be idle; how long it waits for a moment at which the server does
# nothing else, after which it is saved while other slots answer, but never while a request waits; and what takes no
# longer to compute is saved in idle time only.
DEBOUNCE = 0.25
PATIENCE = 10.0
SOON = 0.25
# While requests wait for a slot, one is copied before it goes only if computing that again would take so many times
# as long.
WORTH_WAITING = 8.0


class PoolFullError(Exception):
    """Too many requests wait for a slot already."""


class SlotsReplacedError(PoolFullError):
    """The server has other slots now than the one that was waited for."""


@dataclass(frozen=True)
class Plan:
    """What is done with a slot for a request.

    Attributes
    ----------
    n_live
        How many of the tokens of the prompt it is believed to hold.
    n_usable
        How many of them the server can certainly use: all, unless it would have to step back to a state that it may
        not have.
    n_lost
        How many tokens it loses.
    restore
        Whether to restore what the store has.
    save_first
        Whether it loses what is not stored, and the request waits until that is saved.
    erase_first
        Whether it must be emptied: for another tenant, or since its rows are not clean.
    """

    n_live: int
    n_usable: int
    n_lost: int
    restore: bool
    save_first: bool
    erase_first: bool


@dataclass
class Elsewhere:
    """A request that may use any slot; `is_harmless` if it leaves in none what others must not find."""

    is_harmless: bool = False


class SlotPool:
    """The slots of a server.

    Parameters
    ----------
    slots
        Number and length of the context of each.
    rates
        What work costs.
    max_waiting
        How many requests may wait for a slot.
    separated
        Whether each request may find only what its own tenant has put into a slot.

    Attributes
    ----------
    has_store
        Whether there is a store to save slots in.
    can_cut
        Whether the server can use any part of what a slot holds, as with full attention. A recurrent state, or the end
        of a sliding window, is of use only to a prompt that goes on from there.
    changed
        Set when a slot may have to be saved, or may be taken.
    n_elsewhere
        How many requests run that have no slot of their own.
    n_tainting, n_tainting_begun
        How many of them may leave any rows in any slot, and how many such requests have begun so far.
    """

    def __init__(
        self,
        slots: Sequence[tuple[int, int]],
        rates: Rates | None = None,
        *,
        max_waiting: int = 1024,
        separated: bool = False,
    ) -> None:
        self.slots = [PoolSlot(id_, n_ctx) for id_, n_ctx in slots]
        self.rates, self.separated = rates or Rates(), separated
        self.has_store, self.can_cut = False, True
        self.changed = asyncio.Event()
        self.n_elsewhere = self.n_tainting = self.n_tainting_begun = 0
        self._max_waiting = max_waiting
        self._waiting: list[tuple[Claim, asyncio.Future[PoolSlot]]] = []

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def n_busy(self) -> int:
        """How many slots are in use."""
        return sum(slot.is_busy for slot in self.slots)

    def idle(self) -> list[PoolSlot]:
        """The slots that nobody uses."""
        return [slot for slot in self.slots if not slot.is_busy]

    # -- free, busy, free ----------------------------------------------------------------------------------------------

    async def take(self, claim: Claim) -> PoolSlot:
        """Take the idle slot that costs least, or the wanted one, when it is this request's turn.

        Raises
        ------
        PoolFullError
            If too many wait already, or the slots are replaced before it has the wanted one.
        """
        # a slot that is idle is one that nobody waits for
        if (slot := self.take_now(claim)) is not None:
            return slot
        if len(self._waiting) >= self._max_waiting:
            raise PoolFullError("too many requests wait for a slot")
        claim.forget_lookup()
        granted: asyncio.Future[PoolSlot] = asyncio.get_running_loop().create_future()
        waiting = claim, granted
        self._waiting.append(waiting)
        try:
            return await granted
        except BaseException:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.changed.set()
            elif not granted.cancelled() and granted.exception() is None:
                # it was granted just now, and its slot is still there
                self.release(granted.result())
            raise

    def take_now(self, claim: Claim) -> PoolSlot | None:
        """Take the idle slot that costs least, or the wanted one; None if there is none."""
        slot = min(self.usable(claim), key=lambda slot: self.cost(slot, claim), default=None)
        return self.hold(slot) if slot is not None else None

    def usable(self, claim: Claim) -> list[PoolSlot]:
        """The idle slots that a request may get."""
        wanted = self.slots if claim.wanted is None else [self.slots[claim.wanted % len(self.slots)]]
        return [slot for slot in wanted if not slot.is_busy]

    def hold(self, slot: PoolSlot) -> PoolSlot:
        """Take this slot, which is idle."""
        assert not slot.is_busy, "a slot has one user at a time"
        slot.is_busy, slot.is_lost = True, False
        return slot

    def release(self, slot: PoolSlot) -> None:
        """Give a slot back, and let the next request have it."""
        slot.is_busy = False
        if self.n_tainting:
            self._taint(slot)
        self._grant()

    def _grant(self) -> None:
        """Let those who wait have the slots that are idle, in the order in which they came."""
        for waiting in list(self._waiting):
            claim, granted = waiting
            if not granted.done() and (taken := self.take_now(claim)) is not None:
                self._waiting.remove(waiting)
                granted.set_result(taken)
        self.changed.set()

    # -- what concerns all of them -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def elsewhere(self, *, taints: bool) -> Iterator[Elsewhere]:
        """While a request runs that may use any slot that is idle in the server; `taints` if it may leave any rows."""
        request = Elsewhere(is_harmless=not taints)
        self.n_elsewhere += 1
        self.n_tainting += taints
        self.n_tainting_begun += taints
        try:
            yield request
        finally:
            self.n_elsewhere -= 1
            self.n_tainting -= taints
            # also one that is busy here: it may be idle there already
            for slot in () if request.is_harmless else self.slots:
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

    def replaced(self, slots: Sequence[tuple[int, int]], *, are_empty: bool) -> bool:
        """Note which slots a server has that was started again, or is another one; whether they are other ones."""
        if slots == [(slot.id, slot.n_ctx) for slot in self.slots]:
            return False
        # a request that has one of the same number still works on that
        there = {slot.id: slot for slot in self.slots}
        self.slots = [there.get(id_, PoolSlot(id_, n_ctx)) for id_, n_ctx in slots]
        for slot, (_, n_ctx) in zip(self.slots, slots, strict=True):
            slot.n_ctx = n_ctx
        self.restarted(are_empty=are_empty)
        for claim, granted in self._waiting:
            if claim.wanted is not None and not granted.done():
                granted.set_exception(SlotsReplacedError("the slots of the server were replaced"))
        self._waiting = [(claim, granted) for claim, granted in self._waiting if claim.wanted is None]
        self._grant()
        return True

    # -- what a slot costs a request -----------------------------------------------------------------------------------

    def weigh(self, slot: PoolSlot, claim: Claim) -> Plan:
        """What to do with a slot for a claim, as far as it is known what the store has."""
        n_live = self.live(slot, claim)
        n_usable = n_live if self.can_cut or n_live == len(slot.tokens) else 0
        is_faster = self.rates.is_faster(self.rates.restoring(claim.n_bytes), claim.n_found - n_usable)
        restore = claim.n_found > n_usable and is_faster
        # the end of an answer is lost, too, but the tokens of that are not known
        n_lost = len(slot.tokens) - (0 if restore else n_live)
        is_foreign = self.separated and slot.owner not in (None, claim.owner)
        must_erase = is_foreign or slot.must_empty(trusts=claim.trusts)
        return Plan(n_live, n_usable, n_lost, restore, n_lost > 0 and self.would_save(slot), must_erase)

    def cost(self, slot: PoolSlot, claim: Claim) -> tuple[float, float]:
        """The seconds that a slot costs this request and later ones; of equal ones that used longest ago is cheaper."""
        rates, plan = self.rates, self.weigh(slot, claim)
        kept = claim.n_found if plan.restore else plan.n_live
        if kept < WORTH_KEEPING:
            # the first token of all prompts, say: no reason to take a slot from a conversation
            kept = 0
        seconds = rates.computing(len(claim.tokens) - kept) + (rates.restoring(claim.n_bytes) if plan.restore else 0.0)
        if plan.save_first:
            seconds += rates.saving(len(slot.tokens))
        # who comes back to what is lost here waits for a restore, or for the computing of what was not saved
        n_unsaved = min(plan.n_lost, slot.n_unsaved) if slot.is_dirty and not plan.save_first else 0
        seconds += 0.5 * (rates.restoring((plan.n_lost - n_unsaved) * rates.token_bytes) + rates.computing(n_unsaved))
        return round(seconds, 4), slot.used

    def live(self, slot: PoolSlot, claim: Claim) -> int:
        """How many tokens of its prompt a request is believed to find in a slot."""
        if slot.must_empty(trusts=claim.trusts) or slot.owner != claim.owner:
            return 0
        return common_prefix(slot.tokens, claim.tokens)

    def lead(self, slot: PoolSlot, claim: Claim) -> int:
        """How many more tokens of a prompt a slot holds than every idle one."""
        return self.live(slot, claim) - max((self.live(other, claim) for other in self.idle()), default=0)

    # -- saving --------------------------------------------------------------------------------------------------------

    def may_save(self, slot: PoolSlot) -> bool:
        """Whether what a slot holds may be stored."""
        return self.has_store and slot.is_clean and not self.n_tainting

    def would_save(self, slot: PoolSlot) -> bool:
        """Whether a request waits until this slot is saved, which it will take for itself."""
        if not self.may_save(slot) or not slot.is_worth_saving or time.monotonic() < slot.retry_at:
            return False
        computing, saving = self.rates.computing(slot.n_unsaved), self.rates.saving(len(slot.tokens))
        return computing > SOON and (not self._waiting or computing >= WORTH_WAITING * saving)

    def next_save(self) -> tuple[float, PoolSlot] | None:
        """When a slot is to be saved, and which; None if there is none, or while a request waits for a slot."""
        if not self.has_store or self._waiting or self.n_tainting:
            return None
        due = [(self._due(slot), slot) for slot in self.idle() if slot.is_worth_saving]
        return min(due, key=lambda one: one[0], default=None)

    def _due(self, slot: PoolSlot) -> float:
        if self.n_elsewhere == 0 and self.n_busy == 0:
            # between the answer of one conversation and the next question of another the server is not idle yet
            return max(slot.retry_at, max(one.used for one in self.slots) + DEBOUNCE)
        return max(slot.retry_at, slot.used + DEBOUNCE, slot.unsaved_since + PATIENCE)
