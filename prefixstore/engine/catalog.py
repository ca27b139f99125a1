"""What is stored, as far as this process knows, and the pages that are still to be written.

Two kinds of pages are in the index: committed ones, and pending ones, whose bytes wait in a buffer. Both are matched
and restored alike.

Each method takes the catalog's lock for a moment. The lock is never held while the backend is asked, or while bytes are
copied or packed: a completion may wait for it. A thread in a transaction may use the catalog, not the other way round.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from prefixstore.backends.base import Backend, Transaction, View
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.eviction import Candidates, Policy
from prefixstore.engine.index import Index, Page, Path
from prefixstore.engine.pending import Deferred, Fits, PendingPage
from prefixstore.engine.ram import RamTier
from prefixstore.engine.snapshot_policy import thin
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.keys import Tokens
from prefixstore.format.record import Record, Usage
from prefixstore.stats import Counters

__all__ = ["Catalog", "Claim", "DropReason", "Placement", "Victims"]

log = logging.getLogger("prefixstore")


class Placement(Enum):
    """What became of a page that was announced."""

    ADDED = "added"
    KNOWN = "known"
    """It is here, or a longer page covers it."""
    REFUSED = "refused"
    """There was no space for it earlier."""
    ORPHAN = "orphan"
    """Its parent is not here, or does not end where it starts."""


class DropReason(str, Enum):
    """Why a captured page is not stored: the names in ``Stats.dropped``."""

    BUDGET = "budget"
    QUOTA = "quota"
    FULL = "full"
    ORPHAN = "orphan"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


class Claim(NamedTuple):
    """A pending page that its transaction may write, and the stored tail that it replaces."""

    superseded: bytes | None


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
        self._counters = counters
        self._ram = ram
        self._lock = threading.RLock()
        self._start_index()
        self._pending: dict[bytes, PendingPage] = {}
        # pending pages that are in a transaction, or were until just now: they may be stored already
        self._writing: set[bytes] = set()
        # pending pages that another process has stored meanwhile
        self._also_stored: set[bytes] = set()
        # pending pages that were imported in the open transaction: it may evict them again
        self._evictable: set[bytes] = set()
        # pages for which there was no space
        self._refused: set[bytes] = set()
        self._deferred = Deferred()
        self._generation = -1
        self._trusted = False
        # parents of pages that were taken for damaged: these may be stored, though the index does not have them
        self._hiding: set[bytes] = set()
        # transactions of this process take turns; while one is open, it alone brings the index up to date
        self._turn = threading.Lock()
        self._in_transaction = False
        # time of the last use of any page: what is used later is newer, even if the clock was set back meanwhile
        self._latest = 0

    def _start_index(self) -> None:
        self._index = Index()
        self._candidates = Candidates(self._index, self._policy, self._is_stored)

    def _is_stored(self, page: Page) -> bool:
        """Whether the backend, or the open transaction, has a page."""
        return page.key not in self._pending or page.key in self._evictable

    # -- keeping up with the backend ----------------------------------------------------------------------------------

    def refresh(self, view: View, *, newest: bool = False) -> int:
        """Bring the index to the generation of the view, unless it is ahead of it.

        Every transaction begins with this, and until it ends no other thread refreshes the index: a transaction deletes
        only pages without children, so the index has to have every page that the transaction sees.

        Parameters
        ----------
        view
            Of the backend.
        newest
            Whether it is the transaction of this process, which sees the latest commit. An index that is ahead of it
            describes a store that was replaced.

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
                    self._generation, self._trusted = -1, False
                known = self._generation if self._is_complete(newest) else None
                if self._is_ahead_of(generation, known, newest):
                    # a view that was opened before the last refresh has nothing new
                    return n_records
            changed = view.changes(known) if known is not None else None
            found: Mapping[bytes, tuple[Record | StorageError, Usage]]
            if changed is None:
                found = {key: (record, usage) for key, record, usage in view.scan()}
            else:
                found = view.records(changed)
            n_records += len(found)
            with self._lock:
                is_complete = self._is_complete(newest)
                if self._is_ahead_of(generation, self._generation if is_complete else None, newest):
                    return n_records  # another thread was faster
                if changed is not None and not is_complete:
                    continue  # a transaction has failed meanwhile: the changes alone are not enough any more
                if changed is None:
                    self._rebuild(found)
                else:
                    for key in changed:
                        self._refresh_page(key, *found.get(key, (None, None)))
                self._ram.drop(key for key in (self._ram.keys() if changed is None else changed) if key not in found)
                self._refused.clear()
                self._generation, self._trusted = generation, True
                return n_records

    def _is_complete(self, newest: bool) -> bool:
        """Whether the index had all pages at its generation, for a transaction also those hidden from lookups."""
        return self._trusted and not (newest and self._hiding)

    def _is_ahead_of(self, generation: int, known: int | None, newest: bool) -> bool:
        """Whether a view of this generation must not change the index."""
        return generation < self._generation or generation == known or (self._in_transaction and not newest)

    @contextmanager
    def update(self, backend: Backend, on_commit: Callable[[], None] | None = None) -> Iterator[Transaction]:
        """A transaction for which the index is up to date. If it fails, the index is rebuilt at the next refresh.

        Parameters
        ----------
        backend
            The location.
        on_commit
            Called when the transaction is committed, before any other thread learns from the location what has happened
            since.
        """
        with self._turn:
            try:
                with self._lock:
                    self._in_transaction = True
                with backend.update() as transaction:
                    self.refresh(transaction, newest=True)
                    yield transaction
                if on_commit is not None:
                    on_commit()
            except BaseException:
                # before another transaction begins, which would delete by an index that is wrong
                self.distrust()
                raise
            finally:
                with self._lock:
                    self._in_transaction = False

    def distrust(self) -> None:
        """The index may know less than is stored: rebuild it at the next refresh."""
        with self._lock:
            self._trusted = False

    def contradict(self, key: bytes, generation: int) -> None:
        """A page is not in a view of this generation. If the index covers that generation, the store was replaced."""
        with self._lock:
            if key in self._index and key not in self._pending and generation <= self._generation:
                log.warning("the index does not match what is stored; rebuilding it")
                self._generation, self._trusted = -1, False

    def _refresh_page(self, key: bytes, record: Record | StorageError | None, usage: Usage | None) -> None:
        if isinstance(record, Record) and usage is not None:
            self._know(key, record, usage)
            return
        if record is not None:
            log.warning("a page cannot be read: %s", record)
        if isinstance(record, CorruptError):
            self._deferred.damaged.add(key)
        self._also_stored.discard(key)
        if key not in self._pending:
            self._lose(key)

    def _rebuild(self, found: Mapping[bytes, tuple[Record | StorageError, Usage]]) -> None:
        stored: dict[bytes, tuple[Record, Usage]] = {}
        for key, (record, usage) in found.items():
            if isinstance(record, Record):
                stored[key] = record, usage
            elif isinstance(record, CorruptError):
                self._deferred.damaged.add(key)
            elif not isinstance(record, IncompatibleError):
                raise record
        self._start_index()
        self._hiding.clear()
        self._also_stored.clear()
        self._evictable.clear()
        # parents first; a page that is both pending and stored is the pending node
        places = [(new.page.start, 0, key) for key, new in self._pending.items()]
        places += [(record.start, 1, key) for key, (record, _) in stored.items()]
        for _, is_stored, key in sorted(places):
            if is_stored:
                record, usage = stored[key]
                parent, _ = found.get(record.parent, (None, None))
                is_known = self._know(key, record, usage)
                if not is_known and not isinstance(parent, StorageError) and not record.follows(parent):
                    self._deferred.damaged.add(key)
            elif key in self._pending:
                # a node of the old index: its children are added again, if they are still there
                page = self._pending[key].page
                page.drop_children()
                if not self._index.add(page):
                    self._drop(key, DropReason.ORPHAN)

    def _know(self, key: bytes, record: Record, usage: Usage) -> bool:
        """Note a stored page; whether it has its place in the index."""
        self._latest = max(self._latest, usage.last_used)
        page = self._index.get(key)
        if page is not None:
            self._index.resize(page, record.stored_bytes)
            page.last_used = max(page.last_used, usage.last_used)
            page.pinned, page.priority, page.expires = usage.pinned, usage.priority, usage.expires
        else:
            page = Page.stored(key, record, usage)
            if not self._index.add(page):
                return False
        if key not in self._pending:
            self._candidates.add(page)
        else:
            self._also_stored.add(key)
        return True

    # -- looking pages up ---------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest stored prefix of `tokens`, up to the last page that has not expired."""
        with self._lock:
            path = self._index.match(namespace, tokens, page_tokens)
            pages, now = list(path.pages), time.time_ns()
            while pages and _has_expired(pages[-1], now):
                del pages[-1]
            if len(pages) == len(path.pages):
                return path
            self._deferred.expired = True
            return Path(tuple(pages), pages[-1].end if pages else 0)

    def match_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """The path to the deepest snapshot among the first `limit` tokens, at a multiple of `multiple_of`."""
        now = time.time_ns()
        with self._lock:
            for path in self._index.snapshots_along(namespace, tokens[:limit], page_tokens):
                if _has_expired(path.pages[-1], now):
                    self._deferred.expired = True
                elif path.n_tokens % multiple_of == 0:
                    return path
        return Path((), 0)

    def match_stored(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The path to the deepest snapshot of `tokens`, or the longest prefix where there are none; expired or not."""
        with self._lock:
            # where there are snapshots, pages alone cannot be restored
            snapshots = self._index.snapshots_along(namespace, tokens, page_tokens)
            return snapshots[0] if snapshots else self._index.match(namespace, tokens, page_tokens)

    def get(self, key: bytes) -> Page | None:
        """The page with this key."""
        with self._lock:
            return self._index.get(key)

    def is_current(self, page: Page) -> bool:
        """Whether this node object is in the index."""
        return self.get(page.key) is page

    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        path = [page]
        with self._lock:
            while (parent := self._index.get(path[-1].parent)) is not None:
                path.append(parent)
        return path[::-1]

    def pages(self) -> list[Page]:
        """All pages, parents before their children."""
        with self._lock:
            return list(depth_first(roots(self._index)))

    def select(self, choose: Callable[[Index], Collection[bytes]]) -> list[Page]:
        """The pages whose keys a function of the index chooses, parents before their children."""
        with self._lock:
            keys = choose(self._index)
            return [page for page in depth_first(roots(self._index)) if page.key in keys]

    @property
    def payload_bytes(self) -> tuple[int, int]:
        """The bytes of all payloads as stored, and of the states that they stand for."""
        with self._lock:
            return self._index.stored_bytes, self._index.raw_bytes

    def held_bytes(self, namespaces: Iterable[bytes]) -> int:
        """What the pages of these namespaces count against a quota."""
        with self._lock:
            return sum(self._index.held[namespace] for namespace in namespaces)

    # -- capturing ----------------------------------------------------------------------------------------------------

    def wants(self, page: Page) -> bool:
        """Whether a page is worth capturing."""
        with self._lock:
            return self._place_of(page) is Placement.ADDED

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Which pages of a sequence, given by all their keys, to capture: up to the first that was refused."""
        with self._lock:
            missing = [i for i, key in enumerate(keys) if key not in self._index]
            return list(itertools.takewhile(lambda i: keys[i] not in self._refused, missing))

    def needs_no_capture(self, key: bytes) -> bool:
        """Whether a page or snapshot is here, or was refused."""
        with self._lock:
            return key in self._index or key in self._refused

    def _place_of(self, page: Page) -> Placement:
        if page.key in self._index or self._index.covers(page):
            return Placement.KNOWN
        if page.key in self._refused:
            return Placement.REFUSED
        return Placement.ADDED if self._index.has_parent_of(page) else Placement.ORPHAN

    def announce(self, new: PendingPage) -> Placement:
        """Put a pending page into the index, where it is matched from now on. Nothing changes unless it is `ADDED`."""
        with self._lock:
            place = self._place_of(new.page)
            if place is not Placement.ADDED:
                return place
            new.announced(self._now())
            if not self._index.add(new.page):
                return Placement.ORPHAN
            self._pending[new.page.key] = new
            self._policy.added(new.page)
            older = self._index.superseded_by(new.page)
            may_be_stored = older is not None and older.key in (self._writing | self._also_stored)
            if older is not None and older.is_leaf and older.key in self._pending and not may_be_stored:
                # not written yet, and not needed any more; a stored one is deleted when the new page is written
                self._forget(older.key)
            return place

    def hold(self, pages: Sequence[Page]) -> dict[bytes, PooledBuffer]:
        """Hold the buffers of those of these pages that are pending; the caller releases them."""
        with self._lock:
            buffers = {page.key: self._pending[page.key].buffer for page in pages if page.key in self._pending}
            return {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.hold()}

    def touch(self, namespace: bytes, pages: Sequence[Page], ttl_ns: int | None) -> None:
        """Record a lookup and the pages it used, none for a miss; renew their time to live."""
        with self._lock:
            now = self._now()
            expires = time.time_ns() + ttl_ns if ttl_ns is not None else 0
            self._policy.looked_up(namespace, pages)
            for page in pages:
                page.last_used = max(page.last_used, now)
                page.expires = max(page.expires, expires) if page.expires else 0
                page.hits += 1
                self._deferred.uses[page.key] = self._deferred.uses.get(page.key, 0) + 1
            self._ram.want([page for page in pages if page.key not in self._pending])

    def _now(self) -> int:
        """The time of a use: nanoseconds since the epoch, and never before another."""
        self._latest = max(self._latest, time.time_ns())
        return self._latest

    def thin(self, namespace: bytes, tokens: Tokens, page_tokens: int, keep: int, interval: int) -> int:
        """Give up all but `keep` of the snapshots along `tokens`, except pinned ones; how many."""
        with self._lock:
            paths = self._index.snapshots_along(namespace, tokens, page_tokens)[::-1]
            if len(paths) <= keep:
                return 0
            positions = [path.n_tokens for path in paths]
            branches = self._index.branches(namespace, tokens, page_tokens)
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
            is_stored = page.key not in self._pending or page.key in (self._writing | self._also_stored)
            if page.key not in self._writing:
                self._give_up(page.key)
            if is_stored:
                self._deferred.thinned.add(page.key)

    def mark_damaged(self, key: bytes, fits: Fits | None = None) -> None:
        """Forget a damaged page and its descendants, and have them deleted with the next commit.

        With `fits` its checksum is right, but its state is not usable: it is deleted unless the page stored by then
        fits.
        """
        with self._lock:
            if fits is not None:
                self._deferred.fits[key] = fits
            self._deferred.damaged.add(key)
            page = self._index.get(key)
            if page is not None:
                # it is stored until a transaction deletes it: its parent must not be deleted before
                self._hiding.add(page.parent)
            self._lose(key)

    # -- committing ---------------------------------------------------------------------------------------------------

    @property
    def has_deferred(self) -> bool:
        """Whether uses, or pages to be deleted, wait for the next commit."""
        return bool(self._deferred)

    def deferred(self) -> Deferred:
        """A copy of the deferred changes."""
        with self._lock:
            return self._deferred.copy()

    def still_pending(self, batch: Iterable[PendingPage]) -> list[PendingPage]:
        """Those that still wait: not superseded, dropped, or cleared and captured again."""
        with self._lock:
            return [new for new in batch if self._is_pending(new)]

    def _is_pending(self, new: PendingPage) -> bool:
        return self._pending.get(new.page.key) is new

    def claim(self, new: PendingPage) -> Claim | None:
        """Mark a page as being written, and take the tail that it continues out of the index.

        None if the page is no longer pending.
        """
        page = new.page
        with self._lock:
            if not self._is_pending(new):
                return None
            self._writing.add(page.key)
            older = self._index.superseded_by(page)
            # one that another thread is writing has been written: transactions take turns
            is_stored_tail = older is not None and (older.key not in self._pending or older.key in self._writing)
            if older is None or not older.is_leaf or not is_stored_tail:
                return Claim(None)
            page.pinned = page.pinned or older.pinned
            self._forget(older.key)
            return Claim(older.key)

    def resize(self, page: Page, stored_bytes: int) -> None:
        """Note how many bytes the codec made of a page."""
        with self._lock:
            self._index.resize(page, stored_bytes)

    def imported(self, new: PendingPage) -> None:
        """An imported page was put: it competes with the others for the space from now on."""
        with self._lock:
            if self._is_pending(new):
                self._evictable.add(new.page.key)
                self._candidates.add(new.page)

    def no_longer_pending(self, written: Iterable[PendingPage]) -> list[PendingPage]:
        """Those that were forgotten while they were written."""
        with self._lock:
            return [new for new in written if not self._is_pending(new)]

    def committed(self, written: Iterable[PendingPage], deferred: Deferred) -> None:
        """These pages are stored now, and the deferred changes are made."""
        with self._lock:
            for new in written:
                if self._is_pending(new):
                    del self._pending[new.page.key]
                    self._also_stored.discard(new.page.key)
                    self._candidates.add(new.page)
            self._deferred.subtract(deferred)
            if deferred.damaged:
                # what took their place, and what was stored after them, is not known here
                self._trusted = False

    def refuse(self, new: PendingPage, reason: DropReason) -> None:
        """There is no space for a page, or no parent: give it up."""
        with self._lock:
            if self._is_pending(new):
                self._drop(new.page.key, reason)
                if reason is DropReason.BUDGET:
                    self._refused.add(new.page.key)

    def drop(self, batch: Iterable[PendingPage], reason: DropReason) -> None:
        """Give these pages up, those that are still pending, and count them."""
        with self._lock:
            for new in batch:
                if self._is_pending(new):
                    self._drop(new.page.key, reason)

    def abandon(self, batch: Iterable[PendingPage]) -> None:
        """Give these pages up, uncounted; pending pages that depend on them are counted."""
        with self._lock:
            keys = [new.page.key for new in batch if self._is_pending(new)]
            if lost := sum(map(self._give_up, keys)) - len(keys):
                self._counters.count(f"dropped:{DropReason.ORPHAN.value}", lost)

    def end_writing(self, batch: Iterable[PendingPage]) -> None:
        """The transaction of these pages has ended, one way or the other."""
        with self._lock:
            keys = {new.page.key for new in batch}
            self._writing -= keys
            self._evictable -= keys

    # -- deleting -----------------------------------------------------------------------------------------------------

    def victims(self, namespaces: frozenset[bytes] | None = None) -> Victims:
        """Stored leaves to evict, of these namespaces or of all, in the order of the policy."""
        with self._lock:
            return Victims(self._lock, self._candidates.victims(namespaces))

    def expiring(self) -> Victims:
        """Stored leaves that expire, the first one first."""
        with self._lock:
            return Victims(self._lock, self._candidates.expiring())

    def put_back(self, page: Page) -> None:
        """A victim is not deleted after all."""
        with self._lock:
            self._candidates.add(page)

    def remove_victim(self, page: Page, usage: Usage | None, *, evicting: bool) -> bool:
        """Take a victim out of the index, so that it is not matched any more; whether it may be deleted.

        It is spared if it is not a leaf any more, or if its stored usage says that another process has used or pinned
        it.
        """
        with self._lock:
            if self._index.get(page.key) is not page or not self._may_delete(page):
                return False
            if usage is not None and _is_newer(usage, page):
                page.last_used = max(usage.last_used, page.last_used)
                page.expires = max(usage.expires, page.expires)
                page.hits, page.pinned = max(usage.hits, page.hits), usage.pinned
                self._candidates.add(page)
                return False
            if evicting:
                self._policy.evicted(page)
            self._forget(page.key)
            return True

    def remove_leaf(self, key: bytes) -> Page | None:
        """Take a page out of the index if it is a leaf, pinned or not; the page."""
        with self._lock:
            page = self._index.get(key)
            if page is None or not self._may_delete(page):
                return None
            self._forget(key)
            return page

    def _may_delete(self, page: Page) -> bool:
        """Whether nothing that is stored depends on a page."""
        return page.is_leaf and page.key not in self._hiding

    def remove_snapshot(self, key: bytes, usage: Usage | None) -> bool:
        """Take a snapshot that was thinned out of the index; not one that is pinned, gone, or was captured again."""
        with self._lock:
            doomed = usage is not None and not usage.pinned and key not in self._pending
            if doomed:
                self._forget(key)
            return doomed

    def lose(self, key: bytes) -> None:
        """A stored page is gone: forget it, unless it was captured again."""
        with self._lock:
            if key not in self._pending:
                self._lose(key)

    def set_pinned(self, pages: Iterable[Page], *, pinned: bool) -> None:
        """These pages are pinned now, or not any more."""
        with self._lock:
            for page in pages:
                page.pinned = pinned
                if page.key not in self._pending:
                    self._candidates.add(page)
            # what was refused may find space now
            self._refused.clear()

    def pinned_with(self, page: Page, *, pinned: bool) -> list[Page]:
        """What changes when a page is pinned or unpinned: its descendants too, and its ancestors.

        An ancestor of an unpinned page stays pinned if it leads to another pinned page.
        """
        with self._lock:
            here = self._index.get(page.key)
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

    def _forget(self, key: bytes) -> None:
        """Take a page, and what depends on it, out of the index: it is not stored, or not any more."""
        page = self._index.get(key)
        lost_pages = self._index.remove(key)
        self._ram.drop(lost.key for lost in lost_pages)
        for lost in lost_pages:
            self._pending.pop(lost.key, None)
            self._deferred.uses.pop(lost.key, None)
            self._also_stored.discard(lost.key)
        parent = self._index.get(page.parent) if page is not None else None
        if parent is not None and parent.is_leaf and self._is_stored(parent):
            self._candidates.add(parent)

    def _give_up(self, key: bytes) -> int:
        """Give up a pending page, and the pending pages that depend on it; how many.

        Those that another process has stored stay in the index as stored ones: they have a parent, which an open
        transaction would otherwise take for a leaf.
        """
        page = self._index.get(key)
        if page is None:
            return int(self._pending.pop(key, None) is not None)
        given_up = [one for one in depth_first([page]) if one.key in self._pending]
        for one in reversed(given_up):
            del self._pending[one.key]
            if one.key in self._also_stored:
                self._also_stored.discard(one.key)
                self._candidates.add(one)
            else:
                self._forget(one.key)
        return len(given_up)

    def _drop(self, key: bytes, reason: DropReason) -> None:
        """Give a pending page up, with the pending pages that depend on it, and count them."""
        if lost := self._give_up(key):
            self._counters.count(f"dropped:{reason.value}", lost)

    def _lose(self, key: bytes) -> None:
        """A stored page is gone: forget it, and count the pending pages that depended on it."""
        pending = len(self._pending)
        self._forget(key)
        if lost := pending - len(self._pending):
            self._counters.count(f"dropped:{DropReason.ORPHAN.value}", lost)


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


def _is_newer(usage: Usage, page: Page) -> bool:
    """Whether another process has used or pinned a page."""
    return usage.last_used > page.last_used or usage.expires > page.expires or usage.pinned


def _has_expired(page: Page, now: int) -> bool:
    """Whether a page and all its descendants have expired."""
    return 0 < page.expires <= now and not page.pinned and all(_has_expired(child, now) for child in page.dependents)
