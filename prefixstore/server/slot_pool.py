"""What is known of the slots of a server, one record for each, and what to do with them; `SlotManager` does it.

A request gets the slot that costs least time, and a slot is saved when that costs least.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from prefixstore.format.keys import NO_TOKENS, Tokens, common_prefix
from prefixstore.server.rates import Rates, RequestUsage
from prefixstore.server.slot_files import Restored

# what the store has of a prompt for which it was not asked
NOT_ASKED = Restored()
# Fewer new tokens are saved only when the server stops.
WORTH_A_SAVE = 32
# how long after a save that has failed
RETRY_SECONDS = 10.0
# A shorter common beginning is no reason to prefer a slot.
WORTH_KEEPING = 32
# When slots are saved, in seconds: how long one must be idle; how long it waits for a moment at which the server does
# nothing else, after which it is saved while other slots answer, but never while a request waits; and what can be
# computed again within `SOON` is saved in idle time only.
DEBOUNCE = 0.25
PATIENCE = 10.0
SOON = 0.25
# While requests wait for a slot, one is copied before it is given away only if computing its contents again would
# take this many times as long.
WORTH_WAITING = 8.0


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

    The server compares tokens itself, so that an error in `tokens` costs time only; `owner` is the tenant whose tokens
    these are.
    """

    id: int
    n_ctx: int
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    owner: str | None = None
    rows: Rows = Rows.CLEAN
    # a request has it
    is_busy: bool = False
    # a save begun while no request had it: a request that takes it waits for the end of that
    saving: asyncio.Future[bool] | None = None
    # how many tokens of an answer follow `tokens`, which are not known; the length of the prompt that is being computed
    n_answer: int = 0
    n_computing: int = 0
    # how many tokens entered it since it was saved, and when the first of them did
    n_unsaved: int = 0
    unsaved_since: float = 0.0
    # when it may be saved again, after that has failed
    retry_at: float = 0.0
    # when its last answer has ended
    used: float = 0.0
    # what was done for its last prompt, as the client was told
    told: str | None = None

    @property
    def is_clean(self) -> bool:
        """Whether its rows are those of its tokens alone."""
        return self.rows is Rows.CLEAN

    @property
    def n_held(self) -> int:
        """How many tokens it holds, or will hold when its prompt is computed."""
        return max(len(self.tokens) + self.n_answer, self.n_computing)

    @property
    def is_dirty(self) -> bool:
        """Whether it holds unsaved tokens that can be stored."""
        return self.n_unsaved > 0 and self.is_clean

    @property
    def is_worth_saving(self) -> bool:
        """Whether it holds this many unsaved tokens that all slots may wait for a save."""
        return self.n_unsaved >= WORTH_A_SAVE and self.is_clean

    def must_empty(self, *, trusts: bool) -> bool:
        """Whether it must be emptied before a use; `trusts` if the user trusts the rows that it left there itself."""
        return self.rows > (Rows.ALTERED if trusts else Rows.CLEAN)

    # -- what is done to it, in this order -----------------------------------------------------------------------------

    def emptied(self) -> None:
        """Note that it holds nothing."""
        self.filled(NO_TOKENS, None)
        self.rows = Rows.CLEAN

    def filled(self, tokens: Tokens, owner: str | None) -> None:
        """Note that it holds what was restored or copied, and nothing else."""
        self.tokens, self.owner, self.n_answer, self.n_unsaved = tokens, owner, 0, 0

    def computed(self, tokens: Tokens, n_new: int, n_answer: int = 0) -> None:
        """Note that it holds these tokens of its owner, and how many of them, with those of the answer, are new."""
        if not self.n_unsaved:
            self.unsaved_since = time.monotonic()
        self.tokens, self.n_answer = tokens, n_answer
        self.n_unsaved = min(self.n_unsaved + n_new, len(tokens) + n_answer)

    def lost(self) -> None:
        """Note that it may hold anything. Its owner stays until it was emptied for certain."""
        self.filled(NO_TOKENS, self.owner)
        self.doubt()

    def not_saved(self) -> None:
        """Note that a save of it has failed: it is tried again after a while, and at the end."""
        self.retry_at = time.monotonic() + RETRY_SECONDS

    def doubt(self, rows: Rows = Rows.UNKNOWN) -> None:
        """Note that its rows may be other than those of its tokens."""
        self.rows = max(self.rows, rows)


