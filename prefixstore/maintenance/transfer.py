"""Moves pages from one location into another, directly or through a file. A few pages are in memory at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from prefixstore.engine.importing import Imported
from prefixstore.engine.index import Page, is_same
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.export import ExportReader, ExportWriter
from prefixstore.format.record import Record, StoredPage, checksum
from prefixstore.maintenance.archive import Archive

__all__ = ["Moved", "chosen", "copy_store", "export_store", "import_store"]

# A view is closed after this many bytes: as long as it is open, pages that others delete keep their space.
VIEW_BYTES = 64 << 20
# Size of a commit. Each one costs one flush of the disk, for which nothing else can be done in LMDB.
BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Moved:
    """What was written.

    Attributes
    ----------
    namespaces, pages, bytes
        How many namespaces and pages, and the size of the payloads.
    present
        Pages that were already there.
    damaged
        Pages that could not be read. Their descendants are left out as well, but not counted.
    refused
        Pages for which there was no space, which were evicted again, whose key another page has, or whose parent was
        refused.
    evicted
        Pages that were there before, and were evicted to make space.
    """

    namespaces: int = 0
    pages: int = 0
    bytes: int = 0
    present: int = 0
    damaged: int = 0
    refused: int = 0
    evicted: int = 0


def chosen(archive: Archive, namespaces: Collection[bytes] | None, keys: Collection[bytes] | None = None) -> list[Page]:
    """The pages of these namespaces, and with these keys; None for all."""
    return [
        page
        for page in archive.pages()
        if (namespaces is None or page.namespace in namespaces) and (keys is None or page.key in keys)
    ]


class _Source:
    """The chosen pages of an archive, read in views of bounded length."""

    def __init__(self, archive: Archive, namespaces: Collection[bytes] | None, keys: Collection[bytes] | None) -> None:
        self._archive = archive
        self._pages = chosen(archive, namespaces, keys)
        those = {page.namespace for page in self._pages}
        with archive.backend.view() as view:
            self.settings = {key: settings for key, settings in view.namespaces().items() if key in those}
        self.damaged = 0

    def __iter__(self) -> Iterator[StoredPage]:
        """Parents before their children. A payload is valid until the next page is requested.

        A view of the archive is open meanwhile: do not use the archive for anything else.
        """
        lost: set[bytes] = set()
        waiting = iter(self._pages)
        page = next(waiting, None)
        while page is not None:
            size = 0
            with self._archive.backend.view() as view:
                while page is not None and size < VIEW_BYTES:
                    try:
                        usage = view.usage(page.key)
                        record, payload = next(iter(view.fetch([page.key])), (None, None))
                        if page.parent in lost or record is None or payload is None or usage is None:
                            lost.add(page.key)  # deleted meanwhile, or without its parent
                        elif not is_same(page, record) or page.start != record.start:
                            raise CorruptError(f"page {page.key.hex()} has tokens that do not match its key")
                        elif len(payload) != record.stored_bytes or checksum(payload) != record.checksum:
                            raise CorruptError(f"page {page.key.hex()}: checksum mismatch")
                        else:
                            size += len(payload)
                            yield StoredPage(page.key, record, usage, payload)
                    except (CorruptError, IncompatibleError):
                        # not an error of the location: an outage says nothing about its pages
                        lost.add(page.key)
                        self.damaged += 1
                    page = next(waiting, None)


class _Target:
    """An archive into which pages are written, in batches."""

    def __init__(self, archive: Archive, settings: Mapping[bytes, bytes]) -> None:
        self._archive = archive
        self._settings = settings
        self._evicted_before = archive.engine.counters["evictions"]
        self._entries_before = archive.used().entries
        self._done = Imported()
        self._skipped = 0
        # pages whose keys other pages have here, and their descendants
        self._displaced: set[bytes] = set()

    def wants(self, record: Record) -> bool:
        """Whether the page is missing, and may be added; counts those that are not."""
        known = self._archive.engine.importer.holds(record)
        if known is None or record.parent in self._displaced:
            self._displaced.add(record.key)
            return False
        self._skipped += known
        return not known

    def write(self, batch: Sequence[StoredPage]) -> None:
        """Write pages, whose payloads must not change meanwhile, in one transaction."""
        known = [page for page in batch if page.record.namespace in self._settings]
        if known:
            self._done = self._done.plus(self._archive.engine.importer.import_pages(known, self._settings))

    def finish(self, damaged: int = 0) -> Moved:
        """Make everything durable; what was done."""
        self._archive.engine.sync()
        done, pages = self._done, self._done.pages
        evicted = min(self._archive.engine.counters["evictions"] - self._evicted_before, self._entries_before)
        if self._archive.engine.counters["evictions"] > self._evicted_before:
            # the first to go are those that were here before: exact where the least recently used ones go first
            pages = max(0, self._archive.used().entries - self._entries_before + evicted)
        return Moved(
            namespaces=len(self._settings),
            pages=pages,
            bytes=done.bytes,
            present=done.present + self._skipped,
            damaged=damaged,
            refused=done.refused + done.pages - pages + len(self._displaced),
            evicted=evicted,
        )


def _batches(pages: Iterable[StoredPage | None]) -> Iterator[list[StoredPage]]:
    """Pages that are written together; None is left out. What precedes a damaged page comes before the error."""
    batch: list[StoredPage] = []
    n_bytes = 0
    try:
        for page in pages:
            if page is not None:
                batch.append(page)
                n_bytes += len(page.payload)
            if n_bytes >= BATCH_BYTES:
                yield batch
                batch, n_bytes = [], 0
    except CorruptError:
        yield batch
        raise
    yield batch


def copy_store(
    source: Archive,
    target: Archive,
    *,
    namespaces: Collection[bytes] | None = None,
    keys: Collection[bytes] | None = None,
) -> Moved:
    """Copy pages into another location, of any backend. Pages that are already there are not changed.

    Parameters
    ----------
    source, target
        Two locations.
    namespaces, keys
        Copy only pages of these namespaces, and with these keys; see `Archive.with_ancestors`.

    Raises
    ------
    StorageError
        If one of the locations fails. What was copied until then stays.
    """
    pages = _Source(source, namespaces, keys)
    into = _Target(target, pages.settings)
    wanted = (page._replace(payload=bytes(page.payload)) for page in pages if into.wants(page.record))
    for batch in _batches(wanted):
        into.write(batch)
    return into.finish(pages.damaged)


def export_store(
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
        The source.
    file
        A binary file, open for writing; need not be seekable.
    namespaces, keys
        Export only pages of these namespaces, and with these keys; see `Archive.with_ancestors`.

    Raises
    ------
    StorageError
        If the location fails. The file is not complete then.
    """
    pages = _Source(archive, namespaces, keys)
    writer = ExportWriter(file, pages.settings)
    for page in pages:
        writer.write(page)
    writer.finish()
    return Moved(namespaces=len(pages.settings), pages=writer.pages, bytes=writer.bytes, damaged=pages.damaged)


def import_store(reader: ExportReader, target: Archive, *, namespaces: Collection[bytes] | None = None) -> Moved:
    """Import the pages of a file into a location, within its budget. Pages that are already there are not changed.

    So an interrupted import can be continued: run it again.

    Parameters
    ----------
    reader
        The file, at its start.
    target
        The location.
    namespaces
        Import only pages of these.

    Raises
    ------
    CorruptError
        If the file is damaged or truncated. All pages before that place are stored.
    FullError
        If the disk is full.
    """
    settings = {key: text for key, text in reader.namespaces.items() if namespaces is None or key in namespaces}
    into = _Target(target, settings)
    try:
        for batch in _batches(reader.entries(into.wants)):
            into.write(batch)
    except CorruptError as error:
        done = into.finish()
        existed = f", {done.present:,} already existed" if done.present else ""
        raise CorruptError(f"{error} ({done.pages:,} pages were imported into {target.location}{existed})") from error
    return into.finish()
