"""Sealed messages: AES-256-GCM, each under a key of its own. The format is in ``docs/format.md``.

A message is a head, which says under which key it is, and segments. Nobody can change, shorten or lengthen it, or have
it taken for one that is bound to something else. A file is sealed as a series of messages, bound to their places.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import BinaryIO, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from prefixstore.backends.keys import ID_BYTES, Keys
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.threads import Threads
from prefixstore.errors import CorruptError, LocationError, UndecryptableError
from prefixstore.format.export import ENCRYPTED
from prefixstore.format.record import Buffer

__all__ = ["Sealer", "derive_key", "sealed_size", "sealing", "unsealed"]

RANDOM_BYTES = 24
# the id of the key, and a random number
HEAD = struct.Struct(f"<{ID_BYTES}s{RANDOM_BYTES}s")
TAG_BYTES = 16
# a message is encrypted in segments, so that two threads can decrypt one
SEGMENT = 1 << 20
# of a file, so many bytes are one message
MESSAGE_BYTES = 4 << 20
# and its beginning has so many random ones
STREAM_BYTES = 8
_OF_MESSAGE = b"prefixstore mesg"


@lru_cache(10_000)
def derive_key(secret: bytes, salt: bytes, purpose: str) -> bytes:
    """A key of 32 bytes: HKDF-SHA256."""
    return HKDF(SHA256(), 32, salt, f"prefixstore {purpose} 1".encode()).derive(secret)


def sealed_size(size: int) -> int:
    """The size of a message with so many bytes when it is sealed."""
    return HEAD.size + size + max(-(-size // SEGMENT), 1) * TAG_BYTES


class Sealer:
    """Seals messages for one purpose.

    Parameters
    ----------
    keys
        By their ids.
    salt, purpose
        What the keys of messages are derived with, so that they are keys of nothing else.
    """

    def __init__(self, keys: Mapping[bytes, bytes], salt: bytes, purpose: str) -> None:
        self._keys = keys
        self._salt, self._purpose = salt, purpose
        self._memory = ReceivedMemory()
        self._threads = Threads("prefixstore-decrypt")

    def has_key_of(self, stored: Buffer) -> bool:
        """Whether the key is there under which a message was sealed."""
        return bytes(stored[:ID_BYTES]) in self._keys

    def _cipher(self, head: bytes) -> AESGCM:
        """The cipher of the message with this head. Raises `UndecryptableError` if its key is not there."""
        name, random = HEAD.unpack(head)
        if name not in self._keys:
            raise UndecryptableError(f"it needs the key {name.hex()}, which is not given or was replaced")
        key = derive_key(self._keys[name], self._salt, self._purpose)
        return AESGCM(hashlib.blake2b(random, key=key, person=_OF_MESSAGE, digest_size=32).digest())

    def seal(self, name: bytes, bound_to: bytes, message: Buffer) -> Buffer:
        """A message sealed under the key with this id, and bound to what these bytes stand for."""
        head = HEAD.pack(name, os.urandom(RANDOM_BYTES))
        cipher, plain = self._cipher(head), memoryview(message).cast("B")
        if len(plain) <= SEGMENT:
            return head + cipher.encrypt(_nonce(0, is_last=True), plain, bound_to)
        found = memoryview(bytearray(sealed_size(len(plain))))
        found[: HEAD.size] = head
        for nonce, inside, outside in _segments(len(plain)):
            cipher.encrypt_into(nonce, plain[inside], bound_to, found[outside])
        return found

    def unseal(self, bound_to: bytes, stored: Buffer) -> Buffer:
        """The message in what was sealed.

        Raises
        ------
        UndecryptableError
            If its key is not there, or anything of it was changed, or it is bound to something else.
        """
        given = memoryview(stored).cast("B")
        n_segments = max(-(-(len(given) - HEAD.size) // (SEGMENT + TAG_BYTES)), 1)
        size = len(given) - HEAD.size - n_segments * TAG_BYTES
        if size < 0 or sealed_size(size) != len(given):
            raise UndecryptableError("it has a length that nothing has that was sealed")
        cipher = self._cipher(bytes(given[: HEAD.size]))
        try:
            if n_segments == 1:
                return cipher.decrypt(_nonce(0, is_last=True), given[HEAD.size :], bound_to)
            return self._unsealed(cipher, bound_to, given, size)
        except InvalidTag:
            raise UndecryptableError("it was changed, or belongs elsewhere") from None

    def _unsealed(self, cipher: AESGCM, bound_to: bytes, given: memoryview, size: int) -> memoryview:
        """A message of so many bytes, in several segments."""
        found, segments = self._memory.take(size), list(_segments(size))

        def decrypt(some: Sequence[tuple[bytes, slice, slice]]) -> None:
            for nonce, inside, outside in some:
                cipher.decrypt_into(nonce, given[outside], bound_to, found[inside])

        # half of it by another thread, which has ended when this returns: the memory is the location's
        half = len(segments) // 2
        other = self._threads.start_or_run(decrypt, segments[:half])
        try:
            decrypt(segments[half:])
        finally:
            other.get()
        return found


def _nonce(i: int, *, is_last: bool) -> bytes:
    """The nonce of a segment: its number is enough, since no other message has the key."""
    return i.to_bytes(11, "big") + bytes([is_last])


def _segments(size: int) -> Iterator[tuple[bytes, slice, slice]]:
    """For each segment of a message its nonce, where its bytes are, and where they are when they are encrypted."""
    for i, start in enumerate(range(0, size, SEGMENT)):
        end = min(start + SEGMENT, size)
        at = HEAD.size + start + i * TAG_BYTES
        yield _nonce(i, is_last=end == size), slice(start, end), slice(at, at + end - start + TAG_BYTES)


# -- files ------------------------------------------------------------------------------------------------------------


class _Stream:
    """What is sealed in a file: messages, each bound to its place, and one of them to be the last."""

    def __init__(self, file: BinaryIO, stream: bytes, keys: Keys) -> None:
        self._file, self._stream, self._keys = file, stream, keys
        self._sealer = Sealer(keys.masters, b"", "export")
        # what was written and is not yet sealed, or was unsealed and is not yet read
        self._plain = bytearray()
        self._n = 0

    def _place(self, *, is_last: bool) -> bytes:
        self._n += 1
        return self._stream + self._n.to_bytes(8, "big") + bytes([is_last])

    def _taken(self, size: int) -> bytes:
        found = bytes(self._plain[:size])
        del self._plain[:size]
        return found


class _Writer(_Stream):
    def write(self, data: bytes) -> int:
        self._plain += data
        while len(self._plain) > MESSAGE_BYTES:
            self.put(is_last=False)
        return len(data)

    def put(self, *, is_last: bool) -> None:
        """Write a message."""
        message = self._taken(MESSAGE_BYTES)
        self._file.write(self._sealer.seal(self._keys.newest, self._place(is_last=is_last), message))


class _Reader(_Stream):
    def __init__(self, file: BinaryIO, stream: bytes, keys: Keys, name: str) -> None:
        super().__init__(file, stream, keys)
        self._name = name
        self._next = file.read(sealed_size(MESSAGE_BYTES))
        if self._next and not self._sealer.has_key_of(self._next):
            wanted = self._next[:ID_BYTES].hex()
            raise LocationError(f"{name} needs the key {wanted}; give it by --from-key or PREFIXSTORE_KEY")

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        while len(self._plain) < size and self._next:
            sealed, self._next = self._next, self._file.read(sealed_size(MESSAGE_BYTES))
            try:
                self._plain += self._sealer.unseal(self._place(is_last=not self._next), sealed)
            except UndecryptableError as error:
                what = f"{self._name} is not complete, or was changed: {error}"
                raise CorruptError(f"{what}; import again when it is complete") from None
        return self._taken(size)


@contextmanager
def sealing(file: BinaryIO, keys: Keys) -> Iterator[BinaryIO]:
    """A file for what is sealed in `file`, under the newest of these keys."""
    stream = os.urandom(STREAM_BYTES)
    file.write(ENCRYPTED + stream)
    writer = _Writer(file, stream, keys)
    yield cast("BinaryIO", writer)
    writer.put(is_last=True)


def unsealed(begin: bytes, file: BinaryIO, keys: Keys, name: str) -> BinaryIO:
    """A file for what is sealed in one of which the beginning was read already. It has no place to seek to.

    Reading raises `CorruptError` where anything was changed, or if the end is missing.

    Raises
    ------
    LocationError
        If the key is not there.
    """
    return cast("BinaryIO", _Reader(file, begin[len(ENCRYPTED) :], keys, name))
