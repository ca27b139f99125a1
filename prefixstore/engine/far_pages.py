"""What waits to be written to a far location: captured pages, pages of the nearer one, snapshots to be thinned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from prefixstore.engine.fetch import States
from prefixstore.engine.index import Page
from prefixstore.engine.pending import PendingPage
from prefixstore.format.keys import Tokens

__all__ = ["NamedPage", "Nearer", "SharedPage", "Thinning", "chains", "node_of", "pieces"]


class Nearer(Protocol):
    """The nearer location, as the far engine sees it."""

    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one, as far as they are known."""

    def n_near(self, pages: Sequence[Page]) -> int:
        """How many of the first of these pages it has."""

    def settings_of(self, namespace: bytes) -> bytes | None:
        """Canonical settings of a namespace. Raises `StorageError`."""

    def states_of(self, pages: Sequence[Page]) -> AbstractContextManager[States]:
        """Their verified states, each valid until the next one is requested."""


def node_of(page: Page) -> Page:
    """The same page, for another location."""
    return replace(page, stored_bytes=0, hits=0, pinned=False, children=[], is_far=False)


@dataclass(slots=True, eq=False)
class SharedPage(PendingPage):
    """A captured page, whose buffer the nearer engine has, too."""

    on_release: Callable[[SharedPage], None]
    # bytes that it counts as, until it is released
    weight: int = 0

    def release(self) -> None:
        PendingPage.release(self)
        self.on_release(self)


@dataclass(slots=True, eq=False)
class NamedPage(PendingPage):
    """A page that the nearer location has: its state is read there when its turn comes."""

    on_release: Callable[[], None]

    @property
    def n_bytes(self) -> int:
        # so that the queue bounds what is copied at a time
        return self.page.raw_bytes

    def release(self) -> None:
        self.on_release()


class Thinning(NamedTuple):
    """Arguments of `Engine.thin`."""

    namespace: bytes
    tokens: Tokens
    page_tokens: int
    keep: int
    interval: int
    valued: frozenset[int]

    def continues(self, other: Thinning) -> bool:
        """Whether it is about the same conversation, or a longer one."""
        n = len(other.tokens)
        return self.namespace == other.namespace and np.array_equal(self.tokens[:n], other.tokens)


def chains(pages: Iterable[Page]) -> list[list[Page]]:
    """The same pages, grouped into chains in which each is the parent of the next."""
    by_last: dict[bytes, list[Page]] = {}
    for page in pages:
        chain = by_last.pop(page.parent, [])
        chain.append(page)
        by_last[page.key] = chain
    return list(by_last.values())


def pieces(pages: Iterable[Page], n_bytes: int) -> Iterator[list[Page]]:
    """Pages in groups whose states have at most so many bytes together, or of one page."""
    piece: list[Page] = []
    size = 0
    for page in pages:
        if piece and size + page.raw_bytes > n_bytes:
            yield piece
            piece, size = [], 0
        piece.append(page)
        size += page.raw_bytes
    if piece:
        yield piece
