"""Rows and payloads in a PostgreSQL database. Round trips are the cost here: each read is one statement.

Lists are sent as arrays. ``unnest`` is qualified with its schema: a function of the same name in another one would be
preferred if its parameters fit better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy
from sqlalchemy import Connection

from prefixstore.backends.contract import Change, Costs, Range, Row, View
from prefixstore.backends.sql.database import Database, again, translated
from prefixstore.backends.sql.schema import pieces_of, require_format
from prefixstore.backends.sql.streaming import STREAMED, StreamingConnection, payloads_of
from prefixstore.format.record import Buffer

__all__ = ["COSTS", "PostgreSQLTurn", "PostgreSQLView"]

# The most that a row, and a payload, takes besides its bytes: its key in the index, the last chunk; measured.
ROW_BYTES = PAYLOAD_BYTES = 1280
BASE_BYTES = 256 << 10

_META = "SELECT format, bytes FROM prefixstore_meta WHERE id = 1"
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
_SIZES = """
SELECT key, octet_length(value) AS value_bytes, payload_bytes
FROM prefixstore_rows WHERE key = ANY (%(keys)s::bytea[])
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
_PUT_PIECE = "INSERT INTO prefixstore_payloads (key, piece, data) VALUES (%(key)s, %(piece)s, %(data)s)"
_COUNT = "UPDATE prefixstore_meta SET bytes = %(total)s WHERE id = 1"
# the sum of `_weight` over all rows
_SUM = f"""
SELECT coalesce(sum(n_bytes + n_bytes / 16), 0)::bigint AS total FROM (
    SELECT {ROW_BYTES} + octet_length(key) + octet_length(value) + coalesce({PAYLOAD_BYTES} + payload_bytes, 0)
    AS n_bytes FROM prefixstore_rows
) AS sizes
"""  # noqa: S608 - a constant


def _weight(n_bytes: int, payload: int | None) -> int:
    """What a row of so many bytes takes, and its payload, if it has one. It counts what is left after a vacuum."""
    n_bytes += ROW_BYTES
    if payload is not None:
        n_bytes += PAYLOAD_BYTES + payload
    # chunks of 1996 bytes, of which 4 are in a page of 8192, and their keys: 4 percent
    return n_bytes + n_bytes // 16


class _Costs(Costs):
    """The weights of rows: what is added up in the row about the whole store."""

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        return _weight(len(key) + len(value), payload)


COSTS = _Costs()


class PostgreSQLView(View):
    """What is committed.

    Parameters
    ----------
    database
        Where.
    connection
        By which it is read.
    """

    # a read may be sent again on another connection, as it does not depend on an earlier one
    _retry = True

    def __init__(self, database: Database, connection: Connection) -> None:
        self._database = database
        self._connection = connection
        self._total: int | None = None

    def _rows(self, statement: str, **parameters: Any) -> Sequence[sqlalchemy.Row[Any]]:
        def execute() -> Sequence[sqlalchemy.Row[Any]]:
            return self._connection.exec_driver_sql(statement, parameters).all()

        with translated(self._database.location):
            return again(self._connection, execute) if self._retry else execute()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = {row.key: row.value for row in self._rows(_GET, keys=list(keys))} if keys else {}
        return [found.get(key) for key in keys]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        found: list[list[Row]] = [[] for _ in wanted]
        if wanted:
            starts, stops, limits, reverse = map(list, zip(*wanted, strict=True))
            for row in self._rows(_RANGES, starts=starts, stops=stops, limits=limits, reverse=reverse):
                found[row.position - 1].append(Row(row.key, row.value))
        # the server need not keep the order of what it joins
        return [sorted(rows, reverse=one.reverse) for one, rows in zip(wanted, found, strict=True)]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        if not keys:
            return

        def execute() -> sqlalchemy.CursorResult[Any]:
            return self._connection.exec_driver_sql(_PAYLOADS, {"keys": list(keys)}, execution_options=STREAMED)

        with translated(self._database.location):
            result = again(self._connection, execute) if self._retry else execute()
        rows = self._arriving(result)
        try:
            for value, payload in payloads_of(rows, len(keys), self._database.memory, self._note_arrived):
                yield None if value is None else (value, payload)
        finally:
            self._end(rows)

    def _note_arrived(self, n_bytes: int) -> None:
        self.arrived = n_bytes

    def _arriving(self, result: sqlalchemy.CursorResult[Any]) -> Iterator[sqlalchemy.Row[Any]]:
        # a query that returns nothing is not known to have columns
        while result.returns_rows:
            with translated(self._database.location):
                row = result.fetchone()
            if row is None:
                return
            yield row

    def _end(self, rows: Iterator[sqlalchemy.Row[Any]]) -> None:
        """Receive no more rows, or drop them if the transaction must continue."""
        connection = self._connection
        if connection.closed or connection.invalidated:
            return
        driver = connection.connection.driver_connection
        assert isinstance(driver, StreamingConnection)
        if driver.streamed is None:
            return
        if not self._retry:
            deque(rows, maxlen=0)
            return
        # a new connection costs some milliseconds, the rest of the answer as much time as it takes
        connection.invalidate()
        connection.rollback()

    @property
    def used(self) -> int:
        if self._total is None:
            self._total = self._read_total(_META)
        return BASE_BYTES + self._total

    def _read_total(self, statement: str) -> int:
        rows = self._rows(statement)
        require_format(rows, self._database.location)
        return int(rows[0].bytes)


class PostgreSQLTurn(PostgreSQLView):
    """What the open transaction sees, from the time that it is its turn: nobody else writes until it ends."""

    _retry = False

    def __init__(self, database: Database, connection: Connection) -> None:
        super().__init__(database, connection)
        self._total = self._read_total(f"{_META} FOR UPDATE")

    def _run(self, statement: str, parameters: dict[str, Any] | list[dict[str, Any]]) -> None:
        with translated(self._database.location):
            self._connection.exec_driver_sql(statement, parameters)

    def write(self, changes: Sequence[Change]) -> None:
        """Write changes; where a key has two of them, the first deletes its row."""
        if not changes:
            return
        total = self._total or 0
        stored = {row.key: row for row in self._rows(_SIZES, keys=[change.key for change in changes])}
        written: dict[str, list[Any]] = {"keys": [], "values": [], "sizes": []}
        for change in changes:
            size, kept = None if change.payload is None else memoryview(change.payload).nbytes, None
            if (before := stored.pop(change.key, None)) is not None:
                kept = before.payload_bytes
                total -= _weight(len(change.key) + before.value_bytes, kept)
            if change.value is not None:
                total += _weight(len(change.key) + len(change.value), kept if size is None else size)
                for name, value in zip(written, (change.key, change.value, size), strict=True):
                    written[name].append(value)
        if deleted := [change.key for change in changes if change.value is None]:
            self._run(_DELETE, {"keys": deleted})
        if emptied := [change.key for change in changes if change.value is None or change.payload is not None]:
            self._run(_DELETE_PAYLOADS, {"keys": emptied})
        if written["keys"]:
            self._run(_PUT, written)
        pieces = [{"key": key, "piece": piece, "data": data} for key, piece, data in pieces_of(changes)]
        if pieces:
            self._run(_PUT_PIECE, pieces)
        self._run(_COUNT, {"total": total})

    def count_again(self) -> None:
        """Replace what was counted by what there is."""
        ((total,),) = self._rows(_SUM)
        self._run(_COUNT, {"total": total})
