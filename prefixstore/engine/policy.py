"""The eviction policies: in which order pages are evicted, and which new pages are worth evicting others for.

A policy ranks pages by columns of the page table, many at once; of equal ranks the least recently used is the lower
one, and of those the deepest. Each engine has its own instance and calls it under the lock of its catalog.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.engine.ghosts import GhostTable
from prefixstore.engine.key_table import Slots
from prefixstore.engine.page_columns import SHIFT, Block, Column
from prefixstore.engine.page_table import MASK, MAX_U16, PageTable
from prefixstore.errors import CorruptError
from prefixstore.format.saved_state import pack_state, unpack_state

__all__ = [
    "Columns",
    "Counting",
    "Ordering",
    "PageFacts",
    "Policy",
    "Ranks",
    "by_expiry",
    "lfu",
    "longest_first",
    "lru",
    "priority",
]

Columns: TypeAlias = "dict[str, Column]"
Ranks: TypeAlias = npt.NDArray[np.float64]


class PageFacts(Protocol):
    """What a policy is told of a page that is used, or captured."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def end(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def last_used(self) -> int: ...
    @property
    def compute_us(self) -> int: ...
    @property
    def raw_bytes(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...


class Policy:
    """The order of eviction, and what it is told so that it can learn one. By default it learns nothing."""

    name = ""
    """As in ``policy=``."""

    drifts = False
    """Whether ranks change without a use, so that leaves have to be ranked again from time to time."""

    def ranks(self, columns: Columns, at: Slots) -> Ranks:
        """The ranks of pages of one block: the lowest is evicted first. A use must not lower one, unless it drifts."""
        raise NotImplementedError

    def rank(self, block: Block, at: int) -> float:
        """The rank of one page, as `ranks` has it."""
        raise NotImplementedError

    def admits(self, table: PageTable, new: int, victim: int) -> bool:
        """Whether a new page is worth more than a victim: otherwise it is not stored.

        Parameters
        ----------
        table
            Has both.
        new, victim
            Their slots.
        """
        return True

    def looked_up(self, table: PageTable, namespace: bytes, pages: Sequence[PageFacts], n_tokens: int | None) -> None:
        """A prompt began with these stored pages, restored or already live; there are none after a miss.

        Parameters
        ----------
        table
            Has the pages, as far as it is filled.
        namespace
            Of the prompt.
        pages
            The pages, from the first one on. Their hits do not count this use yet.
        n_tokens
            How long the prompt is, if that is known.
        """
        for page in pages:
            add_use(table, page.key)

    def added(self, table: PageTable, namespace: bytes, page: PageFacts) -> None:
        """A page was captured by this engine, and is in the table."""
        return

    def used_elsewhere(self, table: PageTable, slot: int) -> None:
        """Another process has used a page; the table has the time of that."""
        return

    def found(self, table: PageTable, slot: int, page: PageFacts) -> None:
        """A page that is stored already, by another process or earlier, has come into the table."""
        return

    def stored(self, table: PageTable, slot: int, page: PageFacts) -> None:
        """A captured page was packed and written, so its stored size is known."""
        return

    def evicted(self, key: bytes, uses: int, clock: int) -> None:
        """A page was evicted by this engine, or not admitted.

        Parameters
        ----------
        key
            Of the page.
        uses, clock
            What the policy had noted in its columns.
        """
        return

    def prepare(self, table: PageTable) -> None:
        """Victims are about to be chosen."""
        return

    def describe(self, facts: npt.NDArray[Any], now: int) -> dict[str, Column]:
        """The columns of the policy for pages that the table is filled with.

        Parameters
        ----------
        facts
            Of type `prefixstore.backends.base.FACTS`.
        now
            Nanoseconds since the epoch.
        """
        return {"uses": np.minimum(facts["hits"].astype(np.int64) + 1, MAX_U16)}

    note: bytes | None = None
    """The name under which a location keeps what was learned; None if nothing is."""

    def parts(self) -> dict[str, bytes]:
        """What was learned, at most 2 MiB, in named parts."""
        return {}

    def take_over(self, parts: Mapping[str, bytes]) -> None:
        """Take over what was learned before. Raises `ValueError`, and changes nothing, if it is invalid."""
        raise ValueError("nothing is learned")

    def dump(self) -> bytes:
        """What was learned, as bytes to be kept for the next start."""
        return pack_state(self.parts())

    def load(self, dumped: bytes) -> bool:
        """Take over what was dumped; whether it could be read. If not, nothing changes."""
        try:
            self.take_over(unpack_state(dumped))
        except (CorruptError, KeyError, ValueError, IndexError, OverflowError, struct.error):
            return False
        return True


class Ordering(Policy):
    """A policy that only ranks, by a function of columns."""

    def __init__(
        self, many: Callable[[Columns, Slots], Column], one: Callable[[Block, int], float], *, name: str = ""
    ) -> None:
        self.name = name
        self._many = many
        self._one = one

    def ranks(self, columns: Columns, at: Slots) -> Ranks:
        return self._many(columns, at).astype(np.float64)

    def rank(self, block: Block, at: int) -> float:
        return float(self._one(block, at))


class Counting(Ordering):
    """Counts uses, those before an eviction included."""

    note = b"policy/lfu"

    def __init__(self) -> None:
        super().__init__(lambda columns, at: columns["uses"][at], lambda block, at: block.uses[at], name="lfu")
        self._ghosts = GhostTable()

    def added(self, table: PageTable, namespace: bytes, page: PageFacts) -> None:
        ghost = self._ghosts.recall(page.key, 0)
        slot = table.find(page.key)
        if ghost is not None and slot >= 0:
            table.blocks[slot >> SHIFT].uses[slot & MASK] = ghost.uses + 1

    def evicted(self, key: bytes, uses: int, clock: int) -> None:
        self._ghosts.remember(key, uses, 0)

    def prepare(self, table: PageTable) -> None:
        self._ghosts.grow(len(table))

    def parts(self) -> dict[str, bytes]:
        return {"ghosts": self._ghosts.dump(0)}

    def take_over(self, parts: Mapping[str, bytes]) -> None:
        ghosts = GhostTable()
        ghosts.load(parts["ghosts"], 0)
        self._ghosts = ghosts


def add_use(table: PageTable, key: bytes) -> None:
    """Count a use of a page, if the table has it."""
    slot = table.find(key)
    if slot >= 0:
        block, at = table.blocks[slot >> SHIFT], slot & MASK
        block.uses[at] = min(block.uses[at] + 1, MAX_U16)


def lru() -> Policy:
    """Least recently used first; among pages used together, the deepest first."""
    return Ordering(lambda _, at: np.zeros(len(at)), lambda *_: 0.0, name="lru")


def lfu() -> Policy:
    """Least often used first, counting uses before an eviction; among those, the least recently used."""
    return Counting()


def longest_first() -> Policy:
    """The end of the longest prompt first, which keeps the beginnings of many prompts."""
    return Ordering(
        lambda columns, at: -columns["end"][at].astype(np.float64),
        lambda block, at: -block.end[at],
        name="longest_first",
    )


def priority() -> Policy:
    """Lowest priority first; among those, the least recently used."""
    return Ordering(lambda columns, at: columns["priority"][at], lambda block, at: block.priority[at], name="priority")


def by_expiry() -> Policy:
    """The page that expires next first."""
    return Ordering(lambda columns, at: columns["expires"][at], lambda block, at: block.expires[at])
