"""Zeros over everything in an LMDB file that is not in use: free pages, and the gaps inside of the others.

LMDB keeps the bytes of a page that it frees, and a page from which something was deleted keeps them in its gap, through
copies too; there is no call that clears either. So the file is walked here, as LMDB 0.9 lays it out (data version 1,
64 bits), while the caller holds its write lock and nobody reads an older state. What the walk does not reach must be
exactly what LMDB's own list of free pages has, or nothing is touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prefixstore.errors import CorruptError, UnavailableError

__all__ = ["Layout", "common", "erase", "punch", "read_layout", "split"]

MAGIC = 0xBEEFC0DE
DATA_VERSION = 1
META_PAGES = 2
NO_PAGE = 2**64 - 1

# page number, padding, flags, end of the node pointers, start of the nodes (of an overflow page: how many pages, u32)
PAGE = struct.Struct("<QHHHH")
OVERFLOW_PAGES = struct.Struct("<I")
OVERFLOW_AT = 12
BRANCH, LEAF, OVERFLOW, META = 0x01, 0x02, 0x04, 0x08
# two halves of a size, flags, length of the key
NODE = struct.Struct("<HHHH")
BIG, TREE = 0x01, 0x02
# padding (of the free list: the size of a page), flags, depth, branches, leaves, overflow pages, entries, root
DATABASE = struct.Struct("<IHHQQQQQ")
# magic, version, address, size of the map; two databases, the last page, the transaction
META_HEAD = struct.Struct("<IIQQ")
META_TAIL = struct.Struct("<QQ")
NUMBER = struct.Struct("<Q")

ZEROS = bytes(1 << 20)
# of fallocate(2)
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02


@dataclass
class Layout:
    """What is where in the file.

    Attributes
    ----------
    transaction
        Number of the committed transaction that the file was read at.
    free
        Ranges of bytes, in order: pages that nothing refers to, and what is behind the last page.
    gaps
        Ranges of bytes inside of pages that are in use, which hold nothing.
    """

    transaction: int
    free: list[tuple[int, int]]
    gaps: list[tuple[int, int]]


def read_layout(path: Path) -> Layout:
    """Walk the file, as it was committed last. The caller holds the write lock.

    Raises
    ------
    UnavailableError
        If the file is of a version of LMDB that is not known here.
    CorruptError
        If the walk and the list of free pages do not agree.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Walk(path, data).layout()


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = 0
        self._seen = bytearray()
        self._gaps: list[tuple[int, int]] = []
        self._listed: list[int] = []

    def layout(self) -> Layout:
        try:
            return self._walk()
        except (struct.error, IndexError) as error:
            raise CorruptError(f"{self._path} cannot be walked: {error}") from error

    def _walk(self) -> Layout:
        transaction, last, free, main = max(self._metas())
        self._seen = bytearray(last + 1)
        self._seen[:META_PAGES] = b"\1" * META_PAGES
        self._visit(free, of_free_list=True)
        self._visit(main, of_free_list=False)
        for number in self._listed:
            if self._seen[number]:
                raise CorruptError(f"{self._path}: page {number} is both free and in use")
            self._seen[number] = 2
        if (lost := self._seen.count(0)) > 0:
            raise CorruptError(
                f"{self._path}: {lost} pages are neither free nor in use; copy the store, and use the copy"
            )
        behind = len(self._data) // self._size
        free_pages = [*_ranges(self._listed), *([(last + 1, behind)] if behind > last + 1 else [])]
        return Layout(transaction, [(a * self._size, b * self._size) for a, b in free_pages], self._gaps)

    def _metas(self) -> Iterator[tuple[int, int, int, int]]:
        """Transaction, last page, root of the free list and root of the main tree, of both states that are kept."""
        for i in range(META_PAGES):
            at = i * self._size + PAGE.size
            magic, version, _, _ = META_HEAD.unpack_from(self._data, at)
            if magic != MAGIC or version != DATA_VERSION:
                raise UnavailableError(
                    f"{self._path} is laid out as this prefixstore does not know (version {version}), and cannot be "
                    "scrubbed; copy what you keep into a new store, and delete the directory"
                )
            at += META_HEAD.size
            free, main = (DATABASE.unpack_from(self._data, at + n * DATABASE.size) for n in range(2))
            last, transaction = META_TAIL.unpack_from(self._data, at + 2 * DATABASE.size)
            self._size = free[0]
            yield transaction, last, free[-1], main[-1]

    def _visit(self, root: int, *, of_free_list: bool) -> None:
        """Mark all pages of a tree, and note their gaps."""
        waiting = [root] if root != NO_PAGE else []
        while waiting:
            number = waiting.pop()
            flags, nodes = self._page(number)
            if flags & BRANCH:
                waiting += [low | high << 16 | top << 32 for low, high, top, _ in map(self._node, nodes)]
            elif flags & LEAF:
                for at in nodes:
                    waiting += self._leaf_node(at, of_free_list=of_free_list)
            else:
                raise CorruptError(f"{self._path}: page {number} has the flags {flags:#x}")

    def _page(self, number: int) -> tuple[int, list[int]]:
        """Mark a page with nodes: its flags, and where the nodes are."""
        at = number * self._size
        stored, _, flags, lower, upper = PAGE.unpack_from(self._data, at)
        if stored != number or not PAGE.size <= lower <= upper <= self._size:
            raise CorruptError(f"{self._path}: page {number} is damaged")
        self._mark(number, 1)
        self._gaps.append((at + lower, at + upper))
        pointers = struct.unpack_from(f"<{(lower - PAGE.size) // 2}H", self._data, at + PAGE.size)
        return flags, [at + pointer for pointer in pointers]

    def _node(self, at: int) -> tuple[int, int, int, int]:
        low, high, flags, key = NODE.unpack_from(self._data, at)
        return low, high, flags, key

    def _leaf_node(self, at: int, *, of_free_list: bool) -> list[int]:
        """Roots of trees in a node; values on pages of their own are marked, and free pages noted."""
        low, high, flags, key = self._node(at)
        value = at + NODE.size + key
        if flags & TREE:
            root = DATABASE.unpack_from(self._data, value)[-1]
            return [root] if root != NO_PAGE else []
        if flags & BIG:
            value = self._overflow(NUMBER.unpack_from(self._data, value)[0], low | high << 16)
        if of_free_list:
            count = NUMBER.unpack_from(self._data, value)[0]
            self._listed += struct.unpack_from(f"<{count}Q", self._data, value + NUMBER.size)
        return []

    def _overflow(self, number: int, size: int) -> int:
        """Mark the pages of a large value; where it begins."""
        at = number * self._size
        stored, _, flags, _, _ = PAGE.unpack_from(self._data, at)
        count = OVERFLOW_PAGES.unpack_from(self._data, at + OVERFLOW_AT)[0]
        value = at + PAGE.size
        if stored != number or not flags & OVERFLOW or PAGE.size + size > count * self._size:
            raise CorruptError(f"{self._path}: page {number} is damaged")
        self._mark(number, count)
        self._gaps.append((value + size, at + count * self._size))
        return value

    def _mark(self, first: int, count: int) -> None:
        if any(self._seen[first : first + count]) or first + count > len(self._seen):
            raise CorruptError(f"{self._path}: page {first} is used twice")
        self._seen[first : first + count] = b"\1" * count


