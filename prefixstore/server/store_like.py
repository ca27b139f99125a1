"""The interface that `SlotManager` needs of a `SlotStore`."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["CopyLike", "FoundLike", "RestoredLike", "StoreLike"]


class FoundLike(Protocol):
    """What is stored of a prompt."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def reason(self) -> str | None: ...


class RestoredLike(Protocol):
    """What was restored into a slot."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def saved_seconds(self) -> float: ...
    @property
    def reason(self) -> str | None: ...


class CopyLike(Protocol):
    """The contents of a slot, copied out of the server."""

    @property
    def tokens(self) -> Any: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def has_media(self) -> bool: ...
    def store(self) -> object: ...


class StoreLike(Protocol):
    """The methods of a `SlotStore` that are used."""

    def find(self, tokens: Any, *, salt: str | None = None) -> FoundLike: ...
    def restore(self, slot: int, tokens: Any, *, salt: str | None = None) -> RestoredLike: ...
    def shared(self, tokens: Any, *, salt: str | None = None) -> int: ...
    def copy(self, slot: int, *, salt: str | None = None, expected: Any = None) -> CopyLike: ...
