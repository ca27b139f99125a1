"""Rows in object storage: an object for each row, and one for each payload. No process keeps a list of them."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from heapq import merge
from itertools import groupby
from operator import itemgetter

from prefixstore.backends import refusals
from prefixstore.backends.contract import Backend, Change, ConflictError, Draft, Range, Row, View
from prefixstore.backends.objects import read_ahead
from prefixstore.backends.objects.bucket import Bucket, Client, Listed
from prefixstore.backends.objects.read_ahead import SMALL_AT_ONCE, Arrived, ReadWindow, ahead, at_once
from prefixstore.backends.objects.rows import COSTS, MARK, Stored, key_in, listing, new_payload
from prefixstore.backends.objects.store_state import GoneError, State, Store
from prefixstore.errors import StorageError
from prefixstore.format.record import Buffer

log = logging.getLogger("prefixstore")

# how often rows are read again because others were committed meanwhile, or a payload because it was replaced
READS = 8
# the folder of a store, of which only one is in use
STORE_ID = re.compile(r"[0-9a-f]{16}")


class ObjectsView(View):
    """Reads rows where they are. With `is_alone` this process has the turn, so that no other one writes."""

    at_once = SMALL_AT_ONCE

    def __init__(
        self, store: Store, client: Client, window: ReadWindow, state: State, *, is_alone: bool = False
    ) -> None:
        self._store = store
        self._client = client
        self._window = window
        self._state = state
        self._is_alone = is_alone

    @property
    def used(self) -> int:
        return self._state.used

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        rows = self.rows(keys)
        return [None if (row := rows[key]) is None else row.value for key in keys]

    def rows(self, keys: Sequence[bytes]) -> dict[bytes, Stored | None]:
        """These rows, in one state."""
        return self._in_one_state(lambda state: self._read(state, keys), keys.__contains__)

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        def read(state: State) -> dict[bytes, Stored | None]:
            in_order[:] = at_once(wanted, lambda one: self._keys(state, one))
            return self._read(state, [key for keys in in_order for key in keys])

        in_order: list[list[bytes]] = []
        rows = self._in_one_state(read, lambda key: any(one.start <= key < one.stop for one in wanted))
        return [[Row(key, row.value) for key in keys if (row := rows[key]) is not None] for keys in in_order]

    def _in_one_state(
        self, read: Callable[[State], dict[bytes, Stored | None]], depends_on: Callable[[bytes], bool]
    ) -> dict[bytes, Stored | None]:
        """The rows that this reads, again if others that it depends on were committed meanwhile.

        Of two commits only the last one says what it has changed. But rows that are the same when they are read again
        are those of the state that was there in between.
        """
        rows, last = read(self._state), None
        for _ in range(READS):
            before, now = self._state, self._state if self._is_alone else self._store.refresh()
            self._state = now
            is_next = now.store == before.store and now.number - before.number in (0, 1)
            if is_next and (now.number == before.number or not any(map(depends_on, now.changes))):
                now.learn(rows)
                break
            rows, last = read(now), rows
            if rows == last:
                break
        return rows

    def _read(self, state: State, keys: Sequence[bytes]) -> dict[bytes, Stored | None]:
        """Rows as they are known, or as their objects are now."""
        found = {key: rows[key] for rows in (state.known, state.changes) for key in keys if key in rows}
        missing = [key for key in dict.fromkeys(keys) if key not in found]

        def ask(key: bytes) -> Stored | None:
            stored = self._client.get(state.row_name(key))
            return None if stored is None else Stored.unpack(stored[0])

        return found | dict(zip(missing, at_once(missing, ask), strict=True))

    def _keys(self, state: State, wanted: Range) -> list[bytes]:
        """The keys of the rows in a range."""
        start, stop, limit, reverse = wanted
        if start >= stop or limit == 0:
            return []
        found = [key for key, row in state.changes.items() if row is not None and start <= key < stop]
        n_found = len(found)
        for key in self._listed(state, start, stop):
            if (not reverse and limit is not None and len(found) - n_found >= limit) or key >= stop:
                break
            if key >= start and key not in state.changes:
                found.append(key)
        return sorted(found, reverse=reverse)[:limit]

    def _listed(self, state: State, start: bytes, stop: bytes) -> Iterator[bytes]:
        """The keys of the objects that a server lists for a range, in order; some before it, and those after it."""
        folder, after = listing(start, stop)
        offset = f"{state.rows}/{after}" if after else ""
        for one in self._client.list(f"{state.rows}/{folder}".rstrip("/"), offset):
            with suppress(ValueError):  # something else
                yield key_in(one.name.removeprefix(f"{state.rows}/"))

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        self.arrived = 0
        rows = self.rows(keys)
        sizes = [0 if (row := rows[key]) is None else row.payload_bytes for key in keys]
        return ahead(sizes, lambda n, arrived: self._receive(keys[n], rows[keys[n]], arrived), self._window, self._note)

    def _note(self, n_bytes: int) -> None:
        self.arrived = n_bytes

    def _receive(self, key: bytes, row: Stored | None, arrived: Arrived) -> tuple[bytes, Buffer | None] | None:
        """Value and payload of a row, as they are now if that was replaced; the payload is None if it is missing."""
        state = self._state
        while row is not None and row.payload_bytes:
            found = self._client.receive(state.payload_name(key, row.payload), arrived)
            if found is not None:
                return row.value, found
            before, state = row.payload, self._store.refresh()
            row = self._read(state, [key])[key]
            if row is not None and row.payload == before:
                return row.value, None
        # a payload may have no bytes, and then no object
        return None if row is None else (row.value, b"" if row.payload else None)


class ObjectsBackend(Backend):
    """Rows under a prefix of a bucket. The store is made if there is none, unless with `read_only`."""

    def __init__(self, address: Bucket, *, read_only: bool) -> None:
        self._address = address
        self._read_only = read_only
        self._client = Client(address)
        self._store = Store(self._client, read_only=read_only)
        self._window = ReadWindow()
        self._writing = threading.Lock()
        self._store.open()

    @property
    def location(self) -> str:
        return self._address.shown

    def _current(self, read: Callable[[], State]) -> State:
        """What is committed, as this reads it. A store that was deleted is made again, as when it is opened."""
        try:
            return read()
        except GoneError:
            if self._read_only:
                raise
            log.warning("%s was deleted; starting with an empty store", self.location)
            self._store.open()
            return read()

    @contextmanager
    def view(self) -> Iterator[View]:
        self._client.require_open()
        yield ObjectsView(self._store, self._client, self._window, self._current(self._store.refresh))

    @contextmanager
    def update(self) -> Iterator[Draft]:
        with self._turn() as view:
            draft = Draft(view, COSTS)
            yield draft
            if changes := draft.changes:
                self._commit(view, changes)

    @contextmanager
    def _turn(self) -> Iterator[ObjectsView]:
        """Be the only one who writes."""
        if self._read_only:
            raise refusals.read_only(self.location)
        self._client.require_open()
        with self._writing:
            try:
                state = self._current(self._store.begin)
                yield ObjectsView(self._store, self._client, self._window, state, is_alone=True)
            finally:
                self._store.end()

    def _commit(self, view: ObjectsView, changes: Sequence[Change]) -> None:
        """Upload the payloads, and then make the rows visible."""
        state, before = self._store.state, view.rows([change.key for change in changes])
        after, uploads = dict(before), dict[str, Buffer]()
        for key, value, payload in changes:
            old = after[key]
            reference = b"" if old is None else old.payload
            if payload is not None:
                reference = new_payload(len(payload))
                if len(payload):
                    uploads[state.payload_name(key, reference)] = payload
            after[key] = None if value is None else Stored(value, reference)
        after = {key: row for key, row in after.items() if row != before[key]}
        before = {key: before[key] for key in after}
        largest, is_uploaded = max(map(len, uploads.values()), default=1), False
        try:
            at_once([*uploads.items()], lambda one: self._client.put(*one), max(read_ahead.HELD_BYTES // largest, 1))
            is_uploaded = True
            self._store.commit(after, state.used + _cost(after) - _cost(before))
        except BaseException as error:
            # after another error nobody knows whether it was committed: what was uploaded stays until `compact`
            if not is_uploaded or isinstance(error, ConflictError | GoneError):
                self._delete([*uploads])
            raise
        self._delete([
            state.payload_name(key, row.payload)
            for key, row in before.items()
            if row is not None and row.payload_bytes and ((new := after[key]) is None or new.payload != row.payload)
        ])  # fmt: skip

    def _delete(self, names: Sequence[str]) -> None:
        """Delete payloads that no row leads to. If that fails, `compact` does it."""
        try:
            self._client.delete(names)
        except StorageError as error:
            log.warning("objects that no row leads to were not deleted; `compact` does it: %s", error)

    def sync(self) -> None:
        """Nothing to do: a request is answered when what it has written is safe, as far as the server promises it."""

    def compact(self, *, erase: bool = False) -> int:
        """Delete what no row leads to, as writers have left it that died, and count what is there."""
        with self._turn():
            state = self._store.state
            used, dead = self._count(state)
            for folder in self._client.folders():
                if STORE_ID.fullmatch(folder) and folder != state.store:
                    dead += self._client.list(folder)
            # what others have uploaded meanwhile, had they taken the turn, must stay
            self._store.change()
            self._client.delete([one.name for one in dead])
            # without what the last update has changed: nobody needs it any more
            self._store.change(number=state.number + 1, used=used, changes={})
            return sum(one.size for one in dead)

    def _count(self, state: State) -> tuple[int, list[Listed]]:
        """What rows and payloads take, and the payloads that no row leads to."""
        used, dead = 0, list[Listed]()
        rows = ((_key_in(one.name, state.rows), False, one) for one in self._client.list(state.rows))
        payloads = ((_key_in(one.name, state.payloads), True, one) for one in self._client.list(state.payloads))
        for key, group in groupby(merge(rows, payloads), itemgetter(0)):
            found = [(is_payload, one) for _, is_payload, one in group]
            if len(found) != 2 or found[0][0]:
                # not a row and its payload: the row says which that is
                stored = self._client.get(state.row_name(key)) if found[-1][0] else None
                name = state.payload_name(key, Stored.unpack(stored[0]).payload) if stored is not None else None
                dead += (one for is_payload, one in found if is_payload and one.name != name)
                found = [(is_payload, one) for is_payload, one in found if not is_payload or one.name == name]
            used += sum(one.size if is_payload else len(key) + one.size for is_payload, one in found)
        return used, dead

    def check(self) -> None:
        Store(self._client, read_only=True).open()

    def close(self) -> None:
        self._client.close()

    def after_fork(self) -> None:
        self._client.inherited()


def _cost(rows: Mapping[bytes, Stored | None]) -> int:
    return sum(row.cost(key) for key, row in rows.items() if row is not None)


def _key_in(name: str, folder: str) -> bytes:
    """The key of the row that the object of this name in a folder belongs to, which may be a payload."""
    inner = name.removeprefix(f"{folder}/")
    at = inner.rfind(MARK, inner.rfind("/") + 2)
    return key_in(inner if at < 0 else inner[:at])


def open_objects(location: str, *, max_bytes: int, read_only: bool) -> ObjectsBackend:
    """The store under this prefix of a bucket; its budget is the engine's to keep."""
    return ObjectsBackend(Bucket.parse(location), read_only=read_only)
