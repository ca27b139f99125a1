"""Rows in a Valkey or Redis server, which many machines may share.

An update keeps its changes here until its end. Then it sends the payloads under temporary names, and commits all with
one script. Meanwhile it holds a lock of the location, which expires if this process does not renew it. The commit names
its owner: if it has lost the lock, since it was stopped or the server was replaced, nothing changes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from valkey.exceptions import NoPermissionError, ResponseError

from prefixstore.backends import refusals
from prefixstore.backends.contract import Backend, Change, ConflictError, Draft
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.valkey.connections import Address, Connections, reply_to
from prefixstore.backends.valkey.scripts import BEGIN, COMMIT, COSTS, HEAD, KEEP, TICK, packed
from prefixstore.backends.valkey.valkey_view import ServerView, bytes_in, size
from prefixstore.errors import CorruptError, StorageError, UnavailableError
from prefixstore.format.record import Buffer

# a process that stops in the middle of an update keeps others from writing no longer than this
LOCK_MILLISECONDS = 15_000
RENEW_SECONDS = 3.0
# a writer that waits longer for its turn gives up
WAIT_SECONDS = 30.0
# how often it asks
FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.025
# payloads of an update that never ends are gone after this many milliseconds
STAGED_MILLISECONDS = b"600000"
# The default of Valkey's proto-max-bulk-len, less some space: sent more, it closes the connection as if it had failed.
LARGEST_VALUE = 500 << 20
# A send has to make progress within the timeout of the socket, and Python counts that for the whole of one call.
PIECE_BYTES = 4 << 20
# names that the server looks at in one step
SCANNED_AT_ONCE = 1000
# how long one question waits for the server's disk, below the time after which it counts as silent; and all of them
SYNC_MILLISECONDS = 3000
SYNC_SECONDS = 60.0


class ValkeyBackend(Backend):
    """Rows in a Valkey or Redis server. The location is made if there is none, unless with `read_only`."""

    def __init__(self, address: Address, *, read_only: bool) -> None:
        self._connections = Connections(address)
        self._memory = ReceivedMemory()
        self._read_only = read_only
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Make sure that there is a location that this version can read."""
        if size(self._connections) is not None:
            return
        if self._read_only:
            raise refusals.no_store(self.location)
        with self.update():
            pass

    @property
    def location(self) -> str:
        return self._connections.location

    @contextmanager
    def view(self) -> Iterator[ServerView]:
        self._connections.require_open()
        yield ServerView(self._connections, self._memory)

    @contextmanager
    def update(self) -> Iterator[Draft]:
        if self._read_only:
            raise refusals.read_only(self.location)
        self._connections.require_open()
        turn = WriterTurn(self._connections)
        try:
            view = ServerView(self._connections, self._memory, turn.begin(), turn.keep)
            draft = Draft(view, COSTS)
            yield draft
            turn.commit(draft.changes)
        except BaseException:
            turn.abort()
            raise

    def sync(self) -> None:
        """Wait until the server's log is on its disk, if it keeps one; without it nothing outlives a loss of power."""
        self._connections.require_open()
        if self._read_only:
            return
        until = time.monotonic() + SYNC_SECONDS
        while not self._connections.use(self._is_synced):
            if time.monotonic() > until:
                raise UnavailableError(f"{self.location}: the server's disk has not answered for {SYNC_SECONDS:.0f} s")

    def _is_synced(self, connection: Any) -> bool:
        """Whether the server's log is on its disk after a while; true if it keeps none."""
        # the server waits for what this connection has written
        names = self._connections.names
        reply_to(connection, "EVAL", TICK, len(names), *names)
        try:
            return bool(reply_to(connection, "WAITAOF", 1, 0, SYNC_MILLISECONDS)[0])
        except NoPermissionError:
            raise
        except ResponseError:
            # without a log; or Redis before 7.2
            return True

    def check(self) -> None:
        self._connections.require_open()
        head = self._connections.run(HEAD)
        # nothing at all is an empty location
        if bytes_in(head, self.location) is None and head[-1]:
            raise CorruptError(
                f"{self.location}: the server has evicted a part of the location; the next write creates an empty store"
            )

    def close(self) -> None:
        self._connections.close()


