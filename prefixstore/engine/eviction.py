"""The order of eviction: one ranking function per policy, and the queues that give out victims in that order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from prefixstore.engine.adaptive_policy import Adaptive, GhostTable
from prefixstore.engine.index import Index, Page

__all__ = [
    "POLICIES",
    "Candidates",
    "Counting",
    "Ordering",
    "Policy",
    "VictimQueue",
    "by_expiry",
    "lfu",
    "longest_first",
    "lru",
    "priority",
]

Rank: TypeAlias = "tuple[float, ...]"


class Policy(Protocol):
    """The order of eviction. Each engine has its own instance and calls it under the lock of its catalog."""

    drifts: bool = False
    """Whether ranks change without a use, so that leaves have to be ranked again from time to time."""

    def rank(self, page: Page) -> Rank:
        """The rank of a page: the lowest is evicted first. A use must not lower it, unless the policy drifts."""
        raise NotImplementedError

    def looked_up(self, namespace: bytes, pages: Sequence[Page]) -> None:
        """A prompt began with these stored pages, restored or already live; there are none after a miss."""
        return

    def added(self, page: Page) -> None:
        """A page was captured by this engine."""
        return

    def evicted(self, page: Page) -> None:
        """A page is being evicted by this engine, to make space."""
        return

    def prepare(self, pages: int) -> None:
        """Victims are about to be chosen from an index with this many pages."""
        return


class Ordering(Policy):
    """A policy that only ranks: a function of the page."""

    def __init__(self, function: Callable[[Page], Rank]) -> None:
        self._function = function

    def rank(self, page: Page) -> Rank:
        return self._function(page)


class Counting(Ordering):
    """An ordering whose function finds in `Page.policy_data` how often a page was used before it was evicted."""

    def __init__(self, function: Callable[[Page], Rank]) -> None:
        super().__init__(function)
        self._ghosts = GhostTable()

    def added(self, page: Page) -> None:
        uses, _ = self._ghosts.recall(page.key) or (0, 0)
        page.policy_data = uses

    def evicted(self, page: Page) -> None:
        before = page.policy_data if isinstance(page.policy_data, int) else 0
        self._ghosts.remember(page.key, before + page.hits + 1, 0)

    def prepare(self, pages: int) -> None:
        self._ghosts.grow(pages)


def lru(page: Page) -> Rank:
    """Least recently used first; among pages used together, the deepest first."""
    return (page.last_used, -page.start)


def lfu(page: Page) -> Rank:
    """Least often used first, counting uses before an eviction; among those, the least recently used."""
    return (page.hits + (page.policy_data if isinstance(page.policy_data, int) else 0), *lru(page))


def longest_first(page: Page) -> Rank:
    """The end of the longest prompt first, which keeps the beginnings of many prompts."""
    return (-page.end, page.last_used)


def priority(page: Page) -> Rank:
    """Lowest priority first; among those, the least recently used."""
    return (page.priority, *lru(page))


def by_expiry(page: Page) -> Rank:
    """What expires next first; what never expires last."""
    return (page.expires or float("inf"),)


POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "lru": partial(Ordering, lru),
    "lfu": partial(Counting, lfu),
    "longest_first": partial(Ordering, longest_first),
    "priority": partial(Ordering, priority),
}


class VictimQueue:
    """The leaves that were pushed, in the order of a policy.

    A heap whose entries are checked when they reach the top: a page that is gone, has children or is pinned is skipped,
    and one that was used meanwhile is put back with its new rank. If the policy drifts, all leaves are ranked again
    after one in sixteen was evicted, which costs as much as ranking sixteen pages for each eviction.
    """

    def __init__(self, index: Index, policy: Policy) -> None:
        self._index = index
        self._policy = policy
        self._heap: list[tuple[Rank, bytes]] = []
        self._taken = 0

    def push(self, page: Page) -> None:
        """Add a page that has become a leaf, or may be a victim again."""
        heapq.heappush(self._heap, (self._policy.rank(page), page.key))
        if len(self._heap) > 64 + 4 * len(self._index):
            self._rank_again()

    def _rank_again(self) -> None:
        pages = map(self._index.get, {key for _, key in self._heap})
        self._heap = [(self._policy.rank(page), page.key) for page in pages if page is not None and page.is_leaf]
        heapq.heapify(self._heap)
        self._taken = 0

    def victims(self) -> Generator[Page, None, None]:
        """Pages to evict, in order. The caller removes each from the index, or puts it back with `push`."""
        pinned: list[Page] = []
        try:
            self._policy.prepare(len(self._index))
            while self._heap:
                if self._policy.drifts and self._taken >= max(16, len(self._heap) >> 4):
                    self._rank_again()
                    continue
                rank, key = heapq.heappop(self._heap)
                page = self._index.get(key)
                if page is None or not page.is_leaf:
                    continue
                if page.pinned:
                    pinned.append(page)
                elif (now := self._policy.rank(page)) > rank:
                    heapq.heappush(self._heap, (now, key))
                else:
                    self._taken += 1
                    yield page
        finally:
            for page in pinned:
                self.push(page)


class Candidates:
    """The pages of an index that may be deleted, in several orders. Used under the lock of the catalog.

    Parameters
    ----------
    index
        Holds the pages.
    policy
        The order in which pages are evicted.
    is_stored
        Whether a page is in the backend; only such pages can be deleted there.
    """

    def __init__(self, index: Index, policy: Policy, is_stored: Callable[[Page], bool]) -> None:
        self._index = index
        self._policy = policy
        self._is_stored = is_stored
        self._victims = VictimQueue(index, policy)
        self._expiring = VictimQueue(index, Ordering(by_expiry))
        # for each group of namespaces with a quota: made when the group first needs space
        self._victims_of: dict[frozenset[bytes], VictimQueue] = {}

    def add(self, page: Page) -> None:
        """Add a stored page that has become a leaf, or may be a victim again."""
        self._victims.push(page)
        if page.expires:
            self._expiring.push(page)
        for namespaces, queue in self._victims_of.items():
            if page.namespace in namespaces:
                queue.push(page)

    def victims(self, namespaces: frozenset[bytes] | None = None) -> Generator[Page, None, None]:
        """Pages to evict, in order, from these namespaces or from all; see `VictimQueue.victims`."""
        if namespaces is None:
            return self._victims.victims()
        if namespaces not in self._victims_of:
            queue = self._victims_of[namespaces] = VictimQueue(self._index, self._policy)
            for page in self._index:
                if page.namespace in namespaces and self._is_stored(page):
                    queue.push(page)
        return self._victims_of[namespaces].victims()

    def expiring(self) -> Generator[Page, None, None]:
        """Pages that expire, in this order; see `VictimQueue.victims`."""
        return self._expiring.victims()
