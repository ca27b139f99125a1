"""Pages in object storage: an object for each payload, and a log of commits that every process keeps in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefixstore.backends import refusals
from prefixstore.backends.base import Backend, Transaction, View
from prefixstore.backends.forks import ForkLevel, register_at_fork
from prefixstore.backends.handle_lock import HandleLock
from prefixstore.backends.objects.address import Address
from prefixstore.backends.objects.client import Client, GoneError
from prefixstore.backends.objects.log import Log
from prefixstore.backends.objects.manifest import Payload, name_of
from prefixstore.backends.objects.strays import strays
from prefixstore.backends.objects.transaction import ObjectsTransaction
from prefixstore.backends.objects.view import ObjectsView
from prefixstore.errors import StorageError

__all__ = ["ObjectsBackend"]

log = logging.getLogger("prefixstore")

# payloads that one request deletes
DELETED_AT_ONCE = 1000


class ObjectsBackend(Backend):
    """Pages under a prefix of a bucket.

    Parameters
    ----------
    address
        Of the store, which is made if there is none.
    read_only
        Whether nothing is ever written.
    """

    def __init__(self, address: Address, *, read_only: bool) -> None:
        self._address = address
        self._read_only = read_only
        self._closed = False
        self._client = Client(address)
        self._log = Log(self._client, read_only=read_only)
        # payloads without a page that this process has deleted, and not yet said so
        self._removed: dict[Payload, None] = {}
        # held shared while it is used, so that a child does not inherit a half entered change
        self._handle_lock = HandleLock()
        self._writing = threading.Lock()
        self._is_inherited = False
        self._log.open()
        register_at_fork(self, ForkLevel.HANDLE)

    @property
    def location(self) -> str:
        return self._address.shown

    @property
    def client(self) -> Client:
        """The requests."""
        return self._client

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._handle_lock.shared():
            if self._closed:
                raise refusals.closed(self.location)
            if self._is_inherited:
                with self._writing:
                    if self._is_inherited:
                        self._client.renew()
                        self._is_inherited = False
            yield

    def _refresh(self) -> None:
        """Read what was committed until now. A store that was deleted is made again, as when it is opened."""
        try:
            self._log.refresh()
        except GoneError:
            if self._read_only:
                raise
            log.warning("%s was deleted; starting with an empty store", self.location)
            self._log.open()

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._opened():
            self._refresh()
            yield ObjectsView(self._log, self._client, read_only=self._read_only)

    @contextmanager
    def update(self) -> Iterator[Transaction]:
        if self._read_only:
            raise refusals.read_only(self.location)
        with self._opened(), self._writing:
            self._refresh()
            transaction = ObjectsTransaction(self._log, self._client)
            try:
                yield transaction
                transaction.commit([payload for payload in self._removed if payload in self._log.pages.dead])
            finally:
                transaction.end()
            self._delete_dead()
            self._log.shorten()

    def _delete_dead(self) -> None:
        """Delete payloads that belong to no page any more, whichever process has deleted their pages."""
        pages = self._log.pages
        with pages.lock:
            # a lookup of another thread may enter news
            dead = dict.fromkeys(pages.dead)
        self._removed = {payload: None for payload in self._removed if payload in dead}
        waiting = [payload for payload in dead if payload not in self._removed]
        try:
            for begin in range(0, len(waiting), DELETED_AT_ONCE):
                some = waiting[begin : begin + DELETED_AT_ONCE]
                self._client.delete([name_of(*payload) for payload in some])
                self._removed.update(dict.fromkeys(some))
        except StorageError as error:
            log.warning("payloads of deleted pages were not deleted yet; trying again later: %s", error)

    def sync(self) -> None:
        """Nothing to do: a request is answered when what it has written is safe, as far as the server promises it."""

    def reclaim(self) -> None:
        if not self._read_only:
            with self._opened(), self._writing:
                self._delete_dead()

    def reindex(self) -> None:
        """Delete unreferenced objects; the index of children is in memory only."""
        with self._alone():
            self._sweep()

    def scrub(self) -> None:
        with self._alone():
            self._sweep()
            self._delete_dead()
            # the segments that named deleted pages, and their tokens, go with it
            self._log.fold()

    def compact(self) -> int:
        with self._alone():
            n_bytes = self._sweep()
            self._delete_dead()
            self._log.fold()
        return n_bytes

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._read_only:
            raise refusals.read_only(self.location)
        with self._opened(), self._writing:
            self._refresh()
            yield

    def _sweep(self) -> int:
        found = strays(self._client, self._log, read_only=False)
        for begin in range(0, len(found), DELETED_AT_ONCE):
            self._client.delete([one.name for one in found[begin : begin + DELETED_AT_ONCE]])
        return sum(one.size for one in found)

    def after_fork(self) -> None:
        """Nothing to drop: `after_fork_in_child` has done it."""

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def before_fork(self) -> None:
        self._handle_lock.acquire_exclusive(self)

    def after_fork_in_parent(self) -> None:
        self._handle_lock.release_exclusive(self)

    def after_fork_in_child(self) -> None:
        is_whole = self._handle_lock.is_exclusive(self)
        self._client.inherited()
        self._log = Log(self._client, read_only=self._read_only) if not is_whole else self._log
        self._log.renew()
        self._writing = threading.Lock()
        self._is_inherited = True
        self._handle_lock.renew()
