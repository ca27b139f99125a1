"""A view of the rows in a Valkey server: each call is one command or script, which sees one moment.

Payloads are received straight into reused memory. Clients collect a reply in pieces, join them, and copy the result:
2 GB/s over a socket on which 5 are possible. So the replies to requests for payloads are read here, from the socket of
the client's own connection.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from socket import SocketIO
from typing import Any

from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import InvalidResponse

from prefixstore.backends import refusals
from prefixstore.backends.contract import Range, Row, View
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.valkey.connections import Connections
from prefixstore.backends.valkey.scripts import HEAD, MAGIC, RANGES, VALKEY_VERSION, VALUE_AT
from prefixstore.errors import CorruptError
from prefixstore.format.record import Buffer

# of an empty location
BASE_BYTES = 4096
# what the script answers: how many rows; of each the lengths of its key and of what is stored
_COUNT = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")
# of what the server answers in one line
LONGEST_LINE = 4096
# Requests that are on their way: one whose reply is received and two behind it, and more as long as the replies are
# small. 1 Gbit/s delivers 6 MB in 50 ms: so much has to wait in the server for the link never to be idle.
AHEAD_BYTES = 32 << 20
LEAST = 3
MOST_AHEAD = 64
_CRLF = b"\r\n"


def bytes_in(answer: Sequence[Any], where: str) -> int | None:
    """The bytes of a location, as a script has answered; None if it is incomplete: nothing is there, or not all.

    Raises `IncompatibleError` if the location is that of another application, or has another format.
    """
    exists, magic, version, n_bytes = answer[:4]
    if exists and (magic != MAGIC or not re.fullmatch(rb"\d{1,9}", version or b"")):
        raise refusals.foreign(where, "keys")
    if exists and int(version) != VALKEY_VERSION:
        raise refusals.other_format(where, int(version), VALKEY_VERSION)
    return int(n_bytes) if n_bytes is not None else None


def size(connections: Connections) -> int | None:
    """The bytes of all rows and payloads; None if the location is incomplete: nothing is there, or not all."""
    return bytes_in(connections.run(HEAD), connections.location)


class ServerView(View):
    """The committed rows. Later commits are visible, but each call sees one moment.

    `n_bytes` are those of all rows and payloads, if they are known. `before` is called often while this reads: an
    update renews its lock.
    """

    def __init__(
        self,
        connections: Connections,
        memory: ReceivedMemory,
        n_bytes: int | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._connections = connections
        self._memory = memory
        self._n_bytes = n_bytes
        self._before = before

    @property
    def used(self) -> int:
        if self._n_bytes is None:
            self._n_bytes = size(self._connections) or 0
        return BASE_BYTES + self._n_bytes

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        self._before()
        rows = self._connections.call("HMGET", self._connections.names.rows, *keys)
        return [row[VALUE_AT:] if row is not None else None for row in rows]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        self._before()
        arguments: list[bytes | int] = []
        for start, stop, limit, reverse in wanted:
            arguments += start, stop, -1 if limit is None else limit, b"R" if reverse else b""
        answer, at, found = self._connections.run(RANGES, *arguments), 0, []
        for one in wanted:
            rows: list[Row] = []
            (n_rows,) = _COUNT.unpack_from(answer, at)
            at += _COUNT.size
            for _ in range(n_rows):
                n_key, n_stored = _LENGTHS.unpack_from(answer, at)
                value_at = at + _LENGTHS.size + n_key
                rows.append(Row(answer[value_at - n_key : value_at], answer[value_at + VALUE_AT : value_at + n_stored]))
                at = value_at + n_stored
            keys = [row.key for row in rows]
            if keys != sorted(keys, reverse=one.reverse) or any(not one.start <= key < one.stop for key in keys):
                # who goes on after the last one would never end
                raise CorruptError(f"{self._connections.location}: the rows are out of order")
            found.append(rows)
        return found

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        if not keys:
            return
        rows, payloads = self._connections.names.rows, self._connections.names.payloads
        # each row and its payload are those of one moment
        requests = [
            b"".join(map(_command, ([b"MULTI"], [b"HGET", rows, k], [b"GET", payloads + k], [b"EXEC"]))) for k in keys
        ]
        with self._connections.connection() as connection:
            replies, unsent = _Replies(connection, self._memory, self), deque(requests)

            def send(most: int) -> None:
                if some := [unsent.popleft() for _ in range(min(most, len(unsent)))]:
                    connection.send_packed_command([b"".join(some)])

            send(LEAST)
            for left in reversed(range(len(requests))):
                row, payload = replies.next()
                most = max(LEAST, min(AHEAD_BYTES // max(len(payload or b""), 1), MOST_AHEAD))
                # they are on their way while this payload is used
                send(most - (left - len(unsent)))
                self._before()
                found = None if row is None else (row[VALUE_AT:], payload)
                if not left:
                    break
                yield found
                # nothing here keeps its memory from being used for the next one
                found = row = payload = None
        yield found


def _command(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class _Replies:
    """Replies to requests for payloads, on one connection."""

    def __init__(self, connection: Any, memory: ReceivedMemory, view: View) -> None:
        self._connection = connection
        # It receives straight into memory, but for the first few bytes. Not `makefile`, which keeps the socket open.
        self._file = BufferedReader(SocketIO(connection._sock, "r"))  # noqa: SLF001 - valkey-py has no way to do that
        self._memory = memory
        self._view = view

    def next(self) -> tuple[bytes | None, Buffer | None]:
        """The next reply. Raises what the server answers; other replies are not read then."""
        self._view.arrived = 0
        # to MULTI, and to the two commands that wait for EXEC
        for _ in range(3):
            self._line(b"+")
        self._line(b"*")
        row = self._value()
        return None if row is None else bytes(row), self._value()

    def _line(self, kind: bytes) -> bytes:
        """The next line, without its kind, which must be this one."""
        line = self._file.readline(LONGEST_LINE)
        if not line.endswith(_CRLF):
            raise LostError("the server has closed the connection")
        if line[:1] == b"-":
            self._connection.disconnect()
            raise self._connection._parser.parse_error(line[1:].decode(errors="replace"))  # noqa: SLF001 - as above
        if line[:1] != kind:
            raise InvalidResponse(f"the server has answered {line[:40]!r}")
        return line[1:-2]

    def _value(self) -> memoryview | None:
        """The next value; None for one that there is not."""
        if (size := int(self._line(b"$"))) < 0:
            return None
        into, n = self._memory.take(size), 0
        while n < size:
            n_more = self._file.readinto1(into[n:])
            if not n_more:
                raise LostError("the server has closed the connection in the middle of a reply")
            n += n_more
            self._view.arrived = n
        self._file.read(len(_CRLF))
        return into
