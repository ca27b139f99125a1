"""The eviction policies: in which order leaves are evicted, and which new pages are worth evicting others for.

A policy ranks leaves, many at once; of equal ranks the least recently used is the lower one, and of those the deepest.
Each engine has its own instance and calls it under the lock of its catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.engine.keyspace import Leaf
from prefixstore.engine.page import Page
from prefixstore.format.record import MOST_USES

# evicted pages that are remembered at most: 4 MiB
GHOSTS = 1 << 19
MOST_COUNTED = 255

Leaves: TypeAlias = npt.NDArray[np.void]
"""Leaves, of type `prefixstore.engine.keyspace.LEAVES`."""
Ranks: TypeAlias = npt.NDArray[np.float64]


class Policy:
    """An order of eviction. It is told of lookups, captures and evictions, from which it may learn."""

    name = ""
    """As in ``policy=``."""

    def ranks(self, leaves: Leaves) -> Ranks:
        """The ranks of leaves: the lowest is evicted first."""
        raise NotImplementedError

    def admits(self, new: Leaf, victim: Leaf) -> bool:
        """Whether a new page is worth more than a victim; if not, it is not stored."""
        return True

    def looked_up(self, pages: Sequence[Page], n_tokens: int | None, now: int) -> None:
        """A prompt of `n_tokens`, if known, was served with these pages, restored or live; a miss has none.

        Sets the `uses` and the `page_class` of the pages, which do not include this use yet. `now` is in nanoseconds
        since the epoch, and later than every other use.
        """
        for page in pages:
            page.uses = min(page.uses + 1, MOST_USES)

    def added(self, page: Page) -> None:
        """A page was captured here. Sets its `uses` and `page_class`."""
        return

    def evicted(self, key: bytes, uses: int, last_used: int) -> None:
        """A page was evicted or not admitted here, after this many uses, the last one at this time."""
        return

    def prepare(self, pages: int) -> None:
        """Victims will be chosen among this many stored pages."""
        return

    note: bytes | None = None
    """The name of the note with what was learned; None if this policy learns nothing."""

    def save(self) -> bytes:
        """What was learned, as a note."""
        return b""

    def load(self, note: bytes) -> bool:
        """Continue with what was learned before; False, and no change, if it cannot be read."""
        return False


class Ordering(Policy):
    """A policy that only ranks, by a function of the leaves."""

    def __init__(self, name: str, ranks: Callable[[Leaves], npt.NDArray[Any]]) -> None:
        self.name = name
        self._ranks = ranks

    def ranks(self, leaves: Leaves) -> Ranks:
        return self._ranks(leaves).astype(np.float64)


class Counting(Ordering):
    """Least often used first, counting uses before an eviction; among those, the least recently used."""

    def __init__(self) -> None:
        super().__init__("lfu", lambda leaves: leaves["uses"])
        self._ghosts = Ghosts()

    def added(self, page: Page) -> None:
        ghost = self._ghosts.recall(page.key)
        if ghost is not None:
            page.uses = ghost.uses + 1

    def evicted(self, key: bytes, uses: int, last_used: int) -> None:
        self._ghosts.remember(key, uses, 0)


class Ghost(NamedTuple):
    """What is remembered of an evicted page: its uses, and the clock at the last one."""

    uses: int
    clock: int


class Ghosts:
    """The memory of evicted pages: a table in which a page overwrites another one with the same place.

    An entry has 24 bits of the key, 8 bits of uses, and 32 bits of the clock; 0 is an empty entry.
    """

    def __init__(self) -> None:
        # the system gives out the memory as it is written
        self._table = np.zeros(GHOSTS, np.uint64)

    def remember(self, key: bytes, uses: int, clock: int) -> None:
        """Keep the number of uses of an evicted page, and the clock at the last one."""
        number = int.from_bytes(key[:8], "little")
        self._table[number % GHOSTS] = number >> 40 << 40 | min(max(uses, 1), MOST_COUNTED) << 32 | clock

    def recall(self, key: bytes) -> Ghost | None:
        """What is known of an evicted page; in rare cases, of another one with the same bits."""
        number = int.from_bytes(key[:8], "little")
        entry = int(self._table[number % GHOSTS])
        uses = entry >> 32 & MOST_COUNTED
        return Ghost(uses, entry & 0xFFFFFFFF) if uses and entry >> 40 == number >> 40 else None
