"""Moves pages from one location into another, directly or through a file. A few pages are in memory at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO

from prefixstore.engine.importing import Imported
from prefixstore.engine.page import Page, is_same
from prefixstore.engine.write_queue import BATCH_BYTES
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.export import ExportReader, ExportWriter
from prefixstore.format.namespace import Namespace, model_digits
from prefixstore.format.record import StoredPage, checksum
from prefixstore.maintenance.archive import Archive
from prefixstore.units import counted


@dataclass(frozen=True)
class Moved:
    """What was written: how many namespaces and pages, and the size of the payloads."""

    namespaces: int = 0
    pages: int = 0
    bytes: int = 0
    # pages that were already there
    present: int = 0
    # that could not be read; their descendants are left out as well, but not counted
    damaged: int = 0
    # for which there was no space, which were evicted again, whose key another page has, or whose parent was refused
    refused: int = 0
    # that were there before, and were evicted to make space
    evicted: int = 0


def chosen(archive: Archive, namespaces: Collection[bytes] | None, keys: Collection[bytes] | None = None) -> list[Page]:
    """The pages of these namespaces, and with these keys; None for all."""
    return [
        page
        for page in archive.pages()
        if (namespaces is None or page.namespace in namespaces) and (keys is None or page.key in keys)
    ]


class _Source:
    """The chosen pages of an archive."""

    def __init__(self, archive: Archive, namespaces: Collection[bytes] | None, keys: Collection[bytes] | None) -> None:
        self._archive = archive
        pages = chosen(archive, namespaces, keys)
        those = {page.namespace for page in pages}
        with archive.backend.view() as view:
            known = view.namespaces()
        self.settings = {key: known[key] for key in those if _is_sound(key, known.get(key))}
        self._pages = [page for page in pages if page.namespace in self.settings]
        names = archive.history().models
        digits = {model_digits(Namespace.parse(settings).settings) for settings in self.settings.values()}
        self.models = {one: names[one] for one in digits if one in names}
        # nobody could restore those whose settings are not known
        self.damaged = len(pages) - len(self._pages)

    def __iter__(self) -> Iterator[StoredPage]:
        """Parents before their children. A payload is valid until the next page is requested.

        A view of the archive is open meanwhile: do not use the archive for anything else.
        """
        lost: set[bytes] = set()
        for page in self._pages:
            # not longer than for one page: as long as it is open, pages that others delete keep their space
            with self._archive.backend.view() as view:
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
                        yield StoredPage(page.key, record, usage, payload)
                except (CorruptError, IncompatibleError):
                    # not an error of the location: an outage says nothing about its pages
                    lost.add(page.key)
                    self.damaged += 1


def _is_sound(key: bytes, settings: bytes | None) -> bool:
    """Whether these are the settings of a namespace."""
    try:
        return settings is not None and Namespace.parse(settings).key == key
    except CorruptError:
        return False


def _write(
    pages: Iterable[StoredPage], settings: Mapping[bytes, bytes], names: Mapping[str, str], target: Archive
) -> Moved:
    """Write pages of namespaces with these settings and names of models, and make everything durable."""
    engine, done = target.engine, Imported()
    for space in map(Namespace.parse, settings.values()):
        engine.describe(space, names.get(model_digits(space.settings)))
    evicted_before, entries_before = engine.counters["evictions"], target.used().entries
    for batch in _batches(pages):
        done = done.plus(engine.importer.import_pages(batch, settings))
    engine.sync()
    n_evicted, n_pages, n_bytes = engine.counters["evictions"] - evicted_before, done.pages, done.bytes
    evicted = min(n_evicted, entries_before)
    if n_evicted:
        # the first to go are those that were here before: exact where the least recently used ones go first
        n_pages = max(0, target.used().entries - entries_before + evicted)
        # of pages of about the same size
        n_bytes = n_bytes * n_pages // max(done.pages, 1)
    refused = done.refused + done.pages - n_pages
    return Moved(len(settings), n_pages, n_bytes, done.present, refused=refused, evicted=evicted)


def _batches(pages: Iterable[StoredPage]) -> Iterator[list[StoredPage]]:
    """Pages that are written together."""
    batch: list[StoredPage] = []
    n_bytes = 0
    for page in pages:
        batch.append(page)
        n_bytes += len(page.payload)
        if n_bytes >= BATCH_BYTES:
            yield batch
            # no other list: the caller has this one until the next
            batch.clear()
            n_bytes = 0
    yield batch


def copy_store(
    source: Archive,
    target: Archive,
    *,
    namespaces: Collection[bytes] | None = None,
    keys: Collection[bytes] | None = None,
) -> Moved:
    """Copy pages into another location, of any backend. Pages that are already there are not changed.

    Only pages of these namespaces, and with these keys; see `Archive.select`. Raises `StorageError` if one of
    the locations fails; what was copied until then stays.
    """
    pages = _Source(source, namespaces, keys)
    copied = (page._replace(payload=bytes(page.payload)) for page in pages)
    return replace(_write(copied, pages.settings, pages.models, target), damaged=pages.damaged)


def export_store(
    archive: Archive,
    file: BinaryIO,
    *,
    namespaces: Collection[bytes] | None = None,
    keys: Collection[bytes] | None = None,
) -> Moved:
    """Write pages into one portable file, which need not be seekable.

    Only pages of these namespaces, and with these keys; see `Archive.select`. Raises `StorageError` if the
    location fails; the file is not complete then.
    """
    pages = _Source(archive, namespaces, keys)
    writer = ExportWriter(file, pages.settings, pages.models)
    for page in pages:
        writer.write(page)
    writer.finish()
    return Moved(namespaces=len(pages.settings), pages=writer.pages, bytes=writer.bytes, damaged=pages.damaged)


def import_store(reader: ExportReader, target: Archive) -> Moved:
    """Import the pages of a file into a location, within its budget. Pages that are already there are not changed.

    So an interrupted import can be continued: run it again.

    Raises
    ------
    CorruptError
        If the file is damaged or truncated. All pages before that place are stored.
    FullError
        If the disk is full.
    """
    damage: list[CorruptError] = []

    def pages() -> Iterator[StoredPage]:
        try:
            yield from reader.entries()
        except CorruptError as error:
            damage.append(error)

    done = _write(pages(), reader.namespaces, reader.models, target)
    if damage:
        existed = f", {done.present:,} already existed" if done.present else ""
        raise CorruptError(
            f"{damage[0]} (imported into {target.location}: {counted(done.pages, 'page')}{existed})"
        ) from damage[0]
    return done
