"""Whether the trees in an LMDB file are sound. LMDB trusts what it reads: a changed byte can end the process.

Measured on LMDB 0.9.36: of changed bytes in pages with nodes some end in SIGBUS, some in an assertion that aborts. So
the file is walked here before LMDB follows a pointer in it: metas, branches, leaves, the heads of large values, the
list of free pages; not what is in keys and values, which are checked when they are read. It is read, not mapped, so a
file that is cut meanwhile is an error too. The layout is in `lmdb_scrub`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixstore.backends.lmdb.scrub import (
    BIG,
    BRANCH,
    DATA_VERSION,
    DATABASE,
    LEAF,
    MAGIC,
    META,
    META_HEAD,
    META_PAGES,
    META_TAIL,
    NO_PAGE,
    NODE,
    NUMBER,
    OVERFLOW,
    OVERFLOW_AT,
    OVERFLOW_PAGES,
    PAGE,
    TREE,
)
from prefixstore.errors import CorruptError, LocationError

__all__ = ["check_head", "check_trees"]

PAGE_SIZES = tuple(1 << i for i in range(9, 17))
DEEPEST = 32
# of the list of free pages; those of the others have none
INTEGER_KEYS = 0x08


def check_head(path: Path) -> None:
    """Make sure that LMDB can open a file, if it is one of LMDB's.

    Raises
    ------
    CorruptError
        If a size in it is none.
    LocationError
        If it is no file: LMDB would wait for a pipe.
    """
    if path.exists() and not path.is_file():
        raise LocationError(f"{path} is no file; choose another location")
    try:
        with path.open("rb") as file:
            head = file.read(1 << 17)
    except OSError:
        return  # LMDB says so in its own words
    at = PAGE.size
    if len(head) < at + META_HEAD.size + DATABASE.size:
        return
    magic, version, _, _ = META_HEAD.unpack_from(head, at)
    if (magic, version) == (MAGIC, DATA_VERSION):
        size = DATABASE.unpack_from(head, at + META_HEAD.size)[0]
        if size not in PAGE_SIZES:
            raise _damaged(path, f"its pages cannot have {size} bytes")


def check_trees(path: Path, transaction: int) -> bool:
    """Walk the file as a transaction has left it, while the caller reads at that transaction.

    Returns
    -------
    bool
        False if later transactions have left no trace of this one: begin another, and ask again.

    Raises
    ------
    CorruptError
        If something in it would lead LMDB astray.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        return _Walk(path, handle).walk(transaction)
    finally:
        os.close(handle)


def _damaged(path: Path, why: str) -> CorruptError:
    return CorruptError(
        f"{path} is damaged: {why}; end the processes that use it, and delete the directory: what was in it is "
        "computed anew"
    )


