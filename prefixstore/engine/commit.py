"""Commits pending pages, captured or imported, in one transaction and within the budget.

Crash safety depends on the order of the steps in `Committer._write`. A `Batch` writes the pages themselves: parents
first, each if there is space for it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from prefixstore.backends.contract import ConflictError
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.budget import HIGH_WATER, LOW_WATER
from prefixstore.engine.delete import Deleter
from prefixstore.engine.eviction import Victim
from prefixstore.engine.page import Page, is_same, later
from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.pages import CONFLICTS
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.pending import Deferred, DropReason, PendingPage, Use
from prefixstore.engine.relatives import overlaps_of
from prefixstore.engine.saved_notes import SavedNotes, note_policy
from prefixstore.engine.space import Evictor, Space
from prefixstore.errors import FullError, IncompatibleError, StorageError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.codec import RAW
from prefixstore.format.record import Record, Usage, time_of_use
from prefixstore.units import counted

log = logging.getLogger("prefixstore")

ATTEMPTS = 6
# how often the extra space is doubled: a disk that is full for another reason should not cost the whole store
MAX_DOUBLINGS = 2
# seconds before the second attempt; each further pause is longer by as much
PAUSE = 0.02
# how many expired pages one commit deletes besides its own work; the next one continues
EXPIRED_AT_ONCE = 128


class Batch:
    """Writes packed pages in one transaction.

    Attributes
    ----------
    written
        The pages that are stored once the transaction is committed, including those that were stored before.
    put
        The keys of those that were not stored before.
    refused
        The other pages, each with the reason.
    """

    def __init__(self, transaction: PageUpdate, space: Space, evictor: Evictor, deleter: Deleter) -> None:
        self._transaction = transaction
        self._space = space
        self._evictor = evictor
        self._catalog = evictor.catalog
        self._deleter = deleter
        # the stored records of the pages and of their parents, or why they cannot be read
        self._stored: dict[bytes, Record | StorageError] = {}
        self.written: list[PendingPage] = []
        self.put: set[bytes] = set()
        self.refused: list[tuple[PendingPage, DropReason]] = []

    def write(self, packed: Sequence[PendingPage]) -> None:
        """Write pages, parents before their children."""
        keys = dict.fromkeys(key for new in packed for key in (new.page.parent, new.page.key))
        self._stored = {key: record for key, (record, _) in self._transaction.records(list(keys)).items()}
        reasons: dict[bytes, DropReason] = {}
        for i, new in enumerate(packed):
            # descendants of a refused page are refused as well
            reason = reasons.get(new.page.parent) or self._hindrance(new)
            if reason is None:
                reason = self._write(new, partial(self._admits, packed, i))
            if reason is not None:
                reasons[new.page.key] = reason
                self.refused.append((new, reason))

    def _hindrance(self, new: PendingPage) -> DropReason | None:
        """Why a page cannot be written at all, so that nothing may be evicted for it; None if it can."""
        page = new.page
        # the parent must be stored; the page itself may be, if another process has computed it too
        for key in (page.parent, page.key):
            error = self._stored.get(key)
            if isinstance(error, IncompatibleError):
                log.warning("a page was not written: %s", error)
                return DropReason.UNAVAILABLE
        return None if page.parent in self.put or self._follows(new.record) else DropReason.ORPHAN

    def _follows(self, record: Record) -> bool:
        """Whether the parent of a page is stored, and ends where the page starts."""
        if record.parent == record.namespace:
            return record.follows(None)
        parent = self._stored.get(record.parent)
        return isinstance(parent, Record) and parent.key == record.parent and record.follows(parent)

    def _admits(self, packed: Sequence[PendingPage], i: int, victim: Victim) -> bool:
        """Whether a page, or one of the batch that needs it, must be stored, or is worth more than a victim."""
        followers = _followers(packed, i)
        return any(new.is_wanted or new.page.pinned or self._evictor.admits(new, victim) for new in followers)

    def _write(self, new: PendingPage, admits: Callable[[Victim], bool]) -> DropReason | None:
        """Write one page; returns the reason if it is refused, else None."""
        transaction, record, page = self._transaction, new.record, new.page
        tail, is_covered = overlaps_of(transaction, page)
        if not self._catalog.claim(new, is_covered=is_covered):
            return None
        if tail is not None and (self._catalog.pending_after(tail.key) or transaction.followed([tail.key])):
            tail = None
        if tail is not None and tail.pinned:
            page.pinned = True
        if self._is_stored(page):
            self._use_stored(page, tail)
        else:
            reason = self._space.make(new, admits, tail)
            if reason is not None:
                return reason
            if tail is not None:
                transaction.delete(tail.key)
            transaction.put_namespace(page.namespace, new.settings)
            transaction.put(page.key, record, _usage_of(new), new.payload)
            self._space.added(page.namespace, page.key)
            self.put.add(page.key)
        page.stored_bytes = record.stored_bytes
        self._keep_ancestors(page)
        self.written.append(new)
        return None

    def _is_stored(self, page: Page) -> bool:
        """Whether a page is stored already. If its key has another page, that is deleted, with its descendants."""
        stored = self._stored.get(page.key)
        if not isinstance(stored, Record):
            return False  # a damaged record is overwritten
        if is_same(stored, page) and stored.start == page.start:
            return True
        log.warning("another page has the key %s; deleting it and its descendants", page.key.hex())
        for key in self._deleter.delete_other(self._transaction, page.key):
            self._stored.pop(key, None)
        return False

    def _use_stored(self, page: Page, tail: Page | None) -> None:
        """Keep a page that is stored already as long as the captured one, and delete the tail that it continues."""
        usage = self._transaction.usage(page.key)
        if usage is not None:
            pinned = usage.pinned or (tail is not None and tail.pinned)
            expires = later(usage.expires, page.expires)
            if (pinned, expires) != (usage.pinned, usage.expires):
                self._transaction.touch(page.key, replace(usage, pinned=pinned, expires=expires))
        if tail is not None:
            self._transaction.delete(tail.key)

    def _keep_ancestors(self, page: Page) -> None:
        """Make the ancestors of a new page expire no earlier than the page."""
        key = page.parent
        while key != page.namespace:
            record, usage = self._transaction.records([key]).get(key, (None, Usage(0)))
            if not isinstance(record, Record) or Page.stored(key, record, usage).lasts_until(page):
                return
            self._transaction.touch(key, replace(usage, expires=page.expires if not page.pinned else 0))
            key = record.parent


def _followers(packed: Sequence[PendingPage], first: int) -> Sequence[PendingPage]:
    """A page and the chain of children that comes right after it in the batch; the last one first."""
    end = first + 1
    while end < len(packed) and packed[end].page.parent == packed[end - 1].page.key:
        end += 1
    return packed[first:end][::-1]


def _usage_of(new: PendingPage) -> Usage:
    """The usage that a new page is put with. Uses of a captured page so far are deferred, and written after it."""
    page = new.page
    if new.usage is not None:
        return replace(new.usage, pinned=page.pinned)
    return replace(page.usage, hits=0)


class Committer(Part):
    """Commits batches of pending pages. Several threads may use it: the updates of a location take turns.

    Parameters
    ----------
    housekeeping
        Whether commits also delete damaged, thinned and expired pages, and record uses.
    """

    def __init__(
        self,
        shared: Shared,
        evictor: Evictor,
        deleter: Deleter,
        bookmarks: Bookmarks,
        notes: SavedNotes,
        encode: Encoder,
        *,
        housekeeping: bool,
    ) -> None:
        super().__init__(shared)
        self._deleter = deleter
        self._evictor = evictor
        self._encode = encode
        self._bookmarks = bookmarks
        self._notes = notes
        self._housekeeping = housekeeping

    @property
    def has_deferred(self) -> bool:
        """Whether uses, bookmarks, figures, or pages to be deleted wait for the next commit."""
        has_changes = self._housekeeping and self._catalog.has_deferred
        return has_changes or self._bookmarks.has_pending or self._notes.figures_are_due

    def commit_all(self, batch: Sequence[PendingPage]) -> int:
        """Commit a batch, and save notes; returns how many of its pages are stored. A failure is logged."""
        try:
            n_written = len(self.commit(batch))
        except StorageError as error:
            what = f"{counted(len(batch), 'page')} dropped" if batch else "uses and figures are not written yet"
            log.warning("%s: %s", what, error)
            return 0
        try:
            self._backend.mend()
            self._notes.save()
        except Exception:  # faults of the location are handled there; any other must not cost the pages
            log.exception("what follows a commit was not done")
        return n_written

    def commit(self, batch: Sequence[PendingPage]) -> list[PendingPage]:
        """Write pending pages and deferred changes; returns the pages of the batch that are stored now.

        Pages that do not fit into the budget are dropped and counted, without an error.

        Raises
        ------
        StorageError
            If the transaction fails: `FullError` after several attempts to make space. All pages are dropped then, and
            counted.
        """
        catalog = self._catalog
        try:
            # Pack before the transaction: other processes wait while it is open.
            waiting = [new for new in batch if catalog.is_pending(new)]
            for new in waiting:
                new.pack(self._encode)
            if waiting:
                with suppress(FullError):
                    self._evictor.respect_budget()
            return self._write_with_space(waiting)
        except FullError:
            catalog.give_up(batch, DropReason.FULL)
            raise
        except StorageError:
            catalog.give_up(batch, DropReason.UNAVAILABLE)
            raise
        except BaseException:
            catalog.give_up(batch)
            raise

    def _write_with_space(self, packed: Sequence[PendingPage]) -> list[PendingPage]:
        """Write pages; if the location is full before its budget is, evict more, and write fewer at a time."""
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
                # fewer pages may fit: only a failure with a single page counts
                failures += len(some) <= 1
                if error.asked is None:
                    error.asked = _size(some)
                if failures == ATTEMPTS:
                    raise
                # each change needs some space, and only a later transaction can use what this one frees
                at_once = max(len(some) // 2, 1)
                # in a location that cannot even reclaim, evicting makes no space either
                if self._reclaim() and failures > 1:
                    with suppress(FullError):
                        self._make_extra_space(_size(some) << min(failures - 2, MAX_DOUBLINGS))
                    # what readers still see cannot be reused: give them time
                    time.sleep(PAUSE * failures)
                    self._reclaim()
                continue
            waiting, failures = waiting[len(some) :], 0
            if not waiting:
                return written

    def _reclaim(self) -> bool:
        """Make freed space usable; returns False if there is not even space for that."""
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

        def committed() -> None:
            catalog.committed(batch.written, deferred)
            # children first: dropping a page drops its descendants as well
            for new, reason in reversed(batch.refused):
                catalog.give_up([new], reason)

        with catalog.update(self._backend) as transaction:
            self._evictor.load(transaction)
            space = Space(self._evictor, transaction)
            # Delete pages that are damaged, expired, or no longer wanted.
            fresh = {new.page.key for new in packed}
            if self._housekeeping:
                deferred = catalog.deferred(fresh)
                n_damaged = self._clean_up(transaction, space, deferred)
            # Record uses, on which eviction depends.
            _write_uses(transaction, {key: n for key, n in deferred.uses.items() if key not in fresh})
            # Write the pages, parents first, and make space for each.
            batch = Batch(transaction, space, self._evictor, self._deleter)
            batch.write(packed)
            # Record their uses.
            _write_uses(transaction, {key: n for key, n in deferred.uses.items() if key in fresh})
            # Delete pages that were dropped meanwhile: their parents may have been evicted for the next one.
            for new in [new for new in batch.written if not catalog.is_pending(new)]:
                batch.written.remove(new)
                if new.page.key in batch.put:
                    transaction.delete(new.page.key)
            self._bookmarks.write(transaction, fresh)
            if batch.written and self._housekeeping:
                note_policy(transaction, catalog.policy.name)
            self._evictor.saw(used := transaction.used)
            transaction.after_commit.append(committed)
        self._choose_packing(used.bytes, _size(packed))
        self._count([new for new in packed if new.page.key in batch.put], n_damaged)
        return batch.written

    def _count(self, put: Sequence[PendingPage], n_damaged: int) -> None:
        """Count the pages that a transaction has put, and those that it has deleted as damaged."""
        for namespace, n in Counter(new.page.namespace for new in put).items():
            mine = [new for new in put if new.page.namespace == namespace]
            self._counters.add({"allocations": n, "bytes_written": _size(mine)}, namespace)
        self._counters.add({"packed": sum(new.record.codec != RAW for new in put), "corrupt": n_damaged})

    def _choose_packing(self, used: int, written: int) -> None:
        """Pack new pages above the high water mark; below the low one, `auto` chooses again."""
        most = self._budget.max_bytes
        # also where there is no space for another batch like this one: a few pages may fill the budget
        if used > min(most * HIGH_WATER, most - written):
            self._encode.is_short_of_space = True
        elif used <= most * LOW_WATER:
            self._encode.is_short_of_space = False

    def _clean_up(self, transaction: PageUpdate, space: Space, deferred: Deferred) -> int:
        """Delete pages that cannot or should not be restored; returns how many of them were damaged."""
        # thinned snapshots, but not one that is pinned, gone, or was captured again
        for key in deferred.thinned:
            usage = transaction.usage(key)
            if usage is not None and not usage.pinned and self._catalog.get(key) is None:
                transaction.delete(key)
        # damaged pages and their descendants; those that are too many for one transaction stay deferred
        n_damaged = 0
        if deferred.damaged:
            n_damaged, left = self._deleter.delete_damaged(transaction, deferred.damaged)
            for key in left:
                del deferred.damaged[key]
        # expired leaves
        if deferred.expired and space.delete_expired(EXPIRED_AT_ONCE):
            deferred.expired = False
        return n_damaged


def _write_uses(transaction: PageUpdate, uses: Mapping[bytes, Use]) -> None:
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
    """The size of the payloads of these pages."""
    return sum(len(new.payload) for new in pages)
