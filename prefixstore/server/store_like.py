"""The interface that `SlotManager` needs of a `SlotStore`."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["CopyLike", "FoundLike", "RestoredLike", "StoreLike"]


class FoundLike(Protocol):
    """What the store has of a prompt."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...


class RestoredLike(Protocol):
    """What a slot was filled with."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def saved_seconds(self) -> float: ...
    @property
    def reason(self) -> str | None: ...


class CopyLike(Protocol):
    """What was in a slot that was copied out of the server."""

    @property
    def tokens(self) -> Any: ...
    @property
    def n_bytes(self) -> int: ...
    def store(self) -> object: ...


class StoreLike(Protocol):
    """A `SlotStore`."""

    def find(self, tokens: Any, *, salt: str | None = None) -> FoundLike: ...
    def restore(self, slot: int, tokens: Any, *, salt: str | None = None) -> RestoredLike: ...
    def copy(self, slot: int, *, salt: str | None = None) -> CopyLike: ...
