"""Verifies an LMDB file before LMDB uses it, which trusts what it reads: one changed byte can end the process.

All that LMDB goes by is compared: which of the first two pages is the newest and what it says; each page of the tree of
rows, of the tree of free pages, and of large values, with the places and sizes of what is in it; the order of keys; and
that each page of the file belongs to exactly one of these. Contents of keys and values are not looked at: they have
their own checksums.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator, Sequence
from io import FileIO
from mmap import ACCESS_READ, mmap
from pathlib import Path

from prefixstore.backends.refusals import foreign
from prefixstore.errors import CorruptError

# key and value of the row by which a store is known
MAGIC = b"mmagic", b"prefixstore"
# The header of a page: number, flags, where its free space begins and ends (of a large value: how many pages it has);
# that of a node: size of the value or a page, flags, size of the key.
PAGE, NODE = struct.Struct("=Q2xHHH"), struct.Struct("=HHHH")
BRANCH, LEAF, LARGE = 1, 2, 4
# In the first two pages: flags, two marks of LMDB; of the trees of free pages and of rows the size of a page, flags,
# depth, how many pages with branches, with leaves, and of large values, how many rows, and the root; the last page, and
# the transaction.
META = struct.Struct("=10xH4xII16x IHHQQQQQ IHHQQQQQ QQ")
MARKS = 8, 0xBEEFC0DE, 1
INTEGER_KEYS, NOSUBDIR = 8, 0x4000
SIZES = [1 << n for n in range(9, 17)]
LARGEST_KEY, MOST_LEVELS = 511, 32


def verify_file(path: Path, snapshot: int | None = None, *, is_store: bool = False) -> bool:
    """Whether a file was read: all of it, or what an open transaction sees; False if that is not there any more.

    Raises `CorruptError` if it is not as LMDB writes it; `IncompatibleError` if it may be of another application, too.
    """
    with path.open("rb", buffering=0) as file:
        if not os.fstat(file.fileno()).st_size:
            # LMDB would begin a new one
            raise CorruptError("it is empty")
        try:
            first = _read(file, META.size, 0).ljust(META.size, b"\0")
            size = META.unpack(first)[3]
            second = _read(file, META.size, size).ljust(META.size, b"\0")
            # of equal transactions LMDB takes the first
            metas = [META.unpack(second), META.unpack(first)]
            if any(meta[:3] != MARKS for meta in metas):
                return True
            known = {meta[-1]: meta for meta in metas}
            meta = known.get(max(known) if snapshot is None else snapshot)
            if meta is None:
                return False
            if size not in SIZES or meta[-2] < 1:
                raise CorruptError("its first page is wrong")
            _Pages(file, size, meta[-2] + 1).verify(meta[3:11], meta[11:19])
        except (CorruptError, struct.error, OverflowError, ValueError) as error:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                if not is_store and data.find(b"".join(MAGIC)) < 0:
                    raise foreign(path.parent, "LMDB database, or a damaged one") from error
            raise CorruptError(str(error)) from error
    return True


def _read(file: FileIO, n: int, at: int) -> bytes:
    file.seek(at)
    return file.read(n)


class _Pages:
    """The pages of a file, and which of them were seen."""

    def __init__(self, file: FileIO, size: int, n_pages: int) -> None:
        self._file, self._size, self._n_pages = file, size, n_pages
        # free pages at the end may never have been written
        self._seen = bytearray(min(n_pages, os.fstat(file.fileno()).st_size // size))
        self._seen[:2] = b"\1\1"
        self._unwritten: set[int] = set()
        # of a tree: pages with branches, with leaves, and with large values
        self._counted = [0, 0, 0]

    def verify(self, free: Sequence[int], rows: Sequence[int]) -> None:
        for value in self._values(free, INTEGER_KEYS):
            n, *pages = struct.unpack(f"={len(value) // 8}Q", value)
            if n > len(pages):
                raise CorruptError("a list of free pages is longer than it can be")
            for page in pages[:n]:
                if len(self._seen) <= page < self._n_pages:
                    self._unwritten.add(page)
                else:
                    self._see(page, 1)
        for _ in self._values(rows, 0):
            pass
        if free[0] != self._size or 0 in self._seen or len(self._seen) + len(self._unwritten) != self._n_pages:
            raise CorruptError("pages are neither used nor free")

    def _see(self, first: int, n: int) -> None:
        """Some pages belong to something, and so to nothing else."""
        if not n or first + n > len(self._seen) or any(self._seen[first : first + n]):
            raise CorruptError(f"page {first} is used twice, or is not there")
        self._seen[first : first + n] = b"\1" * n

    def _values(self, tree: Sequence[int], flags: int) -> Iterator[bytes]:
        """The values of a tree, whose keys are in order, and as many as are counted."""
        self._counted, n_rows = [0, 0, 0], 0
        before, bound, depth = b"", b"", min(tree[2], MOST_LEVELS)
        for key, value in self._below(tree[-1], depth, flags) if depth else ():
            if (n_rows and key <= before) or key < bound:
                raise CorruptError("keys are out of order")
            if value is None:
                bound = key
            else:
                before, n_rows = key, n_rows + 1
                yield value
        # in its flags the tree of free pages has those of the file
        if (tree[1] & ~NOSUBDIR, *tree[2:7]) != (flags, depth, *self._counted, n_rows):
            raise CorruptError("there are not as many rows and pages as are counted")

    def _below(self, number: int, depth: int, flags: int) -> Iterator[tuple[bytes, bytes | None]]:
        """The rows in a page and below it; and, without a value, the keys of branches, which are between the others."""
        self._see(number, 1)
        page, kind = _read(self._file, self._size, number * self._size), LEAF if depth == 1 else BRANCH
        self._counted[kind == LEAF] += 1
        found, its_kind, begin, end = PAGE.unpack_from(page)
        starts = struct.unpack_from(f"={(begin - PAGE.size) // 2}H", page, PAGE.size)
        nodes = [(start, *NODE.unpack_from(page, start)) for start in starts]
        # LMDB puts them beside each other, from the end of the free space to that of the page
        is_right = (found, its_kind) == (number, kind) and begin <= end and len(nodes) > (kind == BRANCH and not flags)
        for start, low, high, more, n_key in sorted(nodes):
            n_value = 0 if kind == BRANCH else 8 if more else low | high << 16
            is_right = is_right and start == end and n_key <= LARGEST_KEY and (kind == BRANCH or more <= 1)
            end = start + NODE.size + n_key + n_value
            end += end % 2
        if not is_right or end != self._size:
            raise CorruptError(f"page {number} is not as LMDB fills it")
        for start, low, high, more, n_key in nodes:
            at, n = start + NODE.size + n_key, low | high << 16
            key = page[start + NODE.size : at]
            if flags == INTEGER_KEYS:
                key = int.from_bytes(key, sys.byteorder).to_bytes(LARGEST_KEY, "big")
            if kind == BRANCH:
                if start != starts[0]:
                    yield key, None
                yield from self._below(n | more << 32, depth - 1, flags)
            elif more:
                yield key, self._large(page[at : at + 8], n, is_wanted=flags == INTEGER_KEYS)
            else:
                yield key, page[at : at + n]

    def _large(self, where: bytes, n_bytes: int, *, is_wanted: bool) -> bytes:
        """A large value, if it is wanted."""
        first = int.from_bytes(where, sys.byteorder)
        number, kind, low, high = PAGE.unpack(_read(self._file, PAGE.size, first * self._size))
        n_pages = low | high << 16
        if (number, kind) != (first, LARGE) or n_pages * self._size < PAGE.size + n_bytes:
            raise CorruptError(f"page {first} has not the value that it should have")
        self._see(first, n_pages)
        self._counted[2] += n_pages
        return _read(self._file, n_bytes, first * self._size + PAGE.size) if is_wanted else b""
