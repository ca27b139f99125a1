"""The one object of a store that is ever replaced: it makes an update visible, and says whose turn it is to write.

An update writes its payloads, and then replaces this object by one that has all changed rows in it: from then on it is
committed. Whoever reads takes the rows that were changed last from here; the next writer begins by writing the objects
of these rows. So an update is visible as a whole, without a log: the object has the last update, and no other.

It is replaced only if it is still the version that was read. So there is one writer at a time: the one that has the
turn, which a writer takes before it reads anything, and renews while it works.
"""

from __future__ import annotations

import base64
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from prefixstore.backends import refusals
from prefixstore.backends.contract import ConflictError
from prefixstore.backends.objects.bucket import Client, Version
from prefixstore.backends.objects.read_ahead import at_once
from prefixstore.backends.objects.rows import Stored, name_of, payload_name
from prefixstore.backends.threads import start_thread
from prefixstore.errors import CorruptError, LocationError, StorageError, UnavailableError
from prefixstore.format.record import Buffer

STORE = "prefixstore.json"
FORMAT = 5
# a version that the object never has
NO_VERSION: Version = {"e_tag": '"0"', "version": "0"}
# fields of the object, beside the changes
FIELDS: dict[str, Callable[[Any], Any]] = {
    "store": str,
    "number": int,
    "used": int,
    "turn": str,
    "write": str,
}

# between two looks at whose turn it is, seconds
LONGEST_PAUSE = 0.25
# A writer that stops in its turn keeps the others waiting no longer than this. One that works renews it.
TURN_SECONDS = 15.0
RENEW_SECONDS = 3.0
# a writer that waits longer for its turn gives up
WAIT_SECONDS = 30.0
# rows that a process remembers, and the size of one that it does
MOST_KNOWN = 16_384
KNOWN_BYTES = 4096


class GoneError(LocationError):
    """The store was deleted."""


