"""Walks the trees of an LMDB file many pages at a time, since each step in Python costs more than a page.

The pages of one level of a tree are read together, and each property that they must have is one comparison of arrays.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError

__all__ = ["DATABASE", "META", "PAGE", "Array", "Trees", "damaged"]

NO_PAGE = 2**64 - 1
DEEPEST = 32

# page number, padding, flags, end of the node pointers, start of the nodes (of an overflow page: how many pages, u32)
PAGE = struct.Struct("<QHHHH")
HEADS = np.dtype([("number", "<u8"), ("padding", "<u2"), ("flags", "<u2"), ("lower", "<u2"), ("upper", "<u2")])
OVERFLOW_HEADS = np.dtype([("number", "<u8"), ("padding", "<u2"), ("flags", "<u2"), ("count", "<u4")])
BRANCH, LEAF, OVERFLOW = 0x01, 0x02, 0x04
META = 0x08
# two halves of a size, flags, length of the key
NODE = struct.Struct("<HHHH")
BIG, TREE = 0x01, 0x02
# padding (of the free list: the size of a page), flags, depth, branches, leaves, overflow pages, entries, root
DATABASE = struct.Struct("<IHHQQQQQ")
NUMBER = struct.Struct("<Q")
# how many pages, and how many large values, are looked at together
PAGES_AT_ONCE = 1024
VALUES_AT_ONCE = 4096

Array: TypeAlias = npt.NDArray[np.int64]


def damaged(path: Path, why: str) -> CorruptError:
    """The error for a file that is not as LMDB writes it."""
    return CorruptError(
        f"{path} is damaged: {why}; stop all processes using it, and delete data.mdb and lock.mdb there: its pages "
        "will be computed again"
    )


class _Pages(NamedTuple):
    """Some pages of one level."""

    numbers: Array
    data: bytes
    heads: npt.NDArray[np.void]


class _Nodes(NamedTuple):
    """The nodes of some pages, page by page: the index of each page among them, and what is in the head of a node."""

    page: Array
    at: Array
    low: Array
    high: Array
    flags: Array
    key: Array


class Trees:
    """The pages of a file that its trees refer to.

    Parameters
    ----------
    path, handle
        The file, open to read.
    page_size, n_pages
        Size of a page, and how many there are.
    with_gaps
        Whether to remember the ranges of bytes inside these pages that hold nothing.

    Attributes
    ----------
    seen
        By page: 0 not reached, 1 in use, 2 free.
    """

    def __init__(self, path: Path, handle: int, page_size: int, n_pages: int, *, with_gaps: bool) -> None:
        self._path = path
        self._handle = handle
        self._size = page_size
        self._with_gaps = with_gaps
        self._gaps: list[Array] = []
        self.seen = np.zeros(n_pages, np.uint8)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of bytes inside the pages that hold nothing."""
        return [(start, end) for some in self._gaps for start, end in some.tolist()]

    def wrong(self, number: int) -> CorruptError:
        """The error for a page that is not what it has to be."""
        return damaged(self._path, f"page {number} of data.mdb is not what LMDB writes")

    def walk(self, database: tuple[int, ...], *, of_free: bool = False, of_main: bool = False) -> list[bytes]:
        """Walk a tree: the values of the list of free pages, or the trees in the main one.

        Raises
        ------
        CorruptError
            If LMDB would follow something in it to a wrong place, or if a page was reached before.
        """
        _, flags, depth, branches, leaves, overflows, entries, root = database
        if (flags != 0 and not of_free) or depth > DEEPEST or (root >= len(self.seen) and root != NO_PAGE):
            raise self.wrong(root)
        values: list[bytes] = []
        counted = [0, 0, 0, 0]
        level = np.array([root] if root != NO_PAGE else [], np.int64)
        for above_leaves in range(depth - 1, -1, -1):
            below: list[Array] = []
            for numbers in _split(np.sort(level), PAGES_AT_ONCE):
                pages = self._read(numbers)
                nodes = self._nodes(pages, is_branch=above_leaves > 0)
                counted[0 if above_leaves else 1] += len(numbers)
                if above_leaves:
                    below.append(nodes.low | nodes.high << 16 | nodes.flags << 32)
                    continue
                counted[3] += len(nodes.at)
                if of_free or of_main:
                    counted[2] += self._values(pages, nodes, values, of_free=of_free)
                elif (nodes.flags & TREE).any():
                    raise self._first_wrong(pages.numbers[nodes.page], (nodes.flags & TREE) != 0)
                else:
                    counted[2] += self._large_values(pages, nodes)
            level = np.concatenate(below) if below else np.empty(0, np.int64)
        if len(level):
            raise self.wrong(int(level[0]))
        if counted != [branches, leaves, overflows, entries]:
            raise self.wrong(root if root != NO_PAGE else 0)
        return values

    def _first_wrong(self, numbers: Array, is_wrong: npt.NDArray[np.bool_]) -> CorruptError:
        return self.wrong(int(numbers[is_wrong.argmax()]))

    def _require(self, numbers: Array, is_right: npt.NDArray[np.bool_]) -> None:
        if not is_right.all():
            raise self._first_wrong(numbers, ~is_right)

    def _read(self, numbers: Array) -> _Pages:
        """Read pages that were not reached before."""
        self._require(numbers, numbers < len(self.seen))
        self._require(numbers, self.seen[numbers] == 0)
        self._require(numbers[1:], np.diff(numbers) > 0)
        self.seen[numbers] = 1
        some = [os.pread(self._handle, self._size, number * self._size) for number in numbers.tolist()]
        self._require(numbers, np.fromiter(map(len, some), np.int64, len(some)) == self._size)
        data = b"".join(some)
        heads = np.ndarray(len(numbers), HEADS, data, strides=(self._size,))
        self._require(numbers, heads["number"] == numbers)
        return _Pages(numbers, data, heads)

    def _nodes(self, pages: _Pages, *, is_branch: bool) -> _Nodes:
        """The nodes of pages that have to be branches, or leaves."""
        numbers, data, heads = pages
        lower, upper = heads["lower"].astype(np.int64), heads["upper"].astype(np.int64)
        counts = (lower - PAGE.size) // 2
        self._require(numbers, heads["flags"] == (BRANCH if is_branch else LEAF))
        self._require(numbers, (lower <= upper) & (upper <= self._size) & (lower % 2 == 0) & (upper % 2 == 0))
        self._require(numbers, counts >= (2 if is_branch else 1))
        if self._with_gaps:
            self._gaps.append(np.column_stack([numbers * self._size + lower, numbers * self._size + upper]))
        words = np.frombuffer(data, "<u2")
        page = np.repeat(np.arange(len(numbers)), counts)
        place = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = page * (self._size // 2)
        at = words[start + PAGE.size // 2 + place].astype(np.int64)
        self._require(numbers[page], (at % 2 == 0) & (at >= upper[page]) & (at <= self._size - NODE.size))
        first = start + (at >> 1)
        low, high, flags, key = (words[first + i].astype(np.int64) for i in range(4))
        sizes = NODE.size + key
        if not is_branch:
            self._require(numbers[page], flags & ~(BIG | TREE) == 0)
            sizes += np.where(flags & BIG, NUMBER.size, low | high << 16)
        sizes += sizes & 1
        self._require(numbers[page], at + sizes <= self._size)
        used = np.bincount(page, sizes, len(numbers))
        self._require(numbers, used == self._size - upper)
        # no two nodes of a page at one place
        order = np.sort(page * self._size + at)
        self._require(numbers[order[1:] // self._size], np.diff(order) > 0)
        return _Nodes(page, at, low, high, flags, key)

    def _values(self, pages: _Pages, nodes: _Nodes, values: list[bytes], *, of_free: bool) -> int:
        """The values in leaves of the two trees that have few; the number of their overflow pages."""
        overflows = 0
        for page, at, low, high, flags, key in zip(*(each.tolist() for each in nodes), strict=True):
            size, value = low | high << 16, page * self._size + at + NODE.size + key
            if bool(flags & TREE) != (not of_free and size == DATABASE.size and flags == TREE):
                raise self.wrong(int(pages.numbers[page]))
            if flags & BIG:
                first = NUMBER.unpack_from(pages.data, value)[0]
                overflows += self._overflow(np.array([first], np.uint64), np.array([size]))
            if of_free:
                values.append(
                    os.pread(self._handle, size, first * self._size + PAGE.size)
                    if flags & BIG
                    else pages.data[value : value + size]
                )
            elif flags & TREE:
                values.append(pages.data[value : value + size])
        return overflows

    def _large_values(self, pages: _Pages, nodes: _Nodes) -> int:
        """Follow the nodes to values that have pages of their own; how many pages."""
        large = np.flatnonzero(nodes.flags & BIG)
        overflows = 0
        for some in _split(large, VALUES_AT_ONCE):
            at = nodes.page[some] * self._size + nodes.at[some] + NODE.size + nodes.key[some]
            raw = np.frombuffer(pages.data, np.uint8)[at[:, None] + np.arange(NUMBER.size)]
            firsts = np.ascontiguousarray(raw).view("<u8")[:, 0]
            overflows += self._overflow(firsts, nodes.low[some] | nodes.high[some] << 16)
        return overflows

    def _overflow(self, firsts: npt.NDArray[np.uint64], sizes: Array) -> int:
        """Reach the pages of large values, by their first pages and their sizes; how many pages."""
        if (firsts >= len(self.seen)).any():
            raise self.wrong(int(firsts[firsts >= len(self.seen)][0]))
        numbers = firsts.astype(np.int64)
        some = [os.pread(self._handle, PAGE.size, number * self._size) for number in numbers.tolist()]
        self._require(numbers, np.fromiter(map(len, some), np.int64, len(some)) == PAGE.size)
        heads = np.frombuffer(b"".join(some), OVERFLOW_HEADS)
        counts = heads["count"].astype(np.int64)
        self._require(numbers, (heads["number"] == firsts) & (heads["flags"] == OVERFLOW))
        self._require(numbers, (counts * self._size >= PAGE.size + sizes) & (numbers + counts <= len(self.seen)))
        order = np.argsort(numbers)
        self._require(numbers[order[1:]], numbers[order[1:]] >= (numbers + counts)[order[:-1]])
        pages = np.repeat(numbers - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        self._require(pages, self.seen[pages] == 0)
        self.seen[pages] = 1
        if self._with_gaps:
            self._gaps.append(
                np.column_stack([numbers * self._size + PAGE.size + sizes, (numbers + counts) * self._size])
            )
        return len(pages)


def _split(values: Array, size: int) -> Iterator[Array]:
    return (values[i : i + size] for i in range(0, len(values), size))
