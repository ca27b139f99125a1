"""Rows and payloads in a SQLite file, read and written through the driver: round trips cost nothing here, copies do."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, cast

import numpy as np

from prefixstore.backends.contract import Change, Costs, Range, Row, View
from prefixstore.backends.sql.database import PIECE_BYTES, Database, pieces_of
from prefixstore.format.record import Buffer

# keys in one statement; SQLite takes no more than 32,766 parameters
MOST_KEYS = 10_000
# of the file
PAGE_BYTES = 16 << 10
# of a page, without the number of the one that continues it
USABLE = PAGE_BYTES - 4
# what is longer than this has pages of its own
INLINE = 16_000

# Any column may hold anything in SQLite. Keys that are equal to bytes are bytes. A value that is not is read as other
# bytes, which mean nothing to whoever knows what they should be.
_ROWS = "SELECT key, CAST(value AS BLOB) FROM prefixstore_rows WHERE"
_FORWARD = f"{_ROWS} key >= ? AND key < ? ORDER BY key LIMIT ?"
_BACKWARD = f"{_ROWS} key >= ? AND key < ? ORDER BY key DESC LIMIT ?"
_ROW = (
    "SELECT CAST(value AS BLOB), payload_bytes IS NOT NULL, "
    "(SELECT sum(length(data)) FROM prefixstore_payloads AS pieces WHERE pieces.key = prefixstore_rows.key) "
    "FROM prefixstore_rows WHERE key = ?"
)
_PIECES = "SELECT data FROM prefixstore_payloads WHERE key = ? ORDER BY piece"
_PIECE_ROWS = "SELECT rowid FROM prefixstore_payloads WHERE key = ? ORDER BY piece"
_SPACE = (
    "SELECT page_count, freelist_count, page_size FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
)
_DELETE_PAYLOAD = "DELETE FROM prefixstore_payloads WHERE key = ?"
_DELETE = "DELETE FROM prefixstore_rows WHERE key = ?"
_PUT = (
    "INSERT INTO prefixstore_rows (key, value, payload_bytes) VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE "
    "SET value = excluded.value, payload_bytes = coalesce(excluded.payload_bytes, payload_bytes)"
)
_PUT_PIECE = "INSERT INTO prefixstore_payloads (key, piece, data) VALUES (?, ?, ?)"


class _Costs(Costs):
    """In whole pages: each tree that is written, of rows or of keys, may split a leaf and the branch above it."""

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        n_pages = 3
        if len(key) + len(value) > INLINE:
            n_pages += -(-len(value) // USABLE)
        if payload is not None:
            n_pages += 4 - (-payload // USABLE) + 2 * (payload // PIECE_BYTES + 1)
        return n_pages * PAGE_BYTES


COSTS = _Costs()


def write_to_sqlite(driver: sqlite3.Connection, changes: Sequence[Change]) -> None:
    """Write changes into the open transaction; where a key has two of them, the first deletes its row."""
    kept = [change for change in changes if change.value is not None]
    driver.executemany(_DELETE_PAYLOAD, [(c.key,) for c in changes if c.value is None or c.payload is not None])
    driver.executemany(_DELETE, [(change.key,) for change in changes if change.value is None])
    sizes = [None if change.payload is None else memoryview(change.payload).nbytes for change in kept]
    driver.executemany(_PUT, ((c.key, c.value, size) for c, size in zip(kept, sizes, strict=True)))
    driver.executemany(_PUT_PIECE, pieces_of(kept))


class SQLiteView(View):
    """What the transaction sees that is open on a connection.

    Payloads do not come from the cache of the connection unless it `is_cached`: a page that is damaged on the disk may
    still be intact there.
    """

    def __init__(self, database: Database, driver: sqlite3.Connection, *, is_cached: bool = True) -> None:
        self._database = database
        self._driver = driver
        self._is_cached = is_cached

    def _rows(self, statement: str, parameters: Sequence[Any]) -> list[Row]:
        with self._database.translated():
            return [Row(key, value or b"") for key, value in self._driver.execute(statement, parameters)]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: dict[bytes, bytes] = {}
        for start in range(0, len(keys), MOST_KEYS):
            some = keys[start : start + MOST_KEYS]
            places = ", ".join("?" * len(some))
            found.update(self._rows(f"{_ROWS} key IN ({places})", some))
        return [found.get(key) for key in keys]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        return [self._range(one) for one in wanted]

    def _range(self, one: Range) -> list[Row]:
        limit = -1 if one.limit is None else one.limit
        rows = self._rows(_BACKWARD if one.reverse else _FORWARD, (one.start, one.stop, limit))
        keys = [row.key for row in rows]
        # SQLite trusts its index: a damaged one may give rows that are elsewhere, or that were there before
        are_inside = all(type(key) is bytes and one.start <= key < one.stop for key in keys)
        if not are_inside or keys != sorted(set(keys), reverse=one.reverse):
            with self._database.translated():
                raise sqlite3.DatabaseError("the index of the rows is malformed")
        return rows

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        if not self._is_cached:
            with self._database.translated():
                self._driver.execute("PRAGMA shrink_memory")
        for key in keys:
            with self._database.translated():
                row = self._driver.execute(_ROW, (key,)).fetchone()
            if row is None:
                yield None
                continue
            value, has_payload, size = row
            yield value or b"", self._payload(key, size) if has_payload else None

    def _payload(self, key: bytes, size: int | None) -> Buffer:
        """The pieces of a payload, which have this many bytes."""
        if not size:
            return b""
        with self._database.translated(), closing(self._pieces(key)) as pieces:
            first = next(pieces)
            if len(first) == size:
                return first
            payload, filled = np.frombuffer(self._database.memory.take(size), np.uint8), 0
            for piece in chain((first,), pieces):
                end = filled + len(piece)
                # NumPy copies without holding the GIL
                payload[filled:end] = np.frombuffer(piece, np.uint8)[: size - filled]
                filled = min(end, size)
            return cast("Buffer", payload[:filled].data)

    def _pieces(self, key: bytes) -> Generator[bytes, None, None]:
        if sys.version_info >= (3, 11):
            # a selected value is copied once more
            for (row,) in self._driver.execute(_PIECE_ROWS, (key,)).fetchall():
                with self._driver.blobopen("prefixstore_payloads", "data", row, readonly=True) as piece:
                    yield piece.read()
        else:
            with closing(self._driver.execute(_PIECES, (key,))) as selected:
                for (data,) in selected:
                    yield data

    @property
    def used(self) -> int:
        with self._database.translated():
            pages, free, size = self._driver.execute(_SPACE).fetchone()
        return int((pages - free) * size)
