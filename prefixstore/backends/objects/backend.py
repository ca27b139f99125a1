"""Rows in object storage: an object for each payload, and a log of commits that every process keeps in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from prefixstore.backends import refusals
from prefixstore.backends.contract import Backend, Change, ConflictError, Draft, View
from prefixstore.backends.forks import ForkLevel, register_at_fork
from prefixstore.backends.objects.address import Address
from prefixstore.backends.objects.client import Client, GoneError
from prefixstore.backends.objects.log import Log, State
from prefixstore.backends.objects.read_ahead import at_once
from prefixstore.backends.objects.segments import (
    COSTS,
    HEAD,
    PAYLOADS,
    PROBES,
    SEGMENTS,
    add,
    name_of,
    new_reference,
    size_of,
)
from prefixstore.backends.objects.view import ObjectsView
from prefixstore.errors import StorageError, UnavailableError
from prefixstore.format.record import Buffer

__all__ = ["ObjectsBackend"]

log = logging.getLogger("prefixstore")

# objects that one request deletes
DELETED_AT_ONCE = 1000
# How old an object has to be, by the server's clock, to be deleted because nothing refers to it. An update that uploads
# for half of this, by the clock of its process, is given up: what it has written is never deleted before its commit.
GRACE_SECONDS = 3600.0
# for how long after a conflict updates take turns, which costs a request
CROWDED_SECONDS = 60.0


class ObjectsBackend(Backend):
    """Rows under a prefix of a bucket.

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
        self._client = Client(address)
        self._log = Log(self._client, read_only=read_only)
        # payloads that no row has, as far as they are not deleted yet, and their sizes
        self._dead: dict[str, int] = {}
        self._writing = threading.Lock()
        self._crowded_until = 0.0
        self._log.open()
        register_at_fork(self, ForkLevel.HANDLE)

    @property
    def location(self) -> str:
        return self._address.shown

    @property
    def client(self) -> Client:
        """The requests."""
        return self._client

    def _current(self, read: Callable[[], State]) -> State:
        """What is committed, as this reads it. A store that was deleted is made again, as when it is opened."""
        try:
            return read()
        except GoneError:
            if self._read_only:
                raise
            log.warning("%s was deleted; starting with an empty store", self.location)
            self._log.open()
            return read()

    @contextmanager
    def view(self) -> Iterator[View]:
        self._client.ready()
        yield ObjectsView(self._log, self._client, self._current(self._log.refresh).rows)

    @contextmanager
    def update(self) -> Iterator[Draft]:
        with self._alone():
            try:
                in_turn = time.monotonic() < self._crowded_until
                base = self._current(partial(self._log.begin, in_turn=in_turn))
                draft = Draft(ObjectsView(self._log, self._client, base.rows), COSTS)
                yield draft
                if changes := draft.changes:
                    self._commit(changes, base)
            except ConflictError:
                self._crowded_until = time.monotonic() + CROWDED_SECONDS
                raise
            finally:
                self._log.end_turn()
            self._delete_dead()
            self._log.shorten()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The only thread of this process that writes."""
        if self._read_only:
            raise refusals.read_only(self.location)
        with self._writing:
            self._client.ready()
            yield

    def _commit(self, changes: Sequence[Change], base: State) -> None:
        """Upload the payloads, and then add the changes to the log."""
        begun, segment, uploads = time.monotonic(), dict[bytes, Change](), list[tuple[str, Buffer]]()
        for key, value, payload in changes:
            reference = None if payload is None else new_reference(len(payload))
            if payload is not None and reference is not None and len(payload):
                uploads.append((name_of(reference), payload))
            add(segment, Change(key, value, reference))
        if uploads:
            # before anything is sent in vain
            self._log.refresh()
        try:
            self._log.require(base)
            at_once(uploads, lambda one: self._client.create(*one), lambda one: len(one[1]), self._log.keep_turn)
            if uploads and time.monotonic() - begun > GRACE_SECONDS / 2:
                raise UnavailableError(f"{self.location}: an update took too long; nothing was stored")
        except BaseException:
            self._discard(uploads)
            raise
        try:
            self._log.commit(list(segment.values()), base)
        except (ConflictError, GoneError):
            self._discard(uploads)
            raise
        # after another error nobody knows whether it was committed: what was uploaded or replaced stays until `compact`
        for change in segment.values():
            before = base.rows.row(change.key)
            is_replaced = change.value is None or change.payload is not None
            if is_replaced and before is not None and before.payload and size_of(before.payload):
                self._dead[name_of(before.payload)] = size_of(before.payload)

    def _discard(self, uploads: Sequence[tuple[str, Buffer]]) -> None:
        self._dead.update((name, len(payload)) for name, payload in uploads)
        self._delete_dead()

    def _delete_dead(self) -> int:
        """Delete payloads that no row has any more; how many bytes."""
        n_bytes = 0
        try:
            while some := list(self._dead)[:DELETED_AT_ONCE]:
                self._client.delete(some)
                n_bytes += sum(self._dead.pop(name) for name in some)
        except StorageError as error:
            log.warning("objects that nothing refers to were not deleted yet; trying again later: %s", error)
        return n_bytes

    def sync(self) -> None:
        """Nothing to do: a request is answered when what it has written is safe, as far as the server promises it."""

    def reclaim(self) -> None:
        if not self._read_only:
            with self._alone():
                self._delete_dead()

    def compact(self, *, erase: bool = False) -> int:
        """Delete what nothing refers to, and merge all segments; either way nothing is left of what was deleted."""
        with self._alone():
            n_bytes = self._delete_dead()
            self._log.fold()
            return n_bytes + self._sweep()

    def _sweep(self) -> int:
        """Delete old objects that nothing refers to, left by processes that died; how many bytes."""
        # the newest object says what time it is at the server
        self._log.change_head()
        listed = list(self._client.list())
        # after that: what was committed meanwhile is known
        state = self._log.refresh()
        kept = {HEAD, *(name_of(row.payload) for row in state.rows if row.payload)}
        kept.update(part.name for part in state.head.parts)
        newest = max((one.written for one in listed), default=None)
        for one in listed:
            is_ours = one.name.startswith((PAYLOADS, SEGMENTS, PROBES)) and one.name not in kept
            if is_ours and newest is not None and newest - one.written > timedelta(seconds=GRACE_SECONDS):
                self._dead[one.name] = one.size
        return self._delete_dead()

    def check(self) -> None:
        """Read the whole log again."""
        self._client.ready()
        Log(self._client, read_only=True).refresh()

    def close(self) -> None:
        self._client.close()

    def before_fork(self) -> None:
        """Nothing to wait for: what is known is replaced as a whole, and the child has connections of its own."""

    def after_fork_in_parent(self) -> None:
        """Nothing to release."""

    def after_fork_in_child(self) -> None:
        self._client.inherited()
        self._log.renew()
        self._writing = threading.Lock()
