"""Pages that were written elsewhere, into a location, within its budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from prefixstore.backends.base import Transaction
from prefixstore.engine.index import Page
from prefixstore.engine.room import Room
from prefixstore.errors import FullError
from prefixstore.format.record import Buffer, Record, Usage
from prefixstore.maintenance.archive import Archive

__all__ = ["Entry", "Intake", "Moved"]

# What waits to be written. One commit costs one flush of the disk; but what LMDB holds for a larger one is memory that
# malloc gives back to the system each time, and page faults cost more than the flush (8 MiB: 0.52 GiB/s, 32: 0.40).
BATCH_BYTES = 8 << 20
ATTEMPTS = 4


@dataclass(frozen=True)
class Entry:
    """A page as it is stored."""

    key: bytes
    record: Record
    usage: Usage
    payload: Buffer


@dataclass(frozen=True)
class Moved:
    """What was written.

    Attributes
    ----------
    namespaces, pages, bytes
        How many, and the size of the payloads.
    present
        Pages that were there already.
    damaged
        Pages that could not be read, or stand behind such a page.
    refused
        Pages for which there was no room, or not for the page before.
    evicted
        Pages that made room.
    """

    namespaces: int = 0
    pages: int = 0
    bytes: int = 0
    present: int = 0
    damaged: int = 0
    refused: int = 0
    evicted: int = 0


class Intake:
    """Writes entries in batches; each must come behind the page before it.

    Parameters
    ----------
    target
        The location.
    settings
        Canonical settings of the namespaces whose pages are taken, by key.
    """

    def __init__(self, target: Archive, settings: Mapping[bytes, bytes]) -> None:
        self._target = target
        self._catalog = target.catalog
        self._settings = settings
        self._room = Room(target.catalog, target.budget, target.counters)
        self._evicted_before = target.counters["evictions"]
        self._batch: list[Entry] = []
        self._batch_bytes = 0
        self._count: Counter[str] = Counter()
        with target.view():
            self._known = set(target.catalog.index.pages)

    def wants(self, key: bytes) -> bool:
        """Whether the page is not here yet."""
        if key in self._known:
            self._count["present"] += 1
        return key not in self._known

    def add(self, entry: Entry) -> None:
        """Take a page, whose payload must stay as it is."""
        if entry.record.namespace not in self._settings:
            return
        self._batch.append(entry)
        self._batch_bytes += len(entry.payload)
        if self._batch_bytes >= BATCH_BYTES:
            self._write()

    def finish(self, damaged: int) -> Moved:
        """Write what waits, and make it durable; what was done."""
        if self._batch:
            self._write()
        self._target.backend.sync()
        count = self._count
        return Moved(
            namespaces=len(self._settings),
            pages=count["pages"],
            bytes=count["bytes"],
            present=count["present"],
            damaged=damaged,
            refused=count["refused"],
            evicted=self._target.counters["evictions"] - self._evicted_before,
        )

    def _write(self) -> None:
        for attempt in range(ATTEMPTS):
            if attempt:
                # what a transaction deletes is of use to a later one only
                with self._catalog.transaction(self._target.backend) as transaction:
                    self._room.make_spare(transaction, self._batch_bytes << (attempt - 1))
                self._target.backend.reclaim()
            try:
                count: Counter[str] = Counter()
                with self._catalog.transaction(self._target.backend) as transaction:
                    for entry in self._batch:
                        outcome = self._put(transaction, entry)
                        count[outcome] += 1
                        count["bytes"] += len(entry.payload) if outcome == "pages" else 0
                break
            except FullError:
                if attempt == ATTEMPTS - 1:
                    raise
        self._count += count
        self._batch, self._batch_bytes = [], 0

    def _put(self, transaction: Transaction, entry: Entry) -> str:
        """Write one page; what became of it, as a field of `Moved`."""
        record, usage = entry.record, entry.usage
        page = Page.stored(entry.key, record, usage)
        with self._catalog.lock:
            index = self._catalog.index
            if page.key in index or index.covers(page):
                return "present"
            if not index.has_parent_of(page):
                return "refused"
            older = index.superseded_by(page)
            # in the index before room is made, so that the page before it is not evicted for it
            if not index.add(page):
                return "refused"
        if older is not None:
            transaction.delete(older.key)
            with self._catalog.lock:
                self._catalog.forget(older.key)
        settings = self._settings[record.namespace]
        if self._room.make_for(transaction, record, len(entry.payload), settings) is not None:
            with self._catalog.lock:
                self._catalog.forget(page.key)
            return "refused"
        transaction.put_namespace(record.namespace, settings)
        transaction.put(entry.key, record, usage, entry.payload)
        with self._catalog.lock:
            self._catalog.candidates.offer(page)
        return "pages"
