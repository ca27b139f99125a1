"""A location whose rows and payloads are encrypted, whatever backend keeps them.

`encryption.RowCipher` encrypts them. The header is the only row in clear text, and there twice: it has the secret of
the location, encrypted under its newest key. What that protects from is in ``docs/security.md``.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from prefixstore.backends.contract import Backend, ConflictError, Costs, Range, Row, Update, View
from prefixstore.backends.encryption import (
    HASH_BYTES,
    NO_TENANT,
    Header,
    RowCipher,
    encrypted_size,
    key_and_tenant,
)
from prefixstore.backends.keys import COPY, HEADER, KeyProvider, Keys, is_header
from prefixstore.backends.sorted_rows import SortedRows
from prefixstore.errors import FullError, IncompatibleError, LocationError, UndecryptableError
from prefixstore.format.record import Buffer

__all__ = ["EncryptedBackend"]

V = TypeVar("V", bound=View)
log = logging.getLogger("prefixstore")

FIRST, LAST = b"", b"\xff" * 16
# a view looks at the header again after so many seconds: another process may have replaced the location
CHECKED_SECONDS = 60.0
# so long at least between two attempts to find a key that is missing
AGAIN_SECONDS = 10.0
# and between two lines of the log
LOGGED_SECONDS = 60.0
# how many rows are encrypted anew in one update, and with payloads of how many bytes
REWRITTEN_AT_ONCE, REWRITTEN_BYTES = 256, 64 << 20
LEAST_REWRITTEN_BYTES = 1 << 20
CONFLICTS = 8

Told = Callable[[UndecryptableError], object]


class MissingKeyError(LocationError):
    """The location needs a key that is not given."""


class _Costs(Costs):
    """What a row takes where it is encrypted, by what it takes there."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs.row, costs.payload, costs.unit)
        object.__setattr__(self, "inner", costs)

    inner: Costs

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        stored_key = bytes(max(len(key), 1 + HASH_BYTES))
        row = bytes(encrypted_size(2 + len(key) + len(value)))
        return self.inner.of(stored_key, row, None if payload is None else encrypted_size(payload))


class _View(View):
    """The rows of a view, decrypted.

    Parameters
    ----------
    view
        The view.
    cipher
        Of the location.
    told
        Called for what cannot be decrypted.
    renew
        What decrypts the location now, if it has a key that `cipher` does not know.
    """

    def __init__(self, view: View, cipher: RowCipher, told: Told, renew: Callable[[View], RowCipher | None]) -> None:
        self._view = view
        self._cipher = cipher
        self._told = told
        self._renew = renew
        self.at_once = view.at_once

    @property
    def arrived(self) -> int:  # type: ignore[override]
        return self._view.arrived

    def _row(self, stored_key: bytes, stored: bytes) -> Row | None:
        """A row; None if it cannot be decrypted."""
        name, _ = key_and_tenant(stored)
        if name not in self._cipher.header.keys:
            # another process has replaced the key since; once is enough
            renew, self._renew = self._renew, lambda _: None
            self._cipher = renew(self._view) or self._cipher
        try:
            return self._cipher.decrypt_row(stored_key, stored)
        except UndecryptableError as error:
            if not self._cipher.is_forgotten(stored):
                self._told(error)
            return None

    def _value(self, key: bytes, stored_key: bytes, stored: bytes | None) -> bytes | None:
        """The value of a row, which is empty if it cannot be decrypted."""
        row = None if stored is None else self._row(stored_key, stored)
        if row is not None and row.key == key:
            return row.value
        return None if stored is None or self._cipher.is_forgotten(stored) else b""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        stored_keys = [self._cipher.stored_key(key) for key in keys]
        return list(map(self._value, keys, stored_keys, self._view.get(stored_keys)))

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        stored = [self._cipher.stored_range(one) for one in wanted]
        return [self._readable(*one) for one in zip(stored, self._view.ranges(stored), strict=True)]

    def _readable(self, stored: Range, rows: list[Row]) -> list[Row]:
        """These rows of a range, and others in place of those that cannot be decrypted."""
        found = [row for one in rows if (row := self._row(*one)) is not None]
        limit, at_once = stored.limit, stored.limit
        while limit is not None and at_once is not None and len(rows) == at_once > 0 and len(found) < limit:
            last, at_once = rows[-1].key, 4 * at_once
            stored = stored._replace(stop=last) if stored.reverse else stored._replace(start=last + b"\0")
            [rows] = self._view.ranges([stored._replace(limit=at_once)])
            found += (row for one in rows if (row := self._row(*one)) is not None)
        return found[:limit]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        stored_keys = [self._cipher.stored_key(key) for key in keys]
        return self._decrypted(keys, stored_keys, self._view.payloads(stored_keys))

    def _decrypted(
        self, keys: Sequence[bytes], stored_keys: Sequence[bytes], found: Iterator[tuple[bytes, Buffer | None] | None]
    ) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for key, stored_key, one in zip(keys, stored_keys, found, strict=True):
            value = None if one is None else self._value(key, stored_key, one[0])
            if one is None or value is None:
                yield None
                continue
            payload = one[1]
            if payload is not None:
                try:
                    payload = self._cipher.decrypt_payload(stored_key, payload)
                except UndecryptableError as error:
                    self._told(error)
                    raise
            yield value, payload

    @property
    def used(self) -> int:
        return self._view.used


