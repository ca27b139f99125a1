"""The eviction policies: in which order leaves are evicted, and which new pages are worth evicting others for.

A policy ranks leaves, many at once; of equal ranks the least recently used is the lower one, and of those the deepest.
Each engine has its own instance and calls it under the lock of its catalog.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.engine.ghosts import GhostTable
from prefixstore.engine.index import Page
from prefixstore.engine.keyspace import Leaf
from prefixstore.errors import CorruptError
from prefixstore.format.record import MOST_USES
from prefixstore.format.saved_state import unpack_state

__all__ = [
    "Counting",
    "Leaves",
    "Ordering",
    "Policy",
    "Ranks",
    "lfu",
    "longest_first",
    "lru",
    "priority",
]

Leaves: TypeAlias = npt.NDArray[np.void]
"""Leaves, of type `prefixstore.engine.keyspace.LEAVES`."""
Ranks: TypeAlias = npt.NDArray[np.float64]


class Policy:
    """The order of eviction, and what it is told so that it can learn one. By default it learns nothing."""

    name = ""
    """As in ``policy=``."""

    def ranks(self, leaves: Leaves) -> Ranks:
        """The ranks of leaves: the lowest is evicted first."""
        raise NotImplementedError

    def admits(self, new: Leaf, victim: Leaf) -> bool:
        """Whether a new page is worth more than a victim: otherwise it is not stored."""
        return True

    def looked_up(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None, now: int) -> None:
        """A prompt began with these stored pages, restored or already live; there are none after a miss.

        It sets the `uses` and the `page_class` of these, as `added` does.

        Parameters
        ----------
        namespace
            Of the prompt.
        pages
            The pages, from the first one on. Their uses, and the time of the last one, do not count this one yet.
        n_tokens
            How long the prompt is, if that is known.
        now
            The time of this use, in nanoseconds since the epoch, later than that of every other.
        """
        for page in pages:
            page.uses = min(page.uses + 1, MOST_USES)

    def added(self, namespace: bytes, page: Page) -> None:
        """A page was captured by this engine."""
        return

    def evicted(self, key: bytes, uses: int, last_used: int) -> None:
        """A page was evicted by this engine, or not admitted.

        Parameters
        ----------
        key
            Of the page.
        uses
            How often it was used, as `Page` says.
        last_used
            When, in nanoseconds since the epoch.
        """
        return

    def prepare(self, pages: int) -> None:
        """Victims are about to be chosen, among so many stored pages."""
        return

    note: bytes | None = None
    """The name under which a location keeps what was learned; None if nothing is."""

    def parts(self) -> dict[str, bytes]:
        """What was learned, at most 2 MiB, in named parts."""
        return {}

    def take_over(self, parts: Mapping[str, bytes]) -> None:
        """Take over what was learned before. Raises `ValueError`, and changes nothing, if it is invalid."""
        raise ValueError("nothing is learned")

    def load(self, packed: bytes) -> bool:
        """Take over parts that were packed into a note; whether they could be read. If not, nothing changes."""
        try:
            self.take_over(unpack_state(packed))
        except (CorruptError, KeyError, ValueError, IndexError, OverflowError, struct.error):
            return False
        return True


class Ordering(Policy):
    """A policy that only ranks, by a function of the leaves."""

    def __init__(self, ranks: Callable[[Leaves], npt.NDArray[Any]], *, name: str = "") -> None:
        self.name = name
        self._ranks = ranks

    def ranks(self, leaves: Leaves) -> Ranks:
        return self._ranks(leaves).astype(np.float64)


class Counting(Ordering):
    """Counts uses, those before an eviction included."""

    note = b"policy/lfu"

    def __init__(self) -> None:
        super().__init__(lambda leaves: leaves["uses"], name="lfu")
        self._ghosts = GhostTable()

    def added(self, namespace: bytes, page: Page) -> None:
        ghost = self._ghosts.recall(page.key, 0)
        if ghost is not None:
            page.uses = ghost.uses + 1

    def evicted(self, key: bytes, uses: int, last_used: int) -> None:
        self._ghosts.remember(key, uses, 0)

    def prepare(self, pages: int) -> None:
        self._ghosts.grow(pages)

    def parts(self) -> dict[str, bytes]:
        return {"ghosts": self._ghosts.dump(0)}

    def take_over(self, parts: Mapping[str, bytes]) -> None:
        ghosts = GhostTable()
        ghosts.load(parts["ghosts"], 0)
        self._ghosts = ghosts


def lru() -> Policy:
    """Least recently used first; among pages used together, the deepest first."""
    return Ordering(lambda leaves: np.zeros(len(leaves)), name="lru")


def lfu() -> Policy:
    """Least often used first, counting uses before an eviction; among those, the least recently used."""
    return Counting()


def longest_first() -> Policy:
    """The end of the longest prompt first, which keeps the beginnings of many prompts."""
    return Ordering(lambda leaves: -leaves["end"].astype(np.float64), name="longest_first")


def priority() -> Policy:
    """Lowest priority first; among those, the least recently used."""
    return Ordering(lambda leaves: leaves["priority"], name="priority")
