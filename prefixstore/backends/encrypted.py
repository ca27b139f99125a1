"""A location whose rows and payloads are encrypted, whatever backend keeps them.

`Safe` names and encrypts them (`backends.encryption`). `HEADER` is the only row in clear text, and there twice: it has
the secret of the location, encrypted under each of its keys. What that protects from is in ``docs/security.md``.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from prefixstore.backends.contract import Backend, ConflictError, Costs, Range, Row, Update, View
from prefixstore.backends.encryption import (
    LOCATIONS_OWN,
    PLACE_BYTES,
    Header,
    Safe,
    ciphers,
    derived,
    key_of,
    owner_of,
    row_size,
    size_of,
)
from prefixstore.backends.keys import KeyProvider, Keys
from prefixstore.backends.sorted_rows import SortedRows
from prefixstore.errors import FullError, IncompatibleError, LocationError, UndecryptableError
from prefixstore.format.record import Buffer

__all__ = ["HEADER", "EncryptedBackend"]

log = logging.getLogger("prefixstore")

# in a location that is not encrypted, a row of 8 bytes: so a store without a key cannot write to one that is
HEADER = b"g"
# the header again
COPY = b"g\0"
FIRST, LAST = b"", b"\xff" * 16
# a view looks at the header again after so many seconds: another process may have replaced the location
CHECKED_SECONDS = 60.0
# and what cannot be decrypted is logged once in so many
LOGGED_SECONDS = 60.0
# how many rows are encrypted anew in one update, and with payloads of how many bytes
REWRITTEN_AT_ONCE, REWRITTEN_BYTES = 256, 64 << 20
LEAST_REWRITTEN_BYTES = 1 << 20
CONFLICTS = 8


class _Costs(Costs):
    """What a row takes where it is encrypted, by what it takes there."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs.row, costs.payload, costs.unit)
        object.__setattr__(self, "_costs", costs)
        self._costs: Costs

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        place = bytes(max(len(key), 1 + PLACE_BYTES))
        row = bytes(row_size(key, value))
        return self._costs.of(place, row, None if payload is None else size_of(payload))


class _View(View):
    """The rows of a view, decrypted."""

    def __init__(
        self,
        view: View,
        safe: Safe,
        told: Callable[[UndecryptableError], object],
        renew: Callable[[View], Safe | None] | None = None,
    ) -> None:
        self._view = view
        self._safe = safe
        self._told = told
        self.at_once = view.at_once
        # finds what opens the location now, by its header; None in an update, and where each row is a request
        self._renew = renew if view.at_once is None else None
        self._header: bytes | None = safe.packed

    @property
    def arrived(self) -> int:  # type: ignore[override]
        return self._view.arrived

    def _row(self, place: bytes, stored: bytes) -> Row | None:
        try:
            return self._safe.open_row(place, stored)
        except UndecryptableError as error:
            self._told(error)
            return None

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        places, stored = self._read(keys)
        found = zip(keys, places, stored, strict=True)
        return [None if value is None else self._value(key, place, value) for key, place, value in found]

    def _read(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes | None]]:
        """Where these rows are, and what is there."""
        places = [self._safe.place(key) for key in keys]
        if self._renew is None:
            return places, self._view.get(places)
        header, *stored = self._view.get([HEADER, *places])
        if header != self._header:
            # another process has replaced the location, or has damaged the header
            self._safe, self._header = self._renew(self._view) or self._safe, header
            places = [self._safe.place(key) for key in keys]
            stored = self._view.get(places)
        return places, stored

    def _value(self, key: bytes, place: bytes, stored: bytes) -> bytes:
        """The value of a row; empty, which no value is, if it cannot be decrypted."""
        row = self._row(place, stored)
        return row.value if row is not None and row.key == key else b""

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        places = [self._safe.range(one) for one in wanted]
        return [self._readable(*one) for one in zip(places, self._view.ranges(places), strict=True)]

    def _readable(self, place: Range, stored: list[Row]) -> list[Row]:
        """These rows of a range, and others in place of those that cannot be decrypted."""
        found = [row for one in stored if (row := self._row(*one)) is not None]
        while place.limit is not None and len(stored) == place.limit > 0 and len(found) < place.limit:
            last = stored[-1].key
            place = place._replace(stop=last) if place.reverse else place._replace(start=last + b"\0")
            [stored] = self._view.ranges([place])
            found += (row for one in stored if (row := self._row(*one)) is not None)
        return found if place.limit is None else found[: place.limit]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        places = [self._safe.place(key) for key in keys]
        return self._decrypted(keys, places, self._view.payloads(places))

    def _decrypted(
        self, keys: Sequence[bytes], places: Sequence[bytes], found: Iterator[tuple[bytes, Buffer | None] | None]
    ) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for key, place, one in zip(keys, places, found, strict=True):
            if one is None:
                yield None
                continue
            payload = one[1]
            if payload is not None:
                try:
                    payload = self._safe.open_payload(place, payload)
                except UndecryptableError as error:
                    self._told(error)
                    raise
            yield self._value(key, place, one[0]), payload

    @property
    def used(self) -> int:
        return self._view.used