def _ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Numbers as ranges: the first, and behind the last."""
    first = end = -1
    for number in sorted(numbers):
        if number != end:
            if end > first:
                yield first, end
            first = number
        end = number + 1
    if end > first:
        yield first, end


def common(some: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is in both of two lists of ranges, each of which is in order."""
    found: list[tuple[int, int]] = []
    waiting = iter(others)
    other = next(waiting, None)
    for start, end in some:
        while other is not None and other[1] <= start:
            other = next(waiting, None)
        while other is not None and other[0] < end:
            found.append((max(start, other[0]), min(end, other[1])))
            if other[1] > end:
                break
            other = next(waiting, None)
    return found


def split(ranges: Iterable[tuple[int, int]], size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The first `size` bytes of ranges, or a little more, and the rest."""
    first: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for start, end in ranges:
        taken = min(max(size, 0), end - start)
        size -= taken
        first += [(start, start + taken)] if taken else []
        rest += [(start + taken, end)] if start + taken < end else []
    return first, rest


def erase(handle: int, start: int, end: int) -> int:
    """Write zeros over a range of a file where it holds anything else; how many bytes were written."""
    written = 0
    for at in range(start, end, len(ZEROS)):
        found = os.pread(handle, min(len(ZEROS), end - at), at)
        # what is zero already may be a hole, and stays one
        if found != ZEROS[: len(found)]:
            written += os.pwrite(handle, ZEROS[: len(found)], at)
    return written


def punch(handle: int, start: int, end: int) -> int:
    """Give a range of a file back to the disk, so that it reads as zeros; how many bytes.

    Raises
    ------
    UnavailableError
        If the system or the file system cannot do it.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if sys.platform == "linux" else None
    if fallocate is None:
        raise UnavailableError("this system gives back no part of a file; copy the store, and delete the old one")
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    if fallocate(handle, PUNCH_HOLE | KEEP_SIZE, start, end - start) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise UnavailableError(f"the file system gives back no part of a file ({reason}); copy the store instead")
    return end - start
