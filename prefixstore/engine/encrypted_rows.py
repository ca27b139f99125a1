"""The rows of an encrypted location, decrypted when they are read and encrypted when they are put.

A row is stored under a keyed hash of its key, part by part, so that rows whose keys have some first parts in common are
beside each other; the key itself is encrypted with the value, and so is whose row it is. The format is in
``docs/format.md``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixstore.backends.contract import Costs, Range, Row, Update, View, after_all
from prefixstore.backends.keys import ID_BYTES, Keys, key_id
from prefixstore.backends.sealing import Sealer, derive_key, sealed_size
from prefixstore.engine.keyspace import PARTS, TENANT_BYTES, tenant_of
from prefixstore.errors import UndecryptableError
from prefixstore.format.record import Buffer

__all__ = ["SECRET_BYTES", "EncryptedUpdate", "EncryptedView", "Header", "RowCipher"]

SECRET_BYTES = 32
# what stands for a part of a key; for a short one, such as a token, fewer bytes are enough
HASH_BYTES, SHORT_BYTES = 16, 4
# what is encrypted of a row: the tenant whose it is, the length of its key, that key, and the value
OWNER = struct.Struct(f"<{TENANT_BYTES}sH")
NOBODY = bytes(TENANT_BYTES)


class Header(NamedTuple):
    """What a location says about how it is encrypted. It is sealed under the first of its keys.

    Attributes
    ----------
    secret
        Of the location: its other keys are derived with it.
    keys
        Ids of the keys that are needed, those of tenants included. New rows are under the first one.
    replaced
        Ids of keys that others have replaced: nothing is under them.
    """

    secret: bytes
    keys: tuple[bytes, ...] = ()
    replaced: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """What is sealed."""
        return self.secret + len(self.keys).to_bytes(4, "little") + b"".join(self.keys + self.replaced)

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """Read what was sealed, and so is authentic."""
        n_keys, first = int.from_bytes(packed[SECRET_BYTES : SECRET_BYTES + 4], "little"), SECRET_BYTES + 4
        names = tuple(packed[at : at + ID_BYTES] for at in range(first, len(packed), ID_BYTES))
        return cls(packed[:SECRET_BYTES], names[:n_keys], names[n_keys:])


class RowCipher:
    """Seals the rows and payloads of a location, and says under which keys they are stored.

    Parameters
    ----------
    header
        Of the location.
    keys
        Those that it needs, and others.

    Attributes
    ----------
    masters
        The keys under which it is, but those of tenants, the newest first.
    """

    def __init__(self, header: Header, keys: Keys) -> None:
        self.header, self.keys = header, keys
        # what was encrypted under a key that was replaced is not to be trusted
        self.masters = {name: keys.masters[name] for name in header.keys if name in keys.masters}
        own = {tenant_of(name, b""): key for name, key in keys.tenants.items()}
        # what a tenant has is under both keys
        both = [master + key for master in self.masters.values() for key in own.values()]
        newest = self.masters[header.keys[0]]
        self._owners = {tenant: key_id(newest + key) for tenant, key in own.items()}
        self._names = derive_key(header.secret, b"", "names")
        self._sealer = Sealer(self.masters | {key_id(key): key for key in both}, header.secret, "rows")
        self.has_key_of = self._sealer.has_key_of

    # -- keys of rows -------------------------------------------------------------------------------------------------

    def stored_key(self, key: bytes) -> bytes:
        """The stored key of a row; of the first parts of a key, what all stored keys that have them begin with."""
        kind, at = key[:1], 1
        hashed = hashlib.blake2b(kind, key=self._names, person=b"prefixstore rows", digest_size=HASH_BYTES)
        if kind not in PARTS:
            hashed.update(key[1:])
            return kind + hashed.digest()
        found = kind
        for size in _sizes(key):
            hashed.update(key[at : at + size])
            found += hashed.digest()[: SHORT_BYTES if size <= SHORT_BYTES else HASH_BYTES]
            at += size
        return found

    def stored_range(self, wanted: Range) -> Range:
        """Where the rows of a range are."""
        start, stop = wanted.start, wanted.stop
        if len(stop) > 1 and after_all(shared := start[: len(stop)]) == stop and _is_whole(shared):
            stop = after_all(self.stored_key(shared))
        elif len(stop) > 1:
            stop = self._bound(stop)
        return wanted._replace(start=self._bound(start), stop=stop)

    def _bound(self, bound: bytes) -> bytes:
        # if it ends within a part, it is the least key after another one
        return self.stored_key(bound) if _is_whole(bound) else self.stored_key(bound[:-1]) + b"\0"

    # -- values and payloads ------------------------------------------------------------------------------------------

    def _name_for(self, owner: bytes) -> bytes:
        """The id of the key under which the rows of a tenant are put."""
        return self._owners.get(owner, self.header.keys[0])

    def seal(self, stored_key: bytes, key: bytes, value: bytes, owner: bytes) -> bytes:
        """The stored value of a row."""
        text = OWNER.pack(owner, len(key)) + key + value
        return bytes(self._sealer.seal(self._name_for(owner), b"row" + stored_key, text))

    def unseal(self, stored_key: bytes, stored: bytes) -> tuple[Row, bytes]:
        """The row in a stored one, and whose it is. Raises `UndecryptableError`."""
        text = bytes(self._sealer.unseal(b"row" + stored_key, stored))
        owner, size = OWNER.unpack_from(text)
        end = OWNER.size + size
        return Row(text[OWNER.size : end], text[end:]), owner

    def seal_payload(self, stored_key: bytes, payload: Buffer, owner: bytes) -> Buffer:
        """The stored form of a payload."""
        return self._sealer.seal(self._name_for(owner), b"payload" + stored_key, payload)

    def unseal_payload(self, stored_key: bytes, stored: Buffer) -> Buffer:
        """The payload in its stored form. Raises `UndecryptableError`."""
        return self._sealer.unseal(b"payload" + stored_key, stored)

    def state(self, stored: Row) -> tuple[bytes, bool] | None:
        """The key of a stored row, and whether it is encrypted as it would be now; None if it cannot be decrypted."""
        try:
            row, owner = self.unseal(*stored)
        except UndecryptableError:
            return None
        return row.key, stored.value.startswith(self._name_for(owner))


def _sizes(key: bytes) -> Iterator[int]:
    """The sizes of the whole parts of a key."""
    left = len(key) - 1
    for size in PARTS[key[:1]]:
        left -= size
        if left < 0:
            return
        yield size


def _is_whole(key: bytes) -> bool:
    return 1 + sum(_sizes(key)) == len(key)


@dataclass(frozen=True)
class _Costs(Costs):
    """What a row takes where it is encrypted, by what it takes there."""

    inner: Costs = field(default_factory=Costs)

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        row = bytes(sealed_size(OWNER.size + len(key) + len(value)))
        return self.inner.of(key + bytes(HASH_BYTES), row, None if payload is None else sealed_size(payload))


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
    """

    def __init__(self, view: View, cipher: RowCipher, told: Callable[[], object]) -> None:
        self._view = view
        self.cipher = cipher
        self._told = told
        self.at_once = view.at_once

    @property
    def arrived(self) -> int:  # type: ignore[override]  # other views have an attribute
        return self._view.arrived

    def _row(self, stored_key: bytes, stored: bytes) -> Row | None:
        """A row; None if it cannot be decrypted."""
        try:
            row, owner = self.cipher.unseal(stored_key, stored)
        except UndecryptableError:
            self._told()
            return None
        self._note_owner(stored_key, owner)
        return row

    def _note_owner(self, stored_key: bytes, owner: bytes) -> None:
        """Called for each row that was read."""

    def _value(self, key: bytes, stored_key: bytes, stored: bytes | None) -> bytes | None:
        """The value of a row: empty if it is damaged, None if it was put by somebody without the keys of the location.

        Such a row is of a tenant who was forgotten, or of who still has a key that was replaced.
        """
        if stored is None:
            return None
        row = self._row(stored_key, stored)
        if row is None:
            return b"" if self.cipher.has_key_of(stored) else None
        return row.value if row.key == key else b""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        stored_keys = list(map(self.cipher.stored_key, keys))
        return list(map(self._value, keys, stored_keys, self._view.get(stored_keys)))

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        stored = list(map(self.cipher.stored_range, wanted))
        return list(map(self._readable, stored, self._view.ranges(stored)))

    def _readable(self, stored: Range, rows: list[Row]) -> list[Row]:
        """These rows of a range; if none can be decrypted, the next ones that can."""
        found = [row for one in rows if (row := self._row(*one)) is not None]
        limit, at_once = stored.limit, stored.limit
        while at_once and not found and len(rows) == at_once:
            last, at_once = rows[-1].key, 4 * at_once
            stored = stored._replace(stop=last) if stored.reverse else stored._replace(start=last + b"\0")
            [rows] = self._view.ranges([stored._replace(limit=at_once)])
            found = [row for one in rows if (row := self._row(*one)) is not None]
        return found[:limit]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        stored_keys = list(map(self.cipher.stored_key, keys))
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
                    payload = self.cipher.unseal_payload(stored_key, payload)
                except UndecryptableError:
                    self._told()
                    raise
            yield value, payload

    @property
    def used(self) -> int:
        return self._view.used


