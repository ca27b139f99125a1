"""Pages from one location into another, or into one portable file and back, whose layout is in this module only.

``docs/format.md`` shows the same tables; a test compares them with the structs below. Everything streams: a few pages
are in memory at a time, whatever the size of the store.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import xxhash

from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import FORMAT_VERSION, Buffer, Record, Usage, checksum
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.intake import Entry, Intake, Moved

__all__ = ["PackReader", "copy_store", "export_pack", "import_pack", "with_paths"]

MAGIC = b"\x89PSTORE\n"
PACK_VERSION = 1
# magic, version of the file, version of the records in it
HEADER = struct.Struct("<8sII")
# kind, bytes of the head, bytes of the body
ENTRY = struct.Struct("<4sIQ")
# xxh3-64 of the two, behind the head
SEAL = struct.Struct("<Q")
NAMESPACE, PAGE, END = b"NAME", b"PAGE", b"DONE"
# of a page: key, usage; the record follows
PAGE_HEAD = struct.Struct("<16s24s")
# of the end: namespaces, pages, bytes of payloads, xxh3-128 of all seals before
END_HEAD = struct.Struct("<QQQ16s")
LARGEST_HEAD, LARGEST_BODY = 1 << 28, 1 << 36
READ_AT_ONCE = 16 << 20

# a view is held for so many bytes, so that what others delete meanwhile is not kept for long
BYTES_AT_ONCE = 64 << 20


def with_paths(archive: Archive, pages: Iterable[Page]) -> set[bytes]:
    """The keys of pages, and of those before them, without which they could not be restored."""
    keys: set[bytes] = set()
    for page in pages:
        at: Page | None = page
        while at is not None and at.key not in keys:
            keys.add(at.key)
            at = archive.catalog.index.get(at.parent)
    return keys


@dataclass
class Damaged:
    """How many pages could not be read, or stand behind such a page."""

    pages: int = 0


def _entries(
    archive: Archive, namespaces: Collection[bytes] | None, keys: Collection[bytes] | None, damaged: Damaged
) -> Iterator[Entry]:
    """The pages of an archive, each before those behind it. A payload is valid until the next one is asked for.

    Whoever iterates holds a view of the archive, and must not use it otherwise meanwhile.
    """
    pages = [page for page in archive.pages() if namespaces is None or page.namespace in namespaces]
    lost: set[bytes] = set()
    waiting = iter([page for page in pages if keys is None or page.key in keys])
    page = next(waiting, None)
    while page is not None:
        size = 0
        with archive.backend.view() as view:
            while page is not None and size < BYTES_AT_ONCE:
                try:
                    record, payload = view.record(page.key), view.payload(page.key)
                    usage = view.usage(page.key)
                    if page.parent in lost or record is None or payload is None or usage is None:
                        lost.add(page.key)  # deleted meanwhile
                    elif len(payload) != record.stored_bytes or checksum(payload) != record.checksum:
                        raise CorruptError(f"page {page.key.hex()}: the checksum does not fit the stored bytes")
                    else:
                        size += len(payload)
                        yield Entry(page.key, record, usage, payload)
                except StorageError:
                    lost.add(page.key)
                    damaged.pages += 1
                page = next(waiting, None)


def _settings(archive: Archive, wanted: Collection[bytes]) -> dict[bytes, bytes]:
    with archive.backend.view() as view:
        return {key: settings for key, settings in view.namespaces().items() if key in wanted}


def copy_store(
    source: Archive,
    target: Archive,
    *,
    namespaces: Collection[bytes] | None = None,
    keys: Collection[bytes] | None = None,
) -> Moved:
    """Copy pages into another location, of any backend; those that are there already stay as they are.

    Parameters
    ----------
    source, target
        Two locations.
    namespaces, keys
        Only pages of these namespaces, and with these keys; see `with_paths`.
    """
    damaged = Damaged()
    intake = Intake(target, _settings(source, _chosen(source, namespaces, keys)))
    for entry in _entries(source, namespaces, keys, damaged):
        if intake.wants(entry.key):
            intake.add(replace(entry, payload=bytes(entry.payload)))
    return intake.finish(damaged.pages)


def _chosen(archive: Archive, namespaces: Collection[bytes] | None, keys: Collection[bytes] | None) -> set[bytes]:
    """The namespaces of the pages that are meant."""
    return {
        page.namespace
        for page in archive.pages()
        if (namespaces is None or page.namespace in namespaces) and (keys is None or page.key in keys)
    }


# -- the file --------------------------------------------------------------------------------------------------------


def export_pack(
    archive: Archive,
    file: BinaryIO,
    *,
    namespaces: Collection[bytes] | None = None,
    keys: Collection[bytes] | None = None,
) -> Moved:
    """Write pages into one portable file.

    Parameters
    ----------
    archive
        Has the pages.
    file
        Open for writing bytes; need not be seekable.
    namespaces, keys
        Only pages of these namespaces, and with these keys; see `with_paths`.
    """
    seals = xxhash.xxh3_128()
    file.write(HEADER.pack(MAGIC, PACK_VERSION, FORMAT_VERSION))

    def write(kind: bytes, head: bytes, n_bytes: int) -> None:
        start = ENTRY.pack(kind, len(head), n_bytes) + head
        seal = SEAL.pack(xxhash.xxh3_64_intdigest(start))
        seals.update(seal)
        file.write(start + seal)

    settings = _settings(archive, _chosen(archive, namespaces, keys))
    for key, canonical in settings.items():
        write(NAMESPACE, key + canonical, 0)
    damaged = Damaged()
    pages = size = 0
    for entry in _entries(archive, settings.keys(), keys, damaged):
        head = PAGE_HEAD.pack(entry.key, entry.usage.pack()) + entry.record.pack()
        write(PAGE, head, len(entry.payload))
        file.write(entry.payload)
        pages, size = pages + 1, size + len(entry.payload)
    write(END, END_HEAD.pack(len(settings), pages, size, seals.digest()), 0)
    return Moved(namespaces=len(settings), pages=pages, bytes=size, damaged=damaged.pages)


class PackReader:
    """A portable file, read from its start to its end.

    Parameters
    ----------
    file
        Open for reading bytes; need not be seekable, but what is not wanted is passed over if it is.
    name
        For messages.

    Attributes
    ----------
    namespaces
        Canonical settings of the namespaces in it, by key.

    Raises
    ------
    IncompatibleError
        If it is no such file, or a newer version's.
    CorruptError
        If it ends, or is damaged, before the first page.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._seekable = file.seekable()
        self._mapped = _mapped(file)
        self._seals = xxhash.xxh3_128()
        self.pages = 0
        self._bytes = 0
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise IncompatibleError(f"{name} was not written by prefixstore export")
        _, version, records = HEADER.unpack(header)
        if version > PACK_VERSION or records > FORMAT_VERSION:
            raise IncompatibleError(
                f"{name} has format {version}, and records of format {records}; upgrade prefixstore"
            )
        self.namespaces: dict[bytes, bytes] = {}
        self._next = self._entry()
        while self._next[0] == NAMESPACE:
            head = self._next[1]
            if Namespace.parse(head[16:]).key != head[:16]:
                raise CorruptError(f"{name}: a namespace does not fit its key")
            self.namespaces[head[:16]] = head[16:]
            self._next = self._entry()

    def entries(self, wants: Callable[[bytes], bool]) -> Iterator[Entry | None]:
        """The pages that are wanted, by key; None for each of the others.

        Raises
        ------
        CorruptError
            At the first damaged byte, or where the file ends too early; what came before is good.
        """
        kind, head, n_bytes = self._next
        while kind == PAGE:
            if len(head) < PAGE_HEAD.size:
                raise CorruptError(f"{self._name} is damaged behind page {self.pages}")
            key, usage = PAGE_HEAD.unpack_from(head)
            record = Record.unpack(key, head[PAGE_HEAD.size :])
            if record.stored_bytes != n_bytes or record.namespace not in self.namespaces:
                raise CorruptError(f"{self._name}: page {key.hex()} does not fit what comes before it")
            if wants(key):
                payload = self._payload(n_bytes)
                if checksum(payload) != record.checksum:
                    raise CorruptError(f"{self._name}: page {key.hex()}: the checksum does not fit the bytes")
                entry: Entry | None = Entry(key, record, Usage.unpack(usage), payload)
            else:
                entry = None
                self._pass(n_bytes)
            self.pages, self._bytes = self.pages + 1, self._bytes + n_bytes
            yield entry
            kind, head, n_bytes = self._entry()
        if (
            kind != END
            or len(head) != END_HEAD.size
            or END_HEAD.unpack(head) != (len(self.namespaces), self.pages, self._bytes, self._seals.digest())
        ):
            raise CorruptError(f"{self._name}: its end does not fit what comes before it")

    def _entry(self) -> tuple[bytes, bytes, int]:
        start = self._read(ENTRY.size)
        kind, head_bytes, n_bytes = ENTRY.unpack(start)
        if head_bytes > LARGEST_HEAD or n_bytes > LARGEST_BODY:
            raise CorruptError(f"{self._name} is damaged behind page {self.pages}")
        head, seal = self._read(head_bytes), self._read(SEAL.size)
        if SEAL.pack(xxhash.xxh3_64_intdigest(start + head)) != seal:
            raise CorruptError(f"{self._name} is damaged behind page {self.pages}")
        if kind != END:
            self._seals.update(seal)
        return kind, head, n_bytes

    def _payload(self, n_bytes: int) -> Buffer:
        """The body of an entry: where the file is mapped, it is not copied."""
        if self._mapped is None:
            return self._read(n_bytes)
        at = self._file.tell()
        self._pass(n_bytes)
        return self._mapped[at : at + n_bytes]

    def _read(self, n_bytes: int) -> bytes:
        # piece by piece: what a file claims to hold takes no memory before it is there
        pieces = [self._file.read(min(n_bytes, READ_AT_ONCE))]
        while pieces[-1] and (left := n_bytes - sum(map(len, pieces))) > 0:
            pieces.append(self._file.read(min(left, READ_AT_ONCE)))
        found = b"".join(pieces) if len(pieces) > 1 else pieces[0]
        if len(found) < n_bytes:
            raise CorruptError(f"{self._name}: truncated after {self.pages} pages; import again when it is complete")
        return found

    def _pass(self, n_bytes: int) -> None:
        if self._seekable and n_bytes:
            # the last byte is read, to see that it is there
            self._file.seek(n_bytes - 1, 1)
            n_bytes = 1
        while n_bytes > 0:
            n_bytes -= len(self._read(min(n_bytes, 1 << 20)))


def _mapped(file: BinaryIO) -> memoryview | None:
    """The bytes of a file on a disk. A view keeps the map open, and ends with it."""
    try:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if file.seekable() else None
    except (OSError, ValueError):
        return None  # no file, or an empty one


def import_pack(reader: PackReader, target: Archive, *, namespaces: Collection[bytes] | None = None) -> Moved:
    """Put the pages of a file into a location, within its budget. What is there already stays as it is.

    So a second import goes on where the first one ended.

    Parameters
    ----------
    reader
        At its start.
    target
        The location.
    namespaces
        Only pages of these.

    Raises
    ------
    CorruptError
        If the file is damaged, or ends too early. All pages before that place are stored.
    FullError
        If the disk is full.
    """
    settings = {key: text for key, text in reader.namespaces.items() if namespaces is None or key in namespaces}
    intake = Intake(target, settings)
    try:
        for entry in reader.entries(intake.wants):
            if entry is not None:
                intake.add(entry)
    except CorruptError:
        intake.finish(0)
        raise
    return intake.finish(0)