class _Update(_View, Update):
    """An update whose rows are encrypted when they are put."""

    _view: Update

    def __init__(self, update: Update, safe: Safe, told: Callable[[UndecryptableError], object]) -> None:
        super().__init__(update, safe, told)
        self._costs = _Costs(update.costs)
        # whose the rows are that were read, if they are a tenant's
        self._owners: dict[bytes, bytes] = {}

    def _row(self, place: bytes, stored: bytes) -> Row | None:
        if (owner := owner_of(stored)) != LOCATIONS_OWN:
            self._owners[place] = owner
        return super()._row(place, stored)

    def put(
        self,
        key: bytes,
        value: bytes,
        payload: Buffer | None = None,
        *,
        replaced: int | None = None,
        owner: bytes | None = None,
    ) -> None:
        place = self._safe.place(key)
        whose = self._owners.get(place, LOCATIONS_OWN) if owner is None else self._safe.owner(owner)
        row = self._safe.close_row(place, key, value, whose)
        hidden = None if payload is None else self._safe.close_payload(place, payload, whose)
        self._view.put(place, row, hidden, replaced=None if replaced is None else size_of(replaced))

    @property
    def costs(self) -> Costs:
        return self._costs

    def rewrite(self, places: Sequence[bytes], most: int) -> int:
        """Encrypt rows anew, whoever's they are, until their payloads have so many bytes; how many were looked at."""
        size = n = 0
        for n, (place, found) in enumerate(zip(places, self._view.payloads(places), strict=True), 1):  # noqa: B007
            row = None if found is None else self._row(place, found[0])
            if found is None or row is None:
                continue
            owner, payload = owner_of(found[0]), found[1]
            try:
                plain = None if payload is None else self._safe.open_payload(place, payload)
            except UndecryptableError as error:
                self._told(error)
                continue
            hidden = None if plain is None else self._safe.close_payload(place, plain, owner)
            self._view.put(place, self._safe.close_row(place, *row, owner), hidden)
            size += 0 if payload is None else len(payload)
            if size >= most:
                break
        return n

    def drop_undecryptable(self, places: Sequence[bytes]) -> None:
        """Delete those of these rows that cannot be decrypted."""
        for place, stored in zip(places, self._view.get(places), strict=True):
            if stored is not None and not self._safe.can_open(place, stored):
                self._view.delete(place)

    def delete(self, key: bytes, *, replaced: int | None = None) -> None:
        self._view.delete(self._safe.place(key), replaced=None if replaced is None else size_of(replaced))


