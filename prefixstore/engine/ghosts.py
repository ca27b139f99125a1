"""The memory of evicted pages: how often they were used, and when last."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["GHOSTS_PER_PAGE", "Ghost", "GhostTable"]

# entries for each page in the table, 4 bytes each
GHOSTS_PER_PAGE = 8
SMALLEST, LARGEST = 19, 22
# An entry: a tag, the number of uses, the clock in units of the table. An entry of 0 is empty, so uses are 1 or more.
TAG_BITS, USE_BITS, CLOCK_BITS = 10, 5, 17
TAG_SHIFT, USE_SHIFT = USE_BITS + CLOCK_BITS, CLOCK_BITS
CLOCK_MASK = (1 << CLOCK_BITS) - 1
# entries of a bucket: a page may be in any of them
WAYS = 4
MOST_USES = (1 << USE_BITS) - 1
# what is dumped at most
DUMPED = 1 << 17


class Ghost(NamedTuple):
    """What is remembered of an evicted page."""

    uses: int
    clock: int


class GhostTable:
    """Uses and last use of evicted pages, in a hash table of small buckets: an entry overwrites the oldest one there.

    The clock is kept in units that grow with the table, so that it rarely wraps around before an entry is overwritten.
    """

    def __init__(self) -> None:
        self._use(np.zeros(1 << SMALLEST, np.uint32))

    def _use(self, table: npt.NDArray[np.uint32]) -> None:
        self._table = table
        # in which single cells are read and written faster
        self._cells = memoryview(table)  # type: ignore[arg-type]  # a buffer, which it declares from Python 3.12 on

    def __len__(self) -> int:
        return len(self._table)

    @property
    def n_bytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    @property
    def _bits(self) -> int:
        return len(self._table).bit_length() - 1

    @property
    def _unit(self) -> int:
        """Bits of the clock that are not kept."""
        return self._bits - SMALLEST

    def grow(self, pages: int) -> None:
        """Make the table large enough for so many pages, at most 16 MiB."""
        doublings = 0
        while len(self._table) << doublings < min(GHOSTS_PER_PAGE * pages, 1 << LARGEST):
            doublings += 1
        if not doublings:
            return
        if not self._table.any():
            # without a copy: the system gives out memory as it is written
            self._use(np.zeros(len(self._table) << doublings, np.uint32))
            return
        # the next bits of the hash, which are not known, would tell where an entry belongs: it is in all places
        low = np.uint32(CLOCK_MASK)
        coarser = (self._table & ~low) | ((self._table & low) >> np.uint32(doublings))
        self._use(np.tile(coarser, 1 << doublings))

    def _place(self, key: bytes) -> tuple[int, int]:
        """The first slot of the bucket of a key, and its tag."""
        number = int.from_bytes(key[5:9], "little")
        return number * WAYS & len(self._table) - 1, number >> 32 - TAG_BITS

    def _age(self, entry: int, now: int) -> int:
        """In units of the table."""
        return (now >> self._unit) - entry & CLOCK_MASK

    def remember(self, key: bytes, uses: int, clock: int) -> None:
        """Keep the number of uses of an evicted page, and the clock at the last one."""
        first, tag = self._place(key)
        chosen, oldest = first, -1
        for slot in range(first, first + WAYS):
            entry = self._cells[slot]
            if not entry or entry >> TAG_SHIFT == tag:
                chosen = slot
                break
            age = self._age(entry, clock)
            if age > oldest:
                chosen, oldest = slot, age
        kept = clock >> self._unit & CLOCK_MASK
        self._cells[chosen] = tag << TAG_SHIFT | min(max(uses, 1), MOST_USES) << USE_SHIFT | kept

    def recall(self, key: bytes, now: int) -> Ghost | None:
        """What is known of an evicted page; rarely of another one with the same tag.

        Parameters
        ----------
        key
            Of the page.
        now
            The current clock.
        """
        first, tag = self._place(key)
        for entry in self._cells[first : first + WAYS]:
            uses = entry >> USE_SHIFT & MOST_USES
            if uses and entry >> TAG_SHIFT == tag:
                return Ghost(uses, max(now - (self._age(entry, now) << self._unit), 0))
        return None

    def uses(self) -> npt.NDArray[np.int64]:
        """The numbers of uses of all evicted pages that are remembered."""
        found: npt.NDArray[np.int64] = self._table[self._table > 0].astype(np.int64)
        return found >> USE_SHIFT & MOST_USES

    def dump(self, now: int) -> bytes:
        """The newest entries, at most 1 MiB, as pairs of slot and entry after the size of the table.

        Parameters
        ----------
        now
            The current clock.
        """
        slots = np.flatnonzero(self._table)
        if len(slots) > DUMPED:
            # the clock wraps around, and starts at 0 of its units: only ages can be compared
            ages = (now >> self._unit) - self._table[slots].astype(np.int64) & CLOCK_MASK
            slots = slots[np.argsort(ages, kind="stable")[:DUMPED]]
        pairs = np.stack([slots.astype("<u4"), self._table[slots].astype("<u4")], axis=1)
        return bytes([self._bits]) + pairs.tobytes()

    def load(self, dumped: bytes, later: int) -> None:
        """Take over the dump of another table, with clocks shifted by `later`. Raises `ValueError` if it is invalid."""
        bits, pairs = dumped[0], np.frombuffer(dumped, "<u4", offset=1).reshape(-1, 2)
        if not SMALLEST <= bits <= LARGEST or (len(pairs) and int(pairs[:, 0].max()) >= 1 << bits):
            raise ValueError("not a table of evicted pages")
        table = np.zeros(1 << bits, np.uint32)
        table[pairs[:, 0]] = pairs[:, 1]
        self._use(table)
        entries = table[pairs[:, 0]]
        clocks = (entries.astype(np.int64) & CLOCK_MASK) + (later >> self._unit) & CLOCK_MASK
        table[pairs[:, 0]] = (entries & np.uint32(~CLOCK_MASK & 0xFFFFFFFF)) | clocks.astype(np.uint32)
