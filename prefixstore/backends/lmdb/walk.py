"""Walks an LMDB file with LMDB's own cursors, and accounts for each of its pages and bytes.

LMDB trusts what it reads: a changed byte can end the process. So a file that may have been changed is walked by a child
process first, which runs this module as a script; if the child dies, the file is damaged. The cursors follow all
pointers of the trees. What they do not show is compared with it: each page of the file must either belong to a large
value, be in LMDB's list of free pages, or be a page of a tree. Then its nodes lie inside it and fill it, one node
refers to it, and there are as many of them as LMDB counts. Contents of keys and values are not looked at: they have
their own checksums.

The same account says which bytes hold nothing, for scrub and compaction.

The layout is that of LMDB 0.9 (data version 1, 64 bits). This module imports nothing of prefixstore.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import lt
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

__all__ = ["DAMAGED", "SOUND", "DamageError", "Layout", "walk"]

# exit code of the script, and what it prints if the file is not damaged
DAMAGED = 3
SOUND = b"sound"
MAX_READERS = 512
# how often the script begins again, when others commit meanwhile
ATTEMPTS = 100
# rows and pages that are looked at together: each step in Python costs more than one of them
AT_ONCE = 2048

# of a meta page: after the head of a page and its own, what a tree is, twice: the list of free pages, and the tree that
# has the others; then the last page and the transaction
META_PAGES = 2
META = struct.Struct("<40x48s48sQQ")
# padding, flags, depth; branches, leaves, overflow pages, entries, root
TREE = struct.Struct("<IHHQQQQQ")
NO_PAGE = 2**64 - 1
# number, padding, flags, end of the node pointers and start of the nodes (of a large value: how many pages, u32)
HEAD = struct.Struct("<QHHHH")
BRANCH, LEAF, OVERFLOW = 1, 2, 4
# two halves of a size, flags, length of the key
NODE = struct.Struct("<HHHH")
BIG = 1

Array = npt.NDArray[np.int64]


class DamageError(Exception):
    """The file is not as LMDB writes it."""


class Layout(NamedTuple):
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


def walk(env: lmdb.Environment, txn: lmdb.Transaction, databases: Iterable[Any], file: Path) -> Layout | None:
    """Walk the state of the file that a transaction reads, which has changed nothing and gives out buffers.

    Returns
    -------
    Layout | None
        None if others have committed since it began, and the file no longer says where that state is.

    Raises
    ------
    DamageError, lmdb.Error
        If the file is damaged. LMDB may also end the process.
    """
    try:
        return _Walk(env, txn, file).layout([env.open_db(None), *databases])
    except (struct.error, IndexError, ValueError) as error:
        raise DamageError(str(error)) from error


class _Walk:
    def __init__(self, env: lmdb.Environment, txn: lmdb.Transaction, file: Path) -> None:
        self._txn = txn
        self._size = int(env.stat()["psize"])
        n_bytes = file.stat().st_size // self._size * self._size
        self._file = np.memmap(file, np.uint8, "r", shape=(n_bytes,)).reshape(-1, self._size)
        # a transaction that writes sees the one before it
        self._states = [txn.id(), txn.id() - 1]
        self._gaps: list[Array] = []
        self._children: list[Array] = []

    def layout(self, databases: Sequence[Any]) -> Layout | None:
        metas = [META.unpack_from(self._file[i]) for i in range(META_PAGES)]
        meta = next((one for number in self._states for one in metas if one[-1] == number), None)
        if meta is None:
            return None
        named = [bytes(tree) for _, tree in self._txn.cursor(databases[0])]
        roots = [TREE.unpack_from(tree)[-1] for tree in (*meta[:2], *named)]
        (_, _, depth, branches, leaves, _, _, root), last = TREE.unpack(meta[0]), meta[2]
        stats = [self._txn.stat(one) for one in databases]
        n_tree_pages = branches + leaves + sum(one["branch_pages"] + one["leaf_pages"] for one in stats)
        self._is_known = np.zeros(last + 1, np.bool_)
        self._mark(np.arange(META_PAGES))
        for database, stat in zip(databases, stats, strict=True):
            self._follow(database, stat["entries"])
        free = np.sort(np.concatenate([*self._free_lists(root, depth), np.empty(0, np.int64)]))
        self._mark(free)
        trees = np.flatnonzero(~self._is_known)
        self._require(len(trees) == n_tree_pages, "pages are lost, or used twice")
        for i in range(0, len(trees), AT_ONCE):
            self._check(trees[i : i + AT_ONCE])
        found = np.concatenate([*self._children, np.array([one for one in roots if one != NO_PAGE], np.int64)])
        self._require(np.array_equal(np.sort(found), trees), "trees are not whole")
        free = np.concatenate([free, np.arange(last + 1, len(self._file))])
        # where a number does not follow the one before, a range ends
        ends = np.flatnonzero(np.diff(free) != 1)
        starts = free[np.concatenate([[0], ends + 1])[: len(free)]] * self._size
        stops = (free[np.concatenate([ends, [len(free) - 1]])[: len(free)]] + 1) * self._size
        gaps = [gap for some in self._gaps for gap in some.tolist()]
        return Layout(list(zip(starts.tolist(), stops.tolist(), strict=True)), [(start, end) for start, end in gaps])

    def _require(self, is_right: bool | np.bool_, why: str) -> None:
        if not is_right:
            raise DamageError(why)

    def _mark(self, pages: Array) -> None:
        """Note that pages are known which were not known before."""
        before = np.count_nonzero(self._is_known)
        self._require(((pages >= 0) & (pages < len(self._is_known))).all(), "a number of a page is too high")
        self._is_known[pages] = True
        self._require(np.count_nonzero(self._is_known) - before == len(pages), "a page is used twice")

    def _follow(self, database: Any, n_entries: int) -> None:
        """Have a cursor follow a tree to its end, and find the pages of its large values."""
        # LMDB keeps no larger node in a page of a tree
        largest = ((self._size - HEAD.size) // 2 & ~1) - 2 - NODE.size
        rows = iter(self._txn.cursor(database))
        before, n = b"", 0
        while some := list(islice(rows, AT_ONCE)):
            keys = [before, *(bytes(key) for key, _ in some)]
            self._require(all(map(lt, keys, keys[1:])), "keys are out of order")
            before, n = keys[-1], n + len(some)
            self._require(n <= n_entries, "a tree has more rows than are counted")
            large = [value for key, value in some if len(key) + len(value) > largest]
            if large:
                at = np.array([np.frombuffer(value, np.uint8).__array_interface__["data"][0] for value in large])
                # in the map each page is where its number says
                number = int.from_bytes(ctypes.string_at(int(at[0]) - HEAD.size, 8), "little")
                at -= at[0] - HEAD.size - number * self._size
                self._large(at - HEAD.size, np.array([len(value) for value in large]))
        self._require(n == n_entries, "a tree has fewer rows than are counted")

    def _large(self, starts: Array, sizes: Array) -> None:
        """Mark the pages of large values that start at these bytes of the file."""
        firsts = starts // self._size
        self._require((starts % self._size == 0).all(), "a value is not where it has to be")
        self._require(((firsts >= 0) & (firsts < len(self._file))).all(), "a value is not in the file")
        heads = self._file[firsts, : HEAD.size]
        counts = heads[:, 12:].copy().view("<u4")[:, 0].astype(np.int64)
        is_right = (heads[:, :8].copy().view("<u8")[:, 0] == firsts) & (heads[:, 10] == OVERFLOW) & (heads[:, 11] == 0)
        is_right &= (counts * self._size >= HEAD.size + sizes) & (firsts + counts <= len(self._file))
        self._require(is_right.all(), "a value has no pages of its own")
        self._mark(np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum()))
        self._gaps.append(np.column_stack([starts + HEAD.size + sizes, starts + counts * self._size]))

    def _free_lists(self, root: int, depth: int) -> Iterator[Array]:
        """The numbers of free pages: LMDB gives out no cursor for the tree that has them."""
        level = [root] if depth else []
        for above_leaves in range(depth - 1, -1, -1):
            nodes = [node for number in level for node in self._nodes(number, has_values=not above_leaves)]
            level = [low | high << 16 | flags << 32 for low, high, flags, _ in nodes]
        flat = self._file.reshape(-1)
        for low, high, flags, at in nodes if depth else []:
            n_bytes, start = low | high << 16, at
            if flags & BIG:
                first = int.from_bytes(flat[at : at + 8].tobytes(), "little")
                self._require(first < len(self._file), "a number of a page is too high")
                self._large(np.array([first * self._size]), np.array([n_bytes]))
                start = first * self._size + HEAD.size
            numbers = flat[start : start + n_bytes].copy().view("<u8").astype(np.int64)
            self._require(len(numbers) > 0 and len(numbers) > numbers[0], "a list of free pages is too short")
            yield numbers[1 : numbers[0] + 1]

    def _nodes(self, number: int, *, has_values: bool) -> list[tuple[int, int, int, int]]:
        """The nodes of a page: the first three fields of each, and where in the file its value is."""
        self._require(number < len(self._file), "a number of a page is too high")
        page = self._file[number]
        _, _, kind, lower, _ = HEAD.unpack_from(page)
        self._require(kind == (LEAF if has_values else BRANCH), "a page of free pages has another kind")
        found = []
        for (at,) in struct.iter_unpack("<H", page[HEAD.size : lower]):
            *fields, key = NODE.unpack_from(page, at)
            found.append((*fields, number * self._size + at + NODE.size + key))
        return found

    def _check(self, numbers: Array) -> None:
        """Check that the nodes of these pages of trees lie inside them and fill them, and find their gaps."""
        self._require(numbers[-1] < len(self._file), "the file is too short")
        pages = self._file[numbers]
        words = pages.view("<u2")
        kinds, lower, upper = words[:, 5:8].T.astype(np.int64)
        is_right = (pages.view("<u8")[:, 0] == numbers) & np.isin(kinds, (BRANCH, LEAF)) & (lower > HEAD.size)
        is_right &= (lower <= upper) & (upper <= self._size) & (lower % 2 == 0)
        self._require(is_right.all(), "a page of a tree is none")
        counts = (lower - HEAD.size) // 2
        page = np.repeat(np.arange(len(numbers)), counts)
        place = HEAD.size // 2 + np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = words[page, place].astype(np.int64)
        self._require(
            ((at >= upper[page]) & (at <= self._size - NODE.size) & (at % 2 == 0)).all(), "a node is not there"
        )
        low, high, flags, key = (words[page, at // 2 + i].astype(np.int64) for i in range(4))
        is_leaf = kinds[page] == LEAF
        sizes = NODE.size + key + np.where(is_leaf, np.where(flags & BIG, 8, low | high << 16), 0)
        sizes += sizes & 1
        self._require((at + sizes <= self._size).all(), "a node is too large")
        self._require((np.bincount(page, sizes, len(numbers)) == self._size - upper).all(), "nodes are lost")
        self._children.append((low | high << 16 | flags << 32)[~is_leaf])
        self._gaps.append(np.column_stack([numbers * self._size + lower, numbers * self._size + upper]))


def _main(directory: str, names: Sequence[str]) -> str | None:
    """Walk those of these databases that there are; says what is wrong."""
    if not (Path(directory) / "data.mdb").stat().st_size:
        # LMDB initializes an empty file
        return None
    try:
        env = lmdb.open(
            directory, readonly=True, create=False, map_size=0, max_dbs=len(names), max_readers=MAX_READERS, mode=0o600
        )
    except (lmdb.InvalidError, lmdb.InvalidParameterError, lmdb.VersionMismatchError):
        # not an LMDB file, or of another version: opening it raises the error
        return None
    try:
        for _ in range(ATTEMPTS):
            with env.begin(buffers=True) as txn:
                found = {bytes(name).decode(errors="replace") for name, _ in txn.cursor()}
                # databases of another application are refused when the store is opened
                if found == set(names):
                    databases = [env.open_db(name.encode(), txn=txn, create=False) for name in names]
                    if walk(env, txn, databases, Path(directory) / "data.mdb") is None:
                        continue
            return None
    except DamageError as error:
        return str(error)
    except lmdb.Error as error:
        return f"LMDB says {error}"
    sys.exit("others write to it all the time")


if __name__ == "__main__":
    if why := _main(sys.argv[1], sys.argv[2:]):
        sys.stdout.write(why)
        sys.stdout.flush()
        os._exit(DAMAGED)
    sys.stdout.write(SOUND.decode())