class WriterTurn:
    """The turn of one writer. Whatever happens after `begin`, `commit` it or `abort` it."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._token = os.urandom(16)
        self._renewed = 0.0
        # what the names of its payloads begin with, and how many were sent
        self._staged = b"%s%s:" % (connections.names.staged, self._token.hex().encode())
        self._n_staged = 0

    def begin(self) -> int:
        """Wait for the lock, and make the location if it is incomplete; returns its bytes."""
        until, pause, is_new = time.monotonic() + WAIT_SECONDS, FIRST_PAUSE, 0
        while True:
            self._renewed = time.monotonic()
            answer = self._connections.run(BEGIN, self._token, LOCK_MILLISECONDS, is_new)
            if answer is not None:
                n_bytes = bytes_in(answer, self._connections.location)
                if n_bytes is not None:
                    return n_bytes
                # payloads of an older one go first: if this ends half way, it is still incomplete
                self._unlink_payloads()
                is_new = 1
                continue
            if self._renewed > until:
                raise UnavailableError(
                    f"{self._connections.location}: another process has been writing for {WAIT_SECONDS:.0f} s"
                )
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(1.5 * pause, LONGEST_PAUSE)

    def _unlink_payloads(self) -> None:
        cursor, pattern = b"", self._connections.names.payloads + b"*"
        while cursor != b"0":
            self.keep()
            cursor, names = self._connections.call("SCAN", cursor or 0, "MATCH", pattern, "COUNT", SCANNED_AT_ONCE)
            if names:
                self._connections.call("UNLINK", *names)

    def keep(self) -> None:
        """Renew the lock, if some time has passed. Raises `ConflictError` if it is lost."""
        now = time.monotonic()
        if now - self._renewed < RENEW_SECONDS:
            return
        if not self._connections.run(KEEP, self._token, LOCK_MILLISECONDS):
            raise self._lost()
        self._renewed = now

    def _lost(self) -> ConflictError:
        return ConflictError(
            f"{self._connections.location}: the lock of this update is lost, since this process was stopped for "
            "too long or the server was replaced; nothing was written"
        )

    def commit(self, changes: Sequence[Change]) -> None:
        """Write the changes, in one step, and end the turn."""
        if not changes:
            self._connections.run(KEEP, self._token, 0)
            return
        for change in changes:
            if change.payload is not None:
                self._send(change.payload)
        rows = b"".join(map(packed, changes))
        answer = self._connections.run(COMMIT, self._token, self._staged, self._n_staged, rows)
        if answer == b"evicted":
            raise UnavailableError(
                f"{self._connections.location}: the server has evicted data that was just written; give it more memory "
                "(maxmemory), or a smaller max_bytes to the store"
            )
        if answer != b"committed":
            raise self._lost()

    def _send(self, payload: Buffer) -> None:
        """Store a payload; it expires unless it is committed."""
        view = memoryview(payload).cast("B")
        if len(view) > LARGEST_VALUE:
            raise UnavailableError(
                f"a payload has {len(view):,} bytes: no more than {LARGEST_VALUE:,} are stored in Valkey"
            )
        # known before it is there: an interrupt may come in between
        self._n_staged += 1
        name, life = b"%s%d" % (self._staged, self._n_staged), STAGED_MILLISECONDS

        def pieces() -> Iterator[Buffer]:
            yield b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(view))
            for at in range(0, len(view), PIECE_BYTES):
                # on a slow line all of them may take longer than the lock lasts
                self.keep()
                yield view[at : at + PIECE_BYTES]
            yield b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(life), life)

        def work(connection: Any) -> None:
            connection.send_packed_command(pieces())
            connection.read_response()

        self._connections.use(work)

    def abort(self) -> None:
        """Undo it. If the server cannot be reached, it does so itself after a while."""
        with suppress(StorageError):
            names = [b"%s%d" % (self._staged, number + 1) for number in range(self._n_staged)]
            if names:
                self._connections.call("UNLINK", *names)
            self._connections.run(KEEP, self._token, 0)


def open_valkey(location: str, *, max_bytes: int, read_only: bool) -> ValkeyBackend:
    """The rows in this server; its budget is the engine's to keep."""
    return ValkeyBackend(Address.parse(location), read_only=read_only)
