"""How the rows and payloads of a location are encrypted: AES-256-GCM, each message under a key of its own.

The name of a row is a keyed hash of its key, part by part, so that rows whose keys have some first parts in common are
beside each other; the key itself is encrypted with the value. The format is in ``docs/format.md``.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from prefixstore.backends.contract import Range, Row, after_all
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.threads import Threads
from prefixstore.errors import IncompatibleError, MissingExtraError, UndecryptableError
from prefixstore.format.record import Buffer

__all__ = [
    "LOCATIONS_OWN",
    "PLACE_BYTES",
    "SEGMENT",
    "TAG_BYTES",
    "Header",
    "Safe",
    "ciphers",
    "derived",
    "hash_of",
    "is_header",
    "key_of",
    "nonce",
    "owner_of",
    "row_size",
    "segments",
    "size_of",
]

MAGIC = b"prefixstore encrypted\n"
VERSION = 1
# how an encrypted value or payload begins: how its key is derived, the id of the key, whose it is, a random number
HEAD = struct.Struct("<B4s8s24s")
SHARED, OF_TENANT = 1, 2
LOCATIONS_OWN = bytes(8)
TAG_BYTES = 16
# Payloads are encrypted in segments, so that two threads decrypt one.
SEGMENT = 1 << 20
PLACE_BYTES = 16


def is_header(stored: bytes | None) -> bool:
    """Whether the row `HEADER` says that the location is encrypted."""
    return stored is not None and stored.startswith(MAGIC)


def ciphers() -> tuple[Any, Any]:
    """The cipher, and what it raises if something was changed. Raises `MissingExtraError`."""
    try:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - the extra "encryption"
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError('a key needs cryptography; pip install "prefixstore[encryption]"') from error
    return AESGCM, InvalidTag


def derived(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """A key of 32 bytes: HKDF-SHA256."""
    from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    return HKDF(SHA256(), 32, salt, info).derive(secret)


def _hash(key: bytes, person: bytes, size: int = PLACE_BYTES) -> Any:
    return hashlib.blake2b(key=key, person=person, digest_size=size)


@dataclass(frozen=True)
class Header:
    """What the row `HEADER` says.

    Attributes
    ----------
    location
        16 random bytes.
    keys
        The secret of the location, encrypted under each of its keys, by their ids.
    retired
        Ids of keys under which nothing is written any more.
    """

    location: bytes
    keys: Mapping[bytes, bytes]
    retired: frozenset[bytes] = frozenset()

    def pack(self) -> bytes:
        """The stored form: a line that says what it is, one of JSON, and an xxh3-64 of both."""
        keys = {name.hex(): wrapped.hex() for name, wrapped in sorted(self.keys.items())}
        retired = sorted(name.hex() for name in self.retired)
        told = {"version": VERSION, "location": self.location.hex(), "keys": keys, "retired": retired}
        text = MAGIC + json.dumps(told).encode() + b"\n"
        return text + xxhash.xxh3_64_hexdigest(text).encode()

    @classmethod
    def unpack(cls, stored: Sequence[bytes | None], url: str) -> Header | None:
        """Read the stored form from the first row that is whole; None if there is none.

        Raises
        ------
        IncompatibleError
            If there are rows, and none is whole, or another version has written it.
        """
        rows = [row for row in stored if row is not None]
        for row in rows:
            text, _, seal = row.rpartition(b"\n")
            if not is_header(row) or xxhash.xxh3_64_hexdigest(text + b"\n").encode() != seal:
                continue
            told = json.loads(text.removeprefix(MAGIC))
            if told["version"] != VERSION:
                raise IncompatibleError(f"{url} is encrypted in format {told['version']}; upgrade prefixstore")
            keys = {bytes.fromhex(name): bytes.fromhex(wrapped) for name, wrapped in told["keys"].items()}
            return cls(bytes.fromhex(told["location"]), keys, frozenset(map(bytes.fromhex, told["retired"])))
        if any(map(is_header, rows)):
            raise IncompatibleError(f"{url}: what says how it is encrypted is damaged")
        return None


class Safe:
    """Names and encrypts the rows of one location.

    Parameters
    ----------
    header, secret
        Of the location.
    keys, tenants
        The keys, and those of tenants by the 16 bytes that stand for each in rows.
    parts
        By the first byte of a row's key: how many bytes its parts have. Keys of other rows are in no order.
    """

    def __init__(
        self,
        header: Header,
        secret: bytes,
        keys: Mapping[bytes, bytes],
        tenants: Mapping[bytes, bytes],
        parts: Mapping[bytes, Sequence[int]],
    ) -> None:
        self.header, self.packed = header, header.pack()
        self.secret = secret
        self._keys = keys
        self._parts = parts
        self._names = derived(secret, header.location, b"prefixstore names")
        self._tenants = {self.owner(tenant): key for tenant, key in tenants.items()}
        self._derived: dict[tuple[int, bytes, bytes], bytes] = {}
        self._cipher, self._invalid = ciphers()
        self._memory = ReceivedMemory()
        self._threads = Threads("prefixstore-decrypt")
        self.newest = next(name for name in keys if name in header.keys and name not in header.retired)

    def owner(self, tenant: bytes) -> bytes:
        """What stands for a tenant in what is encrypted."""
        return hash_of(self._names, b"prefixstore ownr", tenant, 8)

    # -- names --------------------------------------------------------------------------------------------------------

    def place(self, key: bytes) -> bytes:
        """The name of a row, or what those of all rows begin with that begin with some whole parts."""
        kind = key[:1]
        hashed = _hash(self._names, b"prefixstore rows")
        hashed.update(kind)
        parts = self._parts.get(kind)
        if parts is None:
            hashed.update(key[1:])
            return kind + bytes(hashed.digest())
        found, at, mask = kind, 1, 0
        for size in _sizes(parts, len(key)):
            part = key[at : at + size]
            hashed.update(part)
            digest = hashed.digest() if size > 1 else bytes([part[0] ^ mask])
            # a part of one byte keeps apart what differs in it: its hash would not
            found += digest[: min(size, PLACE_BYTES)]
            at, mask = at + size, digest[-1]
        return found

    def range(self, wanted: Range) -> Range:
        """Where the rows of a range are."""
        start, stop = wanted.start, wanted.stop
        if len(stop) > 1 and after_all(shared := start[: len(stop)]) == stop and self._is_whole(shared):
            stop = after_all(self.place(shared))
        elif len(stop) > 1:
            stop = self._bound(stop)
        return wanted._replace(start=self._bound(start), stop=stop)

    def _bound(self, bound: bytes) -> bytes:
        is_after = not self._is_whole(bound)
        # the least key after another one
        return self.place(bound[: len(bound) - is_after]) + b"\0" * is_after

    def _is_whole(self, key: bytes) -> bool:
        parts = self._parts[key[:1]]
        return 1 + sum(_sizes(parts, len(key))) == len(key)

    # -- contents -----------------------------------------------------------------------------------------------------

    def _key(self, form: int, name: bytes, owner: bytes) -> bytes:
        """The key of what an owner has in this location."""
        wanted = form, name, owner
        if wanted not in self._derived:
            if name not in self._keys or (form == OF_TENANT and owner not in self._tenants) or form > OF_TENANT:
                raise UndecryptableError(f"it needs a key that is not given, {name.hex()}")
            secret = self._keys[name] + (self._tenants[owner] if form == OF_TENANT else b"")
            self._derived[wanted] = derived(secret, self.header.location, b"prefixstore data" + owner)
        return self._derived[wanted]

    def _opened(self, head: bytes) -> Any:
        form, name, owner, random = HEAD.unpack(head)
        return self._cipher(hash_of(self._key(form, name, owner), b"prefixstore mesg", random, 32))

    def _head(self, owner: bytes) -> bytes:
        form = OF_TENANT if owner in self._tenants else SHARED
        return HEAD.pack(form, self.newest, owner, os.urandom(24))

    def close_row(self, place: bytes, key: bytes, value: bytes, owner: bytes = LOCATIONS_OWN) -> bytes:
        """A row, encrypted."""
        head = self._head(owner)
        text = len(key).to_bytes(2, "little") + key + value
        return head + bytes(self._opened(head).encrypt(nonce(0, 1), text, b"row" + head[:1] + place))

    def open_row(self, place: bytes, stored: bytes) -> Row:
        """The row that `close_row` encrypted. Raises `UndecryptableError`."""
        if len(stored) < HEAD.size + TAG_BYTES:
            raise UndecryptableError("a row is too short")
        head = stored[: HEAD.size]
        try:
            text = self._opened(head).decrypt(nonce(0, 1), stored[HEAD.size :], b"row" + head[:1] + place)
        except self._invalid:
            raise UndecryptableError("a row was changed, or belongs elsewhere") from None
        size = 2 + int.from_bytes(text[:2], "little")
        return Row(text[2:size], text[size:])

    def can_open(self, place: bytes, stored: bytes) -> bool:
        """Whether a row can be decrypted."""
        try:
            self.open_row(place, stored)
        except UndecryptableError:
            return False
        return True

    def close_payload(self, place: bytes, payload: Buffer, owner: bytes = LOCATIONS_OWN) -> Buffer:
        """A payload, encrypted."""
        head = self._head(owner)
        cipher, plain = self._opened(head), memoryview(payload).cast("B")
        n = segments(len(plain))
        found = memoryview(bytearray(HEAD.size + len(plain) + n * TAG_BYTES))
        found[: HEAD.size] = head
        for i in range(n):
            piece = plain[i * SEGMENT : (i + 1) * SEGMENT]
            at = HEAD.size + i * (SEGMENT + TAG_BYTES)
            into = found[at : at + len(piece) + TAG_BYTES]
            cipher.encrypt_into(nonce(i, n), piece, b"payload" + head[:1] + place, into)
        return found

    def open_payload(self, place: bytes, stored: Buffer) -> memoryview:
        """The payload that `close_payload` encrypted. Raises `UndecryptableError`."""
        given = memoryview(stored).cast("B")
        head, n = bytes(given[: HEAD.size]), segments(len(given) - HEAD.size, SEGMENT + TAG_BYTES)
        size = len(given) - HEAD.size - n * TAG_BYTES
        if size < 0 or segments(size) != n:
            raise UndecryptableError("a payload has a length that none has")
        cipher, found = self._opened(head), self._memory.take(size)

        def decrypt(first: int, last: int) -> None:
            for i in range(first, last):
                at = HEAD.size + i * (SEGMENT + TAG_BYTES)
                piece = given[at : at + SEGMENT + TAG_BYTES]
                into = found[i * SEGMENT : i * SEGMENT + len(piece) - TAG_BYTES]
                cipher.decrypt_into(nonce(i, n), piece, b"payload" + head[:1] + place, into)

        # the other half by another thread, which has ended when this returns: the memory is the location's
        other = self._threads.start_or_run(decrypt, n // 2, n) if n > 1 else None
        try:
            try:
                decrypt(0, n // 2 if other is not None else n)
            finally:
                if other is not None:
                    other.get()
        except self._invalid:
            raise UndecryptableError("a payload was changed, or belongs elsewhere") from None
        return found


def segments(size: int, of: int = SEGMENT) -> int:
    """In how many segments so many bytes are: an empty payload has one."""
    return max(-(-size // of), 1)


def nonce(i: int, n: int) -> bytes:
    """The nonce of segment `i` of `n`: each message has its own key, so a number is enough. The last one is marked."""
    return i.to_bytes(11, "big") + bytes([i == n - 1])


def hash_of(key: bytes, person: bytes, text: bytes, size: int) -> bytes:
    """A keyed hash of a text."""
    hashed = _hash(key, person, size)
    hashed.update(text)
    return bytes(hashed.digest())


def _sizes(parts: Sequence[int], length: int) -> Iterator[int]:
    """The sizes of the whole parts of a key of this length."""
    at = 1
    for size in parts:
        at += size
        if at > length:
            return
        yield size


def size_of(payload: int) -> int:
    """The size of a payload of so many bytes where it is encrypted."""
    return HEAD.size + payload + segments(payload) * TAG_BYTES


def row_size(key: bytes, value: bytes) -> int:
    """The size of the value of a row where it is encrypted."""
    return HEAD.size + 2 + len(key) + len(value) + TAG_BYTES


def key_of(stored: bytes) -> bytes:
    """The id of the key under which a row is encrypted."""
    return bytes(HEAD.unpack_from(stored.ljust(HEAD.size))[1])


def owner_of(stored: bytes) -> bytes:
    """Whose a row is."""
    return bytes(HEAD.unpack_from(stored.ljust(HEAD.size))[2])
