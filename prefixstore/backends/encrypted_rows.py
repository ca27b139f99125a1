"""The rows of an encrypted location, decrypted when they are read and encrypted when they are put."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prefixstore.backends.contract import Costs, Range, Row, Update, View
from prefixstore.backends.encryption import HASH_BYTES, NO_TENANT, RowCipher, encrypted_size, key_and_tenant
from prefixstore.errors import UndecryptableError
from prefixstore.format.record import Buffer

__all__ = ["EncryptedUpdate", "EncryptedView"]

Told: TypeAlias = Callable[[UndecryptableError], object]


@dataclass(frozen=True)
class _Costs(Costs):
    """What a row takes where it is encrypted, by what it takes there."""

    inner: Costs = field(default_factory=Costs)

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        stored_key = bytes(max(len(key), 1 + HASH_BYTES))
        row = bytes(encrypted_size(2 + len(key) + len(value)))
        return self.inner.of(stored_key, row, None if payload is None else encrypted_size(payload))


class EncryptedView(View):
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
    def arrived(self) -> int:  # type: ignore[override]  # other views have an attribute
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


class EncryptedUpdate(EncryptedView, Update):
    """An update whose rows are encrypted when they are put."""

    _view: Update

    def __init__(self, update: Update, cipher: RowCipher, told: Told) -> None:
        super().__init__(update, cipher, told, lambda _: None)
        costs = update.costs
        self._costs = _Costs(costs.row, costs.payload, costs.unit, costs)
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
