"""What a location holds of each namespace, and how one is found by the first digits of its key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError, InvalidParameterError
from prefixstore.format.namespace import Namespace

__all__ = ["Holding", "holdings_of", "only_one"]


@dataclass(frozen=True)
class Holding:
    """What a location holds of one namespace.

    Attributes
    ----------
    key
        Key of the namespace.
    namespace
        Its settings; None if they are missing or damaged.
    pages, tokens, stored_bytes, raw_bytes
        The number of pages and of their tokens, and the sizes of their payloads and of their states.
    hits
        How often its pages were restored.
    pinned
        How many pages are pinned.
    created, last_used
        Of the oldest page, and of the most recently used one; nanoseconds since the epoch.
    """

    key: bytes
    namespace: Namespace | None
    pages: int
    tokens: int
    stored_bytes: int
    raw_bytes: int
    hits: int
    pinned: int
    created: int
    last_used: int

    @property
    def settings(self) -> Mapping[str, str | int | float | bool | None]:
        """The settings of the namespace; none if they are missing or damaged."""
        return self.namespace.settings if self.namespace is not None else {}


def holdings_of(settings: Mapping[bytes, bytes], pages: Iterable[Page]) -> list[Holding]:
    """What there is of each namespace, the most recently used first; `settings` are the stored ones, by its key."""
    by_namespace: defaultdict[bytes, list[Page]] = defaultdict(list, {key: [] for key in settings})
    for page in pages:
        by_namespace[page.namespace].append(page)
    found = [_holding(key, settings.get(key), pages) for key, pages in by_namespace.items()]
    return sorted(found, key=lambda holding: -holding.last_used)


def _parsed(settings: bytes) -> Namespace | None:
    try:
        return Namespace.parse(settings)
    except CorruptError:
        return None


def _holding(key: bytes, settings: bytes | None, pages: Sequence[Page]) -> Holding:
    return Holding(
        key,
        _parsed(settings) if settings is not None else None,
        len(pages),
        sum(page.n_tokens for page in pages),
        sum(page.stored_bytes for page in pages),
        sum(page.raw_bytes for page in pages),
        sum(page.hits for page in pages),
        sum(page.pinned for page in pages),
        min((page.created for page in pages), default=0),
        max((page.last_used for page in pages), default=0),
    )


_T = TypeVar("_T", Holding, Page)


def only_one(found: Sequence[_T], kind: str, wanted: str, location: str) -> _T:
    """The namespace or page that was found. Raises `InvalidParameterError` if there is none, or several."""
    if not found:
        command = "ls" if kind == "namespace" else "tree"
        raise InvalidParameterError(f"{location}: no {kind} begins with {wanted!r}; prefixstore {command} lists them")
    if len(found) > 1:
        matches = ", ".join(one.key.hex()[:12] for one in found[:4])
        raise InvalidParameterError(f"{kind} {wanted!r} is ambiguous; it matches {matches}")
    return found[0]