class _Walk:
    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle
        self._size = 0
        self._seen = bytearray()

    def walk(self, transaction: int) -> bool:
        metas = [meta for meta in map(self._meta, range(META_PAGES)) if meta is not None]
        found = [(last, free, main) for number, last, free, main in metas if number == transaction]
        if not found:
            # of a store that is being made there is no meta at all
            return not metas
        last, free, main = found[0]
        pages = os.fstat(self._handle).st_size // self._size
        self._seen = bytearray(min(last + 1, pages))
        self._seen[:META_PAGES] = b"\1" * META_PAGES
        if free[1] & 0xFF != INTEGER_KEYS:
            raise self._wrong(0)
        listed = self._tree(free, of_free=True)
        for tree in self._tree(main, of_main=True):
            self._tree(DATABASE.unpack(tree))
        for stored in listed:
            self._free(stored, last)
        return True

    def _meta(self, i: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]] | None:
        data = os.pread(self._handle, 4096, i * self._size)
        at = PAGE.size
        if len(data) < at + META_HEAD.size + 2 * DATABASE.size + META_TAIL.size:
            return None
        magic, version, _, _ = META_HEAD.unpack_from(data, at)
        if (magic, version) != (MAGIC, DATA_VERSION) or not PAGE.unpack_from(data)[2] & META:
            return None
        at += META_HEAD.size
        free, main = (DATABASE.unpack_from(data, at + n * DATABASE.size) for n in range(2))
        last, transaction = META_TAIL.unpack_from(data, at + 2 * DATABASE.size)
        self._size = self._size or free[0]
        if free[0] != self._size or self._size not in PAGE_SIZES:
            raise self._wrong(i)
        return transaction, last, free, main

    def _wrong(self, number: int) -> CorruptError:
        return _damaged(self._path, f"page {number} of data.mdb is not what LMDB writes")

    def _read(self, number: int) -> bytes:
        if number >= len(self._seen) or self._seen[number]:
            raise self._wrong(number)
        self._seen[number] = 1
        data = os.pread(self._handle, self._size, number * self._size)
        if len(data) != self._size or NUMBER.unpack_from(data)[0] != number:
            raise self._wrong(number)
        return data

    def _tree(self, database: tuple[int, ...], *, of_free: bool = False, of_main: bool = False) -> list[bytes]:
        """Walk a tree: the values of the free list, the trees in the main one."""
        _, flags, depth, branches, leaves, overflows, entries, root = database
        if (flags != 0 and not of_free) or depth > DEEPEST:
            raise self._wrong(root)
        values: list[bytes] = []
        counted = [0, 0, 0, 0]
        waiting = [(root, 1)] if root != NO_PAGE else []
        while waiting:
            number, level = waiting.pop()
            data = self._read(number)
            kind, at, sizes = self._nodes(number, data)
            if (kind == LEAF) != (level == depth) or level > depth or not len(at):
                raise self._wrong(number)
            if kind == BRANCH:
                counted[0] += 1
                if len(at) < 2:
                    raise self._wrong(number)
                words = np.frombuffer(data, "<u2").astype(np.int64)
                first = at >> 1
                children = words[first] | words[first + 1] << 16 | words[first + 2] << 32
                waiting += [(child, level + 1) for child in children.tolist()]
            else:
                counted[1] += 1
                counted[3] += len(at)
                if of_free or of_main or (sizes < 0).any():
                    counted[2] += self._values(number, data, at, values, of_free=of_free, of_main=of_main)
        if counted != [branches, leaves, overflows, entries]:
            raise self._wrong(root if root != NO_PAGE else 0)
        return values

    def _nodes(self, number: int, data: bytes) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Kind of a page, where its nodes are, and their sizes: below 0 where the value has pages of its own."""
        _, _, kind, lower, upper = PAGE.unpack_from(data)
        if kind not in (BRANCH, LEAF) or not PAGE.size <= lower <= upper <= self._size or lower % 2 or upper % 2:
            raise self._wrong(number)
        at = np.frombuffer(data, "<u2", (lower - PAGE.size) // 2, PAGE.size).astype(np.int64)
        if not len(at):
            return kind, at, at
        if (at % 2).any() or at.min() < upper or at.max() > self._size - NODE.size:
            raise self._wrong(number)
        words = np.frombuffer(data, "<u2").astype(np.int64)
        first = at >> 1
        flags, keys = words[first + 2], words[first + 3]
        sizes = NODE.size + keys
        large = np.zeros(len(at), bool)
        if kind == LEAF:
            if (flags & ~(BIG | TREE)).any():
                raise self._wrong(number)
            large = (flags & BIG) != 0
            sizes = sizes + np.where(large, NUMBER.size, words[first] | words[first + 1] << 16)
        padded = sizes + (sizes & 1)
        if (at + padded > self._size).any() or padded.sum() != self._size - upper or len(np.unique(at)) != len(at):
            raise self._wrong(number)
        return kind, at, np.where(large, -sizes, sizes)

    def _values(
        self, number: int, data: bytes, at: npt.NDArray[np.int64], values: list[bytes], *, of_free: bool, of_main: bool
    ) -> int:
        """Follow the nodes of a leaf to values that are elsewhere; how many pages those have."""
        overflows = 0
        for node in at.tolist():
            low, high, flags, key = NODE.unpack_from(data, node)
            size, value = low | high << 16, node + NODE.size + key
            if bool(flags & TREE) != (of_main and size == DATABASE.size and flags == TREE):
                raise self._wrong(number)
            if flags & BIG:
                first = NUMBER.unpack_from(data, value)[0]
                overflows += self._overflow(first, size)
            if of_free:
                values.append(
                    os.pread(self._handle, size, first * self._size + PAGE.size)
                    if flags & BIG
                    else data[value : value + size]
                )
            elif flags & TREE:
                values.append(data[value : value + size])
        return overflows

    def _overflow(self, number: int, size: int) -> int:
        head = os.pread(self._handle, PAGE.size, number * self._size) if number < len(self._seen) else b""
        if len(head) != PAGE.size:
            raise self._wrong(number)
        stored, _, flags, _, _ = PAGE.unpack_from(head)
        count = int(OVERFLOW_PAGES.unpack_from(head, OVERFLOW_AT)[0])
        wanted = -(-(PAGE.size + size) // self._size)
        end = number + count
        if stored != number or flags != OVERFLOW or count < wanted or end > len(self._seen):
            raise self._wrong(number)
        if any(self._seen[number:end]):
            raise self._wrong(number)
        self._seen[number:end] = b"\1" * count
        return count

    def _free(self, stored: bytes, last: int) -> None:
        """A list of free pages: their number, and each, in falling order."""
        numbers = np.frombuffer(stored[: len(stored) // 8 * 8], "<u8").astype(np.int64)
        if len(numbers) < 1 or numbers[0] + 1 > len(numbers) or numbers[0] < 0:
            raise self._wrong(0)
        numbers = numbers[1 : 1 + numbers[0]]
        inside = numbers[numbers < len(self._seen)]
        if (np.diff(numbers) >= 0).any() or (numbers < META_PAGES).any() or (numbers > last).any():
            raise self._wrong(int(numbers[0]))
        used = np.frombuffer(self._seen, np.uint8)[inside]
        if used.any():
            raise self._wrong(int(inside[used != 0][0]))
        for number in inside.tolist():
            self._seen[number] = 2
