"""What is stored, as far as this process knows, and the pages that are still to be written.

Two kinds of pages are in the index: committed ones, and pending ones, whose bytes wait in a buffer. Both are matched
and restored alike.

Each method takes the catalog's lock for a moment, `Catalog.update` at its steps. The lock is never held while the
backend is asked, or while bytes are copied or packed: a completion may wait for it. A thread in a transaction may use
the catalog, not the other way round.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from heapq import nsmallest
from typing import NamedTuple

from prefixstore.backends.base import Backend, Transaction, View
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.contents import Contents, DropReason, Taken
from prefixstore.engine.eviction import Policy
from prefixstore.engine.index import Index, Page, Path, is_same
from prefixstore.engine.journal import Journal
from prefixstore.engine.pending import Deferred, PendingPage, Suspicion
from prefixstore.engine.ram import RamTier
from prefixstore.engine.snapshot_policy import thin
from prefixstore.engine.strays import Strays
from prefixstore.engine.totals import Group, Total
from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.keys import TOKEN_BYTES, Tokens
from prefixstore.format.record import Record, Usage, time_of_use
from prefixstore.stats import Counters

__all__ = ["Catalog", "Claim", "Placement", "Victims"]

log = logging.getLogger("prefixstore")


class Placement(Enum):
    """What became of a page that was announced."""

    ADDED = "added"
    KNOWN = "known"
    """It is here, or a longer page covers it."""
    REFUSED = "refused"
    """There was no space for it earlier, or another page has its key."""
    ORPHAN = "orphan"
    """Its parent is not here, or does not end where it starts."""


class Claim(NamedTuple):
    """A pending page that its transaction may write, and the stored tail that it replaces."""

    superseded: Page | None
    taken: tuple[Taken, ...] = ()


class Victims:
    """Pages to delete, in order. Each `next` takes the catalog's lock for a moment."""

    def __init__(self, lock: threading.RLock, pages: Generator[Page, None, None]) -> None:
        self._lock = lock
        self._pages = pages

    def next(self) -> Page | None:
        """The next page; None when there are no more."""
        with self._lock:
            return next(self._pages, None)

    def close(self) -> None:
        """Put back what was passed over."""
        with self._lock:
            self._pages.close()


