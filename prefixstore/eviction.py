"""Which page goes first: one ordering function per policy, and the queue that asks it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import TypeAlias

from prefixstore.index import Index, Page

__all__ = ["POLICIES", "Policy", "VictimQueue", "lru"]

Policy: TypeAlias = Callable[[Page], tuple[float, ...]]


def lru(page: Page) -> tuple[float, ...]:
    """Least recently used first; of pages used together, the deeper one first."""
    return (page.last_used, -page.start)


POLICIES: dict[str, Policy] = {"lru": lru}


class VictimQueue:
    """Leaves of the index in the order of a policy.

    A heap whose entries are checked when they come up: a page that is gone, has children or is pinned is passed by,
    one that was used meanwhile goes back with its new rank. Using a page must not lower its rank in any policy.
    """

    def __init__(self, index: Index, policy: Policy) -> None:
        self._index = index
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], bytes]] = [(policy(page), page.key) for page in index if page.is_leaf]
        heapq.heapify(self._heap)

    def push(self, page: Page) -> None:
        """Note a page that has become a leaf, or may be a victim again."""
        heapq.heappush(self._heap, (self._policy(page), page.key))
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
                elif (now := self._policy(page)) > rank:
                    heapq.heappush(self._heap, (now, key))
                else:
                    yield page
        finally:
            for page in pinned:
                self.push(page)
