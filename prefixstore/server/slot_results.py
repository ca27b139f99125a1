"""The results of a lookup for a slot, of filling it, and of storing it."""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.format.keys import Tokens

__all__ = ["Found", "Restored", "Stored"]


@dataclass(frozen=True)
class Found:
    """What is stored of a prompt.

    Attributes
    ----------
    n_tokens
        How much of it a slot can be given.
    n_bytes
        Bytes of state that would be read for it.
    n_pages
        Pages that hold them.
    reason
        Why nothing is found, as of `Restored`; None if something is, or if nothing is ever stored.
    """

    n_tokens: int = 0
    n_bytes: int = 0
    n_pages: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class Restored:
    """What was restored into a slot.

    Attributes
    ----------
    n_tokens
        What it holds now; 0 if nothing could be used, and it was left alone.
    n_bytes
        Bytes of its file.
    seconds
        How long it took, everything included.
    saved_seconds
        By how much that was faster than computing the tokens, by the rate at which they were computed; below zero if
        it was slower, or if the rate is not known.
    reason
        Why nothing could be used: see `miss_reason`; ``"unreadable"``, or why nothing is ever stored.
    """

    n_tokens: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    saved_seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Stored:
    """What was stored of a slot.

    Attributes
    ----------
    tokens
        What the slot holds.
    n_new_pages
        Pages that were not stored before.
    n_bytes
        Bytes of their states.
    seconds
        How long it took, everything included. The pages are written after that.
    reason
        Why nothing was stored, or not all, if so: ``"empty"``, ``"short"``, ``"other_tokens"`` (than expected),
        ``"media"`` (images or sound), ``"incomplete"`` (the server has not written all rows, as with ``--swa-full``),
        ``"queue_full"`` (the location takes nothing), ``"read_only"`` (the store), or why nothing is ever stored.
    """

    tokens: Tokens
    n_new_pages: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    reason: str | None = None
