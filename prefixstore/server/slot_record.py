"""What is known of each slot of a server: one record, and every change of it. ``docs/servers.md`` draws the states.

And what a request wants of a slot, and what was done to it for that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum

from prefixstore.format.keys import NO_TOKENS, Tokens

__all__ = ["WORTH_A_SAVE", "Claim", "PoolSlot", "Rows"]

# Fewer new tokens are saved only when the server stops.
WORTH_A_SAVE = 32
# how long after a save that has failed
RETRY_SECONDS = 10.0


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
    retry_at
        When it may be saved again, after that has failed.
    used
        When its last answer has ended.
    told
        What was done for its last prompt, as the client was told.
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
    retry_at: float = 0.0
    used: float = 0.0
    told: str | None = None

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
        self.tokens, self.owner, self.rows = NO_TOKENS, None, Rows.CLEAN
        self.n_unsaved = 0

    def filled(self, tokens: Tokens, owner: str | None) -> None:
        """Note that it holds what was restored, and nothing else."""
        self.tokens, self.owner, self.n_unsaved = tokens, owner, 0

    def lent(self, owner: str | None) -> None:
        """Note that a request of this tenant is sent to it: it may hold tokens of that, however the request ends."""
        self.owner = owner

    def computed(self, tokens: Tokens, n_new: int) -> None:
        """Note that it holds these tokens of its owner, and that so many of them and of an answer are new."""
        if not self.n_unsaved:
            self.unsaved_since = time.monotonic()
        self.tokens, self.n_unsaved = tokens, self.n_unsaved + n_new

    def answered(self) -> None:
        """Note that its answer has ended."""
        self.used = time.monotonic()

    def saved(self, tokens: Tokens) -> None:
        """Note that it holds these tokens, and that all of them are copied."""
        self.tokens, self.n_unsaved = tokens, 0

    def not_saved(self) -> None:
        """Note that a save of it has failed: it is tried again after a while, and at the end."""
        self.retry_at = time.monotonic() + RETRY_SECONDS

    def doubt(self, rows: Rows = Rows.UNKNOWN) -> None:
        """Note that its rows may be other than those of its tokens."""
        self.rows = max(self.rows, rows)


@dataclass(eq=False)
class Claim:
    """What a request wants of a slot, which one it has, and what was done to it for the request.

    Attributes
    ----------
    tokens
        The prompt; empty if it is unknown.
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
    n_found, n_bytes, missed
        How many tokens of the prompt the store has, and the bytes of their state; why nothing was found.
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
    missed: str | None = None
    n_restored: int = 0
    n_reused: int = 0
    n_ahead: int = 0
    restored_seconds: float | None = None
    saved_seconds: float = 0.0
    lookup_seconds: float | None = None
    reason: str | None = None
    must_compute: bool = False

    def forget_lookup(self) -> None:
        """Have the store be asked again: what it has may be more by the time of the next step."""
        self.lookup_seconds = self.missed = None
        self.n_found = self.n_bytes = 0

    @property
    def told(self) -> str:
        """What was done for the prompt, as the client is told before it is computed."""
        reason = self.reason or ("live" if self.n_reused and not self.n_restored else None)
        n, computed = len(self.tokens), len(self.tokens) - self.n_reused
        return f"restored={self.n_restored} of {n}; computed={computed}" + (f"; reason={reason}" if reason else "")