class EncryptedUpdate(EncryptedView, Update):
    """An update whose rows are encrypted when they are put."""

    _view: Update

    def __init__(self, update: Update, cipher: RowCipher, told: Callable[[], object]) -> None:
        super().__init__(update, cipher, told)
        # whose the rows are that were read
        self._owners: dict[bytes, bytes] = {}

    @property
    def costs(self) -> Costs:
        return _Costs(inner=self._view.costs)

    def _note_owner(self, stored_key: bytes, owner: bytes) -> None:
        self._owners[stored_key] = owner

    def put(
        self,
        key: bytes,
        value: bytes,
        payload: Buffer | None = None,
        *,
        replaced: int | None = None,
        owner: bytes | None = None,
    ) -> None:
        stored_key = self.cipher.stored_key(key)
        owner = self._owners.get(stored_key, NOBODY) if owner is None else owner
        hidden = None if payload is None else self.cipher.seal_payload(stored_key, payload, owner)
        row = self.cipher.seal(stored_key, key, value, owner)
        self._view.put(stored_key, row, hidden, replaced=None if replaced is None else sealed_size(replaced))

    def delete(self, key: bytes, *, replaced: int | None = None) -> None:
        size = None if replaced is None else sealed_size(replaced)
        self._view.delete(self.cipher.stored_key(key), replaced=size)
