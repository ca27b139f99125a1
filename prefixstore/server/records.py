"""What a llama-server says about itself and its slots, and what the store did with one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefixstore.format.keys import Tokens

__all__ = ["Found", "Health", "Props", "Restored", "Slot", "SlotAction", "Stored"]


@dataclass(frozen=True)
class Health:
    """Whether a server answers.

    Attributes
    ----------
    status
        ``"ok"``, ``"loading"`` (the model), or, with ``quiet=True``, ``"unreachable"``.
    """

    status: str

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.status == "ok"


@dataclass(frozen=True)
class Props:
    """The properties that a server reports.

    Attributes
    ----------
    build
        Number and commit of llama.cpp, ``"b1-0c1e570"``; empty if it is not known.
    model_path
        Path of the model on the server; empty if it is not known.
    n_slots
        How many sequences it computes side by side.
    n_ctx
        Tokens that fit into one slot.
    is_sleeping
        Whether it has unloaded the model until the next request.
    has_media
        Whether it takes images, sound or video.
    raw
        Everything, as it was answered.
    """

    build: str
    model_path: str
    n_slots: int
    n_ctx: int
    is_sleeping: bool = field(default=False, compare=False)
    has_media: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def commit(self) -> str:
        """The commit of llama.cpp that computes the states; empty if it is not known."""
        return self.build.rpartition("-")[2]


@dataclass(frozen=True)
class Slot:
    """One sequence of a server.

    Attributes
    ----------
    id
        Its number, from 0.
    state
        ``"idle"`` or ``"processing"``.
    n_tokens
        Tokens that it holds; None if the server does not say: before the first request, and after a restore.
    n_ctx
        Tokens that fit into it.
    n_bytes
        Bytes of state that its tokens take, if the bytes of a token are known; see `LlamaServer.bytes_per_token`.
    is_drafting
        Whether tokens are drafted for it: by another model, by layers of its own, or from its prompt.
    """

    id: int
    state: str
    n_tokens: int | None
    n_ctx: int
    n_bytes: int | None = None
    is_drafting: bool = False

    @property
    def is_processing(self) -> bool:
        """Whether it computes a request."""
        return self.state == "processing"

    @property
    def capacity(self) -> float:
        """The used share of its context, 0 to 1."""
        if not self.n_tokens or self.n_ctx <= 0:
            return 0.0
        return min(self.n_tokens / self.n_ctx, 1.0)


@dataclass(frozen=True)
class SlotAction:
    """What the server did with a slot.

    Attributes
    ----------
    n_tokens
        Tokens saved, restored or erased.
    n_bytes
        Bytes of the file written or read; 0 for an erasure.
    seconds
        How long all slots had to wait for it; 0 for an erasure.
    """

    n_tokens: int
    n_bytes: int = 0
    seconds: float = 0.0


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