@dataclass(eq=False)
class Claim:
    """What a request wants of a slot, which one it has, and what was done to it for the request."""

    # the prompt; empty if it is unknown
    tokens: Tokens
    owner: str | None
    # the slot that the client wants; None for any
    wanted: int | None = None
    # whether the store is asked for the prompt
    asks: bool = True
    # whether altered rows will do, as for the same requests that have left them there
    trusts: bool = False
    slot: PoolSlot = field(init=False)
    # what the store has of the prompt
    found: Restored = NOT_ASKED
    n_restored: int = 0
    # tokens of the prompt that the slot is believed to hold when the request is sent: the last one is always computed
    n_reused: int = 0
    # how many tokens were computed ahead of the request itself
    n_ahead: int = 0
    # None if nothing was to be restored, or the store was not asked
    restored_seconds: float | None = None
    lookup_seconds: float | None = None
    # by how much the restore was faster than computing the tokens
    saved_seconds: float = 0.0
    # why nothing was restored; None if something was, or nothing was needed
    reason: str | None = None
    # whether nothing that the slot holds may be used, because it could not be emptied
    must_compute: bool = False
    # whose rows the slot has after the request
    leaves: Rows = Rows.CLEAN

    @property
    def told(self) -> str:
        """What was done for the prompt, as the client is told before it is computed."""
        reason = None if self.n_restored else self.reason or ("live" if self.n_reused else self.found.reason)
        n, computed = len(self.tokens), len(self.tokens) - self.n_reused
        return f"restored={self.n_restored} of {n}; computed={computed}" + (f"; reason={reason}" if reason else "")

    def outcome(self, usage: RequestUsage) -> tuple[str, str | None]:
        """Where the server has found the beginning of the prompt: "store", "live" or "none"; why not in the store."""
        if self.n_restored:
            return ("store", None) if usage.cached_tokens else ("none", "restored_in_vain")
        if usage.cached_tokens:
            return "live", self.reason
        # without a reason, it was believed to be in the slot
        return "none", self.reason or self.found.reason or "not_live"


@dataclass(frozen=True)
class Plan:
    """What is done with a slot for a request."""

    # the tokens of the prompt that it is believed to hold
    n_live: int
    # how many of these it can certainly use: all, unless it would have to step back to a state that it may not have
    n_usable: int
    n_lost: int
    restore: bool
    # whether the request waits until what the slot would lose is saved
    save_first: bool
    # because it holds tokens of another tenant, or its rows are not clean
    erase_first: bool


