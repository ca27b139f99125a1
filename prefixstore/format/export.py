"""The ``.pstore`` file: pages of any location in one portable file. Its byte layout is in this module only.

``docs/format.md`` shows the same tables; a test compares them with the structs below. Reading and writing
stream: one page is in memory at a time, whatever the size of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

import xxhash

from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import FORMAT_VERSION, USAGE, Record, StoredPage, Usage, checksum
from prefixstore.units import counted

MAGIC = b"\x89PSTORE\n"
# how a file begins in which such a file is encrypted
ENCRYPTED = b"\x89PSTENC\n"
EXPORT_VERSION = 4
# magic, version of the file, version of the records in it
HEADER = struct.Struct("<8sII")
# kind, bytes of the head, bytes of the body
ENTRY = struct.Struct("<4sIQ")
# xxh3-64 of the two, after the head
SEAL = struct.Struct("<Q")
NAMESPACE, MODEL, PAGE, END = b"NAME", b"MODL", b"PAGE", b"DONE"
# head of a page: key, usage; the record follows
PAGE_HEAD = struct.Struct(f"<{KEY_BYTES}s{USAGE.size}s")
# head of the end: pages
END_HEAD = struct.Struct("<Q")
# of the digest of a model
MODEL_DIGITS = 12
LARGEST_HEAD, LARGEST_BODY = 1 << 28, 1 << 36
READ_AT_ONCE = 16 << 20


class ExportWriter:
    """Writes a ``.pstore`` file, which need not be seekable: namespaces, names of models, pages, the end.

    `namespaces` are the canonical settings of all whose pages will be written, by key, and `models` what their models
    are called; see `History`. `pages` and `bytes` are how many pages were written, and the size of their payloads.
    """

    def __init__(self, file: BinaryIO, namespaces: Mapping[bytes, bytes], models: Mapping[str, str]) -> None:
        self._file = file
        self.pages = self.bytes = 0
        file.write(HEADER.pack(MAGIC, EXPORT_VERSION, FORMAT_VERSION))
        for key, canonical in namespaces.items():
            self._entry(NAMESPACE, key + canonical, 0)
        for digits, name in models.items():
            self._entry(MODEL, (digits + name).encode("utf-8", "replace"), 0)

    def write(self, page: StoredPage) -> None:
        """Write a page, after its parent."""
        size = len(page.payload)
        self._entry(PAGE, PAGE_HEAD.pack(page.key, page.usage.pack()) + page.record.pack(), size)
        self._file.write(page.payload)
        self.pages, self.bytes = self.pages + 1, self.bytes + size

    def finish(self) -> None:
        """Write the end; without it, a reader reports the file as truncated."""
        self._entry(END, END_HEAD.pack(self.pages), 0)

    def _entry(self, kind: bytes, head: bytes, n_bytes: int) -> None:
        start = ENTRY.pack(kind, len(head), n_bytes) + head
        self._file.write(start + SEAL.pack(xxhash.xxh3_64_intdigest(start)))


class ExportReader:
    """Reads a ``.pstore`` file, which need not be seekable, from its start to its end.

    `decrypt` opens one that is encrypted, of which these bytes were read already. `namespaces` are the canonical
    settings of the namespaces in it, by key, and `models` what these are called; `name` is what messages call the file.

    Raises
    ------
    IncompatibleError
        If it is not such a file, or was written by a newer version.
    CorruptError
        If it is truncated or damaged before the first page.
    """

    def __init__(self, file: BinaryIO, name: str, decrypt: Callable[[bytes, BinaryIO], BinaryIO] | None = None) -> None:
        header = file.read(HEADER.size)
        self.is_encrypted = header.startswith(ENCRYPTED)
        if self.is_encrypted and decrypt is not None:
            file = decrypt(header, file)
            header = file.read(HEADER.size)
        self._file = file
        self._name = name
        self.pages = 0
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise IncompatibleError(f"{name} was not written by prefixstore export")
        _, version, records = HEADER.unpack(header)
        if version > EXPORT_VERSION or records > FORMAT_VERSION:
            raise IncompatibleError(
                f"{name} has format {version} with records of format {records}; upgrade prefixstore to read it"
            )
        if (version, records) != (EXPORT_VERSION, FORMAT_VERSION):
            raise IncompatibleError(
                f"{name} has format {version} with records of format {records}, which this prefixstore does not read "
                f"any more (only {EXPORT_VERSION} with {FORMAT_VERSION}); its pages have to be computed again"
            )
        self.namespaces: dict[bytes, bytes] = {}
        self._next = self._entry()
        while self._next[0] == NAMESPACE:
            head = self._next[1]
            key, settings = head[:KEY_BYTES], head[KEY_BYTES:]
            if Namespace.parse(settings).key != key:
                raise CorruptError(f"{name}: the key of a namespace is not that of its settings")
            self.namespaces[key] = settings
            self._next = self._entry()
        self.models: dict[str, str] = {}
        while self._next[0] == MODEL:
            text = self._next[1].decode("utf-8", "replace")
            self.models[text[:MODEL_DIGITS]] = text[MODEL_DIGITS:]
            self._next = self._entry()

    def entries(self) -> Iterator[StoredPage]:
        """The pages.

        Raises
        ------
        CorruptError
            At the first damaged entry, or where the file ends too early; the pages before it are good.
        """
        kind, head, n_bytes = self._next
        while kind == PAGE:
            if len(head) < PAGE_HEAD.size:
                raise CorruptError(f"{self._name} is damaged after page {self.pages}")
            key, usage = PAGE_HEAD.unpack_from(head)
            record = Record.unpack(key, head[PAGE_HEAD.size :])
            if record.stored_bytes != n_bytes or record.namespace not in self.namespaces:
                raise CorruptError(f"{self._name}: page {key.hex()} has a wrong length, or its namespace is missing")
            payload = self._read(n_bytes)
            if checksum(payload) != record.checksum:
                raise CorruptError(f"{self._name}: page {key.hex()}: checksum mismatch")
            self.pages += 1
            yield StoredPage(key, record, Usage.unpack(usage), payload)
            kind, head, n_bytes = self._entry()
        if (kind, head) != (END, END_HEAD.pack(self.pages)):
            raise CorruptError(f"{self._name} is damaged: its end does not match its pages")

    def _entry(self) -> tuple[bytes, bytes, int]:
        start = self._read(ENTRY.size)
        kind, head_bytes, n_bytes = ENTRY.unpack(start)
        if head_bytes > LARGEST_HEAD or n_bytes > LARGEST_BODY:
            raise CorruptError(f"{self._name} is damaged after page {self.pages}")
        head, seal = self._read(head_bytes), self._read(SEAL.size)
        if SEAL.pack(xxhash.xxh3_64_intdigest(start + head)) != seal:
            raise CorruptError(f"{self._name} is damaged after page {self.pages}")
        return kind, head, n_bytes

    def _read(self, n_bytes: int) -> bytes:
        # piece by piece: a false length allocates no memory
        pieces = [self._file.read(min(n_bytes, READ_AT_ONCE))]
        while pieces[-1] and (left := n_bytes - sum(map(len, pieces))) > 0:
            pieces.append(self._file.read(min(left, READ_AT_ONCE)))
        found = b"".join(pieces) if len(pieces) > 1 else pieces[0]
        if len(found) < n_bytes:
            n_pages = counted(self.pages, "page")
            raise CorruptError(f"{self._name}: truncated after {n_pages}; import again when it is complete")
        return found
