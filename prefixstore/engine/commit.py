"""Writes a batch of pending pages, captured or imported, in one transaction and within the budget.

The last step of the path of a page: the write queue calls it. Crash safety depends on the order of the steps in
`Committer._write`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from prefixstore.backends.contract import ConflictError
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.delete import Deleter
from prefixstore.engine.eviction import Victim
from prefixstore.engine.figures import FigureKeeper
from prefixstore.engine.index import Page, is_same, later
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import Used
from prefixstore.engine.pages import CONFLICTS, Pages
from prefixstore.engine.pending import Deferred, PackedPage, PendingPage, Use
from prefixstore.engine.policy_memory import note_policy
from prefixstore.engine.ram import RamTier
from prefixstore.engine.relatives import siblings_of
from prefixstore.engine.space import Evictor, Space
from prefixstore.engine.waiting import DropReason
from prefixstore.errors import CorruptError, FullError, IncompatibleError, StorageError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.codec import CODECS
from prefixstore.format.record import Record, Usage, time_of_use
from prefixstore.stats import Counters, Shortage

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
    keeper
        Keeps in the location what was counted.
    on_used
        Called after each transaction with what the location holds then.
    housekeeping
        Whether to delete damaged, thinned and expired pages as well, and to record uses.

    Attributes
    ----------
    shortage
        The last time that a page found no space.
    """

    def __init__(
        self,
        backend: Pages,
        catalog: Catalog,
        deleter: Deleter,
        ram: RamTier,
        budget: Budget,
        encode: Encoder,
        counters: Counters,
        keeper: FigureKeeper,
        *,
        on_used: Callable[[Used], None],
        housekeeping: bool,
    ) -> None:
        self.shortage: Shortage | None = None
        self._backend = backend
        self._catalog = catalog
        self._deleter = deleter
        self._ram = ram
        self._evictor = Evictor(catalog, budget, counters)
        self._encode = encode
        self._counters = counters
        self._keeper = keeper
        self._on_used = on_used
        self._housekeeping = housekeeping
        self._max_bytes = budget.max_bytes
        self._high_bytes, self._low_bytes = (
            int(budget.max_bytes * one) for one in (budget.high_water, budget.low_water)
        )

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
        # what is written at the end of the transaction is not to be given back before
        held = [new.buffer for new in batch if new.buffer is not None and new.buffer.hold()]
        try:
            # Pack before the transaction: other processes wait while it is open.
            packed = [new.pack(self._encode) for new in catalog.still_pending(batch)]
            if packed:
                with suppress(FullError):
                    self._evictor.respect_budget(self._backend)
            return self._write_with_space(packed)
        except FullError as error:
            self.shortage = Shortage(DropReason.FULL.value, len(batch), error.asked or 0, error.available or 0)
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
            for buffer in held:
                buffer.release()

    def _write_with_space(self, packed: Sequence[PackedPage]) -> list[PendingPage]:
        """Write; if the location is full before its budget is, make more space, and write fewer pages at a time."""
        written: list[PendingPage] = []
        waiting, at_once, failures, conflicts = packed, max(len(packed), 1), 0, 0
        was_full = False
        while True:
            some = waiting[:at_once]
            try:
                # figures wait where they may be why it fails; not if this may be the last commit
                insists = self._keeper.hurries and conflicts < CONFLICTS - 1
                written += self._write(some, with_figures=not was_full and (not conflicts or insists))
            except ConflictError:
                self._keeper.conflicted()
                conflicts += 1
                if conflicts == CONFLICTS:
                    raise
                continue
            except FullError as error:
                was_full = True
                # fewer pages may fit: only what fails with one of them counts
                failures += len(some) <= 1
                if error.asked is None:
                    error.asked = sum(len(one.payload) for one in some)
                if failures == ATTEMPTS:
                    raise
                # What a transaction frees is reusable only by a later one, and each page that it changes takes space.
                at_once = max(len(some) // 2, 1)
                # Evict nothing for a location that cannot even reclaim: then evicting makes no space either.
                if self._reclaim() and failures > 1:
                    size = sum(len(one.payload) for one in some)
                    with suppress(FullError):
                        self._make_extra_space(size << min(failures - 2, MAX_DOUBLINGS))
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
            self._backend.reclaim()
        except FullError:
            return False
        return True

    def _make_extra_space(self, n_bytes: int) -> None:
        with self._backend.view() as view:
            used = view.used.bytes
        self._evictor.shrink(self._backend, max(used - max(n_bytes, 1), 0))

    def _write(self, packed: Sequence[PackedPage], *, with_figures: bool) -> list[PendingPage]:
        catalog = self._catalog
        written: list[PendingPage] = []
        put: set[bytes] = set()
        refused: list[tuple[PendingPage, DropReason]] = []
        deferred, n_damaged = Deferred(), 0
        shortage: Shortage | None = None
        refused_at: int | None = None

        def committed() -> None:
            # Keep states in RAM while their buffers are still here, then tell the catalog.
            for new in written:
                if new.buffer is not None:
                    self._ram.keep(new.page, new.buffer.view)
            catalog.committed(written, deferred)
            self._keeper.committed()
            if shortage is not None:
                self.shortage = shortage
                log.info("%s", shortage)
            # children first: with a page, those that depend on it are given up
            for new, reason in reversed(refused):
                catalog.refuse(new, reason, refused_at)

        with catalog.update(self._backend, committed) as transaction:
            space = Space(self._evictor, transaction)
            # Delete what is damaged, expired, or no longer wanted.
            fresh = {one.record.key for one in packed}
            if self._housekeeping:
                deferred = catalog.deferred(fresh)
                n_damaged = self._clean_up(transaction, space, deferred)
            # Record uses: what is evicted depends on them.
            self._write_uses(transaction, {key: n for key, n in deferred.uses.items() if key not in fresh})
            # Write the pages, parents first, making space for each.
            refused = self._put_all(transaction, space, packed, written, put)
            shortage = self._shortage(space, packed, refused)
            refused_at = transaction.generation if refused and not put else None
            # And their uses.
            self._write_uses(transaction, {key: n for key, n in deferred.uses.items() if key in fresh})
            # Take out pages that were given up meanwhile: their parents may have been evicted for the next one.
            for new in catalog.given_up(written):
                written.remove(new)
                if new.page.key in put:
                    transaction.delete(new.page.key)
            if written and self._housekeeping:
                note_policy(transaction, self._catalog.policy_name)
            n_bytes = sum(one.pending.n_bytes for one in packed)
            spaces = {new.page.namespace for new in written}
            self._keeper.write(transaction, len(packed), n_bytes, spaces, is_wanted=with_figures and self._housekeeping)
            self._evictor.used = used = transaction.used
        self._on_used(used)
        self._choose_packing(used.bytes, sum(len(one.payload) for one in packed))
        self._counters.count("corrupt", n_damaged)
        self._counters.count("allocations", len(put))
        self._counters.count("packed", sum(one.record.key in put and one.record.codec != RAW for one in packed))
        return written

    def _choose_packing(self, used: int, written: int) -> None:
        """Have new pages packed above the high water mark, and again as `auto` chooses below the low one."""
        # or where there is no space for as much again: a few pages may fill the budget
        if used > min(self._high_bytes, self._max_bytes - written):
            self._encode.is_short_of_space = True
        elif used <= self._low_bytes:
            self._encode.is_short_of_space = False

    def _clean_up(self, transaction: Transaction, space: Space, deferred: Deferred) -> int:
        """Delete pages that cannot or should not be restored; return how many of them were damaged."""
        # Snapshots that were thinned out.
        for key in deferred.thinned:
            if self._catalog.may_delete_snapshot(key, transaction.usage(key)):
                transaction.delete(key)
        # Damaged pages, and what depends on them. Those that are too many for one transaction stay deferred.
        n_damaged = 0
        if deferred.damaged:
            n_damaged, left = self._deleter.delete_damaged(transaction, deferred.damaged, deferred.suspicions)
            for key in left:
                del deferred.damaged[key]
            deferred.suspicions = {key: one for key, one in deferred.suspicions.items() if key not in left}
        # Expired leaves.
        if self._catalog.expects_expiry and space.delete_expired(EXPIRED_AT_ONCE):
            deferred.expired = False
        return n_damaged

    def _put_all(
        self,
        transaction: Transaction,
        space: Space,
        packed: Sequence[PackedPage],
        written: list[PendingPage],
        put: set[bytes],
    ) -> list[tuple[PendingPage, DropReason]]:
        """Write pages; those that are refused, and why."""
        found = _stored(transaction, packed)
        # nothing is evicted for a page that cannot be written
        reasons = _hindrances(packed, found)
        refused: list[tuple[PendingPage, DropReason]] = []
        for i, one in enumerate(packed):
            page = one.pending.page
            # what follows a page that is refused is refused as well
            reason = reasons.get(page.key) or reasons.get(page.parent)
            if reason is None:
                admits = partial(self._admits, _followers(packed, i))
                reason = self._put(transaction, space, one, admits, found, written, put)
            if reason is not None:
                reasons[page.key] = reason
                refused.append((one.pending, reason))
        return refused

    def _admits(self, followers: Sequence[PackedPage], victim: Victim) -> bool:
        """Whether one of these pages is worth more than a victim, or is to be stored in any case."""
        return any(
            one.pending.is_wanted or one.pending.page.pinned or self._catalog.admits(one, victim) for one in followers
        )

    def _shortage(
        self, space: Space, packed: Sequence[PackedPage], refused: Sequence[tuple[PendingPage, DropReason]]
    ) -> Shortage | None:
        """What the last of the refused pages asked for, and what there was; None if none was refused for its size."""
        of = {one.pending.page.key: one for one in packed}
        for new, reason in reversed(refused):
            if reason in (DropReason.BUDGET, DropReason.QUOTA, DropReason.ADMISSION):
                n_pages = sum(1 for _, other in refused if other is reason)
                return space.shortage(of[new.page.key], reason, n_pages)
        return None

    def _put(
        self,
        transaction: Transaction,
        space: Space,
        one: PackedPage,
        admits: Callable[[Victim], bool],
        found: dict[bytes, Record | StorageError],
        written: list[PendingPage],
        put: set[bytes],
    ) -> DropReason | None:
        """Write one page; returns the reason if it is refused."""
        new, record, page = one.pending, one.record, one.pending.page
        if page.parent not in put and not _follows(record, found.get(page.parent)):
            return DropReason.ORPHAN
        tail, is_covered = siblings_of(transaction, page)
        if not self._catalog.claim(new, is_covered=is_covered):
            return None
        if tail is not None and (self._catalog.pending_after(tail.key) or transaction.followed([tail.key])):
            tail = None
        if tail is not None and tail.pinned:
            page.pinned = True
        if self._is_stored(transaction, page, found):
            self._use_stored(transaction, page, tail)
        else:
            reason = self._make_space(transaction, space, one, admits, tail)
            if reason is not None:
                return reason
            transaction.put_namespace(page.namespace, new.settings)
            transaction.put(page.key, record, _usage_of(one), one.payload)
            space.put(page)
            put.add(page.key)
        page.stored_bytes = record.stored_bytes
        _keep_ancestors(transaction, page)
        written.append(new)
        return None

    def _use_stored(self, transaction: Transaction, page: Page, tail: Page | None) -> None:
        """A captured page is stored already: it lasts as long as the captured one, and takes the place of the tail."""
        usage = transaction.usage(page.key)
        if usage is not None:
            pinned = usage.pinned or (tail is not None and tail.pinned)
            expires = later(usage.expires, page.expires)
            if (pinned, expires) != (usage.pinned, usage.expires):
                transaction.touch(page.key, replace(usage, pinned=pinned, expires=expires))
        if tail is not None:
            transaction.delete(tail.key)

    def _make_space(
        self,
        transaction: Transaction,
        space: Space,
        one: PackedPage,
        admits: Callable[[Victim], bool],
        tail: Page | None,
    ) -> DropReason | None:
        """Make space for a page, and delete the tail that it replaces; if the page is refused, the tail stays."""
        reason = space.make(one, admits, tail)
        if reason is not None or tail is None:
            return reason
        # What it frees is exactly known only when it is gone.
        copy = _copy_of(transaction, tail.key)
        transaction.delete(tail.key)
        reason = space.make(one, admits)
        if reason is not None and copy is not None:
            transaction.put(tail.key, *copy)
        return reason

    def _is_stored(self, transaction: Transaction, page: Page, found: dict[bytes, Record | StorageError]) -> bool:
        """Whether a page is stored already. Another page under its key is deleted, with all that is stored after it."""
        stored = found.get(page.key)
        if not isinstance(stored, Record):
            return False  # one whose record is damaged is overwritten
        if is_same(stored, page) and stored.start == page.start:
            return True
        log.warning("another page has the key %s; deleting it and its descendants", page.key.hex())
        for key in self._deleter.delete_other(transaction, page.key):
            found.pop(key, None)
        return False

    def _write_uses(self, transaction: Transaction, uses: Mapping[bytes, Use]) -> None:
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


def _hindrances(packed: Sequence[PackedPage], found: Mapping[bytes, Record | StorageError]) -> dict[bytes, DropReason]:
    """Which of these pages cannot be written, whatever space there is, and why."""
    reasons: dict[bytes, DropReason] = {}
    here: set[bytes] = set()
    for one in packed:
        page = one.pending.page
        # The parent has to be stored; the page itself may be: another process may have computed it too.
        error = next(
            (each for key in (page.parent, page.key) if isinstance(each := found.get(key), IncompatibleError)), None
        )
        if error is not None:
            log.warning("a page was not written: %s", error)
            reasons[page.key] = DropReason.UNAVAILABLE
        elif page.parent not in here and not _follows(one.record, found.get(page.parent)):
            reasons[page.key] = reasons.get(page.parent, DropReason.ORPHAN)
        else:
            here.add(page.key)
    return reasons


def _follows(record: Record, parent: Record | StorageError | None) -> bool:
    """Whether a page may be written: what it follows is stored."""
    if record.parent == record.namespace:
        return record.follows(None)
    return isinstance(parent, Record) and parent.key == record.parent and record.follows(parent)


def _keep_ancestors(transaction: Transaction, page: Page) -> None:
    """Have the pages that a new one follows expire no earlier than it does."""
    key = page.parent
    while key != page.namespace:
        record, usage = transaction.records([key]).get(key, (None, Usage(0)))
        if not isinstance(record, Record):
            return
        if Page.stored(key, record, usage).lasts_until(page):
            return
        transaction.touch(key, replace(usage, expires=page.expires if not page.pinned else 0))
        key = record.parent


def _usage_of(one: PackedPage) -> Usage:
    """The first usage of a page. The uses that a captured one has had already are among those written afterwards."""
    page = one.pending.page
    if one.usage is not None:
        return replace(one.usage, pinned=page.pinned)
    return Usage(page.last_used, 0, page.pinned, page.priority, page.expires, page.uses, page.page_class)


def _copy_of(transaction: Transaction, key: bytes) -> tuple[Record, Usage, bytes] | None:
    """A stored page, to be put again; None if it is damaged."""
    try:
        record, usage, payload = transaction.record(key), transaction.usage(key), transaction.payload(key)
    except (CorruptError, IncompatibleError):
        return None
    if record is None or usage is None or payload is None:
        return None
    return record, usage, bytes(payload)


def _followers(packed: Sequence[PackedPage], first: int) -> Sequence[PackedPage]:
    """A page, and those that come after it, each the parent of the next; the last one first."""
    end = first + 1
    while end < len(packed) and packed[end].pending.page.parent == packed[end - 1].pending.page.key:
        end += 1
    return packed[first:end][::-1]


def _stored(transaction: Transaction, packed: Sequence[PackedPage]) -> dict[bytes, Record | StorageError]:
    """The records of these pages and of their parents, as far as they are stored, or why they cannot be read."""
    keys = dict.fromkeys(key for one in packed for key in (one.pending.page.parent, one.pending.page.key))
    return {key: record for key, (record, _) in transaction.records(list(keys)).items()}
