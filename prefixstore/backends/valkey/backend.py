"""Pages in a Valkey or Redis server, which many machines may share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefixstore.backends import refusals
from prefixstore.backends.base import Backend, Transaction, View
from prefixstore.backends.valkey.address import Address
from prefixstore.backends.valkey.connections import Connections
from prefixstore.backends.valkey.history import COMPLETE
from prefixstore.backends.valkey.layout import Counts, counted, member_of, sum_of
from prefixstore.backends.valkey.scripts import REPLACE, SWEEP
from prefixstore.backends.valkey.transaction import STAGED_SECONDS, ServerTransaction
from prefixstore.backends.valkey.view import ENTRIES_AT_ONCE, ServerView, Shared, key_in, scanned
from prefixstore.errors import StorageError, UnavailableError
from prefixstore.format.keys import KEY_BYTES

__all__ = ["ValkeyBackend"]

log = logging.getLogger("prefixstore")

# values without an entry that one step deletes
SWEPT_AT_ONCE = 500
# how long one question waits for the server's disk, below the time after which it counts as silent; and all of them
SYNC_MILLISECONDS = 3000
SYNC_SECONDS = 60.0


class ValkeyBackend(Backend):
    """Pages in a Valkey or Redis server.

    Parameters
    ----------
    address
        Of the location.
    read_only
        Never write to it.

    Raises
    ------
    LocationError
        If it is opened to read and there is no store, or the server refuses the user.
    IncompatibleError
        If something else has its name, or it is of another version.
    UnavailableError
        If the server cannot be reached.
    """

    def __init__(self, address: Address, *, read_only: bool) -> None:
        self._connections = Connections(address)
        self._shared = Shared(self._connections)
        self._read_only = read_only
        self._writing = threading.Lock()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Make sure that there is a store that this version can read."""
        is_complete = ServerView(self._shared).head().n_structures == COMPLETE
        if not is_complete and self._read_only:
            raise refusals.no_store(self.location)
        if not is_complete:
            with self.update():
                pass

    @property
    def location(self) -> str:
        return self._connections.location

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._connections.handle_lock.shared():
            self._connections.require_open()
            view = ServerView(self._shared)
            try:
                yield view
            finally:
                view.close()

    @contextmanager
    def update(self) -> Iterator[Transaction]:
        with self._turn() as transaction:
            yield transaction
            transaction.finish()
        if transaction.is_new:
            # what this transaction has done is done
            try:
                self._sweep()
            except StorageError as error:
                log.warning("values of pages that the server has evicted were not deleted: %s", error)

    @contextmanager
    def _turn(self) -> Iterator[ServerTransaction]:
        """A transaction, one at a time in this process; it is undone if the block raises."""
        if self._read_only:
            raise refusals.read_only(self.location)
        with self._connections.handle_lock.shared(), self._writing:
            self._connections.require_open()
            transaction = ServerTransaction(self._shared)
            try:
                transaction.begin()
                yield transaction
            except BaseException:
                transaction.abort()
                raise
            finally:
                transaction.close()

    def sync(self) -> None:
        """Wait until the server's log is on its disk, if it keeps one; without it nothing outlives a loss of power."""
        if self._read_only:
            return
        until = time.monotonic() + SYNC_SECONDS
        while not self._connections.synced(SYNC_MILLISECONDS):
            if time.monotonic() > until:
                raise UnavailableError(f"{self.location}: the server's disk has not answered for {SYNC_SECONDS:.0f} s")

    def reclaim(self) -> None:
        """Delete values without an entry; the memory of other deleted values is already free."""
        if not self._read_only:
            self._sweep()

    def _sweep(self) -> None:
        some: list[bytes] = []
        for name in scanned(self._connections, self._connections.names.pages):
            if key_in(name) is not None:
                some.append(name)
            if len(some) == SWEPT_AT_ONCE:
                self._connections.run(SWEEP, *some)
                some = []
        if some:
            self._connections.run(SWEEP, *some)

    def reindex(self) -> None:
        """Rebuild the two sorted sets and the counts from the entries."""
        with self._turn() as transaction:
            names = self._connections.names
            order, children = (
                b"%s%s:%s" % (names.staged, transaction.token.hex().encode(), kind) for kind in (b"o", b"c")
            )
            total = Counts(0, 0, 0, 0)
            self._connections.call("ZADD", order, 0, b"")
            self._connections.call("ZADD", children, 0, b"")
            for name in (order, children):
                self._connections.call("PEXPIRE", name, 1000 * STAGED_SECONDS)
            cursor, seen = b"0", set[bytes]()
            while True:
                transaction.keep_lock()
                cursor, some = self._connections.call("HSCAN", names.entries, cursor, "COUNT", ENTRIES_AT_ONCE)
                # one that is stored while it is read may come twice
                read = {key: entry for key, entry in zip(some[::2], some[1::2], strict=True) if key and key not in seen}
                seen.update(read)
                found = {key: entry for key, entry in read.items() if len(key) == KEY_BYTES}
                if strays := read.keys() - found.keys():
                    self._connections.call("HDEL", names.entries, *strays)
                members = [member for key, entry in found.items() if (member := member_of(key, entry)) is not None]
                for name, values in ((order, list(found)), (children, members)):
                    if values:
                        self._connections.call("ZADD", name, *(each for value in values for each in (0, value)))
                total = total.plus(sum_of(map(counted, found.values())))
                if cursor == b"0":
                    break
            generation = transaction.head().history.generation + 1
            transaction.require_committed(
                self._connections.run(REPLACE, transaction.token, generation, *total, order, children)
            )

    def after_fork(self) -> None:
        self._writing = threading.Lock()
        self._connections.after_fork()

    def close(self) -> None:
        self._connections.close()
