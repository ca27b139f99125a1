"""A slot while one request holds it, and what was done to it for that request."""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.format.keys import Tokens
from prefixstore.server.slot_pool import PoolSlot

__all__ = ["HeldSlot"]


@dataclass
class HeldSlot:
    """A slot, held for one request.

    Attributes
    ----------
    slot
        The slot.
    tokens
        The prompt; empty if it is unknown. Of a chat that continues in its slot, what is known of the slot.
    owner
        Its tenant.
    n_continued
        How many tokens the chat had that it continues, for which the store was not asked; 0 if it was.
    n_restored
        How many tokens were restored for it.
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

    slot: PoolSlot
    tokens: Tokens
    owner: str | None
    n_continued: int = 0
    n_restored: int = 0
    n_ahead: int = 0
    restored_seconds: float | None = None
    saved_seconds: float = 0.0
    lookup_seconds: float | None = None
    reason: str | None = None
    must_compute: bool = False
