"""Payloads, sent in pieces, and received straight into reused memory.

Clients collect a reply in pieces, join them, and copy the result: 2 GB/s over a socket on which 5 are
possible. So the replies to GETs of payloads are read here, from the socket of the client's own connection.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from socket import SocketIO
from typing import Any

from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import InvalidResponse

from prefixstore.backends.contract import View
from prefixstore.backends.valkey.connections import Connections, translated
from prefixstore.errors import UnavailableError
from prefixstore.format.record import Buffer

__all__ = ["LARGEST_VALUE", "LENGTH", "KeptBuffers", "parted", "receive", "send"]

# before the value of the row in what is stored with a payload: its length
LENGTH = struct.Struct("<I")
# Valkey's proto-max-bulk-len, by default, less some space for the value of the row
LARGEST_VALUE = 500 << 20
# of what the server answers in one line
LONGEST_LINE = 4096
# A send has to make progress within the timeout of the socket, and Python counts that for the whole of one call.
PIECE_BYTES = 4 << 20
# Requests that are on their way: one whose reply is received and two behind it, and more as long as the replies are
# small. 1 Gbit/s delivers 6 MB in 50 ms: so much has to wait in the server for the link never to be idle.
AHEAD_BYTES = 32 << 20
LEAST = 3
MOST_AHEAD = 64
KEPT_BYTES = 128 << 20
# below that fresh memory is as good
SMALL = 64 << 10
# a longer one is no payload of ours
LARGEST_REPLY = 1 << 30
_CRLF = b"\r\n"

# the value of a row, and its payload
Stored = tuple[bytes, Buffer]


class KeptBuffers:
    """Memory for received payloads. It is reused only when nothing refers to it any more.

    Fresh memory costs more than the copy into it. Any thread may use it: what is looked at is taken out meanwhile.
    """

    def __init__(self) -> None:
        self._kept: deque[bytearray] = deque()

    def acquire(self, size: int) -> memoryview:
        """Memory of this size; it is taken back when no view of it is left."""
        with suppress(IndexError):  # other threads have taken out what is left
            for _ in range(len(self._kept)):
                memory = self._kept.popleft()
                fits = size <= len(memory) <= 2 * size and _is_free(memory)
                view = memoryview(memory)[:size] if fits else None
                self._kept.append(memory)
                if view is not None:
                    return view
        memory = bytearray(size)
        view = memoryview(memory)
        self._kept.append(memory)
        with suppress(IndexError):
            # the oldest ones stay with those who refer to them
            while sum(map(len, list(self._kept))) > KEPT_BYTES:
                self._kept.popleft()
        return view


def _is_free(memory: bytearray) -> bool:
    try:
        # Python refuses to resize what a view shows
        memory.append(0)
    except BufferError:
        return False
    del memory[-1]
    return True


def send(
    connections: Connections,
    name: bytes,
    value: bytes,
    payload: Buffer,
    milliseconds: int,
    meanwhile: Callable[[], None],
) -> None:
    """Store a payload with the value of its row; it expires unless it is committed.

    `meanwhile` is called before each piece: on a slow line all of them may take longer than a lock lasts.
    """
    view = memoryview(payload).cast("B")
    head, life = LENGTH.pack(len(value)) + value, str(milliseconds).encode()

    def pieces() -> Iterator[Buffer]:
        yield b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s" % (len(name), name, len(head) + len(view), head)
        for at in range(0, len(view), PIECE_BYTES):
            meanwhile()
            yield view[at : at + PIECE_BYTES]
        yield b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(life), life)

    def work(connection: Any) -> None:
        connection.send_packed_command(pieces())
        connection.read_response()

    connections.use(work)


def parted(stored: Buffer) -> Stored | None:
    """What is stored with a payload, taken apart; None if it is nothing of ours."""
    view = memoryview(stored)
    end = LENGTH.size + int.from_bytes(view[: LENGTH.size], "little")
    return (bytes(view[LENGTH.size : end]), view[end:]) if LENGTH.size <= len(view) >= end else None


def receive(
    connections: Connections, names: Sequence[bytes], buffers: KeptBuffers, view: View
) -> Iterator[Stored | None]:
    """What is stored under these names, in order; None for what is not there, or is nothing of ours.

    The next requests are on their way while a payload is used. How much of it has arrived is noted in `view`.
    """
    if not names:
        return
    asked = min(LEAST, len(names))

    def begin(connection: Any) -> tuple[_Replies, Stored | None]:
        replies = _Replies(connection, buffers, view)
        connection.send_packed_command([b"".join(map(_get, names[:asked]))])
        return replies, replies.next()

    connection, (replies, reply) = connections.take(begin)
    # asked for, and not received as a whole
    in_flight = asked - 1
    try:
        while True:
            size = len(reply[1]) if reply is not None else 0
            most = max(LEAST, min(AHEAD_BYTES // max(size, 1), MOST_AHEAD))
            more = names[asked : asked + max(most - in_flight, 0)]
            if more:
                asked, in_flight = asked + len(more), in_flight + len(more)
                with translated(connections.location):
                    connection.send_packed_command([b"".join(map(_get, more))])
            yield reply
            if not in_flight:
                return
            # nothing here keeps its memory from being used for the next one
            reply = None
            with translated(connections.location):
                reply = replies.next()
            in_flight -= 1
    finally:
        if in_flight:
            connection.disconnect()
        else:
            connections.give_back(connection)


def _get(name: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name)


class _Replies:
    """Replies to GETs of payloads, on one connection."""

    def __init__(self, connection: Any, buffers: KeptBuffers, view: View) -> None:
        self._connection = connection
        connection.connect()
        # It receives straight into memory, but for the first few bytes. Not `makefile`, which keeps the socket open.
        self._file = BufferedReader(SocketIO(connection._sock, "r"))  # noqa: SLF001 - valkey-py has no way to do that
        self._buffers = buffers
        self._view = view

    def next(self) -> Stored | None:
        """The next reply. Raises what the server answers; other replies are not read then."""
        self._view.arrived = 0
        line = self._file.readline(LONGEST_LINE)
        if not line.endswith(_CRLF):
            raise LostError("the server has closed the connection")
        if line[:1] == b"-":
            self._connection.disconnect()
            raise self._connection._parser.parse_error(line[1:].decode(errors="replace"))  # noqa: SLF001 - as above
        if line[:1] != b"$" or not line[1:-2].removeprefix(b"-").isdigit() or int(line[1:]) > LARGEST_REPLY:
            raise InvalidResponse(f"the server has answered {line[:40]!r}")
        size = int(line[1:])
        if size < 0:
            return None
        stored = self._exactly(size)
        self._exactly(len(_CRLF))
        return parted(stored)

    def _exactly(self, size: int) -> memoryview:
        """The next bytes."""
        try:
            into = self._buffers.acquire(size) if size >= SMALL else memoryview(bytearray(size))
        except MemoryError:
            raise UnavailableError(f"there is no memory for a payload of {size:,} bytes") from None
        n = 0
        while n < size:
            n_more = self._file.readinto1(into[n:])
            if not n_more:
                raise LostError("the server has closed the connection in the middle of a reply")
            n += n_more
            self._view.arrived = n
        return into
