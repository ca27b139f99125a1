"""Rows in an LMDB environment: a directory that many processes share.

Rows, and the payloads beside some of them, are in one database, under keys that begin with different bytes: a database
with a name could not be opened without the lock of those that write. A payload is one value, so it is contiguous in the
memory map and a restore reads it from there. LMDB never overwrites what an open view can see, so the map is safe to
read while others delete. The size of the map bounds the file: it never grows beyond `FILE_FACTOR` times the largest
budget plus `FILE_EXTRA`, whatever the churn.

LMDB writes a changed page of the file to another place, and reuses what a transaction freed only two commits later. So
deleting takes space, too, and a commit that leaves none would be the last one. Each update therefore leaves a number of
pages of the file that the next one can use; those that write payloads leave more than others, so that what they have
written can be deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import lmdb

from prefixstore.backends import refusals
from prefixstore.backends.contract import LONGEST_KEY, Backend, Change, Costs, Draft, Range, Row, View
from prefixstore.backends.files import absolute
from prefixstore.backends.lmdb.environment import FILE_EXTRA, META, Environment, acquire
from prefixstore.backends.location import path_of
from prefixstore.format.record import Buffer

FILE_FACTOR = 1.25
# what the keys of payloads and of rows begin with
PAYLOAD, ROW = b"p", b"r"
PASSED = META + b"passed"

# Pages of the file that an update leaves. To delete what belongs together takes some 40 of them at most, a commit
# some 10.
LEFT_BY_PAYLOADS = 176
LEFT_BY_OTHERS = 96
LEFT_BY_RECLAIM = 32

# bytes before the first of a payload in its pages
PAGE_HEADER = 16
# the pages of LMDB itself: two heads, and some for the list of free pages
OWN_PAGES = 4


class _View(View):
    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        self._txn = txn
        self._database = environment.database

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        get = self._txn.cursor().get
        return [None if (value := get(ROW + key)) is None else bytes(value) for key in keys]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        cursor = self._txn.cursor()
        return [_rows_of(cursor, one) for one in wanted]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for key in keys:
            value = self._txn.get(ROW + key)
            yield None if value is None else (bytes(value), self._txn.get(PAYLOAD + key))

    @property
    def used(self) -> int:
        stat = self._txn.stat(self._database)
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int((OWN_PAGES + pages) * stat["psize"])


def _rows_of(cursor: lmdb.Cursor, wanted: Range) -> list[Row]:
    """The rows of a range."""
    start, stop = ROW + wanted.start, ROW + wanted.stop
    # LMDB looks for no longer key
    if wanted.reverse:
        found = cursor.set_range(stop[: LONGEST_KEY + 1]) or cursor.last()
        if found and bytes(cursor.key()) >= stop:
            found = cursor.prev()
    else:
        found = cursor.set_range(start[: LONGEST_KEY + 1])
        if found and bytes(cursor.key()) < start:
            found = cursor.next()
    rows: list[Row] = []
    if found:
        for view, value in islice(cursor.iterprev() if wanted.reverse else cursor.iternext(), wanted.limit):
            key = bytes(view)
            if not start <= key < stop:
                break
            rows.append(Row(key[len(ROW) :], bytes(value)))
    return rows


class _Writing(_View):
    """What an update reads and writes. It has to leave `to_leave` pages of the file; none if it has written nothing."""

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
                    self._txn.delete(PAYLOAD + key)
                    self._txn.delete(ROW + key)
                    continue
                if payload is not None:
                    self._txn.put(PAYLOAD + key, payload)
                    self.to_leave = LEFT_BY_PAYLOADS
                self._txn.put(ROW + key, value)


class LMDBBackend(Backend):
    """Rows in an LMDB environment, in a directory that is created if it is missing, and readable by its owner only.

    The file stays within `FILE_FACTOR` times the largest `max_bytes` that it was written with, plus `FILE_EXTRA`.
    """

    is_local = True

    def __init__(self, path: str | os.PathLike[str], max_bytes: int, *, read_only: bool = False) -> None:
        self._path = absolute(path)
        self._read_only = read_only
        self._closed = False
        map_size = (int(max_bytes * FILE_FACTOR) + FILE_EXTRA) // 4096 * 4096
        # shared by all of this process that have the file open
        self._environment = acquire(self._path, map_size, read_only=read_only, user=self)

    def _open(self) -> Environment:
        if self._closed:
            raise refusals.closed(self._path)
        return self._environment

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
            draft = Draft(writing, _costs(txn.stat(environment.database)["psize"]), writing.apply)
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
        # inside a transaction: the handle is open then, and is not replaced
        with environment.begin(write=False):
            environment.env.reader_check()
        for _ in range(2):
            with environment.begin(write=True) as txn:
                txn.put(PASSED, bytes([txn.get(PASSED, default=b"\0")[0] ^ 1]))
                environment.require_free(txn, LEFT_BY_RECLAIM)

    def compact(self, *, erase: bool = False) -> int:
        """Put a copy of all rows in the place of the file, and with `erase` overwrite the old one.

        Needs as much disk space again as the rows take, and that no other process has the store open. What may be left
        is on the disk, outside of the file: in blocks that the file system, or an SSD, has moved elsewhere.
        """
        return self._writable().rewrite(erase=erase)

    def check(self) -> None:
        self._open().check()

    def close(self) -> None:
        self._closed = True
        self._environment.release(self)


def _costs(page_size: int) -> Costs:
    """What rows take in a file with pages of this size.

    A row splits at most a leaf and the branch above it, and a large value takes pages of its own, as a payload does.
    """
    return Costs(row=3 * page_size, payload=PAGE_HEADER + 2 * page_size, unit=page_size)


def open_lmdb(location: str, *, max_bytes: int, read_only: bool) -> LMDBBackend:
    """The store in the directory that a path or a URL names."""
    return LMDBBackend(path_of(location), max_bytes, read_only=read_only)