@dataclass(frozen=True)
class State:
    """The object, as it was read or written. It is replaced as a whole: an interrupt or a fork cannot divide that.

    Attributes
    ----------
    store
        A random id: a store that was deleted and made again is another one.
    number
        How many updates there were.
    used
        What rows and payloads take of the budget.
    changes
        The rows that the last update has changed, None if it has deleted them. Their own objects may be older.
    turn
        Which writer the others wait for; empty if they do not.
    write
        A random id of this version, and so a tag of its own: that may be a hash of the bytes.
    version
        Which version of the object this is for the server.
    known
        Rows that were read since the last update. It is bounded; what is not here is asked for.
    """

    store: str
    number: int = 0
    used: int = 0
    changes: Mapping[bytes, Stored | None] = field(default_factory=dict)
    turn: str = ""
    write: str = ""
    version: Version = field(default_factory=dict)
    known: dict[bytes, Stored | None] = field(default_factory=dict)

    @property
    def rows(self) -> str:
        """The folder with the objects of all rows."""
        return f"{self.store}/rows"

    @property
    def payloads(self) -> str:
        """The folder with all payloads."""
        return f"{self.store}/payloads"

    def row_name(self, key: bytes) -> str:
        """The name of the object with a row."""
        return f"{self.rows}/{name_of(key)}"

    def payload_name(self, key: bytes, payload: bytes) -> str:
        """The name of the object with a payload of a row."""
        return f"{self.payloads}/{payload_name(key, payload)}"

    def learn(self, rows: Mapping[bytes, Stored | None]) -> None:
        """Remember rows that were read while no other update was committed."""
        if len(self.known) + len(rows) > MOST_KNOWN:
            self.known.clear()
        self.known.update((key, row) for key, row in rows.items() if row is None or len(row.value) <= KNOWN_BYTES)

    def pack(self) -> bytes:
        """The stored form."""
        value = {name: getattr(self, name) for name in FIELDS}
        value |= {"magic": "prefixstore", "format": FORMAT}
        value["changes"] = {_text(key): None if row is None else _text(row.pack()) for key, row in self.changes.items()}
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, where: str, stored: Buffer, version: Version) -> State:
        """Read the stored form.

        Raises `CorruptError` if it is damaged and `IncompatibleError` if it is another application's, or of another
        version.
        """
        damaged = f"{where}: {STORE} is damaged, or another application's; choose another prefix, or delete the store"
        try:
            value = json.loads(bytes(stored))
            magic, known = value["magic"], value["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CorruptError(damaged) from None
        if magic != "prefixstore" or not isinstance(known, int):
            raise refusals.foreign(where, STORE)
        if known != FORMAT:
            raise refusals.other_format(where, known, FORMAT)
        try:
            changes = {
                _bytes(key): None if row is None else Stored.unpack(_bytes(row))
                for key, row in value["changes"].items()
            }
            return cls(changes=changes, version=version, **{name: kind(value[name]) for name, kind in FIELDS.items()})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise CorruptError(damaged) from None


class Store:
    """The object of a location; `state` is what this process has last read or written of it."""

    def __init__(self, client: Client, *, read_only: bool) -> None:
        self._client = client
        self._read_only = read_only
        self.state = State("")
        # held while a state is entered
        self._entering = threading.Lock()
        # the turn that this process has, when it was certain of it, and what its end opens
        self._turn, self._renewed, self._end = "", 0.0, threading.Event()

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the object, or create the store.

        Raises `LocationError` if there is no store to read, or the server ignores conditional writes.
        """
        try:
            self.refresh()
        except GoneError:
            if self._read_only:
                raise refusals.no_store(self._client.where) from None
            # if another process is faster, its store is used
            self._client.put(STORE, State(_random_id()).pack(), "create")
            self.refresh()
        # what the server has to refuse; one that does not writes what is there already
        if not self._read_only and self._client.put(STORE, self.state.pack(), NO_VERSION) is not None:
            raise LocationError(
                f"{self._client.where}: the server ignores conditions of writes (If-Match), so that processes would "
                "overwrite each other's pages; choose a server that supports them"
            )

    # -- reading and replacing it -------------------------------------------------------------------------------------

    def refresh(self) -> State:
        """What is committed: one small request if nothing was since the last one.

        Raises `GoneError` if the store was deleted, `UnavailableError` if the server does not answer and `CorruptError`
        or `IncompatibleError` if the object is damaged, or the store is of another version.
        """
        known = self.state
        found = self._client.get(STORE, known.version)
        if found is None:
            raise GoneError(f"{self._client.where}: {STORE} is missing; the store was deleted")
        if found[1] is known.version:
            return self.state
        return self._enter(State.unpack(self._client.where, *found), known)

    def _enter(self, state: State, known: State) -> State:
        """What is known now that this was read, or written, when `known` was known."""
        with self._entering:
            now = self.state
            if state.store == now.store:
                if now is not known and state.number <= now.number:
                    # another thread was faster
                    return now
                if state.number == now.number:
                    state = replace(state, known=now.known)
                elif state.number == now.number + 1:
                    state.learn({**now.known, **state.changes})
            self.state = state
            return state

    def _replace(self, known: State, **changes: Any) -> bool:
        """Change this version of the object; false if another process has been faster: then its version is known.

        A lost reply changes nothing. Raises the errors of `refresh`.
        """
        state, failure, version = replace(known, known={}, write=_random_id(), **changes), None, None
        try:
            version = self._client.put(STORE, state.pack(), known.version)
        except UnavailableError as error:
            failure = error
        if version is not None:
            self._enter(replace(state, version=version), known)
        elif self.refresh().write != state.write:
            if failure is not None:
                raise failure
            return False
        return True

    # -- the turn -----------------------------------------------------------------------------------------------------

    def begin(self) -> State:
        """Wait for the turn, take it, and write the objects of the rows that were changed last.

        Raises `GoneError` if the store was deleted and `UnavailableError` if others are writing for too long.
        """
        self._turn, version = _random_id(), None
        begun = since = time.monotonic()
        for attempt in count():
            state, self._renewed = self.refresh(), time.monotonic()
            if state.version != version:
                version, since = state.version, self._renewed
            if (not state.turn or self._renewed - since > TURN_SECONDS) and self._replace(state, turn=self._turn):
                break
            if self._renewed - begun > WAIT_SECONDS:
                raise UnavailableError(
                    f"{self._client.where}: other processes have been writing for {WAIT_SECONDS:.0f} s"
                )
            # before the object is read again, not after: what was read is soon outdated
            time.sleep(random.random() * min(0.002 * 2**attempt, LONGEST_PAUSE))
        self._end = end = threading.Event()
        # at the end of the process no thread starts: then the turn lasts as long as it does
        with suppress(RuntimeError):
            start_thread(self._keep, self._turn, end, name="prefixstore-turn")
        self._write_rows()
        return self.state

    def _keep(self, turn: str, end: threading.Event) -> None:
        """Renew the turn until it ends."""
        while not end.wait(RENEW_SECONDS) and self._turn == turn:
            with suppress(StorageError):
                self.change(turn)

    def change(self, turn: str = "", /, **changes: Any) -> None:
        """Change the object in a turn, by default this one, which renews it.

        Raises
        ------
        ConflictError, GoneError
            Nothing was changed, as another writer has the turn, or the store was deleted.
        UnavailableError
            If the server does not answer: whether it was changed is not known.
        """
        turn, is_done = turn or self._turn, False
        while not is_done:
            now, state = time.monotonic(), self.state
            if state.turn != turn:
                raise ConflictError(f"{self._client.where}: another process has taken the turn of this one; try again")
            is_done = self._replace(state, **changes)
        self._renewed = now

    def commit(self, changes: Mapping[bytes, Stored | None], used: int) -> None:
        """Make changed rows visible. Raises the errors of `change`."""
        self.change(number=self.state.number + 1, used=used, changes=changes)

    def _write_rows(self) -> None:
        state = self.state

        def in_time() -> None:
            if time.monotonic() - self._renewed > TURN_SECONDS / 2:
                raise ConflictError(f"{self._client.where}: this process was stopped, or had no answer, for too long")

        def write(row: tuple[str, bytes]) -> None:
            in_time()
            self._client.put(*row)

        at_once([(state.row_name(key), row.pack()) for key, row in state.changes.items() if row is not None], write)
        in_time()
        self._client.delete([state.row_name(key) for key, row in state.changes.items() if row is None])

    def end(self) -> None:
        """Have the others go on. Without a reply, they do so after a while."""
        turn, self._turn = self._turn, ""
        self._end.set()
        with suppress(StorageError):
            self.change(turn, turn="")


def _random_id() -> str:
    return os.urandom(8).hex()


def _text(some: bytes) -> str:
    return base64.b64encode(some).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
