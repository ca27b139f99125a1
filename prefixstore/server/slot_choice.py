"""Which slot a request gets, what is done to it before, and when one is saved: whatever costs the least time."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.server.rates import Rates
from prefixstore.server.slot_pool import PoolSlot, SlotPool

__all__ = ["Claim", "Plan", "SlotChoice", "Timing"]

# A shorter common beginning is no reason to prefer a slot.
WORTH_KEEPING = 32
MAX_FAILURES = 3
# While requests wait for a slot, one is copied before it goes only if computing that again would take so many times
# as long.
WORTH_WAITING = 8.0
UNKNOWN_PROMPT_SECONDS = 5.0


@dataclass(frozen=True)
class Timing:
    """When slots are saved, in seconds.

    Attributes
    ----------
    debounce
        How long a slot must be idle.
    patience
        How long it waits for a moment at which the server does nothing else. After that it is saved while other
        slots answer, but never while a request waits.
    soon
        What takes no longer to compute is saved in idle time only: no request waits for that.
    """

    debounce: float = 0.25
    patience: float = 10.0
    soon: float = 0.25


@dataclass(eq=False)
class Claim:
    """What a request wants of a slot, which one it has, and what was done to it for the request.

    Attributes
    ----------
    tokens
        The prompt; empty if it is unknown. Of a chat that continues in its slot, what is known of the slot.
    owner
        Its tenant.
    wanted
        The slot that the client wants; None for any.
    asks
        Whether the store is asked for the prompt.
    trusts
        Whether altered rows will do, as for the same requests that have left them there.
    slot
        The slot, once it has one.
    n_found, n_bytes
        How many tokens of the prompt the store has, and the bytes of their state.
    n_continued
        How many tokens the chat had that it continues, for which the store was not asked; 0 if it was.
    n_restored
        How many tokens were restored for it.
    n_reused
        How many tokens of the prompt the slot is believed to hold when the request is sent.
    n_ahead
        How many tokens were computed ahead of the request itself.
    restored_seconds, lookup_seconds
        Time that this took; None if nothing was to be restored, or the store was not asked.
    saved_seconds
        Time by which that was faster than computing the tokens.
    reason
        Why nothing was restored; None if something was, or nothing was needed.
    must_compute
        Whether nothing that the slot holds may be used: it should have been emptied, and that has failed.
    """

    tokens: Tokens
    owner: str | None
    wanted: int | None = None
    asks: bool = True
    trusts: bool = False
    slot: PoolSlot = field(init=False)
    n_found: int = 0
    n_bytes: int = 0
    n_continued: int = 0
    n_restored: int = 0
    n_reused: int = 0
    n_ahead: int = 0
    restored_seconds: float | None = None
    saved_seconds: float = 0.0
    lookup_seconds: float | None = None
    reason: str | None = None
    must_compute: bool = False

    @property
    def told(self) -> str:
        """What was done for the prompt, as the client is told before it is computed."""
        if self.n_continued:
            return "restored=0; reason=live"
        reason = self.reason or ("live" if self.n_reused and not self.n_restored else None)
        n, computed = len(self.tokens), len(self.tokens) - self.n_reused
        return f"restored={self.n_restored} of {n}; computed={computed}" + (f"; reason={reason}" if reason else "")


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


class SlotChoice:
    """Compares slots.

    Parameters
    ----------
    pool
        The slots.
    rates
        What work costs.
    timing
        When slots are saved.

    Attributes
    ----------
    has_store
        Whether there is a store to save slots in.
    can_cut
        Whether the server can use any part of what a slot holds, as with full attention. A recurrent state, or the end
        of a sliding window, is of use only to a prompt that goes on from there.
    """

    def __init__(self, pool: SlotPool, rates: Rates, timing: Timing) -> None:
        self.rates = rates
        self.has_store = False
        self.can_cut = True
        self._pool, self._timing = pool, timing

    # -- for a request -------------------------------------------------------------------------------------------------

    def plan(self, claim: Claim) -> Plan:
        """What to do with the slot of a claim, now that it is known what the store has."""
        plan, rates = self.weigh(claim.slot, claim), self.rates
        # Restoring may be slower only since the slot holds nearly as much: then there is nothing to learn from a try.
        is_slow = not rates.is_faster(rates.restoring(claim.n_bytes), claim.n_found)
        may_try = claim.n_found > plan.n_usable and (plan.restore or is_slow)
        if may_try and rates.tries(is_faster=plan.restore) and not plan.restore:
            return self.weigh(claim.slot, claim, tries=True)
        return plan

    def weigh(self, slot: PoolSlot, claim: Claim, *, tries: bool = False) -> Plan:
        """What to do with a slot for a claim. With `tries`, what was found is restored even if that is slower."""
        n_live = self.live(slot, claim)
        n_usable = n_live if self.can_cut or n_live == len(slot.tokens) else 0
        is_faster = tries or self.rates.is_faster(self.rates.restoring(claim.n_bytes), claim.n_found - n_usable)
        restore = claim.n_found > n_usable and is_faster
        # the end of an answer is lost, too, but the tokens of that are not known
        n_lost = len(slot.tokens) - (0 if restore else n_live)
        is_foreign = self._pool.separated and slot.owner not in (None, claim.owner)
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
        return self.live(slot, claim) - max((self.live(other, claim) for other in self._pool.idle()), default=0)

    def computing(self, claim: Claim, n_reused: int) -> float:
        """Seconds in which the prompt will probably be computed."""
        n_tokens = len(claim.tokens)
        return 1.5 * (self.rates.computing(n_tokens - n_reused) if n_tokens else UNKNOWN_PROMPT_SECONDS)

    # -- saving --------------------------------------------------------------------------------------------------------

    def may_save(self, slot: PoolSlot) -> bool:
        """Whether what a slot holds may be stored."""
        return self.has_store and slot.is_clean and not self._pool.n_tainting

    def would_save(self, slot: PoolSlot) -> bool:
        """Whether a request waits until this slot is saved, which it will take for itself."""
        if not self.may_save(slot) or not slot.is_worth_saving or slot.failures >= MAX_FAILURES:
            return False
        computing, saving = self.rates.computing(slot.n_unsaved), self.rates.saving(len(slot.tokens))
        return computing > self._timing.soon and (not self._pool.n_waiting or computing >= WORTH_WAITING * saving)

    def next_save(self) -> tuple[float, PoolSlot] | None:
        """When a slot is to be saved, and which; None if there is none, or while a request waits for a slot."""
        pool = self._pool
        if not self.has_store or pool.n_waiting or pool.n_tainting:
            return None
        waiting = [slot for slot in pool.idle() if slot.is_worth_saving and slot.failures < MAX_FAILURES]
        due = [(self._due(slot), slot) for slot in waiting]
        return min(due, key=lambda one: one[0], default=None)

    def _due(self, slot: PoolSlot) -> float:
        pause, slots = self._timing.debounce * (1 + 4 * slot.failures), self._pool.slots
        if self._pool.n_elsewhere == 0 and self._pool.n_busy == 0:
            # between the answer of one conversation and the next question of another the server is not idle yet
            return max(one.used for one in slots) + pause
        longest = slot.unsaved_since + self._timing.patience
        return max(slot.used + pause, longest, *(one.computing_until for one in slots))
