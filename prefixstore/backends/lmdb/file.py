"""Walks the pages of an LMDB file by reading it: whether the file is sound, and which of its bytes are free.

LMDB trusts what it reads: a changed byte can end the process. Measured on LMDB 0.9.36: of changed bytes in pages with
nodes some end in SIGBUS, some in an assertion that aborts. So the file is walked before LMDB follows a pointer in it:
metas, branches, leaves, the heads of large values, the list of free pages; not the contents of keys and values, which
are checked when they are read. It is read, not mapped, so a file that is truncated meanwhile is an error, too.

LMDB keeps the bytes of a page that it frees, and a page from which something was deleted keeps them in its gap, even
when it is copied; no call clears either. The same walk finds both kinds of free bytes, for scrub and compaction:
these require that each page that the walk does not reach is in LMDB's own list of free pages.

The layout is that of LMDB 0.9 (data version 1, 64 bits).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefixstore.backends.lmdb.trees import DATABASE, META, PAGE, Array, Trees, damaged
from prefixstore.errors import CorruptError, UnavailableError

__all__ = ["allowed_size", "check_trees", "read_layout"]

MAGIC = 0xBEEFC0DE
DATA_VERSION = 1
META_PAGES = 2
PAGE_SIZES = tuple(1 << i for i in range(9, 17))
# flags of the list of free pages; the other databases have none
INTEGER_KEYS = 0x08
# magic, version, address, size of the map; two databases, the last page, the transaction
META_HEAD = struct.Struct("<IIQQ")
META_TAIL = struct.Struct("<QQ")


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

    A later state is checked instead if its meta page has replaced that of this transaction: while the caller reads,
    LMDB reuses none of the pages of later states either.

    Returns
    -------
    bool
        False if the file has neither state: begin another transaction, and check again.

    Raises
    ------
    CorruptError
        If LMDB would follow something in it to a wrong place.
    """
    with _opened(path) as handle:
        walk = _Walk(path, handle)
        metas = walk.metas()
        found = [meta for meta in metas if meta.transaction >= transaction]
        if not found:
            # a store that is being created has no meta at all
            return not metas
        walk.check(min(found, key=lambda meta: meta.transaction))
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
                f"{path} has a layout unknown to this prefixstore (version {walk.version}) and cannot be "
                "scrubbed; copy the pages you need into a new store, and delete data.mdb and lock.mdb"
            )
        return walk.layout(max(metas, key=lambda meta: meta.transaction))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        # deleted, or this process has changed its user since it opened the store
        raise UnavailableError(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield handle
    finally:
        os.close(handle)


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
        # the version in the last meta page whose version was not known
        self.version: int | None = None

    def metas(self) -> list[_Meta]:
        """The committed states."""
        return [meta for meta in map(self._meta, range(META_PAGES)) if meta is not None]

    def check(self, meta: _Meta) -> None:
        """Check a state."""
        self._walk(meta, with_gaps=False)

    def layout(self, meta: _Meta) -> Layout:
        """Check a state, and that each of its pages is either in use or free."""
        trees, listed = self._walk(meta, with_gaps=True)
        free = np.unique(listed)
        if len(free) != len(listed):
            raise damaged(self._path, "a page is in the list of free pages twice")
        if (lost := meta.last + 1 - int((trees.seen == 1).sum()) - len(free)) > 0:
            raise CorruptError(
                f"{self._path}: {lost} pages are neither free nor in use; copy the store, and use the copy"
            )
        pages = os.fstat(self._handle).st_size // self._size
        free = np.concatenate([free, np.arange(meta.last + 1, pages)])
        # where a number does not follow the one before, a range ends
        ends = np.flatnonzero(np.diff(free) != 1)
        starts = free[np.concatenate([[0], ends + 1])[: len(free)]] * self._size
        stops = (free[np.concatenate([ends, [len(free) - 1]])[: len(free)]] + 1) * self._size
        return Layout(list(zip(starts.tolist(), stops.tolist(), strict=True)), trees.gaps)

    def _walk(self, meta: _Meta, *, with_gaps: bool) -> tuple[Trees, Array]:
        """Walk a state; its trees, and the listed free pages, in no order."""
        pages = os.fstat(self._handle).st_size // self._size
        trees = Trees(self._path, self._handle, self._size, min(meta.last + 1, pages), with_gaps=with_gaps)
        trees.seen[:META_PAGES] = 1
        if meta.free[1] & 0xFF != INTEGER_KEYS:
            raise trees.wrong(0)
        listed = trees.walk(meta.free, of_free=True)
        for tree in trees.walk(meta.main, of_main=True):
            trees.walk(DATABASE.unpack(tree))
        free = [_free(trees, stored, meta.last) for stored in listed]
        return trees, np.concatenate(free) if free else np.empty(0, np.int64)

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
            raise damaged(self._path, f"page {i} of data.mdb is not what LMDB writes")
        return _Meta(transaction, last, free, main)


def _free(trees: Trees, stored: bytes, last: int) -> Array:
    """Mark the pages of one list of free pages: how many there are, and each, in descending order."""
    numbers = np.frombuffer(stored[: len(stored) // 8 * 8], "<u8").astype(np.int64)
    if len(numbers) < 1 or numbers[0] + 1 > len(numbers) or numbers[0] < 0:
        raise trees.wrong(0)
    numbers = numbers[1 : 1 + numbers[0]]
    inside = numbers[numbers < len(trees.seen)]
    if (np.diff(numbers) >= 0).any() or (numbers < META_PAGES).any() or (numbers > last).any():
        raise trees.wrong(int(numbers[0]))
    if trees.seen[inside].any():
        raise trees.wrong(int(inside[trees.seen[inside] != 0][0]))
    trees.seen[inside] = 2
    return numbers
