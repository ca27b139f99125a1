"""Rows and payloads in a PostgreSQL database. Round trips are the cost here: each read is one statement.

Lists are sent as arrays. ``unnest`` is qualified with its schema: a function of the same name in another one would be
preferred if its parameters fit better.

An answer that is received as a whole takes fresh memory for all of it, twice, and is of no use before it is complete.
So the payloads of a restore are one query, whose rows are received one by one. The contents of a row are copied once,
out of the memory of libpq.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg.abc import Buffer as Received
from psycopg.adapt import Loader
from psycopg.pq import Format

from prefixstore.backends.contract import Change, Costs, Range, Row, View
from prefixstore.backends.sql.database import pieces_of
from prefixstore.errors import UnavailableError
from prefixstore.format.record import Buffer

if TYPE_CHECKING:
    from prefixstore.backends.sql.postgresql import PostgreSQL

# The most that a row, and a payload, takes besides its bytes: its key in the index, the last chunk; measured.
ROW_BYTES = PAYLOAD_BYTES = 1280
BASE_BYTES = 256 << 10
# this many bytes, or more, are handed out in the memory of libpq; fewer are copied
SHOWN_BYTES = 16 << 10

META_ROW = "SELECT bytes, format FROM prefixstore_meta WHERE id = 1"
_GET = "SELECT key, value FROM prefixstore_rows WHERE key = ANY (%(keys)s::bytea[])"
_RANGES = """
SELECT wanted.position, found.key, found.value
FROM ROWS FROM (
    pg_catalog.unnest(%(starts)s::bytea[]), pg_catalog.unnest(%(stops)s::bytea[]),
    pg_catalog.unnest(%(limits)s::bigint[]), pg_catalog.unnest(%(reverse)s::boolean[])
) WITH ORDINALITY AS wanted (start, stop, most, reverse, position), LATERAL (
    (
        SELECT key, value FROM prefixstore_rows WHERE NOT wanted.reverse AND key >= wanted.start AND key < wanted.stop
        ORDER BY key LIMIT wanted.most
    ) UNION ALL (
        SELECT key, value FROM prefixstore_rows WHERE wanted.reverse AND key >= wanted.start AND key < wanted.stop
        ORDER BY key DESC LIMIT wanted.most
    )
) AS found
"""
# A line for each piece of a payload; one for a row that has none, and for one that there is not. The server knows the
# length of a piece without reading it.
_PAYLOADS = """
WITH found AS MATERIALIZED (
    SELECT wanted.position, stored.key, stored.value, stored.payload_bytes IS NOT NULL AS has_payload,
        (SELECT sum(octet_length(data)) FROM prefixstore_payloads WHERE key = stored.key) AS size
    FROM pg_catalog.unnest(%(keys)s::bytea[]) WITH ORDINALITY AS wanted (key, position)
    LEFT JOIN prefixstore_rows AS stored ON stored.key = wanted.key
)
SELECT found.position, found.value, found.has_payload, found.size, pieces.data
FROM found LEFT JOIN prefixstore_payloads AS pieces ON pieces.key = found.key
ORDER BY found.position, pieces.piece
"""
_DELETE = "DELETE FROM prefixstore_rows WHERE key = ANY (%(keys)s::bytea[])"
_DELETE_PAYLOADS = "DELETE FROM prefixstore_payloads WHERE key = ANY (%(keys)s::bytea[])"
_PUT = """
INSERT INTO prefixstore_rows (key, value, payload_bytes)
SELECT * FROM ROWS FROM (
    pg_catalog.unnest(%(keys)s::bytea[]), pg_catalog.unnest(%(values)s::bytea[]), pg_catalog.unnest(%(sizes)s::bigint[])
) AS written
ON CONFLICT (key) DO UPDATE
SET value = excluded.value, payload_bytes = coalesce(excluded.payload_bytes, prefixstore_rows.payload_bytes)
"""
_PUT_PIECE = "INSERT INTO prefixstore_payloads (key, piece, data) VALUES (%s, %s, %s)"
# What rows weigh, by their bytes, and what is left after a vacuum: chunks of 1996 bytes, of which 4 are in a page of
# 8192, and their keys take 4 percent more.
SUM = f"""
SELECT coalesce(sum(n_bytes + n_bytes / 16), 0)::bigint FROM (
    SELECT {ROW_BYTES} + octet_length(key) + octet_length(value) + coalesce({PAYLOAD_BYTES} + payload_bytes, 0)
    AS n_bytes, key FROM prefixstore_rows
) AS stored
"""  # noqa: S608 - a constant
COUNT_AGAIN = f"UPDATE prefixstore_meta SET bytes = ({SUM}) WHERE id = 1"  # noqa: S608 - a constant
# those that are about to be changed no longer count, and then as they have become
_OF_KEYS = f"({SUM} WHERE key = ANY (%(keys)s::bytea[]))"
_UNCOUNT = f"UPDATE prefixstore_meta SET bytes = bytes - {_OF_KEYS} WHERE id = 1"  # noqa: S608 - a constant
_COUNT = f"UPDATE prefixstore_meta SET bytes = bytes + {_OF_KEYS} WHERE id = 1"  # noqa: S608 - a constant


class _Costs(Costs):
    """The weights of rows, as above."""

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        n_bytes = ROW_BYTES + len(key) + len(value) + (0 if payload is None else PAYLOAD_BYTES + payload)
        return n_bytes + n_bytes // 16


COSTS = _Costs()


class _Shown(Loader):
    """Bytes where libpq has received them, as long as anything refers to them."""

    format = Format.BINARY

    def load(self, data: Received) -> Received:
        return data if len(data) >= SHOWN_BYTES else bytes(data)


class PostgreSQLView(View):
    """What is committed. Each answer has a connection of its own while it is received.

    An update reads rows by its own `driver`: its session, which holds a lock, is not idle then. Payloads arrive by
    another one. `total` is what all rows weigh, if it is known.
    """

    def __init__(
        self, database: PostgreSQL, driver: psycopg.Connection[Any] | None = None, total: int | None = None
    ) -> None:
        self._database = database
        self._driver = driver
        self._total = total

    def _ask(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        if self._driver is None:
            return self._database.ask(statement, parameters)
        with self._database.translated():
            return self._driver.execute(statement, parameters, binary=True).fetchall()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = dict(self._ask(_GET, {"keys": list(keys)})) if keys else {}
        return [found.get(key) for key in keys]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        found: list[list[Row]] = [[] for _ in wanted]
        if wanted:
            columns = map(list, zip(*wanted, strict=True))
            asked = dict(zip(("starts", "stops", "limits", "reverse"), columns, strict=True))
            for position, key, value in self._ask(_RANGES, asked):
                found[position - 1].append(Row(key, value))
        # the server need not keep the order of what it joins
        return [sorted(rows, reverse=one.reverse) for one, rows in zip(wanted, found, strict=True)]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        if not keys:
            return
        # One that is given back before the end of the answer is closed: a new one costs some milliseconds, the rest of
        # the answer as much time as it takes.
        with self._database.connection() as driver:
            rows = self._received(driver, keys)
            for position, lines in groupby(rows, itemgetter(0)):
                found = self._row_of(lines)
                if position == len(keys):
                    break
                yield found
                self.arrived = 0
            # the end of the answer: a caller who asked for one payload does not ask for another
            deque(rows, maxlen=0)
        yield found
        self.arrived = 0

    def _received(self, driver: psycopg.Connection[Any], keys: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
        cursor = driver.cursor()
        cursor.adapters.register_loader("bytea", _Shown)
        yield from cursor.stream(_PAYLOADS, {"keys": list(keys)}, binary=True)

    def _row_of(self, lines: Iterator[tuple[Any, ...]]) -> tuple[bytes, Buffer | None] | None:
        """Value and payload of the row to which these lines belong: no more is received than belongs to it."""
        payload: npt.NDArray[np.uint8] | None = None
        end = 0
        # no piece is referred to for longer than it is copied: the next one takes its memory, which the CPU has cached
        for _, value, has_payload, size, data in lines:
            if not (has_payload and size):
                return None if value is None else (bytes(value), b"" if has_payload else None)
            if payload is None:
                payload = np.frombuffer(self._database.memory.take(size), np.uint8)
            start, end = end, end + len(data)
            payload[start:end] = np.frombuffer(data, np.uint8)
            self.arrived = end
            if end >= size:
                return bytes(value), payload.data
        raise UnavailableError(f"{self._database.location}: the answer of the server ended in the middle of a payload")

    @property
    def used(self) -> int:
        if self._total is None:
            meta = self._database.ask(META_ROW)
            self._database.require_format(meta)
            self._total = meta[0][0]
        return BASE_BYTES + self._total


def write_to_postgresql(driver: psycopg.Connection[Any], changes: Sequence[Change]) -> None:
    """Write changes into the open transaction; where a key has two of them, the first deletes its row."""
    if not changes:
        return
    changed = {"keys": [change.key for change in changes]}
    driver.execute(_UNCOUNT, changed)
    if deleted := [change.key for change in changes if change.value is None]:
        driver.execute(_DELETE, {"keys": deleted})
    if emptied := [change.key for change in changes if change.value is None or change.payload is not None]:
        driver.execute(_DELETE_PAYLOADS, {"keys": emptied})
    if kept := [change for change in changes if change.value is not None]:
        sizes = [None if change.payload is None else memoryview(change.payload).nbytes for change in kept]
        keys, values = [change.key for change in kept], [change.value for change in kept]
        driver.execute(_PUT, {"keys": keys, "values": values, "sizes": sizes})
    if pieces := list(pieces_of(changes)):
        driver.cursor().executemany(_PUT_PIECE, pieces)
    driver.execute(_COUNT, changed)
