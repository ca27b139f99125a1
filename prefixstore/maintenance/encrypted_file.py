"""Exported files that are encrypted, in segments, with a key of their own; the format is in ``docs/format.md``."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from prefixstore.backends.encryption import SEGMENT, TAG_BYTES, ciphers, derived, hash_of, nonce
from prefixstore.backends.keys import KeyProvider, Keys
from prefixstore.errors import CorruptError, IncompatibleError, LocationError

__all__ = ["MAGIC", "decrypting", "encrypting"]

MAGIC = b"\x89PSTENC\n"
VERSION = 1
# the magic, the version, the id of the key, a random number
HEAD = struct.Struct("<8sI4s24s")


class _Stream:
    """What both directions have: a cipher, and the number of the next segment."""

    def __init__(self, file: BinaryIO, head: bytes, key: bytes) -> None:
        cipher, self._invalid = ciphers()
        self._file = file
        self._head = head
        self._cipher: Any = cipher(hash_of(derived(key, b"", b"prefixstore file"), b"prefixstore mesg", head[-24:], 32))
        self._left = bytearray()
        self._n = 0

    def _nonce(self, *, is_last: bool) -> bytes:
        self._n += 1
        return nonce(self._n - 1, self._n if is_last else 0)


class _Writer(_Stream):
    def write(self, data: bytes) -> int:
        self._left += data
        while len(self._left) > SEGMENT:
            self._put(SEGMENT, is_last=False)
        return len(data)

    def _put(self, size: int, *, is_last: bool) -> None:
        self._file.write(self._cipher.encrypt(self._nonce(is_last=is_last), bytes(self._left[:size]), self._head))
        del self._left[:size]

    def finish(self) -> None:
        """Write the last segment."""
        self._put(SEGMENT, is_last=True)


class _Reader(_Stream):
    def __init__(self, file: BinaryIO, head: bytes, key: bytes, name: str) -> None:
        super().__init__(file, head, key)
        self._name = name
        self._next = file.read(SEGMENT + TAG_BYTES)

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        while len(self._left) < size and self._next:
            self._get()
        found = bytes(self._left[:size])
        del self._left[:size]
        return found

    def _get(self) -> None:
        segment, self._next = self._next, self._file.read(SEGMENT + TAG_BYTES)
        try:
            self._left += self._cipher.decrypt(self._nonce(is_last=not self._next), segment, self._head)
        except self._invalid:
            raise CorruptError(f"{self._name} was changed, or is not complete, after segment {self._n - 1}") from None


@contextmanager
def encrypting(file: BinaryIO, keys: Keys | None) -> Iterator[BinaryIO]:
    """A file to write what is encrypted into `file` under the newest of these keys; without keys, that file."""
    if keys is None:
        yield file
        return
    name, key = next(iter(keys.masters.items()))
    head = HEAD.pack(MAGIC, VERSION, name, os.urandom(24))
    file.write(head)
    writer = _Writer(file, head, key)
    yield cast("BinaryIO", writer)
    writer.finish()


def decrypting(file: BinaryIO, provider: KeyProvider | None, name: str) -> BinaryIO:
    """A file to read what is in `file`, which may be encrypted.

    Raises
    ------
    LocationError
        If it is encrypted under a key that is not given.
    IncompatibleError
        If a newer version has encrypted it.
    """
    if not file.peek(len(MAGIC)).startswith(MAGIC):  # type: ignore[attr-defined]  # a BufferedReader
        return file
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        raise CorruptError(f"{name} is not complete")
    _, version, wanted, _ = HEAD.unpack(head)
    if version != VERSION:
        raise IncompatibleError(f"{name} is encrypted in format {version}; upgrade prefixstore to read it")
    keys = Keys.read(provider).masters if provider is not None else {}
    if wanted not in keys:
        where = f"which {provider} does not have" if provider is not None else "and none is given"
        raise LocationError(f"{name} needs the key {wanted.hex()}, {where}; set PREFIXSTORE_KEY to where it is")
    return cast("BinaryIO", _Reader(file, head, keys[wanted], name))
