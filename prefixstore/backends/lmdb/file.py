"""The pages of an LMDB file, walked by reading it: whether it is sound, and which of its bytes are free.

LMDB trusts what it reads: a changed byte can end the process. Measured on LMDB 0.9.36: of changed bytes in pages with
nodes some end in SIGBUS, some in an assertion that aborts. So the file is walked before LMDB follows a pointer in it:
metas, branches, leaves, the heads of large values, the list of free pages; not the contents of keys and values, which
are checked when they are read. It is read, not mapped, so a file that is cut meanwhile is an error too.

LMDB keeps the bytes of a page that it frees, and a page from which something was deleted keeps them in its gap, through
copies too; there is no call that clears either. The same walk finds both kinds of free bytes, for scrub and compaction:
then each page that the walk does not reach has to be in LMDB's own list of free pages.

The layout is that of LMDB 0.9 (data version 1, 64 bits).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError, LocationError, UnavailableError

__all__ = ["allowed_size", "check_head", "check_trees", "read_layout"]

MAGIC = 0xBEEFC0DE
DATA_VERSION = 1
META_PAGES = 2
NO_PAGE = 2**64 - 1
PAGE_SIZES = tuple(1 << i for i in range(9, 17))
DEEPEST = 32

# page number, padding, flags, end of the node pointers, start of the nodes (of an overflow page: how many pages, u32)
PAGE = struct.Struct("<QHHHH")
OVERFLOW_PAGES = struct.Struct("<I")
OVERFLOW_AT = 12
BRANCH, LEAF, OVERFLOW, META = 0x01, 0x02, 0x04, 0x08
# two halves of a size, flags, length of the key
NODE = struct.Struct("<HHHH")
BIG, TREE = 0x01, 0x02
# flags of the list of free pages; the other databases have none
INTEGER_KEYS = 0x08
# padding (of the free list: the size of a page), flags, depth, branches, leaves, overflow pages, entries, root
DATABASE = struct.Struct("<IHHQQQQQ")
# magic, version, address, size of the map; two databases, the last page, the transaction
META_HEAD = struct.Struct("<IIQQ")
META_TAIL = struct.Struct("<QQ")
NUMBER = struct.Struct("<Q")

Array: TypeAlias = npt.NDArray[np.int64]


@dataclass
class Layout:
    """The bytes of a file that nothing refers to.

    Attributes
    ----------
    free
        Ranges of bytes, in order: free pages, and what follows the last page.
    gaps
        Ranges of bytes inside pages that are in use, which hold nothing.
    """

    free: list[tuple[int, int]]
    gaps: list[tuple[int, int]]


def check_head(path: Path) -> None:
    """Check that LMDB can open a file, if it is one of LMDB's.

    Raises
    ------
    CorruptError
        If the page size in it is not valid.
    LocationError
        If it is not a regular file: LMDB would wait for a pipe.
    """
    if path.exists() and not path.is_file():
        raise LocationError(f"{path} is not a regular file; choose another location")
    try:
        with path.open("rb") as file:
            head = file.read(1 << 17)
    except OSError:
        return  # LMDB reports it in its own words
    at = PAGE.size
    if len(head) < at + META_HEAD.size + DATABASE.size:
        return
    magic, version, _, _ = META_HEAD.unpack_from(head, at)
    if (magic, version) == (MAGIC, DATA_VERSION):
        size = DATABASE.unpack_from(head, at + META_HEAD.size)[0]
        if size not in PAGE_SIZES:
            raise _damaged(path, f"{size} is not a valid page size")


def allowed_size(path: Path) -> int:
    """How large the file was allowed to become: the largest map through which it was ever written; 0 if unknown."""
    try:
        with path.open("rb") as file:
            head = file.read(META_PAGES * max(PAGE_SIZES))
    except OSError:
        return 0  # there is none, or LMDB reports it in its own words
    sizes = [0]
    at = PAGE.size
    while at + META_HEAD.size + DATABASE.size <= len(head) and len(sizes) <= META_PAGES:
        magic, version, _, map_size = META_HEAD.unpack_from(head, at)
        if (magic, version) != (MAGIC, DATA_VERSION):
            break
        sizes.append(map_size)
        at += DATABASE.unpack_from(head, at + META_HEAD.size)[0]
    return max(sizes)


def check_trees(path: Path, transaction: int) -> bool:
    """Check the file as a transaction has left it, while the caller reads at that transaction.

    Returns
    -------
    bool
        False if later transactions have overwritten the meta page of this one: begin another, and check again.

    Raises
    ------
    CorruptError
        If LMDB would follow something in it to a wrong place.
    """
    with _opened(path) as handle:
        walk = _Walk(path, handle)
        metas = walk.metas()
        found = [meta for meta in metas if meta.transaction == transaction]
        if not found:
            # a store that is being created has no meta at all
            return not metas
        walk.walk(found[0])
        return True


def read_layout(path: Path) -> Layout:
    """Walk the file as it was last committed, and account for each of its pages. The caller holds the write lock.

    Raises
    ------
    UnavailableError
        If the file is of an unknown version of LMDB.
    CorruptError
        If the file is not sound, or a page is neither in use nor in the list of free pages.
    """
    with _opened(path) as handle:
        walk = _Walk(path, handle)
        metas = walk.metas()
        if len(metas) < META_PAGES:
            raise UnavailableError(
                f"{path} has a layout that this prefixstore does not know (version {walk.version}) and cannot be "
                "scrubbed; copy what you keep into a new store, and delete data.mdb and lock.mdb"
            )
        return walk.layout(max(metas, key=lambda meta: meta.transaction))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        yield handle
    finally:
        os.close(handle)


def _damaged(path: Path, why: str) -> CorruptError:
    return CorruptError(
        f"{path} is damaged: {why}; stop all processes using it, and delete data.mdb and lock.mdb there: its pages "
        "will be computed again"
    )


@dataclass(frozen=True)
class _Meta:
    """One of the two committed states that LMDB keeps: its last page, and its two root databases."""

    transaction: int
    last: int
    free: tuple[int, ...]
    main: tuple[int, ...]


class _Walk:
    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle
        self._size = 0
        # by page: 0 not reached, 1 in use, 2 free
        self._seen = bytearray()
        self._gaps: list[tuple[int, int]] = []
        # the version in the last meta page whose version was not known
        self.version: int | None = None

    def metas(self) -> list[_Meta]:
        """The committed states."""
        return [meta for meta in map(self._meta, range(META_PAGES)) if meta is not None]

    def walk(self, meta: _Meta) -> Array:
        """Check a state, and mark its pages; the listed free pages, in no order."""
        pages = os.fstat(self._handle).st_size // self._size
        self._seen = bytearray(min(meta.last + 1, pages))
        self._seen[:META_PAGES] = b"\1" * META_PAGES
        if meta.free[1] & 0xFF != INTEGER_KEYS:
            raise self._wrong(0)
        listed = self._tree(meta.free, of_free=True)
        for tree in self._tree(meta.main, of_main=True):
            self._tree(DATABASE.unpack(tree))
        free = [self._free(stored, meta.last) for stored in listed]
        return np.concatenate(free) if free else np.empty(0, np.int64)

    def layout(self, meta: _Meta) -> Layout:
        """Check a state, and that each of its pages is either in use or free."""
        free = np.unique(listed := self.walk(meta))
        if len(free) != len(listed):
            raise _damaged(self._path, "a page is in the list of free pages twice")
        if (lost := meta.last + 1 - self._seen.count(1) - len(free)) > 0:
            raise CorruptError(
                f"{self._path}: {lost} pages are neither free nor in use; copy the store, and use the copy"
            )
        pages = os.fstat(self._handle).st_size // self._size
        free = np.concatenate([free, np.arange(meta.last + 1, pages)])
        # where a number does not follow the one before, a range ends
        ends = np.flatnonzero(np.diff(free) != 1)
        starts = free[np.concatenate([[0], ends + 1])[: len(free)]] * self._size
        stops = (free[np.concatenate([ends, [len(free) - 1]])[: len(free)]] + 1) * self._size
        return Layout(list(zip(starts.tolist(), stops.tolist(), strict=True)), self._gaps)

    def _meta(self, i: int) -> _Meta | None:
        data = os.pread(self._handle, 4096, i * self._size)
        at = PAGE.size
        if len(data) < at + META_HEAD.size + 2 * DATABASE.size + META_TAIL.size:
            return None
        magic, version, _, _ = META_HEAD.unpack_from(data, at)
        if (magic, version) != (MAGIC, DATA_VERSION) or not PAGE.unpack_from(data)[2] & META:
            self.version = version
            return None
        at += META_HEAD.size
        free, main = (DATABASE.unpack_from(data, at + n * DATABASE.size) for n in range(2))
        last, transaction = META_TAIL.unpack_from(data, at + 2 * DATABASE.size)
        self._size = self._size or free[0]
        if free[0] != self._size or self._size not in PAGE_SIZES:
            raise self._wrong(i)
        return _Meta(transaction, last, free, main)

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
        """Walk a tree: the values of the list of free pages, or the trees in the main one."""
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

    def _nodes(self, number: int, data: bytes) -> tuple[int, Array, Array]:
        """Kind of a page, offsets and sizes of its nodes; a size is negative where the value has pages of its own."""
        _, _, kind, lower, upper = PAGE.unpack_from(data)
        if kind not in (BRANCH, LEAF) or not PAGE.size <= lower <= upper <= self._size or lower % 2 or upper % 2:
            raise self._wrong(number)
        self._gaps.append((number * self._size + lower, number * self._size + upper))
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

    def _values(self, number: int, data: bytes, at: Array, values: list[bytes], *, of_free: bool, of_main: bool) -> int:
        """Follow the nodes of a leaf to values stored elsewhere; the number of their pages."""
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
        self._gaps.append((number * self._size + PAGE.size + size, end * self._size))
        return count

    def _free(self, stored: bytes, last: int) -> Array:
        """Mark the pages of one list of free pages: how many there are, and each, in descending order."""
        numbers = np.frombuffer(stored[: len(stored) // 8 * 8], "<u8").astype(np.int64)
        if len(numbers) < 1 or numbers[0] + 1 > len(numbers) or numbers[0] < 0:
            raise self._wrong(0)
        numbers = numbers[1 : 1 + numbers[0]]
        inside = numbers[numbers < len(self._seen)]
        if (np.diff(numbers) >= 0).any() or (numbers < META_PAGES).any() or (numbers > last).any():
            raise self._wrong(int(numbers[0]))
        used = np.frombuffer(self._seen, np.uint8)
        if used[inside].any():
            raise self._wrong(int(inside[used[inside] != 0][0]))
        used[inside] = 2
        return numbers
