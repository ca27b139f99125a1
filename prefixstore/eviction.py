"""Which page goes first: one ordering function per policy, and the queue that asks it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TypeAlias

from prefixstore.index import Index, Page

__all__ = ["POLICIES", "Ordering", "Policy", "VictimQueue", "by_expiry", "lru"]

Rank: TypeAlias = "tuple[float, ...]"


class Policy:
    """The order of eviction. An engine has one of its own and calls it under the lock of its catalog."""

    def rank(self, page: Page) -> Rank:
        """Where a page stands: the lowest goes first. Using a page must not lower it."""
        raise NotImplementedError

    def looked_up(self, namespace: bytes, pages: Sequence[Page]) -> None:
        """A prompt began with these stored pages, none for a miss; whether they were restored or live already."""

    def added(self, page: Page) -> None:
        """A page was captured here."""

    def evicted(self, page: Page) -> None:
        """A page is being evicted here for want of room."""


class Ordering(Policy):
    """A policy that is nothing but a function of the page."""

    def __init__(self, function: Callable[[Page], Rank]) -> None:
        self._function = function

    def rank(self, page: Page) -> Rank:
        return self._function(page)


def lru(page: Page) -> Rank:
    """Least recently used first; of pages used together, the deeper one first."""
    return (page.last_used, -page.start)


def by_expiry(page: Page) -> Rank:
    """What expires next first; what never does last."""
    return (page.expires or float("inf"),)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": partial(Ordering, lru)}


class VictimQueue:
    """Leaves of the index in the order of a policy; it knows those that were pushed.

    A heap whose entries are checked when they come up: a page that is gone, has children or is pinned is passed by,
    one that was used meanwhile goes back with its new rank.
    """

    def __init__(self, index: Index, policy: Policy) -> None:
        self._index = index
        self._policy = policy
        self._heap: list[tuple[Rank, bytes]] = []

    def push(self, page: Page) -> None:
        """Note a page that has become a leaf, or may be a victim again."""
        heapq.heappush(self._heap, (self._policy.rank(page), page.key))
        if len(self._heap) > 64 + 4 * len(self._index):
            self._heap = list({key: (rank, key) for rank, key in self._heap}.values())
            heapq.heapify(self._heap)

    def victims(self) -> Generator[Page, None, None]:
        """Pages to evict, first one first. The caller removes each from the index, or gives it back with `push`."""
        pinned: list[Page] = []
        try:
            while self._heap:
                rank, key = heapq.heappop(self._heap)
                page = self._index.get(key)
                if page is None or not page.is_leaf:
                    continue
                if page.pinned:
                    pinned.append(page)
                elif (now := self._policy.rank(page)) > rank:
                    heapq.heappush(self._heap, (now, key))
                else:
                    yield page
        finally:
            for page in pinned:
                self.push(page)