class SlotPool:
    """The slots of a server, from its start to its end, given as numbers and lengths.

    With `separated`, each request may find only what its own tenant has put into a slot. The owner sets how many
    requests wait, `has_store`, and `can_cut`: whether the server can use any part of what a slot holds, as with full
    attention. A recurrent state, or the end of a sliding window, is of use only to a prompt that goes on from there.
    With `is_unified`, all slots together have the room of one.
    """

    def __init__(
        self, slots: Sequence[tuple[int, int]], rates: Rates | None = None, *, separated: bool = False
    ) -> None:
        self.slots = [PoolSlot(id_, n_ctx) for id_, n_ctx in slots]
        self.rates, self.separated = rates or Rates(), separated
        self.has_store, self.can_cut, self.is_unified = False, True, False
        self.n_waiting = 0

    @property
    def n_busy(self) -> int:
        """How many slots are in use, or are being saved."""
        return sum(slot.is_busy or slot.saving is not None for slot in self.slots)

    def idle(self, wanted: int | None = None) -> list[PoolSlot]:
        """Idle slots; only `wanted`, if it is given."""
        slots = self.slots if wanted is None else [self.slots[wanted % len(self.slots)]]
        return [slot for slot in slots if not slot.is_busy]

    # -- what a slot costs a request -----------------------------------------------------------------------------------

    def cheapest(self, claim: Claim) -> PoolSlot:
        """The idle slot that a request gets."""
        return min(self.idle(claim.wanted), key=lambda slot: self.cost(slot, claim))

    def weigh(self, slot: PoolSlot, claim: Claim) -> Plan:
        """What to do with a slot for a claim, as far as it is known what the store has."""
        n_live, found = self.live(slot, claim), claim.found
        n_usable = n_live if self.can_cut or n_live == len(slot.tokens) else 0
        is_faster = self.rates.is_faster(self.rates.restoring(found.n_bytes), found.n_tokens - n_usable)
        restore = found.n_tokens > n_usable and is_faster
        # the end of an answer is lost, too, but the tokens of that are not known
        n_lost = len(slot.tokens) - (0 if restore else n_live)
        is_foreign = self.separated and slot.owner not in (None, claim.owner)
        must_erase = is_foreign or slot.must_empty(trusts=claim.trusts)
        return Plan(n_live, n_usable, n_lost, restore, n_lost > 0 and self.would_save(slot), must_erase)

    def cost(self, slot: PoolSlot, claim: Claim) -> tuple[float, float]:
        """The seconds that a slot costs this request and later ones; then its last use: it decides among equals."""
        rates, plan = self.rates, self.weigh(slot, claim)
        kept = claim.found.n_tokens if plan.restore else plan.n_live
        if kept < WORTH_KEEPING:
            # the first token of all prompts, say: no reason to take a slot from a conversation
            kept = 0
        seconds = rates.computing(len(claim.tokens) - kept)
        if plan.restore:
            seconds += rates.restoring(claim.found.n_bytes)
        if plan.save_first or slot.saving is not None:
            seconds += rates.saving(len(slot.tokens))
        # a later request for what is lost here waits for a restore, or until what was not saved is computed again
        n_unsaved = min(plan.n_lost, slot.n_unsaved) if slot.is_dirty and not plan.save_first else 0
        seconds += 0.5 * (rates.restoring((plan.n_lost - n_unsaved) * rates.token_bytes) + rates.computing(n_unsaved))
        return round(seconds, 4), slot.used

    def live(self, slot: PoolSlot, claim: Claim) -> int:
        """How many tokens of its prompt a request is believed to find in a slot."""
        if slot.must_empty(trusts=claim.trusts) or slot.owner != claim.owner:
            return 0
        return common_prefix(slot.tokens, claim.tokens)

    # -- room ----------------------------------------------------------------------------------------------------------

    def in_the_way(self, claim: Claim) -> PoolSlot | None:
        """The idle slot to be emptied next, so that all of a prompt has room; None if it has, or cannot have it."""
        others = [slot for slot in self.slots if slot is not claim.slot]
        n, n_ctx = len(claim.tokens), claim.slot.n_ctx
        if not self.is_unified or n >= n_ctx or n + sum(slot.n_held for slot in others) <= n_ctx:
            return None
        idle = [slot for slot in others if slot.n_held and not slot.is_busy]
        return min(idle, key=lambda slot: slot.used, default=None)

    def outgrown(self, by: PoolSlot) -> None:
        """Note which idle slots an answer has left no room for: the server has emptied some, in their order."""
        held = [slot for slot in self.slots if slot.n_held and slot.is_clean]
        n_over = sum(slot.n_held for slot in held) - by.n_ctx if self.is_unified else 0
        for slot in held:
            if n_over > 0 and slot is not by and not slot.is_busy:
                slot.doubt()
                n_over -= slot.n_held

    # -- saving --------------------------------------------------------------------------------------------------------

    def may_save(self, slot: PoolSlot) -> bool:
        """Whether what a slot holds may be stored."""
        return self.has_store and slot.is_clean

    def would_save(self, slot: PoolSlot) -> bool:
        """Whether a request waits until this slot is saved, which it will take for itself."""
        if not self.may_save(slot) or not slot.is_worth_saving or time.monotonic() < slot.retry_at:
            return False
        computing, saving = self.rates.computing(slot.n_unsaved), self.rates.saving(len(slot.tokens))
        return computing > SOON and (not self.n_waiting or computing >= WORTH_WAITING * saving)

    def next_save(self) -> tuple[float, PoolSlot] | None:
        """When a slot is to be saved, and which; None if there is none, or while a request waits for a slot."""
        if not self.has_store or self.n_waiting:
            return None
        due = [(self._due(slot), slot) for slot in self.idle() if slot.is_worth_saving]
        return min(due, key=lambda one: one[0], default=None)

    def _due(self, slot: PoolSlot) -> float:
        if self.n_busy == 0:
            # between the answer of one conversation and the next question of another the server is not idle yet
            return max(slot.retry_at, max(one.used for one in self.slots) + DEBOUNCE)
        return max(slot.retry_at, slot.used + DEBOUNCE, slot.unsaved_since + PATIENCE)