class Catalog:
    """The index, kept up with the backend, and what waits for the next commit.

    Parameters
    ----------
    policy
        The order of eviction.
    counters
        Counts what is dropped.
    ram
        Is told which pages have left the location.
    """

    def __init__(self, policy: Policy, counters: Counters, ram: RamTier) -> None:
        self._policy = policy
        self._ram = ram
        self._lock = threading.RLock()
        self._contents = Contents(policy, counters, ram)
        # pages for which there was no space
        self._refused: set[bytes] = set()
        self._generation = -1
        self._trusted = False
        # taken by one transaction of this process at a time
        self._turn = threading.Lock()

    # -- keeping up with the backend ----------------------------------------------------------------------------------

    def refresh(self, view: View, *, newest: bool = False) -> int:
        """Bring the index to the generation of the view, unless it is ahead of it.

        Every transaction begins with this, so what a transaction changes in the index is never undone by what another
        thread has read before.

        Parameters
        ----------
        view
            Of the backend.
        newest
            Whether the view is of the latest commit. An index that is ahead of it describes a store that was replaced.

        Returns
        -------
        int
            How many records were read.
        """
        generation = view.generation
        n_records = 0
        while True:
            with self._lock:
                if newest and generation < self._generation:
                    self._distrust()
                if not self._is_news(generation):
                    return n_records
                known = self._generation if self._trusted else None
            changed = view.changes(known) if known is not None else None
            found: Mapping[bytes, tuple[Record | StorageError, Usage]]
            if changed is None:
                found = {key: (record, usage) for key, record, usage in view.scan()}
            else:
                found = view.records(changed)
            n_records += len(found)
            with self._lock:
                if not self._is_news(generation):
                    return n_records  # another thread was faster
                if changed is not None and not self._trusted:
                    continue  # the index was found to be wrong meanwhile: the changes alone are not enough any more
                if changed is None:
                    self._contents.rebuild(found)
                else:
                    for key in changed:
                        self._contents.refresh_page(key, *found.get(key, (None, None)))
                    self._contents.place_again()
                self._ram.drop(key for key in (self._ram.keys() if changed is None else changed) if key not in found)
                self._refused.clear()
                self._generation, self._trusted = generation, True
                return n_records

    def _is_news(self, generation: int) -> bool:
        """Whether a view of this generation may change the index.

        One that was opened before the last refresh has nothing new. And while a transaction of this process is open, or
        just ends, no other one has changed anything since it began, and what it has changed itself is in the index and
        may have to be taken back.
        """
        is_known = generation < self._generation or (generation == self._generation and self._trusted)
        return not is_known and self._contents.journal is None

    def _distrust(self) -> None:
        """The index describes nothing that is stored any more: the next refresh reads all of it."""
        self._generation, self._trusted = -1, False

    @contextmanager
    def update(self, backend: Backend, on_commit: Callable[[], None] | None = None) -> Iterator[Transaction]:
        """A transaction for which the index is up to date. If it fails, what it has changed in the index is undone.

        At its end it drops the settings of namespaces that it has left without pages.

        Parameters
        ----------
        backend
            The location.
        on_commit
            Called when the transaction is committed, before any other thread learns from the location what has happened
            since.
        """
        # Until the outcome is in the index, the next transaction of this process waits here: before it has the backend,
        # and with nothing to be interrupted between taking the turn and being sure to pass it on.
        with self._turn:
            try:
                with backend.update() as transaction:
                    with self._lock:
                        if self._contents.journal is not None:
                            # left by a thread that was interrupted while it ended its transaction
                            self._contents.journal, self._trusted = None, False
                    self.refresh(transaction, newest=True)
                    with self._lock:
                        self._contents.journal = Journal()
                    yield transaction
                    self._drop_empty_namespaces(transaction)
                if on_commit is not None:
                    on_commit()
            except BaseException as error:
                self._end_journal(error)
                raise
            else:
                self._end_journal(None)

    def _end_journal(self, error: BaseException | None) -> None:
        with self._lock:
            journal, self._contents.journal = self._contents.journal, None
            if error is not None and not isinstance(error, StorageError):
                # interrupted anywhere, maybe in the middle of a change of the index
                self._trusted = False
            if journal is not None and error is None:
                journal.commit()
            elif journal is not None:
                trusted, self._trusted = self._trusted, False
                # if it was committed in spite of the error, the log of changes says so at the next refresh
                journal.roll_back()
                self._trusted = trusted

    def _drop_empty_namespaces(self, transaction: Transaction) -> None:
        """Drop the settings of namespaces from which the transaction has deleted the last page."""
        with self._lock:
            journal, sweeps = self._contents.journal, self._contents.sweeps
            if journal is None or self._contents.strays.newer:
                return
            emptied = set(journal.deleted_from)
            if sweeps:
                journal.after_commit(self._swept)
        if sweeps:
            emptied = set(transaction.namespaces())
        for namespace in emptied:
            # asked just before: a page may have lost its place in the index while the backend was asked
            if not self._holds_pages_of(namespace):
                transaction.drop_namespace(namespace)

    def _holds_pages_of(self, namespace: bytes) -> bool:
        """Whether pages of a namespace may be stored, in the index or not."""
        with self._lock:
            return self._contents.strays.may_be_of(namespace) or self._contents.index.totals.of(namespace).stored > 0

    def _swept(self) -> None:
        self._contents.sweeps = False

    def sweep(self) -> None:
        """Have the next transaction look for settings of namespaces that have no pages."""
        with self._lock:
            self._contents.sweeps = True

    def contradict(self, page: Page, generation: int) -> None:
        """A page is not in a view of this generation. If the index covers that generation, the store was replaced.

        Not if the page was deleted, and captured again since: then the index has another node for it.
        """
        with self._lock:
            is_here = self._contents.index.get(page.key) is page and page.key not in self._contents.pending
            if is_here and generation <= self._generation:
                log.warning("the index does not match what is stored; rebuilding it")
                self._distrust()

    # -- looking pages up ---------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest stored prefix of `tokens`, up to the last page that has not expired."""
        with self._lock:
            path, now = self._contents.index.match(namespace, tokens, page_tokens), time.time_ns()
            # a page is kept at least as long as those after it
            n_kept = bisect_left(path.pages, True, key=lambda page: page.kept_until <= now)
            if n_kept == len(path.pages):
                return path
            self._contents.deferred.expired = True
            pages = path.pages[:n_kept]
            return Path(pages, pages[-1].end if pages else 0)

    def match_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """The path to the deepest snapshot among the first `limit` tokens, at a multiple of `multiple_of`."""
        now = time.time_ns()
        with self._lock:
            for path in self._contents.index.snapshots_along(namespace, tokens[:limit], page_tokens):
                if path.pages[-1].kept_until <= now:
                    self._contents.deferred.expired = True
                elif path.n_tokens % multiple_of == 0:
                    return path
        return Path((), 0)

    def match_stored(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The path to the deepest snapshot of `tokens`, or the longest prefix where there are none; expired or not."""
        with self._lock:
            # where there are snapshots, pages alone cannot be restored
            snapshots = self._contents.index.snapshots_along(namespace, tokens, page_tokens)
            return snapshots[0] if snapshots else self._contents.index.match(namespace, tokens, page_tokens)

    def get(self, key: bytes) -> Page | None:
        """The page with this key."""
        with self._lock:
            return self._contents.index.get(key)

    def is_current(self, page: Page) -> bool:
        """Whether this node object is in the index."""
        return self.get(page.key) is page

    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        path = [page]
        with self._lock:
            while (parent := self._contents.index.get(path[-1].parent)) is not None:
                path.append(parent)
        return path[::-1]

    def pages(self) -> list[Page]:
        """All pages, parents before their children."""
        with self._lock:
            return list(depth_first(roots(self._contents.index)))

    def select(self, choose: Callable[[Index], Collection[bytes]]) -> list[Page]:
        """The pages whose keys a function of the index chooses, parents before their children."""
        with self._lock:
            keys = choose(self._contents.index)
            return [page for page in depth_first(roots(self._contents.index)) if page.key in keys]

    @property
    def payload_bytes(self) -> tuple[int, int]:
        """The bytes of all payloads as stored, and of the states that they stand for."""
        with self._lock:
            return self._contents.index.stored_bytes, self._contents.index.raw_bytes

    def total(self, group: Group = None) -> Total:
        """What a group of pages holds; see `Total`."""
        with self._lock:
            return replace(self._contents.index.totals.of(group))

    def evictable(self) -> Total:
        """What all pages hold, and how much of it eviction could delete at most, pages without a place included."""
        with self._lock:
            total = replace(self._contents.index.totals.of(None))
            total.add(self._contents.strays.total)
            return total

    def namespaces_without_salt(self) -> list[bytes]:
        """Namespaces with pages, for which `set_salt` was not called yet."""
        with self._lock:
            return list(self._contents.index.totals.without_salt)

    def set_salt(self, namespace: bytes, salt: str | None) -> None:
        """Note whose pages those of a namespace are."""
        with self._lock:
            self._contents.index.totals.set_salt(namespace, salt)
            self._contents.candidates.joined(namespace)

    # -- capturing ----------------------------------------------------------------------------------------------------

    def wants(self, page: Page) -> bool:
        """Whether a page is worth capturing."""
        with self._lock:
            return self._place_of(page) is Placement.ADDED

    def missing(self, namespace: bytes, keys: Sequence[bytes], tokens: Tokens, page_tokens: int) -> list[int]:
        """Which full pages of a sequence, given by all their keys, to capture: up to the first that was refused.

        Raises
        ------
        CorruptError
            If another page has one of the keys: nothing may be stored after it.
        """
        raw, step = tokens.tobytes(), page_tokens * TOKEN_BYTES
        with self._lock:
            missing: list[int] = []
            parent = namespace
            for i, key in enumerate(keys):
                page = self._contents.index.get(key)
                if page is None:
                    missing.append(i)
                elif (page.tokens, page.parent) != (raw[i * step : (i + 1) * step], parent):
                    raise CorruptError(f"page {key.hex()} holds other tokens than its key stands for")
                parent = key
            return list(itertools.takewhile(lambda i: keys[i] not in self._refused, missing))

    def needs_no_capture(self, key: bytes) -> bool:
        """Whether a page or snapshot is here, or was refused."""
        with self._lock:
            return key in self._contents.index or key in self._refused

    def _place_of(self, page: Page) -> Placement:
        known = self._contents.index.get(page.key)
        if known is not None:
            return Placement.KNOWN if is_same(known, page) else Placement.REFUSED
        if self._contents.index.covers(page):
            return Placement.KNOWN
        if page.key in self._refused:
            return Placement.REFUSED
        return Placement.ADDED if self._contents.index.has_parent_of(page) else Placement.ORPHAN

    def announce(self, new: PendingPage) -> Placement:
        """Put a pending page into the index, where it is matched from now on. Nothing changes unless it is `ADDED`."""
        with self._lock:
            place = self._place_of(new.page)
            if place is not Placement.ADDED:
                return place
            new.announced(self._contents.time_of_use())
            new.page.is_stored = new.page.may_be_victim = False
            try:
                is_added = self._contents.add(new.page)
            except BaseException:
                # interrupted: the index may have half of it
                self._contents.start()
                self._distrust()
                raise
            if not is_added:
                return Placement.ORPHAN
            self._contents.pending[new.page.key] = new
            self._policy.added(new.page)
            older = self._contents.index.superseded_by(new.page)
            if older is not None and older.is_leaf and not self._contents.may_be_stored(older):
                # not written yet, and not needed any more; a stored one is deleted when the new page is written
                self._contents.forget(older.key)
            return place

    def hold(self, pages: Sequence[Page]) -> dict[bytes, PooledBuffer]:
        """Hold the buffers of those of these pages that are pending; the caller releases them."""
        with self._lock:
            pending = [(page, self._contents.pending[page.key]) for page in pages if page.key in self._contents.pending]
            buffers = {page.key: new.buffer for page, new in pending if is_same(new.page, page)}
            return {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.hold()}

    def touch(self, namespace: bytes, pages: Sequence[Page], ttl_ns: int | None) -> None:
        """Record a lookup and the pages it used, none for a miss; renew their time to live."""
        with self._lock:
            now = self._contents.time_of_use()
            expires = time.time_ns() + ttl_ns if ttl_ns is not None else 0
            self._policy.looked_up(namespace, pages)
            # the deepest first: it decides how long the others are kept
            for page in reversed(pages):
                page.last_used = max(page.last_used, now)
                if page.expires and page.expires < expires:
                    self._contents.index.change(page, expires=expires)
                page.hits += 1
                self._contents.deferred.uses[page.key] = self._contents.deferred.uses.get(page.key, 0) + 1
            self._ram.want([page for page in pages if page.key not in self._contents.pending])

    def thin(self, namespace: bytes, tokens: Tokens, page_tokens: int, keep: int, interval: int) -> int:
        """Give up all but `keep` of the snapshots along `tokens`, except pinned ones; how many."""
        with self._lock:
            paths = self._contents.index.snapshots_along(namespace, tokens, page_tokens)[::-1]
            if len(paths) <= keep:
                return 0
            positions = [path.n_tokens for path in paths]
            branches = self._contents.index.branches(namespace, tokens, page_tokens)
            # other sequences start from the last snapshot before the fork
            shared = {max((n for n in positions if n <= branch), default=0) for branch in branches}
            doomed = thin(positions, keep, interval, shared)
            discarded = [path.pages[-1] for path in paths if path.n_tokens in doomed and not path.pages[-1].pinned]
            for page in discarded:
                self.discard_snapshot(page)
            return len(discarded)

    def discard_snapshot(self, page: Page) -> None:
        """A snapshot is no longer wanted: if it is stored, have it deleted with the next commit.

        Until then it stays in the index, or the pages that it depends on would seem to be leaves.
        """
        with self._lock:
            if page.key in self._contents.pending and page.key not in self._contents.writing:
                if not page.is_stored:
                    self._contents.forget(page.key)
                    return
                self._contents.keep_as_stored(page)
            self._contents.deferred.thinned.add(page.key)

    def mark_damaged(self, key: bytes, suspicion: Suspicion | None = None) -> None:
        """Forget a damaged page and its descendants, and have them deleted with the next commit.

        With a `suspicion` its checksum is right, but its state is not usable: it is deleted unless the page stored by
        then is.
        """
        with self._lock:
            if suspicion is not None:
                self._contents.deferred.suspicions[key] = suspicion
            self._contents.deferred.damaged.add(key)
            self._contents.lose(key)

    # -- committing ---------------------------------------------------------------------------------------------------

    @property
    def has_deferred(self) -> bool:
        """Whether uses, or pages to be deleted, wait for the next commit."""
        return bool(self._contents.deferred)

    def deferred(self) -> Deferred:
        """A copy of the deferred changes."""
        with self._lock:
            return self._contents.deferred.copy()

    def still_pending(self, batch: Iterable[PendingPage]) -> list[PendingPage]:
        """Those that still wait: not superseded, dropped, or cleared and captured again."""
        with self._lock:
            return [new for new in batch if self._contents.is_pending(new)]

    def claim(self, new: PendingPage) -> Claim | None:
        """Mark a page as being written, and take the tail that it continues out of the index.

        None if the page is no longer pending.
        """
        page = new.page
        with self._lock:
            if not self._contents.is_pending(new):
                return None
            self._contents.writing.add(page.key)
            older = self._contents.index.superseded_by(page)
            # one that another thread is writing has been written: transactions take turns
            if older is None or not self._contents.may_be_deleted(older) or not self._contents.may_be_stored(older):
                return Claim(None)
            if older.pinned and not page.pinned:
                self._contents.index.change(page, pinned=True)
                self._contents.undo(partial(self._contents.index.change, page, pinned=False))
            return Claim(older, tuple(self._contents.delete(older.key)))

    def keep_superseded(self, claim: Claim) -> None:
        """The page that was to replace a tail is refused: the tail, which was not deleted, stays."""
        with self._lock:
            self._contents.put_back(claim.taken)

    def put(self, new: PendingPage, stored_bytes: int, *, may_be_victim: bool) -> None:
        """The open transaction has stored a page, or found it there: how many bytes the codec made of it.

        An imported page competes with the others for the space from now on.
        """
        page = new.page
        with self._lock:
            if not page.is_stored:
                self._contents.uncommitted.add(page.key)
            self._contents.undo(
                partial(self._contents.take_back, page, page.stored_bytes, page.is_stored, page.may_be_victim)
            )
            self._contents.index.change(page, stored_bytes=stored_bytes, is_stored=True, may_be_victim=may_be_victim)
            if self._contents.is_pending(new):
                self._contents.candidates.add(page)

    def after_commit(self, step: Callable[[], None]) -> None:
        """Call this when the open transaction is committed; not if it fails."""
        with self._lock:
            if self._contents.journal is not None:
                self._contents.journal.after_commit(step)
            else:
                step()

    def no_longer_pending(self, written: Iterable[PendingPage]) -> list[PendingPage]:
        """Those that were forgotten while they were written."""
        with self._lock:
            return [new for new in written if not self._contents.is_pending(new)]

    def committed(self, written: Iterable[PendingPage], deferred: Deferred) -> None:
        """These pages are stored now, and the deferred changes are made."""
        with self._lock:
            for new in written:
                self._contents.uncommitted.discard(new.page.key)
                if self._contents.is_pending(new):
                    del self._contents.pending[new.page.key]
                    self._contents.index.change(new.page, may_be_victim=True)
                    new.page.announced_expiry = new.page.expires
                    self._contents.candidates.add(new.page)
            self._contents.deferred.subtract(deferred)
            if deferred.damaged:
                # those that are not damaged after all, because another process has replaced them
                for key in deferred.damaged:
                    self._contents.moved(key)
                self._contents.place_again()

    def refuse(self, new: PendingPage, reason: DropReason) -> None:
        """There is no space for a page, or no parent: give it up."""
        with self._lock:
            if self._contents.is_pending(new):
                self._contents.drop(new.page.key, reason)
                if reason is DropReason.BUDGET:
                    self._refused.add(new.page.key)

    def drop(self, batch: Iterable[PendingPage], reason: DropReason) -> None:
        """Give these pages up, those that are still pending, and count them."""
        with self._lock:
            for new in batch:
                if self._contents.is_pending(new):
                    self._contents.drop(new.page.key, reason)

    def abandon(self, batch: Iterable[PendingPage]) -> None:
        """Give these pages up, uncounted; pending pages that depend on them are counted."""
        with self._lock:
            # all of them first: their buffers go back to the pool now
            pages = [self._contents.pending.pop(new.page.key).page for new in batch if self._contents.is_pending(new)]
            for page in pages:
                if self._contents.index.get(page.key) is page:
                    self._contents.drop(page.key, DropReason.ORPHAN)

    def end_writing(self, batch: Iterable[PendingPage]) -> None:
        """The transaction of these pages has ended, one way or the other."""
        with self._lock:
            keys = {new.page.key for new in batch}
            self._contents.writing -= keys
            self._contents.uncommitted -= keys

    # -- packing ------------------------------------------------------------------------------------------------------

    def coldest(self, n: int) -> list[Page]:
        """Raw pages that are stored and not pending, leaves or not, in the order of eviction; at most `n`."""
        with self._lock:
            index, pending = self._contents.index, self._contents.pending
            self._policy.prepare(len(index))
            pages = [
                page
                for page in index.pages.values()
                if page.stored_bytes == page.raw_bytes > 0 and page.may_be_victim and page.key not in pending
            ]
            return nsmallest(n, pages, key=self._policy.rank)

    # -- deleting -----------------------------------------------------------------------------------------------------

    def victims(self, group: Group = None) -> Victims:
        """Stored leaves to evict, of a group of pages or of all, in the order of the policy."""
        with self._lock:
            return Victims(self._lock, self._contents.candidates.victims(group))

    def expiring(self) -> Victims:
        """Stored leaves that expire, the first one first."""
        with self._lock:
            return Victims(self._lock, self._contents.candidates.expiring())

    def put_back(self, page: Page) -> None:
        """A victim is not deleted after all."""
        with self._lock:
            self._contents.candidates.add(page)

    def remove_victim(self, page: Page, usage: Usage | None, *, evicting: bool) -> bool:
        """Take a victim out of the index, so that it is not matched any more; whether it may be deleted.

        It is spared if it is not a leaf any more, or if its stored usage says that another process has used or pinned
        it.
        """
        with self._lock:
            if self._contents.index.get(page.key) is not page or not self._contents.may_be_deleted(page):
                return False
            last_used = time_of_use(usage.last_used, time.time_ns()) if usage is not None else 0
            if usage is not None and (last_used > page.last_used or usage.expires > page.expires or usage.pinned):
                page.last_used, page.hits = max(last_used, page.last_used), max(usage.hits, page.hits)
                self._contents.index.change(page, pinned=usage.pinned, expires=max(usage.expires, page.expires))
                self._contents.candidates.add(page)
                return False
            if evicting:
                self.after_commit(partial(self._policy.evicted, page))
            self._contents.delete(page.key)
            return True

    def remove_leaf(self, key: bytes) -> Page | None:
        """Take a page out of the index if it is a leaf, pinned or not; the page."""
        with self._lock:
            page = self._contents.index.get(key)
            if page is None or not self._contents.may_be_deleted(page):
                return None
            self._contents.delete(key)
            return page

    def remove_stray_leaf(self) -> bytes | None:
        """Forget a page that has no place in the index, to delete it; its key.

        Not one that is pinned, or that others follow, nor one that was captured again: its transaction counts on it.
        """
        with self._lock:
            strays, index = self._contents.strays, self._contents.index
            found = (page.key for page in strays.leaves() if not page.pinned and page.key not in index)
            key = next(found, None)
            if key is not None:
                self.lose(key)
            return key

    def remove_snapshot(self, key: bytes, usage: Usage | None) -> bool:
        """Take a snapshot that was thinned out of the index; not one that is pinned, gone, or was captured again."""
        with self._lock:
            doomed = usage is not None and not usage.pinned and key not in self._contents.pending
            if doomed:
                self._contents.delete(key)
            return doomed

    def lose(self, key: bytes) -> None:
        """The open transaction deletes a page, whatever is known of it; not one that was captured again."""
        with self._lock:
            page, is_newer = self._contents.remove_stray(key), self._contents.strays.remove_unreadable(key)
            if page is not None:
                self._contents.note_deleted_from(page.namespace)
                self._contents.undo(partial(self._contents.add_stray, page))
            if is_newer is not None:
                self._contents.sweeps = True
                self._contents.undo(partial(self._contents.strays.add_unreadable, key, is_newer=is_newer))
            here = self._contents.index.get(key)
            if here is not None and key in self._contents.pending:
                if here.is_stored:
                    self._contents.note_deleted_from(here.namespace)
                    self._contents.undo(partial(self._contents.index.change, here, is_stored=True))
                    self._contents.index.change(here, is_stored=False)
            elif here is not None:
                self._contents.delete(key)

    def with_descendants(self, keys: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """These pages and all that is stored after them, children before their parents: keys and stored bytes.

        To be used in a transaction, for which the catalog is up to date. Each step takes the lock for a moment.
        """
        waiting = [(key, False) for key in keys]
        page: Page | None
        seen: set[bytes] = set()
        while waiting:
            key, is_done = waiting.pop()
            with self._lock:
                page = self._contents.index.get(key) or self._contents.strays.get(key)
                if not is_done and key not in seen:
                    seen.add(key)
                    waiting.append((key, True))
                    dependents = page.dependents if page is not None and page.key in self._contents.index else []
                    waiting += [(each.key, False) for each in (*dependents, *self._contents.strays.after(key))]
                    continue
            if is_done:
                yield key, page.stored_bytes if page is not None else 0

    def select_strays(self, choose: Callable[[Strays], Collection[bytes]]) -> set[bytes]:
        """The keys that a function chooses of the stored pages that have no place in the index."""
        with self._lock:
            return set(choose(self._contents.strays))

    def damaged(self) -> set[bytes]:
        """The keys of those of them that can never be restored: their records are damaged, or they follow nothing."""
        with self._lock:
            strays = self._contents.strays
            return {key for key in self._contents.deferred.damaged if key in strays} | strays.corrupt

    @property
    def n_newer(self) -> int:
        """How many stored pages a newer version wrote, so that their records cannot be read."""
        with self._lock:
            return len(self._contents.strays.newer)

    def knows(self, key: bytes) -> bool:
        """Whether there is such a page, in the index or not."""
        with self._lock:
            return key in self._contents.index or key in self._contents.strays

    def set_pinned(self, pages: Iterable[Page], *, pinned: bool) -> None:
        """These pages are pinned now, or not any more."""
        with self._lock:
            # children first: while a parent is pinned, it need not know how long its children are kept
            for page in sorted(pages, key=lambda page: -page.start):
                self._contents.undo(partial(self._set_pinned, page, pinned=page.pinned))
                self._set_pinned(page, pinned=pinned)
            # what was refused may find space now
            self._refused.clear()

    def _set_pinned(self, page: Page, *, pinned: bool) -> None:
        self._contents.index.change(page, pinned=pinned)
        if self._contents.index.get(page.key) is page:
            self._contents.candidates.add(page)

    def pinned_with(self, page: Page, *, pinned: bool) -> list[Page]:
        """What changes when a page is pinned or unpinned: its descendants too, and its ancestors.

        An ancestor of an unpinned page stays pinned if it leads to another pinned page.
        """
        with self._lock:
            here = self._contents.index.get(page.key)
            if here is None:
                return []
            changed = list(depth_first([here]))
            known = {one.key for one in changed}
            for ancestor in self.path(here)[-2::-1]:
                if not pinned and any(child.pinned and child.key not in known for child in ancestor.dependents):
                    break
                changed.append(ancestor)
                known.add(ancestor.key)
            return changed


def roots(index: Index) -> list[Page]:
    """The first pages of all sequences."""
    return [page for page in index if page.parent == page.namespace]


def depth_first(start: Iterable[Page]) -> Iterator[Page]:
    """Pages and their descendants, parents before their children."""
    waiting = list(start)[::-1]
    while waiting:
        page = waiting.pop()
        yield page
        waiting += page.dependents[::-1]
