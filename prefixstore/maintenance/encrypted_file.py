"""Exported files that are encrypted, in segments, with a key of their own; the format is in ``docs/format.md``."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from prefixstore.backends.encryption import SEGMENT, TAG_BYTES, cipher_of_message, derive_key, nonce
from prefixstore.backends.keys import KeyProvider, Keys
from prefixstore.errors import CorruptError, IncompatibleError, LocationError
from prefixstore.format.export import ENCRYPTED

__all__ = ["decrypting", "encrypting"]

VERSION = 1
# the magic, the version, the id of the key, a random number
HEAD = struct.Struct("<8sI4s24s")


def _cipher_of(head: bytes, key: bytes) -> AESGCM:
    return cipher_of_message(derive_key(key, b"", b"prefixstore file"), head[-24:])


class _Writer:
    """A file for what is encrypted into another one."""

    def __init__(self, file: BinaryIO, head: bytes, key: bytes) -> None:
        self._file, self._head, self._cipher = file, head, _cipher_of(head, key)
        self._left = bytearray()
        self._n = 0

    def write(self, data: bytes) -> int:
        self._left += data
        while len(self._left) > SEGMENT:
            self.put(is_last=False)
        return len(data)

    def put(self, *, is_last: bool) -> None:
        """Write a segment of what is left."""
        plain = bytes(self._left[:SEGMENT])
        self._file.write(self._cipher.encrypt(nonce(self._n, is_last=is_last), plain, self._head))
        self._n += 1
        del self._left[:SEGMENT]


class _Reader:
    """A file for what is decrypted from another one. It has no place to seek to."""

    def __init__(self, file: BinaryIO, head: bytes, key: bytes, name: str) -> None:
        self._file, self._head, self._cipher, self._name = file, head, _cipher_of(head, key), name
        self._left = bytearray()
        self._next = _whole(file, SEGMENT + TAG_BYTES)
        self._n = 0

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        while len(self._left) < size and self._next:
            segment, self._next = self._next, _whole(self._file, SEGMENT + TAG_BYTES)
            try:
                self._left += self._cipher.decrypt(nonce(self._n, is_last=not self._next), segment, self._head)
            except InvalidTag:
                what = f"{self._name} is not complete, or was changed, after {self._n} MiB"
                raise CorruptError(f"{what}; import again when it is complete") from None
            self._n += 1
        found = bytes(self._left[:size])
        del self._left[:size]
        return found


class _Resumed:
    """A file of which the beginning was read already, from a pipe."""

    def __init__(self, begin: bytes, file: BinaryIO) -> None:
        self._begin, self._file = begin, file

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        found, self._begin = self._begin[:size], self._begin[size:]
        return found + _whole(self._file, size - len(found)) if len(found) < size else found


def _whole(file: BinaryIO, size: int) -> bytes:
    """So many bytes, or all that are left: a pipe may give fewer at a time."""
    found = file.read(size)
    while len(found) < size and (more := file.read(size - len(found))):
        found += more
    return found


@contextmanager
def encrypting(file: BinaryIO, keys: Keys) -> Iterator[BinaryIO]:
    """A file for what is encrypted into `file`, under the newest of these keys."""
    name, key = next(iter(keys.masters.items()))
    head = HEAD.pack(ENCRYPTED, VERSION, name, os.urandom(24))
    file.write(head)
    writer = _Writer(file, head, key)
    yield cast("BinaryIO", writer)
    writer.put(is_last=True)


def decrypting(file: BinaryIO, provider: KeyProvider | None, name: str) -> BinaryIO:
    """A file for what is in `file`, which may be encrypted.

    Raises
    ------
    LocationError
        If it is encrypted under a key that is not given.
    IncompatibleError
        If a newer version has encrypted it.
    """
    head = _whole(file, len(ENCRYPTED))
    if head != ENCRYPTED:
        if not file.seekable():
            return cast("BinaryIO", _Resumed(head, file))
        file.seek(0)
        return file
    head += _whole(file, HEAD.size - len(ENCRYPTED))
    if len(head) < HEAD.size:
        raise CorruptError(f"{name} is not complete; import again when it is")
    _, version, wanted, _ = HEAD.unpack(head)
    if version != VERSION:
        raise IncompatibleError(f"{name} is encrypted in format {version}; upgrade prefixstore to read it")
    masters = Keys.read(provider).masters if provider is not None else {}
    if wanted not in masters:
        where = f"which {provider} does not have" if provider is not None else "and none is given"
        raise LocationError(f"{name} needs the key {wanted.hex()}, {where}; pass --from-key, or set PREFIXSTORE_KEY")
    return cast("BinaryIO", _Reader(file, head, masters[wanted], name))
