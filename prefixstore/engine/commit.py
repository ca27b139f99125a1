"""Writes a batch of pending pages, captured or imported, in one transaction and within the budget.

The last step of the path of a page: the write queue calls it. Crash safety depends on the order of the steps in
`Committer._write`; `engine.batch` writes the pages.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from prefixstore.backends.contract import ConflictError
from prefixstore.engine.batch import Batch
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.delete import Deleter
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pages import CONFLICTS
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.pending import Deferred, DropReason, PendingPage, Use
from prefixstore.engine.saved_notes import SavedNotes, note_policy
from prefixstore.engine.space import Evictor, Space
from prefixstore.engine.upkeep import Upkeep
from prefixstore.errors import FullError, StorageError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.codec import CODECS
from prefixstore.format.record import time_of_use
from prefixstore.results import Shortage

__all__ = ["Committer"]

log = logging.getLogger("prefixstore")

ATTEMPTS = 6
# how often the extra space is doubled: a disk that is full for another reason should not cost the whole store
MAX_DOUBLINGS = 2
# seconds before the second attempt; each further pause is longer by as much
PAUSE = 0.02
RAW = CODECS["raw"]
# expired pages that one commit deletes beside its own work; the next one continues
EXPIRED_AT_ONCE = 128


class Committer(Part):
    """Writes batches of announced pages. Several threads may use it: the backend's transactions take turns.

    Parameters
    ----------
    housekeeping
        Whether to delete damaged, thinned and expired pages as well, and to record uses.

    Attributes
    ----------
    shortage
        The last time that a page found no space.
    """

    def __init__(
        self,
        shared: Shared,
        evictor: Evictor,
        deleter: Deleter,
        upkeep: Upkeep,
        bookmarks: Bookmarks,
        notes: SavedNotes,
        encode: Encoder,
        *,
        housekeeping: bool,
    ) -> None:
        super().__init__(shared)
        budget = shared.budget
        self.shortage: Shortage | None = None
        self._deleter = deleter
        self._evictor = evictor
        self._encode = encode
        self._upkeep = upkeep
        self._bookmarks = bookmarks
        self._notes = notes
        self._housekeeping = housekeeping
        self._max_bytes = budget.max_bytes
        self._high_bytes, self._low_bytes = (
            int(budget.max_bytes * one) for one in (budget.high_water, budget.low_water)
        )

    @property
    def has_deferred(self) -> bool:
        """Whether uses, bookmarks, figures, or pages to be deleted wait for the next commit."""
        has_changes = self._housekeeping and self._catalog.has_deferred
        return has_changes or self._bookmarks.has_pending or self._notes.figures_are_due

    def commit_all(self, batch: Sequence[PendingPage]) -> int:
        """As `commit`, then bookmarks and notes; how many pages are stored. What fails is dropped and logged."""
        try:
            n_written = len(self.commit(batch))
        except StorageError as error:
            log.warning("%d pages were dropped: %s", len(batch), error)
            return 0
        try:
            self._backend.mend()
            self._bookmarks.write_soon()
            self._notes.save()
        except Exception:  # they handle faults of the location; others must not cost the pages, which are stored
            log.exception("what follows a commit was not done")
        return n_written

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
        self._evictor.load()
        try:
            # Pack before the transaction: other processes wait while it is open.
            waiting = [new for new in batch if catalog.is_pending(new)]
            for new in waiting:
                new.pack(self._encode)
            if waiting:
                with suppress(FullError):
                    self._evictor.respect_budget()
            return self._write_with_space(waiting)
        except FullError as error:
            self.shortage = Shortage(DropReason.FULL.value, len(batch), error.asked or 0, error.available or 0)
            catalog.give_up(batch, DropReason.FULL)
            raise
        except StorageError:
            catalog.give_up(batch, DropReason.UNAVAILABLE)
            raise
        except BaseException:
            catalog.give_up(batch)
            raise

    def _write_with_space(self, packed: Sequence[PendingPage]) -> list[PendingPage]:
        """Write; if the location is full before its budget is, make more space, and write fewer pages at a time."""
        written: list[PendingPage] = []
        waiting, at_once, failures, conflicts = packed, max(len(packed), 1), 0, 0
        while True:
            some = waiting[:at_once]
            try:
                written += self._write(some)
            except ConflictError:
                conflicts += 1
                if conflicts == CONFLICTS:
                    raise
                continue
            except FullError as error:
                # fewer pages may fit: only what fails with one of them counts
                failures += len(some) <= 1
                if error.asked is None:
                    error.asked = _size(some)
                if failures == ATTEMPTS:
                    raise
                # What a transaction frees is reusable only by a later one, and each page that it changes takes space.
                at_once = max(len(some) // 2, 1)
                # Evict nothing for a location that cannot even reclaim: then evicting makes no space either.
                if self._reclaim() and failures > 1:
                    with suppress(FullError):
                        self._make_extra_space(_size(some) << min(failures - 2, MAX_DOUBLINGS))
                    # Give readers time: what they still see cannot be reused.
                    time.sleep(PAUSE * failures)
                    self._reclaim()
                continue
            waiting, failures = waiting[len(some) :], 0
            if not waiting:
                return written

    def _reclaim(self) -> bool:
        """Make what is free usable; whether there was space for that."""
        try:
            self._backend.rows.reclaim()
        except FullError:
            return False
        return True

    def _make_extra_space(self, n_bytes: int) -> None:
        with self._backend.view() as view:
            used = view.used.bytes
        self._evictor.shrink(max(used - max(n_bytes, 1), 0))

    def _write(self, packed: Sequence[PendingPage]) -> list[PendingPage]:
        catalog = self._catalog
        deferred, n_damaged = Deferred(), 0
        shortage: Shortage | None = None

        def committed() -> None:
            catalog.committed(batch.written, deferred)
            if shortage is not None:
                self.shortage = shortage
                log.info("%s", shortage)
            # children first: with a page, those that depend on it are given up
            for new, reason in reversed(batch.refused):
                catalog.give_up([new], reason)

        with catalog.update(self._backend) as transaction:
            space = Space(self._evictor, transaction)
            # Delete what is damaged, expired, or no longer wanted.
            fresh = {new.page.key for new in packed}
            if self._housekeeping:
                deferred = catalog.deferred(fresh)
                n_damaged = self._clean_up(transaction, space, deferred)
            # Record uses: what is evicted depends on them.
            _write_uses(transaction, {key: n for key, n in deferred.uses.items() if key not in fresh})
            # Write the pages, parents first, making space for each.
            batch = Batch(transaction, space, self._evictor, self._deleter)
            batch.write(packed)
            shortage = batch.shortage()
            # And their uses.
            _write_uses(transaction, {key: n for key, n in deferred.uses.items() if key in fresh})
            # Take out pages that were given up meanwhile: their parents may have been evicted for the next one.
            for new in [new for new in batch.written if not catalog.is_pending(new)]:
                batch.written.remove(new)
                if new.page.key in batch.put:
                    transaction.delete(new.page.key)
            if batch.written and self._housekeeping:
                note_policy(transaction, catalog.policy.name)
            self._evictor.used = used = transaction.used
            transaction.after_commit.append(committed)
        self._upkeep.saw(used)
        self._choose_packing(used.bytes, _size(packed))
        self._count([new for new in packed if new.page.key in batch.put], n_damaged)
        return batch.written

    def _count(self, put: Sequence[PendingPage], n_damaged: int) -> None:
        """Count what a transaction has written, and deleted as damaged."""
        for namespace, n in Counter(new.page.namespace for new in put).items():
            mine = [new for new in put if new.page.namespace == namespace]
            self._counters.add({"allocations": n, "bytes_written": _size(mine)}, namespace)
        self._counters.add({"packed": sum(new.record.codec != RAW for new in put), "corrupt": n_damaged})

    def _choose_packing(self, used: int, written: int) -> None:
        """Have new pages packed above the high water mark, and again as `auto` chooses below the low one."""
        # or where there is no space for as much again: a few pages may fill the budget
        if used > min(self._high_bytes, self._max_bytes - written):
            self._encode.is_short_of_space = True
        elif used <= self._low_bytes:
            self._encode.is_short_of_space = False

    def _clean_up(self, transaction: Transaction, space: Space, deferred: Deferred) -> int:
        """Delete pages that cannot or should not be restored; return how many of them were damaged."""
        # Snapshots that were thinned out: not one that is pinned, gone, or was captured again.
        for key in deferred.thinned:
            usage = transaction.usage(key)
            if usage is not None and not usage.pinned and self._catalog.get(key) is None:
                transaction.delete(key)
        # Damaged pages, and what depends on them. Those that are too many for one transaction stay deferred.
        n_damaged = 0
        if deferred.damaged:
            n_damaged, left = self._deleter.delete_damaged(transaction, deferred.damaged)
            for key in left:
                del deferred.damaged[key]
        # Expired leaves.
        if deferred.expired and space.delete_expired(EXPIRED_AT_ONCE):
            deferred.expired = False
        return n_damaged


def _write_uses(transaction: Transaction, uses: Mapping[bytes, Use]) -> None:
    now = time.time_ns()
    transaction.read_ahead(list(uses))
    for key, use in uses.items():
        usage = transaction.usage(key)
        if usage is not None:
            expires = max(usage.expires, use.expires) if usage.expires else 0
            last_used = max(time_of_use(usage.last_used, now), use.last_used)
            used = replace(usage, last_used=last_used, hits=usage.hits + use.n, expires=expires)
            if last_used == use.last_used:
                used = replace(used, uses=max(use.uses, usage.uses), page_class=use.page_class)
            transaction.touch(key, used)


def _size(pages: Sequence[PendingPage]) -> int:
    """The bytes that these pages are stored in."""
    return sum(len(new.payload) for new in pages)
