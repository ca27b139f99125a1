"""Receives payloads from PostgreSQL row by row, into reused memory.

An answer that is received as a whole takes fresh memory for all of it, twice, and is of no use before it is complete.
So the pages of a restore are one query, whose rows are received one by one. The contents of a row are copied once, out
of the memory of libpq.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg.abc import Buffer as Received
from psycopg.adapt import Loader
from psycopg.pq import Format
from sqlalchemy import BigInteger, ColumnElement, Executable, FromClause, Row, ScalarSelect, bindparam, func, select

from prefixstore.backends.sql.schema import PAGES, PIECES, RECORD_COLUMNS, record_of
from prefixstore.buffers import BufferPool
from prefixstore.errors import CorruptError, UnavailableError
from prefixstore.format.record import Buffer, Record

__all__ = [
    "Cursor",
    "StreamedCursor",
    "StreamingConnection",
    "kept_memory",
    "pages_of",
    "payload_of",
    "select_pages",
    "select_payloads",
]

# bytes that are shown where they are, and not copied
SHOWN_BYTES = 16 << 10


class StreamingConnection(psycopg.Connection[Any]):
    """A connection that knows which of its cursors still receives rows: one at a time can.

    Attributes
    ----------
    streamed
        This cursor.
    """

    streamed: StreamedCursor | None = None

    def load_streamed(self) -> None:
        """Receive the rows in transit, so that another statement can be sent."""
        if self.streamed is not None:
            self.streamed.load()

    def rollback(self) -> None:
        """End the transaction, if there is one; the pool of SQLAlchemy asks for it when it gets a connection back."""
        if self.streamed is not None:
            # it would wait for rows that are never read; an interrupt may have prevented closing it before
            self.close()
            return
        super().rollback()


class Cursor(psycopg.Cursor[Any]):
    """Asks for binary answers: as text, each byte of a payload is two digits, which takes four times as long."""

    def __init__(self, connection: StreamingConnection, **options: Any) -> None:
        super().__init__(connection, **options)
        self.format = Format.BINARY
        self._session = connection

    def execute(self, *arguments: Any, **options: Any) -> Cursor:
        """Send a statement, and receive its whole answer."""
        self._session.load_streamed()
        return super().execute(*arguments, **options)

    def executemany(self, *arguments: Any, **options: Any) -> None:
        """Send a statement once for each set of parameters."""
        self._session.load_streamed()
        super().executemany(*arguments, **options)


class _Shown(Loader):
    """Bytes where libpq has received them, as long as anything refers to them."""

    format = Format.BINARY

    def load(self, data: Received) -> Received:
        return data if len(data) >= SHOWN_BYTES else bytes(data)


class StreamedCursor(Cursor):
    """Receives rows one by one, as they are requested.

    It takes the place of a cursor in the server, which SQLAlchemy asks for by a name: such a one would need a
    transaction, and a round trip for each row.
    """

    def __init__(self, connection: StreamingConnection, name: str, **options: Any) -> None:
        super().__init__(connection, row_factory=options.get("row_factory"))
        self.adapters.register_loader("bytea", _Shown)
        self._arriving: Iterator[Any] = iter(())
        self._loaded: deque[Any] = deque()
        self._failed: psycopg.Error | None = None

    def execute(self, query: Any, params: Any = None, **options: Any) -> StreamedCursor:
        """Send a query, and receive the first row, with which it is known what the columns are."""
        self._session.load_streamed()
        self._session.streamed = self
        self._arriving, self._failed = self.stream(query, params, binary=True), None
        self._loaded = deque(islice(iter(self._received, None), 1))
        return self

    def fetchone(self) -> Any:
        """The next row; None if there is none."""
        return self._loaded.popleft() if self._loaded else self._received()

    def fetchmany(self, size: int = 0) -> list[Any]:
        """The next rows."""
        return list(islice(iter(self.fetchone, None), size or self.arraysize))

    def load(self) -> None:
        """Receive all rows; they are in memory then."""
        self._loaded.extend(iter(self._received, None))

    def _received(self) -> Any:
        if self._failed is not None:
            # it was another statement that found out
            raise self._failed
        try:
            row = next(self._arriving, None)
        except psycopg.Error as error:
            self._failed = error
            self._ended()
            raise
        if row is None:
            self._ended()
        return row

    def _ended(self) -> None:
        if self._session.streamed is self:
            self._session.streamed = None


def _size_of(key: ColumnElement[Any]) -> ScalarSelect[Any]:
    """The bytes of all pieces of a page; the server knows them without reading the pieces."""
    pieces = PIECES.alias("all_pieces")
    return select(func.sum(func.length(pieces.c.data))).where(pieces.c.page == key).scalar_subquery()


def select_pages(wanted: FromClause) -> Executable:
    """Wanted pages with their payloads: up to the first that is missing, as many as ``limit`` allows; at least one."""
    place = wanted.c.position
    before = func.sum(PAGES.c.stored_bytes).over(order_by=place) - PAGES.c.stored_bytes
    found = (
        select(
            *RECORD_COLUMNS,
            place,
            before.cast(BigInteger).label("before"),
            _size_of(PAGES.c.key).label("size"),
            func.row_number().over(order_by=place).label("rank"),
        )
        .join_from(wanted, PAGES, PAGES.c.key == wanted.c.key)
        .subquery("found")
    )
    return (
        select(found, PIECES.c.data)
        .join_from(found, PIECES, PIECES.c.page == found.c.key, isouter=True)
        .where(found.c.rank == found.c.position + 1, found.c.before < bindparam("limit", type_=BigInteger))
        .order_by(found.c.position, PIECES.c.number)
    )


def select_payloads(wanted: FromClause) -> Executable:
    """The pieces of wanted pages."""
    return (
        select(wanted.c.position, _size_of(wanted.c.key).label("size"), PIECES.c.data)
        .join_from(wanted, PIECES, PIECES.c.page == wanted.c.key)
        .order_by(wanted.c.position, PIECES.c.number)
    )


def kept_memory(pool: BufferPool, size: int, where: str) -> npt.NDArray[np.uint8]:
    """Reused memory: it is free once nothing refers to it. Fresh memory is slower by half.

    Raises
    ------
    UnavailableError
        If there is none.
    """
    try:
        buffer = pool.acquire(size, wait=True)
    except (MemoryError, ValueError) as error:
        raise UnavailableError(f"{where}: no memory for a payload of {size} bytes") from error
    assert buffer is not None, "it waits until there is one"
    array = np.asarray(buffer.view)
    weakref.finalize(array, buffer.release).atexit = False
    return array


def payload_of(
    row: Row[Any],
    rows: Iterator[Row[Any]],
    memory: Callable[[int], npt.NDArray[np.uint8]],
    arrived: Callable[[int], None] = lambda _: None,
) -> memoryview:
    """The payload of which a row has the first piece, and ``size``, the bytes of all its pieces, which follow.

    `arrived` is called with the number of its bytes that have arrived.
    """
    payload, at = memory(row.size), 0
    piece: Row[Any] | None = row
    while True:
        if piece is None:
            raise UnavailableError("the response of the server ended in the middle of a payload")
        payload[at : at + len(piece.data)] = np.frombuffer(piece.data, np.uint8)
        at += len(piece.data)
        arrived(at)
        if at >= len(payload):
            return payload.data
        piece = next(rows, None)


def pages_of(
    rows: Iterator[Row[Any]],
    n_wanted: int,
    memory: Callable[[int], npt.NDArray[np.uint8]],
    arrived: Callable[[int], None],
) -> Iterator[tuple[Record, Buffer]]:
    """The pages in rows of pieces: each as soon as its last piece is there, and the last one when all rows are.

    Parameters
    ----------
    rows
        A row for each piece, with the columns of the page, its ``position``, and ``size``, the bytes of all its pieces.
    n_wanted
        How many pages were requested.
    memory
        Makes the memory for a payload.
    arrived
        Called with the number of bytes of the next payload that have arrived.

    Raises
    ------
    CorruptError
        When the turn of a page comes that has no payload, or a record that cannot be read.
    """
    n_pages, done = 0, None
    for row in rows:
        if row.position == done:
            # a piece too many, without a byte
            continue
        record, done = record_of(row), row.position
        if row.data is None:
            raise CorruptError(f"page {bytes(row.key).hex()} has no payload")
        payload = payload_of(row, rows, memory, arrived)
        n_pages += 1
        if n_pages == n_wanted:
            # the end of the answer: a caller who asked for one page does not ask for another
            deque(rows, maxlen=0)
        yield record, payload
        arrived(0)
