"""Payloads, received straight into reused memory.

Clients collect a reply in pieces, join them, and copy the result: 2 GB/s over a socket on which 5 are
possible. So the replies to requests for payloads are read here, from the socket of the client's own connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BufferedReader
from socket import SocketIO
from typing import Any, TypeAlias

from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import InvalidResponse

from prefixstore.backends.contract import View
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.valkey.connections import Connections, translated
from prefixstore.format.record import Buffer

__all__ = ["receive"]

# of what the server answers in one line
LONGEST_LINE = 4096
# Requests that are on their way: one whose reply is received and two behind it, and more as long as the replies are
# small. 1 Gbit/s delivers 6 MB in 50 ms: so much has to wait in the server for the link never to be idle.
AHEAD_BYTES = 32 << 20
LEAST = 3
MOST_AHEAD = 64
# a longer one is no payload of ours
LARGEST_REPLY = 1 << 30
_CRLF = b"\r\n"

# a row and its payload, as they are stored
Stored: TypeAlias = "tuple[bytes | None, Buffer | None]"


def receive(connections: Connections, keys: Sequence[bytes], memory: ReceivedMemory, view: View) -> Iterator[Stored]:
    """Rows and payloads, in order, None for what is not there; each row and its payload are those of one moment.

    The next requests are on their way while a payload is used. How much of it has arrived is noted in `view`.
    """
    rows, payloads = connections.names.rows, connections.names.payloads
    requests = [
        b"".join(map(_command, ([b"MULTI"], [b"HGET", rows, k], [b"GET", payloads + k], [b"EXEC"]))) for k in keys
    ]
    if not requests:
        return
    asked = min(LEAST, len(requests))

    def begin(connection: Any) -> tuple[_Replies, Stored]:
        replies = _Replies(connection, memory, view)
        connection.send_packed_command([b"".join(requests[:asked])])
        return replies, replies.next()

    connection, (replies, (row, payload)) = connections.take(begin)
    # asked for, and not received as a whole
    in_flight = asked - 1
    try:
        while True:
            most = max(LEAST, min(AHEAD_BYTES // max(len(payload or b""), 1), MOST_AHEAD))
            more = requests[asked : asked + max(most - in_flight, 0)]
            if more:
                asked, in_flight = asked + len(more), in_flight + len(more)
                with translated(connections.location):
                    connection.send_packed_command([b"".join(more)])
            yield row, payload
            if not in_flight:
                return
            # nothing here keeps its memory from being used for the next one
            payload = None
            with translated(connections.location):
                row, payload = replies.next()
            in_flight -= 1
    finally:
        if in_flight:
            connection.disconnect()
        connections.give_back(connection)


def _command(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class _Replies:
    """Replies to requests for payloads, on one connection."""

    def __init__(self, connection: Any, memory: ReceivedMemory, view: View) -> None:
        self._connection = connection
        connection.connect()
        # It receives straight into memory, but for the first few bytes. Not `makefile`, which keeps the socket open.
        self._file = BufferedReader(SocketIO(connection._sock, "r"))  # noqa: SLF001 - valkey-py has no way to do that
        self._memory = memory
        self._view = view

    def next(self) -> Stored:
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
        length = self._line(b"$")
        if not length.removeprefix(b"-").isdigit() or int(length) > LARGEST_REPLY:
            raise InvalidResponse(f"the server has answered {length[:40]!r}")
        if (size := int(length)) < 0:
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