class EncryptedBackend(Backend):
    """A backend whose rows and payloads are encrypted.

    Parameters
    ----------
    backend
        Keeps what is encrypted; closed with this.
    provider
        Gives the keys.
    parts
        As for `Safe`.
    tenant_of
        What stands in rows for the tenant with this name: 16 bytes.
    on_undecryptable
        Called for each row or payload that cannot be decrypted.

    Attributes
    ----------
    keys
        The keys that were read last.

    Raises
    ------
    LocationError
        If none of the keys is one of the location's, or it is not encrypted and has rows.
    MissingExtraError
        If cryptography is not installed.
    """

    def __init__(
        self,
        backend: Backend,
        provider: KeyProvider,
        *,
        parts: Mapping[bytes, Sequence[int]],
        tenant_of: Callable[[str], bytes],
        on_undecryptable: Callable[[], object] = lambda: None,
    ) -> None:
        self._backend = backend
        self._provider = provider
        self._parts = parts
        self._tenant_of = tenant_of
        self._on_undecryptable = on_undecryptable
        self._logged = -LOGGED_SECONDS
        self._safe: Safe | None = None
        self._checked = 0.0
        ciphers()
        self.keys = Keys.read(self._provider)
        with self.view():
            pass  # raises if a key is missing

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _opened(self, rows: View) -> Safe | None:
        """What opens the location, by its header; None if it is empty."""
        self._checked = time.monotonic()
        header = Header.unpack(rows.get([HEADER, COPY]), self.location)
        if header is None:
            if rows.ranges([Range(FIRST, LAST, 1)])[0]:
                raise LocationError(
                    f"{self.location} is not encrypted: open it without a key, and prefixstore copy it to a new "
                    "location with one"
                )
            return None
        if self._safe is None or self._safe.header != header:
            self._safe = self._unlocked(header)
        return self._safe

    def _unlocked(self, header: Header) -> Safe:
        if header.keys.keys() - self.keys.masters.keys():
            # another process may have been given a new one
            self.keys = Keys.read(self._provider)
        missing = header.keys.keys() - self.keys.masters.keys()
        if missing:
            names = ", ".join(sorted(name.hex() for name in missing))
            raise LocationError(
                f"{self.location} needs the key {names}, which {self._provider} does not have; pass key=, or set "
                "PREFIXSTORE_KEY, to where it is"
            )
        name, wrapped = next(iter(header.keys.items()))
        AESGCM, InvalidTag = ciphers()  # noqa: N806 - their own names
        try:
            lock = AESGCM(_lock(self.keys.masters[name], header.location))
            secret = lock.decrypt(bytes(12), wrapped, header.location)
        except InvalidTag:
            raise IncompatibleError(f"{self.location}: what says how it is encrypted was changed") from None
        return self._made(header, secret)

    def _made(self, header: Header, secret: bytes) -> Safe:
        tenants = {self._tenant_of(name): key for name, key in self.keys.tenants.items()}
        return Safe(header, secret, self.keys.masters, tenants, self._parts)

    def _wrapped(self, name: bytes, location: bytes, secret: bytes) -> bytes:
        AESGCM, _ = ciphers()  # noqa: N806
        return bytes(AESGCM(_lock(self.keys.masters[name], location)).encrypt(bytes(12), secret, location))

    def _ready(self, draft: Update) -> Safe:
        """What encrypts an update; the header is written if it is missing, or has not the newest key."""
        safe = self._opened(draft)
        if safe is None:
            # as before, if the location was emptied
            old = self._safe
            header = Header(old.header.location if old else secrets.token_bytes(16), {})
            secret = old.secret if old else secrets.token_bytes(32)
            retired: frozenset[bytes] = old.header.retired if old else frozenset()
        else:
            header, secret, retired = safe.header, safe.secret, safe.header.retired
        newest = next((name for name in self.keys.masters if name not in retired), None)
        if newest is None:
            raise LocationError(f"{self.location}: all keys in {self._provider} have been replaced by newer ones")
        if newest not in header.keys:
            wrapped = self._wrapped(newest, header.location, secret)
            header = replace(header, keys={**header.keys, newest: wrapped}, retired=retired)
            safe = self._made(header, secret)
        assert safe is not None
        self._put(draft, header)
        return safe

    def _put(self, draft: Update, header: Header) -> None:
        """Write the header, and its copy, where it is not there."""
        packed = header.pack()
        for key, stored in zip((HEADER, COPY), draft.get([HEADER, COPY]), strict=True):
            if stored != packed:
                draft.put(key, packed)

    # -- as a backend -------------------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return self._backend.location

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        return self._backend.is_local

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._backend.view() as view:
            safe = self._safe
            if safe is None or time.monotonic() - self._checked > CHECKED_SECONDS:
                safe = self._opened(view)
            yield SortedRows(lambda _: 0) if safe is None else _View(view, safe, self._tell, self._opened)

    @contextmanager
    def update(self) -> Iterator[Update]:
        with self._backend.update() as draft:
            safe = self._ready(draft)
            yield _Update(draft, safe, self._tell)
        self._safe = safe

    def _tell(self, error: UndecryptableError) -> None:
        self._on_undecryptable()
        if time.monotonic() - self._logged > LOGGED_SECONDS:
            self._logged = time.monotonic()
            log.warning("%s: something cannot be decrypted, and is not used: %s", self.location, error)

    def sync(self) -> None:
        self._backend.sync()

    def compact(self, *, erase: bool = False) -> int:
        return self._backend.compact(erase=erase)

    def check(self) -> None:
        self._backend.check()

    def reclaim(self) -> None:
        self._backend.reclaim()

    def after_fork(self) -> None:
        # its threads are the parent's
        self._safe = None
        self._backend.after_fork()

    def close(self) -> None:
        self._safe = None
        self._backend.close()

    # -- all rows -----------------------------------------------------------------------------------------------------

    def rotate(self, progress: Callable[[int], object] = lambda _: None) -> int:
        """Have everything encrypted under the newest key alone, and the others needed no more; how many rows were not.

        Others may go on using the location if they have the newest key. What cannot be decrypted stays as it is. May be
        interrupted, and called again.

        Raises
        ------
        LocationError
            If the first key was replaced by another one before.
        FullError
            If there is no space for what is written before the old rows are gone.
        """
        self.keys = Keys.read(self._provider)
        newest = next(iter(self.keys.masters))
        self._change_header(newest, is_done=False)
        n_done = 0
        for rows in self._all():
            places = [row.key for row in rows if key_of(row.value) != newest]
            n_done += self._rewrite(places)
            progress(n_done)
        self._change_header(newest, is_done=True)
        return n_done

    def _change_header(self, newest: bytes, *, is_done: bool) -> None:
        """Have nothing written under other keys than the newest; if all is done, no other one is needed any more."""
        with self._backend.update() as draft:
            header = self._ready(draft).header
            if newest in header.retired:
                raise LocationError(f"{self.location}: the key {newest.hex()} was replaced; put a newer one before it")
            keys = {newest: header.keys[newest]} if is_done else header.keys
            retired = header.retired | (header.keys.keys() - {newest})
            self._put(draft, replace(header, keys=keys, retired=retired))

    def _rewrite(self, places: Sequence[bytes]) -> int:
        most, n_done, n_conflicts = REWRITTEN_BYTES, 0, 0
        while n_done < len(places):
            try:
                with self.update() as draft:
                    assert isinstance(draft, _Update)
                    n = draft.rewrite(places[n_done:], most)
                n_done += n
            except ConflictError:
                n_conflicts += 1
                if n_conflicts == CONFLICTS:
                    raise
            except FullError:
                if most < LEAST_REWRITTEN_BYTES:
                    raise
                most //= 4
                self._backend.reclaim()
        return n_done

    def undecryptable(self, *, delete: bool = False) -> int:
        """How many rows cannot be decrypted; with `delete` they are deleted."""
        n_found = 0
        for rows in self._all():
            safe = self._safe
            wrong = [row.key for row in rows if safe is not None and not safe.can_open(*row)]
            n_found += len(wrong)
            if wrong and delete:
                with self.update() as draft:
                    assert isinstance(draft, _Update)
                    draft.drop_undecryptable(wrong)
        return n_found

    def _all(self) -> Iterator[list[Row]]:
        """All rows as they are stored, some at a time, but the header."""
        start, self._checked = FIRST, -CHECKED_SECONDS
        while True:
            with self.view(), self._backend.view() as view:
                [rows] = view.ranges([Range(start, LAST, REWRITTEN_AT_ONCE)])
            if not rows:
                return
            yield [row for row in rows if row.key not in (HEADER, COPY)]
            start = rows[-1].key + b"\0"


def _lock(key: bytes, location: bytes) -> bytes:
    """The key under which the secret of a location is encrypted: nothing else is, so its nonce is 0."""
    return derived(key, location, b"prefixstore lock")
