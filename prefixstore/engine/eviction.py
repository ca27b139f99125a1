"""The order of eviction: one ranking function per policy, and the queues that give out victims in that order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from prefixstore.engine.adaptive_policy import Adaptive, GhostTable
from prefixstore.engine.index import Index, Page
from prefixstore.engine.totals import Group

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

    A heap whose entries are checked when they reach the top: a page that is gone, has children, is pinned or is not
    stored is dropped, since it is pushed again when that changes. One that was used meanwhile is put back with its new
    rank. If the policy drifts, all leaves are ranked again after one in sixteen was evicted, which costs as much as
    ranking sixteen pages for each eviction.
    """

    def __init__(self, index: Index, policy: Policy) -> None:
        self._index = index
        self._policy = policy
        self._heap: list[tuple[Rank, bytes]] = []
        self._taken = 0
        # entries are left behind by pages that are pushed again: beyond this many, the heap is cleared of them
        self._limit = 64

    def push(self, page: Page) -> None:
        """Add a page that has become a leaf, or may be a victim again."""
        if not _is_victim(page):
            return
        heapq.heappush(self._heap, (self._policy.rank(page), page.key))
        if len(self._heap) > self._limit:
            self._rank_again()

    def _rank_again(self) -> None:
        pages = map(self._index.get, {key for _, key in self._heap})
        self._heap = [(self._policy.rank(page), page.key) for page in pages if page is not None and _is_victim(page)]
        heapq.heapify(self._heap)
        self._taken = 0
        self._limit = 64 + 4 * len(self._heap)

    def victims(self) -> Generator[Page, None, None]:
        """Pages to evict, in order. The caller removes each from the index, or puts it back with `push`."""
        self._policy.prepare(len(self._index))
        while self._heap:
            if self._policy.drifts and self._taken >= max(16, len(self._heap) >> 4):
                self._rank_again()
                continue
            rank, key = heapq.heappop(self._heap)
            page = self._index.get(key)
            if page is None or not _is_victim(page):
                continue
            if (now := self._policy.rank(page)) > rank:
                heapq.heappush(self._heap, (now, key))
                continue
            self._taken += 1
            try:
                yield page
            except GeneratorExit:
                # the caller may have failed before it removed the page
                if self._index.get(key) is page:
                    self.push(page)
                raise


def _is_victim(page: Page) -> bool:
    return page.is_leaf and page.may_be_victim and not page.pinned


class Candidates:
    """The pages of an index that may be deleted, in several orders. Used under the lock of the catalog.

    Parameters
    ----------
    index
        Holds the pages.
    policy
        The order in which pages are evicted.
    """

    def __init__(self, index: Index, policy: Policy) -> None:
        self._index = index
        self._policy = policy
        self._victims = VictimQueue(index, policy)
        self._expiring = VictimQueue(index, Ordering(by_expiry))
        # for namespaces, and for salts, with a quota: made when they first need space
        self._victims_of: dict[bytes | str, VictimQueue] = {}

    def add(self, page: Page) -> None:
        """Add a stored page that has become a leaf, or may be a victim again."""
        self._victims.push(page)
        if page.expires:
            self._expiring.push(page)
        if self._victims_of:
            for group in (page.namespace, self._index.totals.salt_of(page.namespace)):
                if group is not None and group in self._victims_of:
                    self._victims_of[group].push(page)

    def victims(self, group: Group = None) -> Generator[Page, None, None]:
        """Pages to evict, in order, of a group or of all; see `VictimQueue.victims`."""
        if group is None:
            return self._victims.victims()
        if group not in self._victims_of:
            queue = self._victims_of[group] = VictimQueue(self._index, self._policy)
            for namespace in self._index.totals.namespaces(group):
                for page in self._index.of_namespace(namespace):
                    queue.push(page)
        return self._victims_of[group].victims()

    def joined(self, namespace: bytes) -> None:
        """The salt of a namespace is known now: its pages belong to that salt's."""
        queue = self._victims_of.get(self._index.totals.salt_of(namespace) or b"")
        if queue is not None:
            for page in self._index.of_namespace(namespace):
                queue.push(page)

    def forget(self, group: bytes | str) -> None:
        """A group has no pages any more."""
        self._victims_of.pop(group, None)

    def expiring(self) -> Generator[Page, None, None]:
        """Pages that expire, in this order; see `VictimQueue.victims`."""
        return self._expiring.victims()
