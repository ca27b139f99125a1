"""How the rows and payloads of a location are encrypted: AES-256-GCM, each message under a key of its own.

A row is stored under a keyed hash of its key, part by part, so that rows whose keys have some first parts in common are
beside each other; the key itself is encrypted with the value. The format is in ``docs/format.md``.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from prefixstore.backends.contract import Range, Row, after_all
from prefixstore.backends.keys import MAGIC, is_header, key_id
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.threads import Threads
from prefixstore.errors import IncompatibleError, UndecryptableError
from prefixstore.format.record import Buffer

__all__ = [
    "HASH_BYTES",
    "NO_TENANT",
    "SEGMENT",
    "TAG_BYTES",
    "Header",
    "RowCipher",
    "cipher_of_message",
    "derive_key",
    "encrypted_size",
    "key_and_tenant",
    "nonce",
]

VERSION = 1
# How an encrypted value or payload begins: 1, or 2 if the tenant has a key of its own; the id of the key; the tag of
# the tenant; a random number.
PREFIX = struct.Struct("<B4s8s24s")
SHARED, OF_TENANT = 1, 2
NO_TENANT = bytes(8)
TAG_BYTES = 16
# payloads are encrypted in segments, so that two threads can decrypt one
SEGMENT = 1 << 20
HASH_BYTES = 16
# keys of messages that are kept; a forged row may name any tenant
MOST_KEPT = 10_000


def derive_key(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """A key of 32 bytes: HKDF-SHA256."""
    return HKDF(SHA256(), 32, salt, info).derive(secret)


def keyed_hash(key: bytes, person: bytes, text: bytes, size: int) -> bytes:
    """BLAKE2b."""
    return hashlib.blake2b(text, key=key, person=person, digest_size=size).digest()


def cipher_of_message(key: bytes, random: bytes) -> AESGCM:
    """The cipher of one message, which no other one has: so its nonces are numbers."""
    return AESGCM(keyed_hash(key, b"prefixstore mesg", random, 32))


def nonce(i: int, *, is_last: bool) -> bytes:
    """The nonce of a segment: 12 bytes."""
    return i.to_bytes(11, "big") + bytes([is_last])


def encrypted_size(payload: int) -> int:
    """The size of a payload of so many bytes when it is encrypted."""
    return PREFIX.size + payload + max(-(-payload // SEGMENT), 1) * TAG_BYTES


def key_and_tenant(stored: bytes) -> tuple[bytes, bytes]:
    """The id of the key of an encrypted row, and the tag of its tenant."""
    return PREFIX.unpack_from(stored.ljust(PREFIX.size))[1:3]


@dataclass(frozen=True)
class Header:
    """What the row `keys.HEADER` says.

    Attributes
    ----------
    location
        16 random bytes.
    keys
        Ids of the keys under which something is encrypted, the newest first. New rows are under that one.
    retired
        Ids of keys that others have replaced: nothing is under them.
    tenants
        The keys of tenants that have one of their own: the tag of the tenant, and the id of the key.
    forgotten
        Those of them that are gone for ever.
    """

    location: bytes
    keys: tuple[bytes, ...]
    retired: frozenset[bytes] = frozenset()
    tenants: frozenset[bytes] = frozenset()
    forgotten: frozenset[bytes] = frozenset()

    def _text(self) -> bytes:
        told = {
            "version": VERSION,
            "location": self.location.hex(),
            "keys": [name.hex() for name in self.keys],
            "retired": sorted(name.hex() for name in self.retired),
            "tenants": sorted(key.hex() for key in self.tenants),
            "forgotten": sorted(key.hex() for key in self.forgotten),
        }
        return json.dumps(told).encode()

    def pack(self, secret: bytes, masters: Mapping[bytes, bytes]) -> bytes:
        """The stored form: lines with what it is, these facts as JSON, and the secret of the location, encrypted.

        The secret is encrypted under the newest key, with the line before it as associated data.
        """
        text = self._text()
        return MAGIC + text + b"\n" + self._cipher(masters).encrypt(bytes(12), secret, text).hex().encode()

    def _cipher(self, masters: Mapping[bytes, bytes]) -> AESGCM:
        # a key for these facts alone, so that its nonce may be 0
        facts = hashlib.blake2b(self._text()).digest()
        return AESGCM(derive_key(masters[self.keys[0]], self.location, b"prefixstore head" + facts))

    @classmethod
    def unpack(cls, stored: bytes, url: str) -> Header:
        """The facts in the stored form, which are not authentic before `secret_in`. Raises `IncompatibleError`."""
        try:
            told = json.loads(stored.removeprefix(MAGIC).partition(b"\n")[0])
            version = told["version"]
            keys, *more = (
                [bytes.fromhex(one) for one in told[of]] for of in ("keys", "retired", "tenants", "forgotten")
            )
            found = cls(bytes.fromhex(told["location"]), tuple(keys), *map(frozenset, more))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(url) from error
        if version != VERSION:
            raise IncompatibleError(f"{url} is encrypted in format {version}; upgrade prefixstore to read it")
        if not is_header(stored) or not keys:
            raise _damaged(url)
        return found

    def secret_in(self, stored: bytes, masters: Mapping[bytes, bytes], url: str) -> bytes:
        """The secret of the location. Raises `IncompatibleError` if anything was changed."""
        try:
            wrapped = bytes.fromhex(stored.rpartition(b"\n")[2].decode())
            return self._cipher(masters).decrypt(bytes(12), wrapped, self._text())
        except (InvalidTag, ValueError) as error:
            raise _damaged(url) from error


def _damaged(url: str) -> IncompatibleError:
    return IncompatibleError(f"{url}: what says how it is encrypted is damaged, or was changed")


class RowCipher:
    """Encrypts the rows of one location, and says under which keys they are stored.

    Parameters
    ----------
    header, secret
        Of the location.
    masters, tenants
        The keys by their ids, and those of tenants by the 16 bytes that stand for each in rows.
    forgotten
        The tenants whose keys are gone.
    parts
        By the first byte of a row's key: how many bytes its parts have. Keys of other rows are in no order.

    Attributes
    ----------
    tenants
        The keys of tenants, as in the header.
    forgotten
        The tags of tenants whose keys are gone.
    """

    def __init__(
        self,
        header: Header,
        secret: bytes,
        masters: Mapping[bytes, bytes],
        tenants: Mapping[bytes, bytes],
        forgotten: Collection[bytes],
        parts: Mapping[bytes, Sequence[int]],
    ) -> None:
        self.header = header
        self.secret = secret
        # what was encrypted under a key that was replaced is not to be trusted
        self._masters = {name: masters[name] for name in header.keys}
        self._parts = parts
        self._names = derive_key(secret, header.location, b"prefixstore names")
        self._tenants = {self.tag(tenant): key for tenant, key in tenants.items()}
        self.tenants = frozenset(tag + key_id(key) for tag, key in self._tenants.items())
        self.forgotten = frozenset(map(self.tag, forgotten))
        self._derived: dict[tuple[int, bytes, bytes], bytes] = {}
        self._memory = ReceivedMemory()
        self._threads = Threads("prefixstore-decrypt")

    def tag(self, tenant: bytes) -> bytes:
        """What stands for a tenant beside what is encrypted: 8 bytes."""
        return keyed_hash(self._names, b"prefixstore tnnt", tenant, len(NO_TENANT))

    # -- keys of rows -------------------------------------------------------------------------------------------------

    def stored_key(self, key: bytes) -> bytes:
        """The stored key of a row; of the first parts of a key, what all stored keys that have them begin with."""
        kind = key[:1]
        hashed = hashlib.blake2b(kind, key=self._names, person=b"prefixstore rows", digest_size=HASH_BYTES)
        parts = self._parts.get(kind)
        if parts is None:
            hashed.update(key[1:])
            return kind + hashed.digest()
        found, at, mask = kind, 1, 0
        for size in _sizes(parts, len(key)):
            part = key[at : at + size]
            hashed.update(part)
            # a part of one byte keeps apart what differs in it: its hash would not
            digest = hashed.digest() if size > 1 else bytes([part[0] ^ mask])
            found += digest[: min(size, HASH_BYTES)]
            at, mask = at + size, digest[-1]
        return found

    def stored_range(self, wanted: Range) -> Range:
        """Where the rows of a range are."""
        start, stop = wanted.start, wanted.stop
        if len(stop) > 1 and after_all(shared := start[: len(stop)]) == stop and self._is_whole(shared):
            stop = after_all(self.stored_key(shared))
        elif len(stop) > 1:
            stop = self._bound(stop)
        return wanted._replace(start=self._bound(start), stop=stop)

    def _bound(self, bound: bytes) -> bytes:
        # if it ends within a part, it is the least key after another one
        is_after = not self._is_whole(bound)
        return self.stored_key(bound[: len(bound) - is_after]) + b"\0" * is_after

    def _is_whole(self, key: bytes) -> bool:
        return 1 + sum(_sizes(self._parts[key[:1]], len(key))) == len(key)

    # -- values and payloads ------------------------------------------------------------------------------------------

    def _cipher(self, prefix: bytes) -> AESGCM:
        """The cipher of what begins with this prefix. Raises `UndecryptableError` if its key is not there."""
        kind, name, tag, random = PREFIX.unpack(prefix)
        wanted = kind, name, tag
        if wanted not in self._derived:
            own = self._tenants.get(tag) if kind == OF_TENANT else b""
            if name not in self._masters or own is None:
                raise UndecryptableError(f"it needs the key {name.hex()}, or that of a tenant, which is not given")
            if len(self._derived) >= MOST_KEPT:
                self._derived.clear()
            info = b"prefixstore data" + tag
            self._derived[wanted] = derive_key(self._masters[name] + own, self.header.location, info)
        return cipher_of_message(self._derived[wanted], random)

    def _new_prefix(self, tag: bytes) -> bytes:
        kind = OF_TENANT if tag in self._tenants else SHARED
        return PREFIX.pack(kind, self.header.keys[0], tag, os.urandom(24))

    def is_current(self, stored: bytes) -> bool:
        """Whether a row is encrypted as it would be now."""
        return stored[: PREFIX.size - 24] == self._new_prefix(key_and_tenant(stored)[1])[:-24]

    def encrypt_row(self, stored_key: bytes, key: bytes, value: bytes, tag: bytes = NO_TENANT) -> bytes:
        """The stored value of a row."""
        prefix = self._new_prefix(tag)
        text = len(key).to_bytes(2, "little") + key + value
        return prefix + self._cipher(prefix).encrypt(
            nonce(0, is_last=True), text, _bound_to(b"row", prefix, stored_key)
        )

    def decrypt_row(self, stored_key: bytes, stored: bytes) -> Row:
        """The row in a stored one. Raises `UndecryptableError`."""
        prefix, rest = stored[: PREFIX.size], stored[PREFIX.size :]
        if len(rest) < TAG_BYTES:
            raise UndecryptableError("a row is too short")
        try:
            text = self._cipher(prefix).decrypt(nonce(0, is_last=True), rest, _bound_to(b"row", prefix, stored_key))
        except InvalidTag:
            raise UndecryptableError("a row was changed, or belongs elsewhere") from None
        size = 2 + int.from_bytes(text[:2], "little")
        return Row(text[2:size], text[size:])

    def can_decrypt(self, stored_key: bytes, stored: bytes) -> bool:
        """Whether a row can be decrypted."""
        try:
            self.decrypt_row(stored_key, stored)
        except UndecryptableError:
            return False
        return True

    def is_forgotten(self, stored: bytes) -> bool:
        """Whether a row is of a tenant whose key is gone."""
        return stored[:1] == bytes([OF_TENANT]) and key_and_tenant(stored)[1] in self.forgotten

    def encrypt_payload(self, stored_key: bytes, payload: Buffer, tag: bytes = NO_TENANT) -> Buffer:
        """The stored form of a payload."""
        prefix, plain = self._new_prefix(tag), memoryview(payload).cast("B")
        found = memoryview(bytearray(encrypted_size(len(plain))))
        found[: PREFIX.size] = prefix
        cipher, bound = self._cipher(prefix), _bound_to(b"payload", prefix, stored_key)
        for number, inside, outside in _segments(len(plain)):
            cipher.encrypt_into(number, plain[inside], bound, found[outside])
        return found

    def decrypt_payload(self, stored_key: bytes, stored: Buffer) -> memoryview:
        """The payload in its stored form. Raises `UndecryptableError`."""
        given = memoryview(stored).cast("B")
        n_segments = max(-(-(len(given) - PREFIX.size) // (SEGMENT + TAG_BYTES)), 1)
        size = len(given) - PREFIX.size - n_segments * TAG_BYTES
        if size < 0 or encrypted_size(size) != len(given):
            raise UndecryptableError("a payload has a length that none has")
        prefix = bytes(given[: PREFIX.size])
        cipher, bound = self._cipher(prefix), _bound_to(b"payload", prefix, stored_key)
        found, segments = self._memory.take(size), list(_segments(size))

        def decrypt(some: Sequence[tuple[bytes, slice, slice]]) -> None:
            for number, inside, outside in some:
                cipher.decrypt_into(number, given[outside], bound, found[inside])

        # half of it by another thread, which has ended when this returns: the memory is the location's
        half = n_segments // 2
        other = self._threads.start_or_run(decrypt, segments[:half]) if half else None
        try:
            try:
                decrypt(segments[half:])
            finally:
                if other is not None:
                    other.get()
        except InvalidTag:
            raise UndecryptableError("a payload was changed, or belongs elsewhere") from None
        return found


def _bound_to(what: bytes, prefix: bytes, stored_key: bytes) -> bytes:
    """The associated data of a row or a payload."""
    return what + prefix[:1] + stored_key


def _segments(size: int) -> Iterator[tuple[bytes, slice, slice]]:
    """For each segment of a payload its nonce, where its bytes are, and where they are when they are encrypted."""
    for i, start in enumerate(range(0, max(size, 1), SEGMENT)):
        end = min(start + SEGMENT, size)
        at = PREFIX.size + start + i * TAG_BYTES
        yield nonce(i, is_last=end == size), slice(start, end), slice(at, at + end - start + TAG_BYTES)


def _sizes(parts: Sequence[int], length: int) -> Iterator[int]:
    """The sizes of the whole parts of a key of this length."""
    at = 1
    for size in parts:
        at += size
        if at > length:
            return
        yield size
