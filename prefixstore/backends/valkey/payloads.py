"""Payloads, sent in pieces, and received straight into reused memory.

Clients collect a reply in pieces, join them, and copy the result: 2 GB/s over a socket on which 5 are
possible. So the replies to GETs of payloads are read here, from the socket of the client's own connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import InvalidResponse, ResponseError

from prefixstore.backends.valkey.connections import Connections, translated
from prefixstore.backends.valkey.layout import LENGTH
from prefixstore.errors import UnavailableError
from prefixstore.format.record import Buffer

__all__ = ["KeptBuffers", "Value", "receive", "send"]

# received at once until the length of a reply is known
HEAD_BYTES = 4096
# A send has to make progress within the timeout of the socket, and Python counts that for the whole of one call.
PIECE_BYTES = 4 << 20
# Requests that are on their way: one whose reply is received and two behind it, and more as long as the replies are
# small. 1 Gbit/s delivers 6 MB in 50 ms: so much has to wait in the server for the link never to be idle.
AHEAD_BYTES = 32 << 20
LEAST = 3
MOST_AHEAD = 64
KEPT_BYTES = 64 << 20
# a longer one is no value of ours
LARGEST_REPLY = 1 << 30
_CRLF = b"\r\n"

# what is stored of a page under its name: its packed record, and its payload
Value = tuple[bytes, Buffer]


class KeptBuffers:
    """Memory for received payloads. It is reused only when nothing refers to it any more.

    Fresh memory costs more than the copy into it. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._all: list[bytearray] = []

    def acquire(self, size: int) -> memoryview:
        """Memory of this size; it is taken back when no view of it is left."""
        for memory in self._all:
            if size <= len(memory) <= 2 * size + HEAD_BYTES and _is_free(memory):
                return memoryview(memory)[:size]
        memory = bytearray(size)
        self._all.append(memory)
        return memoryview(memory)

    def trim(self) -> None:
        """Keep at most this much, the latest ones; memory that is still referred to stays with its users."""
        kept: list[bytearray] = []
        n_bytes = 0
        for memory in reversed(self._all):
            n_bytes += len(memory)
            if n_bytes <= KEPT_BYTES and _is_free(memory):
                kept.append(memory)
        self._all = kept[::-1]


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
    head: bytes,
    payload: Buffer,
    milliseconds: int,
    meanwhile: Callable[[], None],
) -> None:
    """Store a value, in two parts, that expires unless it is committed.

    `meanwhile` is called before each piece: on a slow line all of them may take longer than a lock lasts.
    """
    view = memoryview(payload).cast("B")
    size, life = len(head) + len(view), str(milliseconds).encode()

    def pieces() -> Iterator[Buffer]:
        yield b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s" % (len(name), name, size, head)
        for at in range(0, len(view), PIECE_BYTES):
            meanwhile()
            yield view[at : at + PIECE_BYTES]
        yield b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(life), life)

    def work(connection: Any) -> None:
        connection.send_packed_command(pieces())
        connection.read_response()

    connections.use(work)


def receive(
    connections: Connections,
    names: Sequence[bytes],
    buffers: KeptBuffers,
    arrived: Callable[[int], None] = lambda _: None,
) -> Iterator[Value | None]:
    """The values of pages, in order: record and payload, or None for one that is missing.

    The next requests are on their way while a value is used. A value that cannot be taken apart has an empty record.
    `arrived` is called with the number of bytes of the next value that have arrived.
    """
    if not names:
        return
    location = connections.location
    asked = min(LEAST, len(names))
    replies, reply = _first(connections, names[:asked], buffers, arrived)
    connection = replies.connection
    # asked for, and not received as a whole
    in_flight = asked - 1
    try:
        while True:
            size = len(reply[1]) if reply is not None else 0
            most = max(LEAST, min(AHEAD_BYTES // max(size, 1), MOST_AHEAD))
            more = names[asked : asked + max(most - in_flight, 0)]
            if more:
                asked, in_flight = asked + len(more), in_flight + len(more)
                with translated(location):
                    connection.send_packed_command([b"".join(map(_get, more))])
            yield reply
            if not in_flight:
                return
            # nothing here keeps its memory from being used for the next one
            reply = None
            with translated(location):
                reply = replies.next()
            in_flight -= 1
    finally:
        if in_flight:
            connection.disconnect()
        else:
            connections.give_back(connection)


def _first(
    connections: Connections, names: Sequence[bytes], buffers: KeptBuffers, arrived: Callable[[int], None]
) -> tuple[_Replies, Value | None]:
    """The first value, and whence the others come: if the connection is dead, another one is tried."""

    def work(connection: Any) -> tuple[_Replies, Value | None]:
        connection.send_packed_command([b"".join(map(_get, names))])
        replies = _Replies(connection, buffers, arrived)
        try:
            return replies, replies.next()
        except ResponseError:
            # the other answers are not read
            connection.disconnect()
            raise

    return connections.take(work)


def _get(name: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name)


class _Replies:
    """Replies to GETs of values, on one connection."""

    def __init__(self, connection: Any, buffers: KeptBuffers, arrived: Callable[[int], None]) -> None:
        self.connection = connection
        self._socket = connection._sock  # noqa: SLF001 - valkey-py has no other way to receive into memory
        self._buffers = buffers
        self._arrived = arrived
        # received, and not used yet
        self._ahead = b""

    def next(self) -> Value | None:
        """The next reply: record and payload; None for nothing. Raises what the server answers."""
        self._arrived(0)
        line = self._line()
        if line[:1] == b"-":
            raise self.connection._parser.parse_error(line[1:].decode(errors="replace"))  # noqa: SLF001 - as above
        if line[:1] != b"$" or not line[1:].removeprefix(b"-").isdigit() or int(line[1:]) > LARGEST_REPLY:
            raise InvalidResponse(f"the server has answered {line[:40]!r}")
        size = int(line[1:])
        if size < 0:
            return None
        record = b""
        if size >= LENGTH.size:
            n_record = LENGTH.unpack(self._exactly(LENGTH.size))[0]
            size -= LENGTH.size
            if n_record <= size:
                record = bytes(self._exactly(n_record))
                size -= n_record
        # with the end of the line, which is received with it
        return record, self._exactly(size + len(_CRLF))[:size]

    def _line(self) -> bytes:
        while (end := self._ahead.find(_CRLF)) < 0:
            some = self._socket.recv(HEAD_BYTES)
            if not some or len(self._ahead) > HEAD_BYTES:
                raise LostError("the server has closed the connection")
            self._ahead += some
        line, self._ahead = self._ahead[:end], self._ahead[end + len(_CRLF) :]
        return line

    def _exactly(self, size: int) -> memoryview:
        """The next bytes."""
        if size <= len(self._ahead):
            some, self._ahead = self._ahead[:size], self._ahead[size:]
            return memoryview(some)
        try:
            into = self._buffers.acquire(size)
        except MemoryError:
            raise UnavailableError(f"there is no memory for a payload of {size:,} bytes") from None
        n = len(self._ahead)
        into[:n], self._ahead = self._ahead, b""
        while n < size:
            n_more = self._socket.recv_into(into[n:])
            if not n_more:
                raise LostError("the server closed the connection in the middle of a response")
            n += n_more
            self._arrived(n)
        return into