class _Update(_View, Update):
    """An update whose rows are encrypted when they are put."""

    _view: Update

    def __init__(self, update: Update, cipher: RowCipher, told: Told) -> None:
        super().__init__(update, cipher, told, lambda _: None)
        self._costs = _Costs(update.costs)
        # the tags of tenants of rows that were read
        self._tags: dict[bytes, bytes] = {}

    @property
    def costs(self) -> Costs:
        return self._costs

    def _row(self, stored_key: bytes, stored: bytes) -> Row | None:
        self._tags[stored_key] = key_and_tenant(stored)[1]
        return super()._row(stored_key, stored)

    def put(
        self,
        key: bytes,
        value: bytes,
        payload: Buffer | None = None,
        *,
        replaced: int | None = None,
        owner: bytes | None = None,
    ) -> None:
        stored_key = self._cipher.stored_key(key)
        tag = self._tags.get(stored_key, NO_TENANT) if owner is None else self._cipher.tag(owner)
        row = self._cipher.encrypt_row(stored_key, key, value, tag)
        hidden = None if payload is None else self._cipher.encrypt_payload(stored_key, payload, tag)
        self._view.put(stored_key, row, hidden, replaced=None if replaced is None else encrypted_size(replaced))

    def delete(self, key: bytes, *, replaced: int | None = None) -> None:
        size = None if replaced is None else encrypted_size(replaced)
        self._view.delete(self._cipher.stored_key(key), replaced=size)

    def rewrite(self, stored_keys: Sequence[bytes], most: int) -> tuple[int, int]:
        """Encrypt rows anew, until their payloads have so many bytes; how many were looked at, and cannot be decrypted.

        A row that has a payload was put with it: both are under the same key.
        """
        size = n = n_left = 0
        for stored_key, found in zip(stored_keys, self._view.payloads(stored_keys), strict=True):
            n += 1
            if found is None:
                continue
            stored, payload = found
            try:
                row, tag = self._cipher.decrypt_row(stored_key, stored), key_and_tenant(stored)[1]
                plain = None if payload is None else self._cipher.decrypt_payload(stored_key, payload)
            except UndecryptableError:
                n_left += 1
                continue
            hidden = None if plain is None else self._cipher.encrypt_payload(stored_key, plain, tag)
            self._view.put(stored_key, self._cipher.encrypt_row(stored_key, *row, tag), hidden)
            size += 0 if payload is None else len(payload)
            if size >= most:
                break
        return n, n_left

    def drop_undecryptable(self, stored_keys: Sequence[bytes]) -> None:
        """Delete those of these rows that cannot be decrypted."""
        for stored_key, stored in zip(stored_keys, self._view.get(stored_keys), strict=True):
            if stored is not None and self._row(stored_key, stored) is None:
                self._view.delete(stored_key)


