"""Pages into the backend, within the budget: pack, evict, write, in one transaction."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from prefixstore.backends.base import Backend, Transaction
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog, Fits, NewPage
from prefixstore.engine.room import Room
from prefixstore.errors import CorruptError, FullError, IncompatibleError, StorageError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.codec import decode
from prefixstore.format.keys import TOKEN_BYTES
from prefixstore.format.record import Buffer, Record, Usage, checksum
from prefixstore.stats import Counters

__all__ = ["Committer"]

log = logging.getLogger("prefixstore")

Packed: TypeAlias = tuple[NewPage, Record, Buffer]

ATTEMPTS = 4
# seconds before the second attempt, twice as many before the third, and so on
PAUSE = 0.01


class Committer:
    """Writes batches of announced pages. Used by one thread at a time, or by several: the backend takes turns.

    Nothing of a page that cannot be written is an exception: it is dropped, counted and logged.
    """

    def __init__(self, backend: Backend, catalog: Catalog, budget: Budget, encode: Encoder, counters: Counters) -> None:
        self._backend = backend
        self._catalog = catalog
        self._room = Room(catalog, budget, counters)
        self._encode = encode
        self._counters = counters

    def commit(self, batch: Sequence[NewPage]) -> int:
        """Write announced pages, and with them what was noted: uses, and damaged pages to delete.

        Returns
        -------
        int
            How many pages of the batch are stored now.
        """
        catalog = self._catalog
        try:
            return self._commit([new for new in batch if catalog.is_pending(new)])
        except BaseException:
            # their buffers go back to the pool now: nobody may find them any more
            with catalog.lock:
                given_up = [new.page.key for new in batch if catalog.is_pending(new)]
                for key in given_up:
                    del catalog.pending[key]
                for key in given_up:
                    catalog.lose(key)
            raise
        finally:
            with catalog.lock:
                catalog.writing.difference_update(new.page.key for new in batch)

    def _commit(self, batch: Sequence[NewPage]) -> int:
        packed = [self._pack(new) for new in batch]
        room = sum(len(stored) for _, _, stored in packed)
        cause: StorageError
        for attempt in range(ATTEMPTS):
            try:
                if attempt:
                    # what a transaction deletes is of use to a later one only
                    with self._catalog.transaction(self._backend) as transaction:
                        self._room.make_spare(transaction, room << (attempt - 1))
                    # what somebody still reads cannot be written over
                    time.sleep(PAUSE * attempt)
                    self._backend.reclaim()
                return self._write(packed)
            except FullError as error:
                reason, cause = "full", error
            except StorageError as error:
                reason, cause = "unavailable", error
                break
        log.warning("%d pages are dropped: %s", len(packed), cause)
        with self._catalog.lock:
            for new in batch:
                if self._catalog.is_pending(new):
                    self._catalog.drop(new.page.key, reason)
        return 0

    def _pack(self, new: NewPage) -> Packed:
        page = new.page
        # a page that holds tokens only says nothing about how states are packed
        number, stored = self._encode(page.namespace, new.buffer.view) if page.raw_bytes else (0, b"")
        record = Record(
            page.namespace,
            page.parent,
            page.start,
            page.tokens,
            number,
            page.raw_bytes,
            len(stored),
            checksum(stored),
            page.compute_us,
            page.created,
            page.form,
        )
        return new, record, stored

    def _write(self, packed: Sequence[Packed]) -> int:
        written: list[NewPage] = []
        put: set[bytes] = set()
        catalog = self._catalog
        with catalog.transaction(self._backend) as transaction:
            with catalog.lock:
                damaged, touched, thinned = set(catalog.damaged), dict(catalog.touched), set(catalog.thinned)
                fits = dict(catalog.fits)
            for key in thinned:
                self._thin(transaction, key)
            removed = self._remove_damaged(transaction, damaged, fits) if damaged else 0
            self._room.remove_expired(transaction)
            refused = [
                (new, reason)
                for new, record, stored in packed
                if (reason := self._put(transaction, new, record, stored, written, put)) is not None
            ]
            for key, hits in touched.items():
                self._write_use(transaction, key, hits)
            self._take_back(transaction, written, put)
        for new in written:
            self._backend.keep(new.page.key, new.page.tokens, new.buffer.view)
        with catalog.lock:
            catalog.committed(written)
            if damaged:
                catalog.damaged -= damaged
                for key in fits:
                    catalog.fits.pop(key, None)
                catalog.distrust()
            catalog.thinned -= thinned
            for key, hits in touched.items():
                if catalog.touched.get(key) == hits:
                    del catalog.touched[key]
            for new, reason in refused:
                catalog.drop(new.page.key, reason)
                if reason == "budget":
                    catalog.refused.add(new.page.key)
        self._counters.count("corrupt", removed)
        return len(written)

    def _thin(self, transaction: Transaction, key: bytes) -> None:
        """Delete a snapshot, unless somebody has pinned it, or it was taken anew."""
        usage = transaction.usage(key)
        with self._catalog.lock:
            doomed = usage is not None and not usage.pinned and key not in self._catalog.pending
            if doomed:
                self._catalog.forget(key)
        if doomed:
            transaction.delete(key)

    def _remove_damaged(self, transaction: Transaction, suspects: Collection[bytes], fits: Mapping[bytes, Fits]) -> int:
        """Delete those that are damaged indeed, and all that is stored behind them; how many.

        Another process may have put a good page in the place of a suspect, or pages behind it that are not known here.
        """
        children: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for key, record, _ in transaction.scan():
            if isinstance(record, Record):
                children[record.parent].append(key)
        doomed = dict.fromkeys(key for key in suspects if _is_damaged(transaction, key, fits.get(key)))
        behind = list(doomed)
        for key in behind:
            behind += children.pop(key, ())
        doomed |= dict.fromkeys(behind)
        for key in doomed:
            transaction.delete(key)
            with self._catalog.lock:
                if key not in self._catalog.pending:
                    self._catalog.lose(key)
        return len(doomed)

    def _put(
        self,
        transaction: Transaction,
        new: NewPage,
        record: Record,
        stored: Buffer,
        written: list[NewPage],
        put: set[bytes],
    ) -> str | None:
        """Write one page; or why not."""
        page, catalog = new.page, self._catalog
        try:
            if page.parent != page.namespace and not _is_stored(transaction, page.parent):
                return "orphan"
            is_stored = _is_stored(transaction, page.key)
        except IncompatibleError as error:
            log.warning("a page is not written: %s", error)
            return "unavailable"
        with catalog.lock:
            if not catalog.is_pending(new):
                return None  # forgotten since: superseded, or cleared
            catalog.writing.add(page.key)
            older = catalog.index.superseded_by(page)
            # one that is being written by somebody else was: transactions take turns
            is_stored_tail = older is not None and (older.key not in catalog.pending or older.key in catalog.writing)
            superseded = older.key if older is not None and older.is_leaf and is_stored_tail else None
            if older is not None and superseded is not None:
                page.pinned = page.pinned or older.pinned
                catalog.forget(older.key)
        if superseded is not None:
            transaction.delete(superseded)
        if not is_stored:
            if (reason := self._room.make_for(transaction, record, len(stored), new.settings)) is not None:
                return reason
            transaction.put_namespace(page.namespace, new.settings)
            # hits that it has had already are among the uses that are written afterwards
            usage = Usage(page.last_used, 0, page.pinned, page.priority, page.expires)
            transaction.put(page.key, record, usage, stored)
            put.add(page.key)
        with catalog.lock:
            catalog.index.resize(page, len(stored))
        written.append(new)
        return None

    def _take_back(self, transaction: Transaction, written: list[NewPage], put: set[bytes]) -> None:
        """Delete pages that were given up while they were written: room may have been made of those before them."""
        with self._catalog.lock:
            given_up = [new for new in written if not self._catalog.is_pending(new)]
        for new in given_up:
            written.remove(new)
            if new.page.key in put:
                transaction.delete(new.page.key)

    def _write_use(self, transaction: Transaction, key: bytes, hits: int) -> None:
        usage = transaction.usage(key)
        page = self._catalog.index.get(key)
        if usage is not None and page is not None:
            expires = max(usage.expires, page.expires) if usage.expires else 0
            used = replace(
                usage, last_used=max(usage.last_used, page.last_used), hits=usage.hits + hits, expires=expires
            )
            transaction.touch(key, used)


def _is_stored(transaction: Transaction, key: bytes) -> bool:
    """Whether a page is there; one whose record is damaged is not, and may be overwritten."""
    try:
        return transaction.record(key) is not None
    except CorruptError:
        return False


def _is_damaged(transaction: Transaction, key: bytes, fits: Fits | None) -> bool:
    """Whether a page cannot be restored for good: by its own fault, or because it does not follow any page."""
    try:
        payload, record = transaction.payload(key), transaction.record(key)
        if record is None or payload is None:
            return record is not None or payload is not None
        state = decode(record, payload)
        if fits is not None and not fits(state, record.start, len(record.tokens) // TOKEN_BYTES):
            return True
        return not record.follows(transaction.record(record.parent) if record.parent != record.namespace else None)
    except CorruptError:
        return True
    except IncompatibleError:
        return False
