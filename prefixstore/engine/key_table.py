"""From page keys to slot numbers: a hash table in arrays, which grows in small steps.

It is divided into shards by the first byte of the key. Only a shard that is too full is rebuilt, so no step takes
longer than one shard: 4,000 entries of a million.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["SHARDS", "KeyTable", "Keys", "Slots", "cells_of"]

Slots: TypeAlias = npt.NDArray[np.int64]
Keys: TypeAlias = npt.NDArray[np.uint8]
"""Keys as bytes, shape ``(n, 32)``."""

SHARDS = 256
# an entry is a slot and two, so that the others have numbers, too
EMPTY, DELETED = 0, 1
# a shard is at most four fifths full, and three fifths full after it was built again
MOST_FULL, FRESH = 0.8, 0.6
SMALLEST = 8


def cells_of(column: npt.NDArray[Any]) -> memoryview[Any]:
    """An array as a memoryview, in which single cells are read and written faster."""
    return memoryview(column)  # type: ignore[arg-type]  # arrays are buffers, which they declare from Python 3.12 on


class KeyTable:
    """Slot numbers by key: open addressing with linear probing, about 7 bytes a key.

    It does not hold the keys: `KeyTable.key_of` and `KeyTable.keys_of` are supplied by its owner.
    """

    def __init__(self) -> None:
        self._shards = [np.zeros(SMALLEST, "<u4") for _ in range(SHARDS)]
        self._cells = [cells_of(shard) for shard in self._shards]
        self._n_used = [0] * SHARDS

    def key_of(self, slot: int) -> bytes:
        """The key in a slot."""
        raise NotImplementedError

    def keys_of(self, slots: Slots) -> Keys:
        """The keys in these slots."""
        raise NotImplementedError

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(shard.nbytes for shard in self._shards)

    def find(self, key: bytes) -> int:
        """The slot of a key; -1 if it has none."""
        cells = self._cells[key[0]]
        size = len(cells)
        at = int.from_bytes(key[1:5], "little") * size >> 32
        while (entry := cells[at]) != EMPTY:
            if entry != DELETED and self.key_of(entry - 2) == key:
                return int(entry) - 2
            at = at + 1 if at + 1 < size else 0
        return -1

    def insert(self, key: bytes, slot: int) -> None:
        """Add a key that is not there. Its slot holds it already."""
        shard = key[0]
        if self._n_used[shard] + 1 > MOST_FULL * len(self._cells[shard]):
            self._build(shard, np.array([slot], np.int64))
            return
        cells = self._cells[shard]
        size = len(cells)
        at = int.from_bytes(key[1:5], "little") * size >> 32
        while cells[at] > DELETED:
            at = at + 1 if at + 1 < size else 0
        self._n_used[shard] += cells[at] == EMPTY
        cells[at] = slot + 2

    def delete(self, key: bytes, slot: int) -> None:
        """Remove a key that is in this slot."""
        cells = self._cells[key[0]]
        size = len(cells)
        at = int.from_bytes(key[1:5], "little") * size >> 32
        while cells[at] != slot + 2:
            at = at + 1 if at + 1 < size else 0
        after = at + 1 if at + 1 < size else 0
        # at the end of a run nothing needs the mark
        if cells[after] == EMPTY:
            cells[at] = EMPTY
            self._n_used[key[0]] -= 1
        else:
            cells[at] = DELETED

    def insert_many(self, keys: Keys, first: int) -> None:
        """Add keys that are not there, in consecutive slots, which hold them already."""
        order = np.argsort(keys[:, 0], kind="stable")
        shards, starts = np.unique(keys[order, 0], return_index=True)
        for shard, some in zip(shards.tolist(), np.split(order, starts[1:]), strict=True):
            self._build(shard, some + first)

    def find_many(self, shard: int, keys: Keys) -> Slots:
        """The slots of keys that begin with the byte `shard`; -1 for those that have none."""
        slots = self.slots(shard)
        found = np.full(len(keys), -1, np.int64)
        if not len(slots) or not len(keys):
            return found
        here = self.keys_of(slots)
        numbers = here[:, :8].copy().view(">u8")[:, 0]
        order = np.argsort(numbers)
        wanted = keys[:, :8].copy().view(">u8")[:, 0]
        at = np.minimum(np.searchsorted(numbers[order], wanted), len(order) - 1)
        near = order[at]
        is_same = (here[near] == keys).all(axis=1)
        found[is_same] = slots[near[is_same]]
        # keys that share their first eight bytes with another one
        for i in np.flatnonzero((numbers[near] == wanted) & ~is_same).tolist():
            found[i] = self.find(keys[i].tobytes())
        return found

    def slots(self, shard: int) -> Slots:
        """The slots of all keys that begin with this byte."""
        entries = self._shards[shard]
        return entries[entries > DELETED].astype(np.int64) - 2

    def __iter__(self) -> Iterator[int]:
        for shard in range(SHARDS):
            yield from self.slots(shard).tolist()

    def _build(self, shard: int, new: Slots) -> None:
        """Place the slots of a shard, and new ones, in an array of the right size."""
        slots = np.concatenate([self.slots(shard), new])
        size = max(SMALLEST, int(len(slots) / FRESH) + 1)
        prints = self.keys_of(slots)[:, 1:5].copy().view("<u4")[:, 0]
        homes = (prints.astype(np.uint64) * np.uint64(size) >> np.uint64(32)).astype(np.int64)
        order = np.argsort(homes, kind="stable")
        # each is where it belongs, or after the one before it
        steps = np.arange(len(slots))
        places = np.maximum.accumulate(homes[order] - steps) + steps
        entries = np.zeros(size, "<u4")
        fits = places < size
        entries[places[fits]] = slots[order[fits]] + 2
        # probing wraps around at the end
        n_over = len(slots) - int(fits.sum())
        if n_over:
            entries[np.flatnonzero(entries == EMPTY)[:n_over]] = slots[order[~fits]] + 2
        self._cells[shard] = cells_of(entries)
        self._shards[shard] = entries
        self._n_used[shard] = len(slots)