class EncryptedBackend(Backend):
    """A backend whose rows and payloads are encrypted.

    Parameters
    ----------
    backend
        Keeps what is encrypted; closed with this.
    provider, keys
        Gives the keys, and has given these.
    parts
        As for `RowCipher`.
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
        If a key is missing, or it is not encrypted and has rows.
    IncompatibleError
        If its header is damaged, or of another version.
    """

    def __init__(
        self,
        backend: Backend,
        provider: KeyProvider,
        keys: Keys,
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
        self._logged = self._asked_again = -max(LOGGED_SECONDS, AGAIN_SECONDS)
        # what was found last, the rows of the header in which it was, and when
        self._found: tuple[RowCipher, list[bytes | None], float] | None = None
        self.keys = keys
        with self.view():
            pass  # raises if a key is missing

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _cipher_in(self, rows: View) -> RowCipher | None:
        """The cipher of the location, by its header; None if it is empty."""
        stored, found = rows.get([HEADER, COPY]), self._found
        if found is not None and found[1] == stored:
            cipher = found[0]
        elif any(map(is_header, stored)):
            cipher = self._cipher_of(stored)
        elif rows.ranges([Range(FIRST, LAST, 1)])[0]:
            raise LocationError(
                "it is not encrypted: open it without a key (PREFIXSTORE_KEY=none), or prefixstore copy it to a new "
                "location, with --from-key none"
            )
        else:
            return None
        self._found = cipher, stored, time.monotonic()
        return cipher

    def _cipher_of(self, stored: Sequence[bytes | None]) -> RowCipher:
        """The cipher by the first whole row of the header."""
        *others, last = [row for row in stored if row is not None and is_header(row)]
        for row in others:
            with suppress(IncompatibleError, MissingKeyError):
                return self._unlocked(row)
        return self._unlocked(last)

    def _unlocked(self, stored: bytes) -> RowCipher:
        header = Header.unpack(stored, self.location)
        if missing := [name.hex() for name in header.keys if name not in self.keys.masters]:
            raise self._missing(f"the key {', '.join(missing)}")
        cipher = self._made(header, header.secret_in(stored, self.keys.masters, self.location))
        needed = {key for key in header.tenants if key[: len(NO_TENANT)] not in cipher.forgotten}
        if n_missing := len(needed - cipher.tenants):
            raise self._missing(f"the keys of {n_missing} tenants")
        return cipher

    def _missing(self, what: str) -> MissingKeyError:
        return MissingKeyError(
            f"it needs {what}, which {self._provider} does not have, or did not when it was read last; give it by "
            "PREFIXSTORE_KEY or key= (copy: --from-key, --to-key)"
        )

    def _made(self, header: Header, secret: bytes) -> RowCipher:
        tenants = {self._tenant_of(name): key for name, key in self.keys.tenants.items()}
        forgotten = list(map(self._tenant_of, self.keys.forgotten))
        return RowCipher(header, secret, self.keys.masters, tenants, forgotten, self._parts)

    def _cipher_for(self, update: Update) -> RowCipher:
        """The cipher of an update; the header is written if it is not there, or lacks a key."""
        before = self._found
        cipher = self._cipher_in(update)
        if cipher is None and before is not None:
            # it was emptied: others have it open, too
            cipher = before[0]
        if cipher is None:
            cipher = self._made(Header(secrets.token_bytes(16), ()), secrets.token_bytes(32))
        header, newest = cipher.header, next(iter(self.keys.masters))
        if newest not in {*header.keys, *header.retired}:
            header = replace(header, keys=(newest, *header.keys))
        gone = {key for key in header.tenants if key[: len(NO_TENANT)] in cipher.forgotten}
        forgotten = header.forgotten | gone
        header = replace(header, tenants=(header.tenants | cipher.tenants) - forgotten, forgotten=forgotten)
        return self._noted(update, header, cipher)

    def _noted(self, update: Update, header: Header, cipher: RowCipher) -> RowCipher:
        """Write the header, if it is not there; the cipher by it."""
        stored = update.get([HEADER, COPY])
        if header == cipher.header and stored[0] is not None and stored[0] == stored[1]:
            return cipher
        packed = header.pack(cipher.secret, self.keys.masters)
        update.put(HEADER, packed)
        update.put(COPY, packed)
        return self._made(header, cipher.secret)

    def _read_keys_again(self) -> bool:
        """Read the keys again, but not all the time: another process may have been given a new one."""
        if time.monotonic() - self._asked_again < AGAIN_SECONDS:
            return False
        self._asked_again = time.monotonic()
        self._read_keys()
        return True

    def _read_keys(self) -> None:
        self.keys, self._found = Keys.read(self._provider), None

    @contextmanager
    def _opened(
        self, opened: Callable[[], AbstractContextManager[V]], find: Callable[[V], RowCipher | None]
    ) -> Iterator[tuple[V, RowCipher | None]]:
        """A view or update, and its cipher. If a key is missing, the keys are read again while nothing is open."""
        with opened() as rows:
            try:
                found = find(rows)
            except MissingKeyError as error:
                missing = error
            else:
                yield rows, found
                return
        if not self._read_keys_again():
            raise missing
        with opened() as rows:
            yield rows, find(rows)

    def key_ids(self) -> list[str]:
        """The ids of the keys that the location needs, the newest first."""
        with self._opened(self._backend.view, self._cipher_in) as (_, cipher):
            return [] if cipher is None else [name.hex() for name in cipher.header.keys]

    # -- as a backend -------------------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return self._backend.location

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        return self._backend.is_local

    def _known_cipher(self, rows: View) -> RowCipher | None:
        """As `_cipher_in`, without a look at the header if there was one lately."""
        found = self._found
        return found[0] if found and time.monotonic() - found[2] < CHECKED_SECONDS else self._cipher_in(rows)

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._opened(self._backend.view, self._known_cipher) as (rows, cipher):
            # what is in an empty location now was written by others, who are seen later
            yield SortedRows(lambda _: 0) if cipher is None else _View(rows, cipher, self._tell, self._renewed)

    def _renewed(self, rows: View) -> RowCipher | None:
        """As `_cipher_in`; if a key is missing, the next view looks for it."""
        try:
            return self._cipher_in(rows)
        except MissingKeyError:
            self._found = None
            raise

    @contextmanager
    def update(self) -> Iterator[Update]:
        with self._opened(self._backend.update, self._cipher_for) as (rows, cipher):
            assert cipher is not None
            yield _Update(rows, cipher, self._tell)

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
        self._found = None
        self._backend.after_fork()

    def close(self) -> None:
        self._backend.close()

    # -- all rows -----------------------------------------------------------------------------------------------------

    def rotate(self, progress: Callable[[int], object] = lambda _: None) -> tuple[int, int]:
        """Have everything encrypted under the newest key, and that of its tenant, so that older ones are not needed.

        Others may go on using the location if they have the newest key. May be interrupted, and called again.

        Returns
        -------
        int
            How many rows were encrypted anew.
        int
            How many of them could not be decrypted: then the older keys are still needed.

        Raises
        ------
        LocationError
            If the newest key was replaced by another one before.
        FullError
            If there is no space for what is written before the old rows are gone.
        """
        self._read_keys()
        newest = next(iter(self.keys.masters))
        with self._opened(self._backend.update, self._cipher_for) as (_, cipher):
            assert cipher is not None
            header = cipher.header
            if header.keys[0] != newest:
                raise LocationError(
                    f"the key {newest.hex()} was replaced in {self.location}; add a newer one to the file"
                )
        n_done = n_left = 0
        for rows, cipher in self._all():
            n, left = self._rewrite([row.key for row in rows if not cipher.is_current(row.value)])
            n_done, n_left = n_done + n - left, n_left + left
            progress(n_done)
        if not n_left:
            self._retire(header.keys[1:])
        return n_done, n_left

    def _retire(self, names: Sequence[bytes]) -> None:
        """Note that nothing is under these keys any more."""
        with self._opened(self._backend.update, self._cipher_for) as (update, cipher):
            assert cipher is not None
            header = cipher.header
            keys = tuple(name for name in header.keys if name not in names)
            self._noted(update, replace(header, keys=keys, retired=header.retired.union(names)), cipher)
        self._found = None

    def _rewrite(self, stored_keys: Sequence[bytes]) -> tuple[int, int]:
        most, n_done, n_left, n_conflicts = REWRITTEN_BYTES, 0, 0, 0
        while n_done < len(stored_keys):
            try:
                with self.update() as update:
                    assert isinstance(update, _Update)
                    n, left = update.rewrite(stored_keys[n_done:], most)
                n_done, n_left = n_done + n, n_left + left
            except ConflictError:
                n_conflicts += 1
                if n_conflicts == CONFLICTS:
                    raise
            except FullError:
                if most < LEAST_REWRITTEN_BYTES:
                    raise
                most //= 4
                self._backend.reclaim()
        return n_done, n_left

    def undecryptable(self, *, delete: bool = False) -> int:
        """How many rows cannot be decrypted, or are of a forgotten tenant; with `delete` they are deleted."""
        n_found = 0
        for rows, cipher in self._all():
            wrong = [row.key for row in rows if not cipher.can_decrypt(*row)]
            n_found += len(wrong)
            if wrong and delete:
                with self.update() as update:
                    assert isinstance(update, _Update)
                    update.drop_undecryptable(wrong)
        return n_found

    def _all(self) -> Iterator[tuple[list[Row], RowCipher]]:
        """All rows as they are stored, some at a time, but the header; and what decrypts them."""
        start = FIRST
        while True:
            with self._opened(self._backend.view, self._cipher_in) as (view, cipher):
                [rows] = view.ranges([Range(start, LAST, REWRITTEN_AT_ONCE)])
            if not rows or cipher is None:
                return
            yield [row for row in rows if row.key not in (HEADER, COPY)], cipher
            start = rows[-1].key + b"\0"
