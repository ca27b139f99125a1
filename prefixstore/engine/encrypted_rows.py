"""The rows of an encrypted location, decrypted when they are read and encrypted when they are put.

A row is stored under a keyed hash of its key, part by part, so that rows whose keys have some first parts in common are
beside each other; the key itself is encrypted with the value, and so is whose row it is. The format is in
``docs/format.md``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from prefixstore.backends.contract import Costs, Range, Row, Update, View, after_all
from prefixstore.backends.keys import ID_BYTES, MAGIC, Keys
from prefixstore.backends.sealing import Sealer, sealed_size
from prefixstore.engine.keyspace import CHILD, PARTS, TENANT_BYTES, tenant_of
from prefixstore.errors import UndecryptableError
from prefixstore.format.keys import TOKEN_BYTES
from prefixstore.format.record import Buffer

__all__ = ["SECRET_BYTES", "EncryptedUpdate", "EncryptedView", "RowCipher", "keys_for"]

SECRET_BYTES = 32
# what stands for a part of a key; for a short one, such as a token, fewer bytes are enough
HASH_BYTES = 16
# what is encrypted of a row: the tenant whose it is, the length of its key, that key, and the value
OWNER = struct.Struct(f"<{TENANT_BYTES}sH")
NOBODY = bytes(TENANT_BYTES)
# by how much a row is longer, with a key of 32 tokens; hardly any has a longer one. A payload of 10 MiB is so, too.
LONGER_BYTES = sealed_size(OWNER.size) + PARTS[CHILD][33]
# what a row, or a payload, is bound to begins with this
ROW, PAYLOAD = b"row", b"payload"
# where the ids of keys begin in a header, after the secret of the location
IDS_AT = len(MAGIC) + sealed_size(SECRET_BYTES)


def keys_for(header: bytes) -> tuple[bytes, ...]:
    """The ids of the keys that a location with this header needs, the newest first: the header is sealed under that."""
    return tuple(header[at : at + ID_BYTES] for at in range(IDS_AT, len(header), ID_BYTES))


class RowCipher:
    """How the rows and payloads of a location are named and sealed.

    Parameters
    ----------
    secret
        Of the location. The names of its rows follow from it, whatever the keys are.
    needed
        The ids of the keys that it needs, those of tenants included, the newest first.
    keys
        These keys, and others.

    Attributes
    ----------
    sealer
        Seals rows and payloads.
    """

    def __init__(self, secret: bytes, needed: Sequence[bytes], keys: Keys) -> None:
        self.secret, self.needed, self.keys = secret, tuple(needed), keys
        self._names = {tenant_of(name, b""): ids[-1] for name, ids in keys.ids.items() if name is not None}
        self.sealer = Sealer(keys.secrets, secret)

    @classmethod
    def of(cls, header: bytes, keys: Keys) -> RowCipher:
        """Of the location with this header. Raises `UndecryptableError`."""
        secret = Sealer(keys.masters).unseal(MAGIC + header[IDS_AT:], header[len(MAGIC) : IDS_AT])
        return cls(bytes(secret), keys_for(header), keys)

    def header(self) -> bytes:
        """The header of the location."""
        ids = b"".join(self.needed)
        return MAGIC + Sealer(self.keys.masters).seal(self.needed[0], MAGIC + ids, self.secret) + ids

    def stored_key(self, key: bytes) -> bytes:
        """The stored key of a row.

        Of the first parts of a key, what all stored keys that have them begin with; of one that ends within a part, the
        least key after those.
        """
        found, at = key[:1], 1
        hashed = hashlib.blake2b(found, key=self.secret, person=b"prefixstore rows", digest_size=HASH_BYTES)
        for end in PARTS.get(found, (len(key),)):
            if end > len(key):
                break
            hashed.update(key[at:end])
            found += hashed.digest()[: HASH_BYTES if end - at > TOKEN_BYTES else TOKEN_BYTES]
            at = end
        return found if at == len(key) else found + b"\0"

    def stored_range(self, wanted: Range) -> Range:
        """Where the rows of a range are."""
        shared = wanted.start[: len(wanted.stop)]
        # it ends after all rows that begin with something, or before a row
        is_whole = after_all(shared) == wanted.stop
        stop = after_all(self.stored_key(shared)) if is_whole else self.stored_key(wanted.stop)
        return wanted._replace(start=self.stored_key(wanted.start), stop=stop)

    def name_for(self, owner: bytes) -> bytes:
        """The id of the key under which the rows of a tenant are put."""
        return self._names.get(owner, self.keys.newest)

    def opened(self, stored: Row) -> tuple[bytes, Row] | None:
        """A stored row, decrypted, and whose it is before it; None if that is not possible."""
        try:
            text = bytes(self.sealer.unseal(ROW + stored.key, stored.value))
        except UndecryptableError:
            return None
        owner, size = OWNER.unpack_from(text)
        end = OWNER.size + size
        return owner, Row(text[OWNER.size : end], text[end:])


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

    @property
    def used(self) -> int:
        return self._view.used

    def opened(self, stored: Row) -> tuple[bytes, Row] | None:
        """As `RowCipher.opened`; counts what cannot be decrypted."""
        found = self.cipher.opened(stored)
        if found is None:
            self._told()
        return found

    def _value(self, key: bytes, stored_key: bytes, stored: bytes | None) -> bytes | None:
        """The value of a row; an empty one, as if it was damaged, if it cannot be decrypted."""
        if stored is None:
            return None
        found = self.opened(Row(stored_key, stored))
        return found[1].value if found is not None and found[1].key == key else b""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        stored_keys = list(map(self.cipher.stored_key, keys))
        return list(map(self._value, keys, stored_keys, self._view.get(stored_keys)))

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        found = self._view.ranges(list(map(self.cipher.stored_range, wanted)))
        return [[one[1] for one in map(self.opened, rows) if one is not None] for rows in found]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        stored_keys = list(map(self.cipher.stored_key, keys))
        return self._opened(keys, stored_keys, self._view.payloads(stored_keys))

    def _opened(
        self, keys: Sequence[bytes], stored_keys: Sequence[bytes], found: Iterator[tuple[bytes, Buffer | None] | None]
    ) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for key, stored_key, one in zip(keys, stored_keys, found, strict=True):
            value, payload = (None, None) if one is None else (self._value(key, stored_key, one[0]), one[1])
            if payload is not None:
                try:
                    payload = self.cipher.sealer.unseal(PAYLOAD + stored_key, payload)
                except UndecryptableError:
                    self._told()
                    raise
            yield None if value is None else (value, payload)


class EncryptedUpdate(EncryptedView, Update):
    """An update whose rows are encrypted when they are put."""

    _view: Update

    def __init__(self, update: Update, cipher: RowCipher, told: Callable[[], object]) -> None:
        super().__init__(update, cipher, told)
        # whose the rows are that were read
        self._owners: dict[bytes, bytes] = {}

    @property
    def costs(self) -> Costs:
        costs = self._view.costs
        return replace(costs, row=costs.row + LONGER_BYTES, payload=costs.payload + LONGER_BYTES)

    def opened(self, stored: Row) -> tuple[bytes, Row] | None:
        found = super().opened(stored)
        if found is not None:
            self._owners[stored.key] = found[0]
        return found

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
        name, seal = self.cipher.name_for(owner), self.cipher.sealer.seal
        row = seal(name, ROW + stored_key, OWNER.pack(owner, len(key)) + key + value)
        hidden = None if payload is None else seal(name, PAYLOAD + stored_key, payload)
        self._view.put(stored_key, bytes(row), hidden, replaced=replaced)

    def delete(self, key: bytes, *, replaced: int | None = None) -> None:
        self._view.delete(self.cipher.stored_key(key), replaced=replaced)
