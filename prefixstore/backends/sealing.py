"""Sealed messages: AES-256-GCM, each under a key of its own. The format is in ``docs/format.md``.

A message is a head, which says under which key it is, and segments. Nobody can change, shorten or lengthen it, or have
it taken for one that is bound to something else. A file is sealed as a chain of messages, each bound to the one before.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import BinaryIO, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from prefixstore.backends.encryption_keys import ID_BYTES, Keys
from prefixstore.backends.received import ReceivedMemory
from prefixstore.errors import CorruptError, LocationError, UndecryptableError
from prefixstore.format.export import ENCRYPTED
from prefixstore.format.record import Buffer

RANDOM_BYTES = 24
# the id of the key, and a random number
HEAD = struct.Struct(f"<{ID_BYTES}s{RANDOM_BYTES}s")
TAG_BYTES = 16
# a message is encrypted in segments: the cipher takes no more than 2 GiB at a time
SEGMENT = 1 << 20
# in a file a message is one segment, after its size when it is sealed
SIZE = struct.Struct("<I")
_OF_KEYS = b"prefixstore 1"
_OF_MESSAGE = b"prefixstore mesg"


@lru_cache(10_000)
def _derived(secret: bytes, salt: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, _OF_KEYS).derive(secret)


def sealed_size(size: int) -> int:
    """The size of a message with this many bytes when it is sealed."""
    return HEAD.size + size + max(-(-size // SEGMENT), 1) * TAG_BYTES


class Sealer:
    """Seals messages under keys, which it knows by their ids. With another salt nothing opens what it has sealed."""

    def __init__(self, keys: Mapping[bytes, bytes], salt: bytes = b"") -> None:
        self._keys, self._salt = keys, salt
        self._memory = ReceivedMemory()

    def _cipher(self, head: bytes) -> AESGCM:
        """The cipher of the message with this head. Raises `UndecryptableError` if its key is not there."""
        name, random = HEAD.unpack(head)
        if name not in self._keys:
            raise UndecryptableError(f"it needs the key {name.hex()}, which is not given, or was forgotten")
        key = _derived(self._keys[name], self._salt)
        return AESGCM(hashlib.blake2b(random, key=key, person=_OF_MESSAGE, digest_size=32).digest())

    def seal(self, name: bytes, bound_to: bytes, message: Buffer) -> memoryview:
        """A message sealed under the key with this id, and bound to what these bytes stand for."""
        head = HEAD.pack(name, os.urandom(RANDOM_BYTES))
        cipher, plain = self._cipher(head), memoryview(message).cast("B")
        found = memoryview(bytearray(sealed_size(len(plain))))
        found[: HEAD.size] = head
        for nonce, inside, outside in _segments(len(plain)):
            cipher.encrypt_into(nonce, plain[inside], bound_to, found[outside])
        return found

    def unseal(self, bound_to: bytes, stored: Buffer) -> memoryview:
        """The message in what was sealed.

        Raises `UndecryptableError` if its key is not there, or anything of it was changed, or it is bound to something
        else.
        """
        given = memoryview(stored).cast("B")
        n_segments = max(-(-(len(given) - HEAD.size) // (SEGMENT + TAG_BYTES)), 1)
        size = len(given) - HEAD.size - n_segments * TAG_BYTES
        if size < 0 or sealed_size(size) != len(given):
            raise UndecryptableError("it has a length that nothing has that was sealed")
        cipher = self._cipher(bytes(given[: HEAD.size]))
        found = self._memory.take(size)
        try:
            for nonce, inside, outside in _segments(size):
                cipher.decrypt_into(nonce, given[outside], bound_to, found[inside])
        except InvalidTag:
            raise UndecryptableError("it was changed, or belongs elsewhere") from None
        return found


def _segments(size: int) -> Iterator[tuple[bytes, slice, slice]]:
    """For each segment of a message its nonce, where its bytes are, and where they are when they are encrypted.

    The number of the segment is enough for a nonce, since no other message has the key; and whether it is the last.
    """
    for i, start in enumerate(range(0, max(size, 1), SEGMENT)):
        end = min(start + SEGMENT, size)
        at = HEAD.size + start + i * TAG_BYTES
        nonce = i.to_bytes(11, "big") + bytes([end == size])
        yield nonce, slice(start, end), slice(at, at + end - start + TAG_BYTES)


# -- files ------------------------------------------------------------------------------------------------------------


class SealedFile:
    """What is sealed in a file: messages, each bound to the tag of the one before, the first one to the beginning.

    The beginning says which key it needs; of a file that is read, it was read already. Who reads notices if the end is
    missing: an export has one.

    Raises `LocationError` if the key is not there. Reading raises `CorruptError` where anything was changed.
    """

    def __init__(self, file: BinaryIO, begin: bytes, keys: Keys, name: str = "") -> None:
        wanted = begin[len(ENCRYPTED) :]
        if wanted not in keys.masters:
            raise LocationError(f"{name} needs the key {wanted.hex()}; give it by --from-key or PREFIXSTORE_KEY")
        self._file, self._before, self._key, self._name = file, begin, wanted, name
        self._sealer = Sealer(keys.masters)
        # what was unsealed and is not yet read
        self._plain = bytearray()

    def write(self, data: Buffer) -> None:
        for at in range(0, len(data), SEGMENT):
            sealed = self._sealer.seal(self._key, self._before, data[at : at + SEGMENT])
            self._before = bytes(sealed[-TAG_BYTES:])
            self._file.write(SIZE.pack(len(sealed)) + sealed)

    def read(self, n_bytes: int) -> bytes:
        while len(self._plain) < n_bytes and (size := self._file.read(SIZE.size)):
            try:
                sealed = self._file.read(min(SIZE.unpack(size)[0], sealed_size(SEGMENT)))
                self._plain += self._sealer.unseal(self._before, sealed)
            except (struct.error, UndecryptableError) as error:
                what = f"{self._name} is not complete, or was changed: {error}"
                raise CorruptError(f"{what}; import again when it is complete") from None
            self._before = sealed[-TAG_BYTES:]
        found = bytes(self._plain[:n_bytes])
        del self._plain[:n_bytes]
        return found


def sealing(file: BinaryIO, keys: Keys) -> BinaryIO:
    """A file that can be written to: what is written is sealed in `file`, under the newest of these keys."""
    begin = ENCRYPTED + keys.newest
    file.write(begin)
    return cast("BinaryIO", SealedFile(file, begin, keys))
