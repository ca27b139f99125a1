# mypy: ignore-errors
"""The order of eviction: one ranking function per policy, and the queues that give out victims in that order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from prefixstore.engine.adaptive_policy import Adaptive, GhostTable
from prefixstore.engine.index import Page

__all__ = [
    "POLICIES",
    "Counting",
    "Ordering",
    "Policy",
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
