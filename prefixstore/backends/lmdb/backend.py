"""Rows in an LMDB environment: a directory that many processes share.

Two databases: the rows, and the payloads beside some of them. A payload is one value, so it is contiguous in the memory
map and a restore reads it from there. LMDB never overwrites what an open view can see, so the map is safe to read while
others delete. The size of the map bounds the file: it never grows beyond `FILE_FACTOR` times the budget plus
`FILE_EXTRA`, whatever the churn. If it was filled with a larger budget, it may grow by up to `FILE_EXTRA` after it is
opened, within the bound of that budget.

LMDB writes a changed page of the file to another place, and reuses what a transaction freed only two commits later. So
deleting takes space, too, and a commit that leaves none would be the last one. Each update therefore leaves a number of
pages of the file that the next one can use; those that write payloads leave more than others, so that what they have
written can be deleted.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import lmdb

from prefixstore.backends import refusals
from prefixstore.backends.contract import LONGEST_KEY, Backend, Change, Costs, Draft, Range, Row, View
from prefixstore.backends.files import absolute
from prefixstore.backends.lmdb.checked import damaged
from prefixstore.backends.lmdb.environment import DATABASES, FILE_EXTRA, SCRUBS, Environment, acquire, release
from prefixstore.backends.lmdb.walk import DamageError, Layout, walk
from prefixstore.backends.location import path_of
from prefixstore.errors import UnavailableError
from prefixstore.format.record import Buffer

__all__ = ["LMDBBackend", "open_lmdb"]

FILE_FACTOR = 1.25

# Pages of the file that an update leaves. To delete what belongs together takes some 40 of them at most, a commit
# some 10.
LEFT_BY_PAYLOADS = 176
LEFT_BY_OTHERS = 96
LEFT_BY_RECLAIM = 32

# bytes before the first of a payload in its pages
PAGE_HEADER = 16
# the pages of LMDB itself: two heads, and the roots of the databases and of the free pages
OWN_PAGES = 4
# seconds that `compact` waits for readers of an older state, and bytes that it clears at a time while writers wait
READERS_WITHIN = 10.0
CLEARED_AT_ONCE = 256 << 20
ZEROS = bytes(1 << 20)
# of fallocate(2)
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02


class _View(View):
    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        self._txn = txn
        self._databases = environment.databases
        self._rows = self._databases[b"rows"]
        self._payloads = self._databases[b"payloads"]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        get = self._txn.cursor(self._rows).get
        return [None if (value := get(key)) is None else bytes(value) for key in keys]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        cursor = self._txn.cursor(self._rows)
        return [_rows_of(cursor, one) for one in wanted]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for key in keys:
            value = self._txn.get(key, db=self._rows)
            yield None if value is None else (bytes(value), self._txn.get(key, db=self._payloads))

    @property
    def used(self) -> int:
        stats = [self._txn.stat(self._databases[name]) for name in DATABASES]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return int((OWN_PAGES + pages) * stats[0]["psize"])


def _rows_of(cursor: lmdb.Cursor, wanted: Range) -> list[Row]:
    """The rows of a range."""
    start, stop, limit, is_reverse = wanted
    # LMDB looks for no longer key
    if is_reverse:
        found = cursor.set_range(stop[:LONGEST_KEY]) or cursor.last()
        if found and bytes(cursor.key()) >= stop:
            found = cursor.prev()
    else:
        found = cursor.set_range(start[:LONGEST_KEY])
        if found and bytes(cursor.key()) < start:
            found = cursor.next()
    rows: list[Row] = []
    if found:
        for view, value in islice(cursor.iterprev() if is_reverse else cursor.iternext(), limit):
            key = bytes(view)
            if not start <= key < stop:
                break
            rows.append(Row(key, bytes(value)))
    return rows


class _Writing(_View):
    """What an update reads and writes.

    Attributes
    ----------
    to_leave
        Pages of the file that it has to leave; none if it has written nothing.
    """

    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        super().__init__(txn, environment)
        self._environment = environment
        self.to_leave = 0

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for found in super().payloads(keys):
            # what the update writes next may move what it has written before
            yield found if found is None or found[1] is None else (found[0], bytes(found[1]))

    def apply(self, changes: Sequence[Change]) -> None:
        """Write changes into the transaction. Raises `FullError`."""
        self.to_leave = self.to_leave or LEFT_BY_OTHERS
        with self._environment.translated():
            for key, value, payload in changes:
                if value is None:
                    self._txn.delete(key, db=self._payloads)
                    self._txn.delete(key, db=self._rows)
                    continue
                if payload is not None:
                    self._txn.put(key, payload, db=self._payloads)
                    self.to_leave = LEFT_BY_PAYLOADS
                self._txn.put(key, value, db=self._rows)


class LMDBBackend(Backend):
    """Rows in an LMDB environment.

    Parameters
    ----------
    path
        A directory; created if missing, readable by its owner only.
    max_bytes
        The budget; the file stays within `FILE_FACTOR` times the largest that it was written with, plus `FILE_EXTRA`.
    read_only
        Open an existing store and never write to it.

    Raises
    ------
    LocationError
        If the path is a file, cannot be written, or holds no store to read.
    IncompatibleError
        If the path holds something else, or a newer format.
    """

    is_local = True

    def __init__(self, path: str | os.PathLike[str], max_bytes: int, *, read_only: bool = False) -> None:
        self._path = absolute(path)
        self._map_size = (int(max_bytes * FILE_FACTOR) + FILE_EXTRA) // 4096 * 4096
        self._read_only = read_only
        self._closed = False
        self._environment: Environment | None = None
        self._open()

    def _open(self) -> Environment:
        """The shared environment of this process, opened if necessary."""
        environment = self._environment
        if environment is None and not self._closed:
            environment = self._environment = acquire(self._path, self._map_size, read_only=self._read_only, user=self)
            if self._closed:  # by another thread, meanwhile
                self.close()
        if environment is None or self._closed:
            raise refusals.closed(self._path)
        return environment

    def _writable(self) -> Environment:
        environment = self._open()
        if self._read_only:
            raise refusals.read_only(self._path)
        return environment

    @property
    def location(self) -> str:
        return f"lmdb://{self._path}"

    @contextmanager
    def view(self) -> Iterator[View]:
        environment = self._open()
        with environment.begin(write=False) as txn:
            yield _View(txn, environment)

    @contextmanager
    def update(self) -> Iterator[Draft]:
        environment = self._writable()
        with environment.begin(write=True) as txn:
            writing = _Writing(txn, environment)
            draft = Draft(writing, _costs(txn.stat(environment.databases[b"rows"])["psize"]), writing.apply)
            yield draft
            draft.flush()
            environment.require_free(txn, writing.to_leave)

    def sync(self) -> None:
        environment = self._open()
        # inside a transaction, so the map cannot be replaced nor the process fork
        with environment.begin(write=False):
            environment.env.sync(True)

    def reclaim(self) -> None:
        """Let LMDB reuse what was deleted: remove dead readers, and commit twice (it keeps two earlier states)."""
        environment = self._open()
        environment.free_readers()
        for _ in range(2):
            with environment.begin(write=True) as txn:
                passed = txn.get(b"passed", default=b"\0", db=environment.databases[b"meta"])
                txn.put(b"passed", bytes([passed[0] ^ 1]), db=environment.databases[b"meta"])
                environment.require_free(txn, LEFT_BY_RECLAIM)

    def compact(self, *, erase: bool = False) -> int:
        """Return the free pages of the file to the disk, or overwrite all its free bytes; returns how many bytes.

        The file keeps its length, and gets holes; where files cannot have any, it raises `UnavailableError`. To
        erase, also the gaps inside pages are overwritten with zeros. Servers keep running: from then on they write
        through new handles, because LMDB's buffers of the old ones hold what they have written. Views that see what
        was deleted must end first, for which this waits some seconds. What may be left is the key of a payload.
        """
        if not erase:
            return self._clear_free_space(_punch, gaps=False)
        self._write_rows_again()
        return self._clear_free_space(_overwrite, gaps=True)

    def _write_rows_again(self) -> None:
        """Write all rows again, in order: the branches of their tree hold keys that were deleted."""
        environment = self._writable()
        # they need space: that of what was deleted
        self.reclaim()
        # what was committed last is read while it is written again
        with environment.begin(write=True) as txn, environment.env.begin(buffers=True) as before:
            meta, rows = environment.databases[b"meta"], environment.databases[b"rows"]
            txn.drop(rows, delete=False)
            for key, value in before.cursor(rows):
                txn.put(key, value, db=rows, append=True)
            scrubs = int.from_bytes(txn.get(SCRUBS, default=b"", db=meta), "little")
            txn.put(SCRUBS, (scrubs + 1).to_bytes(8, "little"), db=meta)
            environment.require_free(txn, LEFT_BY_RECLAIM)

    def check(self) -> None:
        self._open().check()

    def _clear_free_space(self, clear: Callable[[int, int, int], int], *, gaps: bool) -> int:
        """Call `clear(handle, start, end)` for all bytes that nothing refers to; returns the sum of its results."""
        environment = self._writable()
        # after this, neither of the two states that LMDB keeps refers to what was deleted before
        self.reclaim()
        self.sync()
        path = self._path / "data.mdb"
        # up to here it is clear
        at = cleared = 0
        is_done = False
        handle = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            while not is_done:
                # others wait for this transaction, so it is short; the next one reads the layout again
                with self._alone_with_the_newest(environment) as txn:
                    layout = _layout(environment, txn)
                    if gaps and at == 0:
                        cleared += sum(clear(handle, *gap) for gap in layout.gaps)
                    left = CLEARED_AT_ONCE
                    for first, end in layout.free:
                        start = max(first, at)
                        at = max(at, min(end, start + left))
                        if start < at:
                            cleared += clear(handle, start, at)
                            left -= at - start
                        if left == 0:
                            break
                    is_done = left > 0
            os.fsync(handle)
        finally:
            os.close(handle)
        return cleared

    @contextmanager
    def _alone_with_the_newest(self, environment: Environment) -> Iterator[lmdb.Transaction]:
        """Hold the write lock while there is no reader of a state older than the last commit, which is durable."""
        deadline = time.monotonic() + READERS_WITHIN
        while True:
            with environment.begin(write=True) as txn:
                newest = txn.id() - 1
                readers = [pid for pid, transaction in environment.readers().items() if transaction < newest]
                if not readers:
                    # until it is on disk, a loss of power restores the state before it, which has other free pages
                    environment.env.sync(True)
                    yield txn
                    return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self._path}: process {readers[0]} still reads deleted pages; try again, or stop it first"
                )
            time.sleep(0.05)
            environment.free_readers()

    def after_fork(self) -> None:
        self._environment = None

    def close(self) -> None:
        self._closed = True
        self._environment = None
        # also if an interrupt has kept the environment from being noted here
        release(self)


def _layout(environment: Environment, txn: lmdb.Transaction) -> Layout:
    """The bytes of the file that nothing refers to, in the state before a transaction that has written nothing."""
    file = environment.path / "data.mdb"
    try:
        layout = walk(environment.env, txn, environment.databases.values(), file)
    except DamageError as error:
        raise damaged(file, str(error)) from error
    if layout is None:
        raise UnavailableError(f"{file} has a layout unknown to this prefixstore; copy the pages into a new store")
    return layout


def _overwrite(handle: int, start: int, end: int) -> int:
    """Overwrite a range of a file with zeros where it holds anything else; returns the bytes written."""
    written = 0
    for at in range(start, end, len(ZEROS)):
        found = os.pread(handle, min(len(ZEROS), end - at), at)
        # what is zero already may be a hole, which stays one
        if found != ZEROS[: len(found)]:
            written += os.pwrite(handle, ZEROS[: len(found)], at)
    return written


def _punch(handle: int, start: int, end: int) -> int:
    """Punch a hole into a file, which then reads as zeros; returns the freed bytes.

    Raises
    ------
    UnavailableError
        If the operating system or the file system does not support it.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if sys.platform == "linux" else None
    if fallocate is None:
        raise UnavailableError("this system cannot free parts of a file; copy the store and delete the old one")
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    if fallocate(handle, PUNCH_HOLE | KEEP_SIZE, start, end - start) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise UnavailableError(f"the file system cannot free parts of a file ({reason}); copy the store instead")
    return end - start


def _costs(page_size: int) -> Costs:
    """What rows take in a file with pages of this size.

    A row splits at most a leaf and the branch above it, and a large value takes pages of its own, as a payload does.
    """
    return Costs(row=3 * page_size, payload=PAGE_HEADER + 2 * page_size, unit=page_size)


def open_lmdb(location: str, *, max_bytes: int, read_only: bool) -> LMDBBackend:
    """The store in the directory that a path or a URL names."""
    return LMDBBackend(path_of(location), max_bytes, read_only=read_only)
