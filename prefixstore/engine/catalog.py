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
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import NamedTuple

from prefixstore.backends.base import Backend, Transaction, View
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.eviction import Candidates, Policy
from prefixstore.engine.index import Index, Page, Path, is_same
from prefixstore.engine.journal import Journal
from prefixstore.engine.pending import Deferred, PendingPage, Suspicion
from prefixstore.engine.ram import RamTier
from prefixstore.engine.snapshot_policy import thin
from prefixstore.engine.strays import Strays
from prefixstore.engine.totals import Group, Total
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.keys import TOKEN_BYTES, Tokens
from prefixstore.format.record import Record, Usage, time_of_use
from prefixstore.stats import Counters

__all__ = ["Catalog", "Claim", "DropReason", "Placement", "Victims"]

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


class DropReason(str, Enum):
    """Why a captured page is not stored: the names in ``Stats.dropped``."""

    BUDGET = "budget"
    QUOTA = "quota"
    FULL = "full"
    ORPHAN = "orphan"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


class _Taken(NamedTuple):
    """A page that was taken out of the index, and what else it takes to put it back."""

    page: Page
    new: PendingPage | None
    n_uses: int


class Claim(NamedTuple):
    """A pending page that its transaction may write, and the stored tail that it replaces."""

    superseded: Page | None
    taken: tuple[_Taken, ...] = ()


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
        # those that the open transaction has put
        self._uncommitted: set[bytes] = set()
        # pages for which there was no space
        self._refused: set[bytes] = set()
        self._deferred = Deferred()
        self._generation = -1
        self._trusted = False
        # what the open transaction of this process has changed; taken by one thread at a time
        self._journal: Journal | None = None
        self._turn = threading.Lock()
        # time of the last use of any page: what is used later is newer, even if the clock was set back meanwhile
        self._latest = 0

    def _start_index(self) -> None:
        self._index = Index()
        self._candidates = Candidates(self._index, self._policy)
        self._strays = Strays()
        # whether there may be settings of namespaces without pages
        self._sweeps = True

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
                    self._generation, self._trusted = -1, False
                known = self._generation if self._trusted else None
                # A view that was opened before the last refresh has nothing new. And while a transaction of this
                # process is open, or just ends, no other one has changed anything since it began, and what it has
                # changed itself is in the index and may have to be taken back.
                if generation < self._generation or generation == known or self._journal is not None:
                    return n_records
            changed = view.changes(known) if known is not None else None
            found: Mapping[bytes, tuple[Record | StorageError, Usage]]
            if changed is None:
                found = {key: (record, usage) for key, record, usage in view.scan()}
            else:
                found = view.records(changed)
            n_records += len(found)
            with self._lock:
                is_known = generation < self._generation or (generation == self._generation and self._trusted)
                if is_known or self._journal is not None:
                    return n_records  # another thread was faster
                if changed is not None and not self._trusted:
                    continue  # the index was found to be wrong meanwhile: the changes alone are not enough any more
                if changed is None:
                    self._rebuild(found)
                else:
                    for key in changed:
                        self._refresh_page(key, *found.get(key, (None, None)))
                    self._place_again()
                self._ram.drop(key for key in (self._ram.keys() if changed is None else changed) if key not in found)
                self._refused.clear()
                self._generation, self._trusted = generation, True
                return n_records

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
        has_turn = False
        try:
            with backend.update() as transaction:
                # until the outcome is in the index, the next transaction of this process waits here
                has_turn = self._turn.acquire()
                with self._lock:
                    if self._journal is not None:
                        # left by a thread that was interrupted while it ended its transaction
                        self._journal, self._trusted = None, False
                self.refresh(transaction, newest=True)
                with self._lock:
                    self._journal = Journal()
                yield transaction
                self._drop_empty_namespaces(transaction)
        except BaseException as error:
            self._end_journal(error)
            raise
        else:
            if on_commit is not None:
                on_commit()
            self._end_journal(None)
        finally:
            if has_turn:
                self._turn.release()

    def _end_journal(self, error: BaseException | None) -> None:
        with self._lock:
            journal, self._journal = self._journal, None
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
            journal, sweeps = self._journal, self._sweeps
            doubtful = self._strays.namespaces()
            if journal is None or doubtful is None:
                return
            emptied = journal.deleted_from - doubtful
            if sweeps:
                journal.after_commit(self._swept)
        if sweeps:
            emptied = set(transaction.namespaces()) - doubtful
        for namespace in emptied:
            with self._lock:
                is_empty = not self._index.totals.of(namespace).stored
            if is_empty:
                transaction.drop_namespace(namespace)

    def _swept(self) -> None:
        self._sweeps = False

    def sweep(self) -> None:
        """Have the next transaction look for settings of namespaces that have no pages."""
        with self._lock:
            self._sweeps = True

    def contradict(self, page: Page, generation: int) -> None:
        """A page is not in a view of this generation. If the index covers that generation, the store was replaced.

        Not if the page was deleted, and captured again since: then the index has another node for it.
        """
        with self._lock:
            is_here = self._index.get(page.key) is page and page.key not in self._pending
            if is_here and generation <= self._generation:
                log.warning("the index does not match what is stored; rebuilding it")
                self._generation, self._trusted = -1, False

    def _refresh_page(self, key: bytes, record: Record | StorageError | None, usage: Usage | None) -> None:
        self._strays.unreadable.pop(key, None)
        if isinstance(record, Record) and usage is not None:
            is_known = self._know(key, record, usage)
            if not is_known and record.parent not in self._strays and key not in self._index:
                self._deferred.damaged.add(key)
            return
        self._remove_stray(key)
        if record is not None:
            log.warning("a page cannot be read: %s", record)
            self._strays.unreadable[key] = not isinstance(record, CorruptError)
        if isinstance(record, CorruptError):
            self._deferred.damaged.add(key)
        page = self._index.get(key)
        if page is not None:
            self._index.change(page, is_stored=False)
        if key not in self._pending:
            self._lose(key)

    def _rebuild(self, found: Mapping[bytes, tuple[Record | StorageError, Usage]]) -> None:
        stored: dict[bytes, tuple[Record, Usage]] = {}
        unreadable: dict[bytes, bool] = {}
        for key, (record, usage) in found.items():
            if isinstance(record, Record):
                stored[key] = record, usage
            elif isinstance(record, (CorruptError, IncompatibleError)):
                unreadable[key] = isinstance(record, IncompatibleError)
            else:
                raise record
        self._start_index()
        self._strays.unreadable = unreadable
        self._deferred.damaged |= {key for key, is_newer in unreadable.items() if not is_newer}
        # parents first; a page that is both pending and stored is the pending node
        places = [(new.page.start, 0, key) for key, new in self._pending.items()]
        places += [(record.start, 1, key) for key, (record, _) in stored.items()]
        with self._index.adding_many():
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
                    page.is_stored = page.may_be_victim = False
                    if not self._index.add(page):
                        self._drop(key, DropReason.ORPHAN)

    def _know(self, key: bytes, record: Record, usage: Usage) -> bool:
        """Note a stored page; whether it has its place in the index."""
        now = time.time_ns()
        last_used = time_of_use(usage.last_used, now)
        self._latest = max(self._latest, last_used)
        self._remove_stray(key)
        if self._strays.get(record.parent) is not None:
            # what it was computed after has no place in the index, even if a pending page has that key
            self._strays.add(Page.stored(key, record, usage))
            return False
        page = self._index.get(key)
        if page is not None and not (is_same(page, record) and page.start == record.start):
            log.warning("two different pages have the key %s", key.hex())
            if key in self._pending:
                # the stored one is deleted when the pending one is written
                self._index.change(page, is_stored=False)
                self._strays.add(Page.stored(key, record, usage))
                return False
            # another process has replaced it
            self._lose(key)
            self._remove_stray(key)
            page = None
        if page is not None:
            page.last_used = max(page.last_used, last_used)
            page.priority = usage.priority
            # one that is to be written with the next uses is later than the stored one
            expires = max(page.expires, usage.expires) if page.expires and usage.expires else usage.expires
            self._index.change(
                page,
                stored_bytes=record.stored_bytes,
                pinned=usage.pinned,
                expires=expires,
                is_stored=True,
                may_be_victim=key not in self._pending,
            )
        else:
            page = Page.stored(key, record, usage)
            page.last_used = last_used or now
            if not self._index.add(page):
                self._strays.add(page)
                return False
        page.announced_expiry = usage.expires
        self._candidates.add(page)
        return True

    def _place_again(self) -> None:
        """Put stored pages into the index that had no place, as far as they have one now."""
        for page in self._strays.parents_first():
            here = self._index.get(page.key)
            if self._strays.get(page.parent) is not None or (here is not None and not is_same(here, page)):
                continue  # it follows, or is, another page than the one in the index
            if here is not None:
                # captured again meanwhile
                self._index.change(here, is_stored=True)
                self._remove_stray(page.key)
            elif page.key not in self._deferred.damaged:
                page.may_be_victim = True
                page.drop_children()
                if self._index.add(page):
                    self._remove_stray(page.key)
                    self._candidates.add(page)

    # -- looking pages up ---------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest stored prefix of `tokens`, up to the last page that has not expired."""
        with self._lock:
            path, now = self._index.match(namespace, tokens, page_tokens), time.time_ns()
            # a page is kept at least as long as those after it
            n_kept = bisect_left(path.pages, True, key=lambda page: page.kept_until <= now)
            if n_kept == len(path.pages):
                return path
            self._deferred.expired = True
            pages = path.pages[:n_kept]
            return Path(pages, pages[-1].end if pages else 0)

    def match_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """The path to the deepest snapshot among the first `limit` tokens, at a multiple of `multiple_of`."""
        now = time.time_ns()
        with self._lock:
            for path in self._index.snapshots_along(namespace, tokens[:limit], page_tokens):
                if path.pages[-1].kept_until <= now:
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

    def total(self, group: Group = None) -> Total:
        """What a group of pages holds; see `Total`."""
        with self._lock:
            return replace(self._index.totals.of(group))

    def namespaces_without_salt(self) -> list[bytes]:
        """Namespaces with pages, for which `set_salt` was not called yet."""
        with self._lock:
            return list(self._index.totals.without_salt)

    def set_salt(self, namespace: bytes, salt: str | None) -> None:
        """Note whose pages those of a namespace are."""
        with self._lock:
            self._index.totals.set_salt(namespace, salt)
            self._candidates.joined(namespace)

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
                page = self._index.get(key)
                if page is None:
                    missing.append(i)
                elif (page.tokens, page.parent) != (raw[i * step : (i + 1) * step], parent):
                    raise CorruptError(f"page {key.hex()} holds other tokens than its key stands for")
                parent = key
            return list(itertools.takewhile(lambda i: keys[i] not in self._refused, missing))

    def needs_no_capture(self, key: bytes) -> bool:
        """Whether a page or snapshot is here, or was refused."""
        with self._lock:
            return key in self._index or key in self._refused

    def _place_of(self, page: Page) -> Placement:
        known = self._index.get(page.key)
        if known is not None:
            return Placement.KNOWN if is_same(known, page) else Placement.REFUSED
        if self._index.covers(page):
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
            new.page.is_stored = new.page.may_be_victim = False
            try:
                is_added = self._index.add(new.page)
            except BaseException:
                # interrupted: the index may have half of it
                self._start_index()
                self._generation, self._trusted = -1, False
                raise
            if not is_added:
                return Placement.ORPHAN
            self._pending[new.page.key] = new
            self._policy.added(new.page)
            older = self._index.superseded_by(new.page)
            if older is not None and older.is_leaf and not self._may_be_stored(older):
                # not written yet, and not needed any more; a stored one is deleted when the new page is written
                self._forget(older.key)
            return place

    def _may_be_stored(self, page: Page) -> bool:
        return page.is_stored or page.key in self._writing

    def hold(self, pages: Sequence[Page]) -> dict[bytes, PooledBuffer]:
        """Hold the buffers of those of these pages that are pending; the caller releases them."""
        with self._lock:
            pending = [(page, self._pending[page.key]) for page in pages if page.key in self._pending]
            buffers = {page.key: new.buffer for page, new in pending if is_same(new.page, page)}
            return {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.hold()}

    def touch(self, namespace: bytes, pages: Sequence[Page], ttl_ns: int | None) -> None:
        """Record a lookup and the pages it used, none for a miss; renew their time to live."""
        with self._lock:
            now = self._now()
            expires = time.time_ns() + ttl_ns if ttl_ns is not None else 0
            self._policy.looked_up(namespace, pages)
            # the deepest first: it decides how long the others are kept
            for page in reversed(pages):
                page.last_used = max(page.last_used, now)
                if page.expires and page.expires < expires:
                    self._index.change(page, expires=expires)
                page.hits += 1
                self._deferred.uses[page.key] = self._deferred.uses.get(page.key, 0) + 1
            self._ram.want([page for page in pages if page.key not in self._pending])

    def _now(self) -> int:
        """The time of a use: nanoseconds since the epoch, and later than every other."""
        self._latest = max(self._latest + 1, time.time_ns())
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
            if page.key in self._pending and page.key not in self._writing:
                if not page.is_stored:
                    self._forget(page.key)
                    return
                self._is_only_stored(page)
            self._deferred.thinned.add(page.key)

    def mark_damaged(self, key: bytes, suspicion: Suspicion | None = None) -> None:
        """Forget a damaged page and its descendants, and have them deleted with the next commit.

        With a `suspicion` its checksum is right, but its state is not usable: it is deleted unless the page stored by
        then is.
        """
        with self._lock:
            if suspicion is not None:
                self._deferred.fits[key] = suspicion
            self._deferred.damaged.add(key)
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
            if older is None or not self._may_be_deleted(older) or not self._may_be_stored(older):
                return Claim(None)
            if older.pinned and not page.pinned:
                self._index.change(page, pinned=True)
                self._undo(partial(self._index.change, page, pinned=False))
            return Claim(older, tuple(self._delete(older.key)))

    def keep_superseded(self, claim: Claim) -> None:
        """The page that was to replace a tail is refused: the tail, which was not deleted, stays."""
        with self._lock:
            self._put_back(claim.taken)

    def put(self, new: PendingPage, stored_bytes: int, *, may_be_victim: bool) -> None:
        """The open transaction has stored a page, or found it there: how many bytes the codec made of it.

        An imported page competes with the others for the space from now on.
        """
        page = new.page
        with self._lock:
            if not page.is_stored:
                self._uncommitted.add(page.key)
            self._undo(partial(self._take_back, page, page.stored_bytes, page.is_stored, page.may_be_victim))
            self._index.change(page, stored_bytes=stored_bytes, is_stored=True, may_be_victim=may_be_victim)
            if self._is_pending(new):
                self._candidates.add(page)

    def _take_back(self, page: Page, stored_bytes: int, is_stored: bool, may_be_victim: bool) -> None:
        """A page was not put after all."""
        self._uncommitted.discard(page.key)
        self._index.change(page, stored_bytes=stored_bytes, is_stored=is_stored, may_be_victim=may_be_victim)
        if not is_stored and self._strays.get(page.key) is page:
            # given up while it was written
            self._remove_stray(page.key)

    def _undo(self, step: Callable[[], None]) -> None:
        if self._journal is not None:
            self._journal.undo(step)

    def after_commit(self, step: Callable[[], None]) -> None:
        """Call this when the open transaction is committed; not if it fails."""
        with self._lock:
            if self._journal is not None:
                self._journal.after_commit(step)
            else:
                step()

    def no_longer_pending(self, written: Iterable[PendingPage]) -> list[PendingPage]:
        """Those that were forgotten while they were written."""
        with self._lock:
            return [new for new in written if not self._is_pending(new)]

    def committed(self, written: Iterable[PendingPage], deferred: Deferred) -> None:
        """These pages are stored now, and the deferred changes are made."""
        with self._lock:
            for new in written:
                self._uncommitted.discard(new.page.key)
                if self._is_pending(new):
                    del self._pending[new.page.key]
                    self._index.change(new.page, may_be_victim=True)
                    new.page.announced_expiry = new.page.expires
                    self._candidates.add(new.page)
            self._deferred.subtract(deferred)
            if deferred.damaged:
                # those that are not damaged after all, because another process has replaced them
                self._place_again()

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
            # all of them first: their buffers go back to the pool now
            pages = [self._pending.pop(new.page.key).page for new in batch if self._is_pending(new)]
            for page in pages:
                if self._index.get(page.key) is page:
                    self._drop(page.key, DropReason.ORPHAN)

    def end_writing(self, batch: Iterable[PendingPage]) -> None:
        """The transaction of these pages has ended, one way or the other."""
        with self._lock:
            keys = {new.page.key for new in batch}
            self._writing -= keys
            self._uncommitted -= keys

    # -- deleting -----------------------------------------------------------------------------------------------------

    def victims(self, group: Group = None) -> Victims:
        """Stored leaves to evict, of a group of pages or of all, in the order of the policy."""
        with self._lock:
            return Victims(self._lock, self._candidates.victims(group))

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
            if self._index.get(page.key) is not page or not self._may_be_deleted(page):
                return False
            last_used = time_of_use(usage.last_used, time.time_ns()) if usage is not None else 0
            if usage is not None and (last_used > page.last_used or usage.expires > page.expires or usage.pinned):
                page.last_used, page.hits = max(last_used, page.last_used), max(usage.hits, page.hits)
                self._index.change(page, pinned=usage.pinned, expires=max(usage.expires, page.expires))
                self._candidates.add(page)
                return False
            if evicting:
                self.after_commit(partial(self._policy.evicted, page))
            self._delete(page.key)
            return True

    def _may_be_deleted(self, page: Page) -> bool:
        """Whether nothing that is stored depends on a page, in the index or not."""
        return page.is_leaf and not self._strays.follow(page.key)

    def _remove_stray(self, key: bytes) -> Page | None:
        """A stored page has a place in the index now, or is gone; the page."""
        page = self._strays.remove(key)
        parent = self._index.get(page.parent) if page is not None else None
        if parent is not None:
            # it may be a leaf now
            self._candidates.add(parent)
        return page

    def remove_leaf(self, key: bytes) -> Page | None:
        """Take a page out of the index if it is a leaf, pinned or not; the page."""
        with self._lock:
            page = self._index.get(key)
            if page is None or not self._may_be_deleted(page):
                return None
            self._delete(key)
            return page

    def remove_snapshot(self, key: bytes, usage: Usage | None) -> bool:
        """Take a snapshot that was thinned out of the index; not one that is pinned, gone, or was captured again."""
        with self._lock:
            doomed = usage is not None and not usage.pinned and key not in self._pending
            if doomed:
                self._delete(key)
            return doomed

    def lose(self, key: bytes) -> None:
        """The open transaction deletes a page, whatever is known of it; not one that was captured again."""
        with self._lock:
            page, unreadable = self._remove_stray(key), self._strays.unreadable.pop(key, None)
            if page is not None:
                self._deleted_from(page.namespace)
                self._undo(partial(self._strays.add, page))
            if unreadable is not None:
                self._sweeps = True
                self._undo(partial(self._strays.unreadable.__setitem__, key, unreadable))
            here = self._index.get(key)
            if here is not None and key in self._pending:
                if here.is_stored:
                    self._deleted_from(here.namespace)
                    self._undo(partial(self._index.change, here, is_stored=True))
                    self._index.change(here, is_stored=False)
            elif here is not None:
                self._delete(key)

    def _deleted_from(self, namespace: bytes) -> None:
        if self._journal is not None:
            self._journal.deleted_from.add(namespace)

    def with_descendants(self, keys: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """These pages and all that is stored after them, children before their parents: keys and stored bytes.

        To be used in a transaction, for which the catalog is up to date. Each step takes the lock for a moment.
        """
        with self._lock:
            after = self._strays.by_parent()
        waiting = [(key, False) for key in keys]
        page: Page | None
        seen: set[bytes] = set()
        while waiting:
            key, is_done = waiting.pop()
            with self._lock:
                page = self._index.get(key) or self._strays.get(key)
                if not is_done and key not in seen:
                    seen.add(key)
                    waiting.append((key, True))
                    dependents = page.dependents if page is not None and page.key in self._index else []
                    waiting += [(each.key, False) for each in (*dependents, *after.get(key, ()))]
                    continue
            if is_done:
                yield key, page.stored_bytes if page is not None else 0

    def strays(self, namespaces: Collection[bytes] | None) -> list[bytes]:
        """Stored pages that have no place in the index; for None also those that cannot be read."""
        with self._lock:
            return self._strays.keys(namespaces)

    def knows(self, key: bytes) -> bool:
        """Whether there is such a page, in the index or not."""
        with self._lock:
            return key in self._index or key in self._strays

    def set_pinned(self, pages: Iterable[Page], *, pinned: bool) -> None:
        """These pages are pinned now, or not any more."""
        with self._lock:
            # children first: while a parent is pinned, it need not know how long its children are kept
            for page in sorted(pages, key=lambda page: -page.start):
                self._undo(partial(self._set_pinned, page, pinned=page.pinned))
                self._set_pinned(page, pinned=pinned)
            # what was refused may find space now
            self._refused.clear()

    def _set_pinned(self, page: Page, *, pinned: bool) -> None:
        self._index.change(page, pinned=pinned)
        if self._index.get(page.key) is page:
            self._candidates.add(page)

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

    def _forget(self, key: bytes) -> list[_Taken]:
        """Take a page, and what depends on it, out of the index; what was taken, children before their parents."""
        page = self._index.get(key)
        lost_pages = self._index.remove(key)
        self._ram.drop(lost.key for lost in lost_pages)
        taken = [
            _Taken(lost, self._pending.pop(lost.key, None), self._deferred.uses.pop(lost.key, 0)) for lost in lost_pages
        ]
        parent = self._index.get(page.parent) if page is not None else None
        if parent is not None:
            self._candidates.add(parent)
        for namespace in {lost.namespace for lost in lost_pages}:
            salt = self._index.totals.salt_of(namespace)
            if self._index.totals.forget_if_empty(namespace):
                self._candidates.forget(namespace)
                if salt is not None and not self._index.totals.namespaces(salt):
                    self._candidates.forget(salt)
        return taken

    def _delete(self, key: bytes) -> list[_Taken]:
        """The open transaction deletes a page: take it out of the index; what was taken."""
        taken = self._forget(key)
        for one in taken:
            self._deleted_from(one.page.namespace)
        self._undo(partial(self._put_back, taken))
        self._leave_as_strays(one for one in taken if one.page.key != key)
        return taken

    def _put_back(self, taken: Sequence[_Taken]) -> None:
        """Put stored pages back into the index, because they are not deleted after all."""
        for page, new, n_uses in reversed(taken):
            self._remove_stray(page.key)
            here = self._index.get(page.key)
            if not page.is_stored:
                continue
            if here is not None:
                # captured again meanwhile
                self._index.change(here, is_stored=True, pinned=here.pinned or page.pinned)
                continue
            is_imported = new is not None and page.may_be_victim
            page.may_be_victim = True
            page.drop_children()
            if not self._index.add(page):
                self._strays.add(page)
                continue
            if new is not None and is_imported:
                self._pending[page.key] = new
            if n_uses:
                self._deferred.uses[page.key] = self._deferred.uses.get(page.key, 0) + n_uses
            self._candidates.add(page)

    def _leave_as_strays(self, taken: Iterable[_Taken]) -> None:
        """Remember pages that are not in the index any more, but still stored.

        Where another page is stored under the key of one that was given up, that one takes its place.
        """
        are_other = False
        for one in taken:
            if one.page.is_stored:
                self._strays.add(one.page)
            else:
                are_other = are_other or self._strays.get(one.page.key) is not None
        if are_other:
            self._place_again()

    def _drop(self, key: bytes, reason: DropReason) -> None:
        """Give a pending page up, with the pending pages that depend on it, and count them.

        One that another process has stored meanwhile stays in the index.
        """
        page = self._index.get(key)
        if page is not None and page.is_stored and key not in self._uncommitted:
            self._is_only_stored(page)
            return
        lost = 1 if self._pending.pop(key, None) is not None else 0
        taken = self._forget(key)
        self._leave_as_strays(taken)
        lost += sum(1 for one in taken if one.new is not None)
        if lost:
            self._counters.count(f"dropped:{reason.value}", lost)

    def _is_only_stored(self, page: Page) -> None:
        """A page that another process has stored is not pending here any more."""
        self._pending.pop(page.key, None)
        self._index.change(page, may_be_victim=True)
        self._candidates.add(page)

    def _lose(self, key: bytes) -> None:
        """A stored page is gone or damaged: forget it, and count the pending pages that depended on it."""
        taken = self._forget(key)
        self._leave_as_strays(taken)
        if lost := sum(1 for one in taken if one.new is not None):
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
