"""Which page goes first: one ordering function per policy, and the queue that asks it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from prefixstore.engine.adaptive import Adaptive, Memory
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
    """The order of eviction. An engine has one of its own and calls it under the lock of its catalog."""

    drifts: bool = False
    """Whether ranks change without a use, so that they have to be asked for again and again."""

    def rank(self, page: Page) -> Rank:
        """Where a page stands: the lowest goes first. Using a page must not lower it, unless the policy drifts."""
        raise NotImplementedError

    def looked_up(self, namespace: bytes, pages: Sequence[Page]) -> None:
        """A prompt began with these stored pages, none for a miss; whether they were restored or live already."""
        return

    def added(self, page: Page) -> None:
        """A page was captured here."""
        return

    def evicted(self, page: Page) -> None:
        """A page is being evicted here for want of room."""
        return

    def renew(self, pages: int) -> None:
        """Victims are about to be asked for, from an index with so many pages."""
        return


class Ordering(Policy):
    """A policy that is nothing but a function of the page."""

    def __init__(self, function: Callable[[Page], Rank]) -> None:
        self._function = function

    def rank(self, page: Page) -> Rank:
        return self._function(page)


class Counting(Ordering):
    """An ordering that is told, as the note of a page, how often it was used before it was evicted."""

    def __init__(self, function: Callable[[Page], Rank]) -> None:
        super().__init__(function)
        self._memory = Memory()

    def added(self, page: Page) -> None:
        uses, _ = self._memory.recall(page.key) or (0, 0)
        page.note = uses

    def evicted(self, page: Page) -> None:
        before = page.note if isinstance(page.note, int) else 0
        self._memory.keep(page.key, before + page.hits + 1, 0)

    def renew(self, pages: int) -> None:
        self._memory.grow(pages)


def lru(page: Page) -> Rank:
    """Least recently used first; of pages used together, the deeper one first."""
    return (page.last_used, -page.start)


def lfu(page: Page) -> Rank:
    """Least often used first, uses before an eviction included; of those, the least recently used."""
    return (page.hits + (page.note if isinstance(page.note, int) else 0), *lru(page))


def longest_first(page: Page) -> Rank:
    """The end of the longest prompt first, which keeps many beginnings."""
    return (-page.end, page.last_used)


def priority(page: Page) -> Rank:
    """Lowest priority first; of those, the least recently used."""
    return (page.priority, *lru(page))


def by_expiry(page: Page) -> Rank:
    """What expires next first; what never does last."""
    return (page.expires or float("inf"),)


POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "lru": partial(Ordering, lru),
    "lfu": partial(Counting, lfu),
    "longest_first": partial(Ordering, longest_first),
    "priority": partial(Ordering, priority),
}


class VictimQueue:
    """Leaves of the index in the order of a policy; it knows those that were pushed.

    A heap whose entries are checked when they come up: a page that is gone, has children or is pinned is passed by,
    one that was used meanwhile goes back with its new rank. If the policy drifts, all are ranked anew after one in
    sixteen was evicted, which costs as much as ranking sixteen pages for each.
    """

    def __init__(self, index: Index, policy: Policy) -> None:
        self._index = index
        self._policy = policy
        self._heap: list[tuple[Rank, bytes]] = []
        self._taken = 0

    def push(self, page: Page) -> None:
        """Note a page that has become a leaf, or may be a victim again."""
        heapq.heappush(self._heap, (self._policy.rank(page), page.key))
        if len(self._heap) > 64 + 4 * len(self._index):
            self._rank_anew()

    def _rank_anew(self) -> None:
        pages = map(self._index.get, {key for _, key in self._heap})
        self._heap = [(self._policy.rank(page), page.key) for page in pages if page is not None and page.is_leaf]
        heapq.heapify(self._heap)
        self._taken = 0

    def victims(self) -> Generator[Page, None, None]:
        """Pages to evict, first one first. The caller removes each from the index, or gives it back with `push`."""
        pinned: list[Page] = []
        try:
            self._policy.renew(len(self._index))
            while self._heap:
                if self._policy.drifts and self._taken >= max(16, len(self._heap) >> 4):
                    self._rank_anew()
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
        Whose pages they are.
    policy
        The order in which pages are evicted.
    is_stored
        Whether a page is in the backend: others cannot be deleted there.
    """

    def __init__(self, index: Index, policy: Policy, is_stored: Callable[[Page], bool]) -> None:
        self._index = index
        self._policy = policy
        self._is_stored = is_stored
        self._victims = VictimQueue(index, policy)
        self._expiring = VictimQueue(index, Ordering(by_expiry))
        # of the groups that quotas bound, made when one of them needs room first
        self._victims_of: dict[frozenset[bytes], VictimQueue] = {}

    def offer(self, page: Page) -> None:
        """A stored page has become a leaf, or may be a victim again."""
        self._victims.push(page)
        if page.expires:
            self._expiring.push(page)
        for namespaces, queue in self._victims_of.items():
            if page.namespace in namespaces:
                queue.push(page)

    def victims(self, namespaces: frozenset[bytes] | None = None) -> Generator[Page, None, None]:
        """Pages to evict, first one first, of these namespaces or of all; see `VictimQueue.victims`."""
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
