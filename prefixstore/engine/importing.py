"""Writes pages that were stored elsewhere: exported to a file, or read from another location."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add
from typing import NamedTuple

from prefixstore.backends.threads import handed_over
from prefixstore.engine.commit import Committer
from prefixstore.engine.page import is_same
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.relatives import overlaps_of
from prefixstore.format.record import Record, StoredPage


class Imported(NamedTuple):
    """How many imported pages were stored, and the size of their payloads; how many were present, or refused.

    A page is refused if there is no space for it, or its parent is not stored.
    """

    pages: int = 0
    bytes: int = 0
    present: int = 0
    refused: int = 0

    def plus(self, other: Imported) -> Imported:
        """The sums of both."""
        return Imported(*map(add, self, other))


class Importer(Part):
    """Imports pages into a location."""

    def __init__(self, shared: Shared, committer: Committer) -> None:
        super().__init__(shared)
        self._committer = committer

    @handed_over
    def import_pages(self, batch: Sequence[StoredPage], settings: Mapping[bytes, bytes]) -> Imported:
        """Write pages that were stored elsewhere, parents before their children; lookups find them after that.

        Pages that are stored already stay as they are. `settings` has the canonical settings of their namespaces.

        Raises
        ------
        StorageError
            If they cannot be written: `FullError` if the disk is full.
        """
        news = [PendingPage.from_stored(one, settings[one.record.namespace]) for one in batch]
        try:
            with self._backend.view() as view:
                here = view.records([key for one in batch for key in (one.key, one.record.parent)])
            known = {key: record for key, (record, _) in here.items() if isinstance(record, Record)}
            added: list[PendingPage] = []
            present = 0
            for one, new in zip(batch, news, strict=True):
                record = one.record
                if not record.follows(known.get(record.parent)):
                    continue
                if one.key not in known:
                    known[one.key] = record
                    if self._catalog.announce(new):
                        added.append(new)
                    else:
                        present += 1
                elif is_same(known[one.key], record):
                    present += 1
                else:
                    # another page has its key: neither the page nor its descendants can be stored
                    del known[one.key]
            written = self._committer.commit(added)
            with self._backend.view() as view:
                # tails that a stored page continues
                present += sum(overlaps_of(view, new.page)[1] for new in added if new not in written)
        except Exception:
            # including pages that were announced and not committed
            self._catalog.give_up(news)
            raise
        return Imported(len(written), sum(new.n_bytes for new in written), present, len(batch) - present - len(written))
