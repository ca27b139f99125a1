"""Receives payloads from PostgreSQL row by row, into reused memory.

An answer that is received as a whole takes fresh memory for all of it, twice, and is of no use before it is complete.
So the payloads of a restore are one query, whose rows are received one by one. The contents of a row are copied once,
out of the memory of libpq.
"""

from __future__ import annotations

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
from sqlalchemy import Row

from prefixstore.errors import UnavailableError
from prefixstore.format.record import Buffer

__all__ = ["STREAMED", "Cursor", "StreamedCursor", "StreamingConnection", "payloads_of"]

# for a statement whose rows are received when they are asked for
STREAMED = {"stream_results": True, "yield_per": 1}

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


def payloads_of(
    rows: Iterator[Row[Any]],
    n_wanted: int,
    memory: Callable[[int], npt.NDArray[np.uint8]],
    arrived: Callable[[int], None],
) -> Iterator[tuple[bytes | None, Buffer | None]]:
    """Values and payloads: each as soon as its last piece is there, and the last one when all rows are.

    Parameters
    ----------
    rows
        At least one for each wanted key, in order: its ``position``, from 1; its ``value``; whether it ``has_payload``,
        the ``size`` of that, and ``data``, a piece of it.
    n_wanted
        How many keys were requested.
    memory
        Makes the memory for a payload.
    arrived
        Called with the number of bytes of the next payload that have arrived.
    """
    for position in range(1, n_wanted + 1):
        # a piece without a byte may follow the one before
        row = next((each for each in rows if each.position == position), None)
        if row is None:
            raise UnavailableError("the response of the server ended before the last row")
        payload = _payload_of(row, rows, memory, arrived) if row.has_payload else None
        if position == n_wanted:
            # the end of the answer: a caller who asked for one payload does not ask for another
            deque(rows, maxlen=0)
        yield None if row.value is None else bytes(row.value), payload
        arrived(0)


def _payload_of(
    row: Row[Any],
    rows: Iterator[Row[Any]],
    memory: Callable[[int], npt.NDArray[np.uint8]],
    arrived: Callable[[int], None],
) -> Buffer:
    """The payload of which a row has the first piece; the others follow."""
    if not row.size:
        return b""
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
