"""Writes pending pages, captured or imported, in one transaction and within the budget.

Crash safety depends on the order of the steps in `Committer._write`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from prefixstore.backends.base import Backend, Transaction
from prefixstore.engine.budget import Budget, Evictor
from prefixstore.engine.catalog import Catalog, DropReason
from prefixstore.engine.delete import Deleter
from prefixstore.engine.pending import Deferred, PackedPage, PendingPage
from prefixstore.engine.ram import RamTier
from prefixstore.errors import CorruptError, FullError, IncompatibleError, StorageError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.record import Usage
from prefixstore.stats import Counters

__all__ = ["Committer"]

log = logging.getLogger("prefixstore")

ATTEMPTS = 4
# seconds before the second attempt; each further pause is longer by as much
PAUSE = 0.01


class Committer:
    """Writes batches of announced pages. Several threads may use it: the backend's transactions take turns.

    Parameters
    ----------
    backend
        The location.
    catalog, deleter, ram
        Of the engine.
    budget
        What the location may hold.
    encode
        Packs states.
    counters
        Counts what is evicted, dropped and repaired.
    """

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        deleter: Deleter,
        ram: RamTier,
        budget: Budget,
        encode: Encoder,
        counters: Counters,
    ) -> None:
        self._backend = backend
        self._catalog = catalog
        self._deleter = deleter
        self._ram = ram
        self._evictor = Evictor(catalog, budget, counters)
        self._encode = encode
        self._counters = counters

    def commit(self, batch: Sequence[PendingPage]) -> list[PendingPage]:
        """Write announced pages, and what is deferred.

        Returns
        -------
        list of PendingPage
            Those of the batch that are stored now.

        Raises
        ------
        StorageError
            If the transaction fails: `FullError` after several attempts to make space. The pages are dropped, and
            counted. Pages that do not fit into the budget are dropped without an error.
        """
        catalog = self._catalog
        try:
            # Pack before the transaction: other processes wait while it is open.
            packed = [new.pack(self._encode) for new in catalog.still_pending(batch)]
            return self._write_with_space(packed)
        except FullError:
            catalog.drop(batch, DropReason.FULL)
            raise
        except StorageError:
            catalog.drop(batch, DropReason.UNAVAILABLE)
            raise
        except BaseException:
            catalog.abandon(batch)
            raise
        finally:
            catalog.end_writing(batch)

    def _write_with_space(self, packed: Sequence[PackedPage]) -> list[PendingPage]:
        """Write; if the location is full before its budget is, make more space and try again."""
        size = sum(len(one.payload) for one in packed)
        for attempt in range(ATTEMPTS - 1):
            try:
                return self._write(packed)
            except FullError:
                # Space freed in a transaction is reusable only by a later one.
                with self._catalog.update(self._backend) as transaction:
                    self._evictor.make_extra_space(transaction, size << attempt)
                # Give readers time: what they still see cannot be reused.
                time.sleep(PAUSE * (attempt + 1))
                self._backend.reclaim()
        return self._write(packed)

    def _write(self, packed: Sequence[PackedPage]) -> list[PendingPage]:
        catalog = self._catalog
        written: list[PendingPage] = []
        put: set[bytes] = set()
        refused: list[tuple[PendingPage, DropReason]] = []
        with catalog.update(self._backend) as transaction:
            deferred = catalog.deferred()
            # Delete snapshots that are no longer wanted.
            for key in deferred.thinned:
                if catalog.remove_snapshot(key, transaction.usage(key)):
                    transaction.delete(key)
            # Delete damaged pages, and what depends on them.
            removed = (
                self._deleter.delete_damaged(transaction, deferred.damaged, deferred.fits) if deferred.damaged else 0
            )
            # Delete expired leaves.
            self._evictor.delete_expired(transaction)
            # Write the pages, parents first, making space for each.
            for one in packed:
                reason = self._put(transaction, one, written, put)
                if reason is not None:
                    refused.append((one.pending, reason))
            # Record uses, those of the new pages included.
            self._write_uses(transaction, deferred)
            # Take out pages that were given up meanwhile: their parents may have been evicted for the next one.
            for new in catalog.no_longer_pending(written):
                written.remove(new)
                if new.page.key in put:
                    transaction.delete(new.page.key)
        # Committed: keep states in RAM while their buffers are still here, then tell the catalog.
        for new in written:
            if new.buffer is not None:
                self._ram.keep(new.page, new.buffer.view)
        catalog.committed(written, deferred)
        for new, reason in refused:
            catalog.refuse(new, reason)
        self._counters.count("corrupt", removed)
        return written

    def _put(
        self, transaction: Transaction, one: PackedPage, written: list[PendingPage], put: set[bytes]
    ) -> DropReason | None:
        """Write one page; returns the reason if it is refused."""
        new, record, page = one.pending, one.record, one.pending.page
        # The parent has to be stored; the page itself may be: another process may have computed it too.
        try:
            if page.parent != page.namespace and not _is_stored(transaction, page.parent):
                return DropReason.ORPHAN
            is_stored = _is_stored(transaction, page.key)
        except IncompatibleError as error:
            log.warning("a page is not written: %s", error)
            return DropReason.UNAVAILABLE
        # From here on no other thread supersedes it.
        claim = self._catalog.claim(new)
        if claim is None:
            return None
        # The tail that it continues goes before space is made.
        if claim.superseded is not None:
            transaction.delete(claim.superseded)
        if not is_stored:
            reason = self._evictor.make_space(transaction, record, len(one.payload), new.settings)
            if reason is not None:
                return reason
            transaction.put_namespace(page.namespace, new.settings)
            transaction.put(page.key, record, _usage_of(one), one.payload)
            put.add(page.key)
        self._catalog.resize(page, record.stored_bytes)
        written.append(new)
        return None

    def _write_uses(self, transaction: Transaction, deferred: Deferred) -> None:
        for key, hits in deferred.uses.items():
            usage = transaction.usage(key)
            page = self._catalog.get(key)
            if usage is not None and page is not None:
                expires = max(usage.expires, page.expires) if usage.expires else 0
                last_used = max(usage.last_used, page.last_used)
                transaction.touch(key, replace(usage, last_used=last_used, hits=usage.hits + hits, expires=expires))


def _usage_of(one: PackedPage) -> Usage:
    """The first usage of a page. The uses that a captured one has had already are among those written afterwards."""
    page = one.pending.page
    if one.usage is not None:
        return replace(one.usage, pinned=page.pinned)
    return Usage(page.last_used, 0, page.pinned, page.priority, page.expires)


def _is_stored(transaction: Transaction, key: bytes) -> bool:
    """Whether a page is stored; one whose record is damaged is not, and may be overwritten."""
    try:
        return transaction.record(key) is not None
    except CorruptError:
        return False
