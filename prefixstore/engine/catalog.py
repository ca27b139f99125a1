"""What is stored, as far as this process knows, and the pages that are still to be written.

Two kinds of pages are in the index: committed ones, as far as lookups came across them, and pending ones, whose bytes
wait in a buffer. Both are matched and restored alike. What a lookup needs, and the index lacks, `Catalog.load` reads.

Each method takes the catalog's lock for a moment, `Catalog.update` at its steps. The lock is never held while the
backend is asked, or while bytes are copied or packed: a completion may wait for it. A thread in a transaction may use
the catalog, not the other way round.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

from prefixstore.backends.base import Backend, Entry, Facts, Transaction, View
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.contents import Contents, DropReason, Taken
from prefixstore.engine.eviction import VictimQueue
from prefixstore.engine.index import Index, Page, Path, Unknown, branches, is_same
from prefixstore.engine.journal import Journal
from prefixstore.engine.pending import Deferred, PendingPage, Suspicion
from prefixstore.engine.ram import RamTier
from prefixstore.engine.snapshot_policy import thin
from prefixstore.engine.stored_pages import StoredPages, Victim
from prefixstore.engine.totals import Group, Total
from prefixstore.errors import CorruptError, StorageError, UnavailableError
from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES, Tokens, page_keys
from prefixstore.format.record import CLOCK_SLACK, Record, Usage, time_of_use
from prefixstore.stats import Counters

__all__ = ["Catalog", "Claim", "Lock", "LockT", "Placement", "Victims", "depth_first"]

log = logging.getLogger("prefixstore")

# siblings compared at each page to find out where sequences fork: where there are many, they fork in few places
SIBLINGS_COMPARED = 64
# how often what a lookup needs is read again if a commit of this process makes it outdated meanwhile
LOADS = 4
# pages of which facts are read at a time: the lock is held while they are entered into the table
FACTS_AT_ONCE = 4_000

Lock: TypeAlias = AbstractContextManager[object]
T = TypeVar("T")
LockT = TypeVar("LockT", bound=AbstractContextManager[object])


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
    """Pages to delete, in order. `next` takes the catalog's lock for a moment, or for several if it has to rank."""

    def __init__(self, lock: Lock, table: StoredPages, queue: VictimQueue) -> None:
        self._lock = lock
        self._table = table
        self._queue = queue
        self._given: bytes | None = None

    def next(self) -> Victim | None:
        """The next page; None when there are no more."""
        while True:
            with self._lock:
                self._given = None
                slot = self._queue.next()
                if slot is None:
                    return None
                if isinstance(slot, int):
                    victim = self._table.table.entry(slot)
                    self._given = victim.key
                    return victim

    def spared(self) -> None:
        """A new page gave way to the last one."""
        with self._lock:
            self._queue.spared()

    def close(self) -> None:
        """Put the last page back, if it was not deleted."""
        with self._lock:
            if self._given is not None:
                self._table.put_back(self._given)


class Catalog:
    """What is known of the location, kept up with it, and what waits for the next commit.

    Parameters
    ----------
    table
        The order of eviction.
    counters
        Counts what is dropped.
    ram
        Is told which pages have left the location.
    """

    def __init__(self, table: StoredPages, counters: Counters, ram: RamTier) -> None:
        self._table = table
        self._ram = ram
        self._lock: Lock = threading.RLock()
        self._contents = Contents(counters, ram, table)
        # since the start of this process
        self.n_lookups = 0
        # pages for which there was no space
        self._refused: set[bytes] = set()
        self._generation = -1
        self._trusted = False
        self._epoch = 0
        # taken by the thread that fills the table
        self._loading = threading.Lock()
        # taken by one transaction of this process at a time
        self._turn = threading.Lock()

    def wrap_lock(self, wrap: Callable[[Lock], LockT]) -> LockT:
        """Use what `wrap` makes of the lock; see `Engine.wrap_lock`."""
        self._lock = wrapped = wrap(self._lock)
        return wrapped

    # -- keeping up with the backend ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Changes when a transaction of this process ends: a view that was opened before may lack what it has done."""
        return self._epoch

    def refresh(self, view: View, *, newest: bool = False) -> int:
        """Bring what is known to the generation of the view, unless it is ahead of it.

        Every transaction begins with this, so what a transaction changes here is never undone by what another thread
        has read before.

        Parameters
        ----------
        view
            Of the backend.
        newest
            Whether the view is of the latest commit. A catalog that is ahead of it describes a store that was replaced.

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
                needed = self._needed()
            changed = view.changes(known) if known is not None else None
            if changed is None:
                found = _with_ancestors(view, needed)
            else:
                found = {key: Entry(key, *one) for key, one in view.records(list(dict.fromkeys(changed))).items()}
            n_records += len(found)
            with self._lock:
                if not self._is_news(generation):
                    return n_records  # another thread was faster
                if changed is not None and not self._trusted:
                    continue  # found to be wrong meanwhile: the changes alone are not enough any more
                if changed is None:
                    self._table.unload(new.page for new in self._contents.pending.values())
                    self._contents.rebuild(found)
                    self._ram.drop(set(self._ram.keys()) - found.keys())
                else:
                    for key in dict.fromkeys(changed):
                        self._contents.refresh_page(key, found.get(key))
                    self._ram.drop(key for key in changed if key not in found)
                self._refused.clear()
                self._generation, self._trusted = generation, True
                return n_records

    def _needed(self) -> set[bytes]:
        """What has to be known even if all else is forgotten: pending pages and what they follow, states in RAM."""
        index = self._contents.index
        needed = set(self._ram.keys())
        for new in self._contents.pending.values():
            page: Page | None = new.page
            while page is not None and page.key not in needed:
                needed |= {page.key, page.parent} - {page.namespace}
                page = index.get(page.parent)
        return needed

    def _is_news(self, generation: int) -> bool:
        """Whether a view of this generation may change what is known.

        One that was opened before the last refresh has nothing new. And while a transaction of this process is open, or
        just ends, no other one has changed anything since it began, and what it has changed itself is known and may
        have to be taken back.
        """
        is_known = generation < self._generation or (generation == self._generation and self._trusted)
        return not is_known and self._contents.journal is None

    def _distrust(self) -> None:
        """What is known describes nothing that is stored any more: the next refresh begins anew."""
        self._generation, self._trusted = -1, False

    @contextmanager
    def update(self, backend: Backend, on_commit: Callable[[], None] | None = None) -> Iterator[Transaction]:
        """A transaction for which the catalog is up to date. If it fails, what it has changed here is undone.

        At its end it drops the settings of namespaces that it has left without pages.

        Parameters
        ----------
        backend
            The location.
        on_commit
            Called when the transaction is committed, before any other thread learns from the location what has happened
            since.
        """
        # Until the outcome is known here, the next transaction of this process waits: before it has the backend, and
        # with nothing to be interrupted between taking the turn and being sure to pass it on.
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
            self._epoch += 1
            if error is not None and not isinstance(error, StorageError):
                # interrupted anywhere, maybe in the middle of a change
                self._trusted = False
            if journal is not None and error is None:
                journal.commit()
            elif journal is not None:
                trusted, self._trusted = self._trusted, False
                # if it was committed in spite of the error, the log of changes says so at the next refresh
                journal.roll_back()
                self._trusted = trusted
            self._table.end_transaction()

    def _drop_empty_namespaces(self, transaction: Transaction) -> None:
        """Drop the settings of namespaces from which the transaction has deleted the last page."""
        with self._lock:
            journal, sweeps = self._contents.journal, self._contents.sweeps
            emptied = set(journal.deleted_from) if journal is not None else set()
            if journal is None or not (emptied or sweeps):
                return
            if sweeps:
                journal.after_commit(self._swept)
        if sweeps:
            emptied = set(transaction.namespaces())
        for namespace in emptied - transaction.followed(sorted(emptied)):
            transaction.drop_namespace(namespace)

    def _swept(self) -> None:
        self._contents.sweeps = False

    def sweep(self) -> None:
        """Have the next transaction look for settings of namespaces that have no pages."""
        with self._lock:
            self._contents.sweeps = True

    def contradict(self, page: Page, generation: int) -> None:
        """A page is not in a view of this generation. If the catalog covers that generation, the store was replaced.

        Not if the page was deleted, and captured again since: then the index has another node for it.
        """
        with self._lock:
            is_here = self._contents.index.get(page.key) is page and page.key not in self._contents.pending
            if is_here and generation <= self._generation:
                log.warning("the index does not match what is stored; rebuilding it")
                self._distrust()

    # -- reading what a lookup needs ----------------------------------------------------------------------------------

    def read(self, backend: Backend, load: Callable[[View, int], bool]) -> int:
        """Bring what is known up to date, and call one of the methods below, again if its view is too old by then.

        Returns
        -------
        int
            How many records have changed.
        """
        n_records = 0
        for _ in range(LOADS):
            epoch = self._epoch
            with backend.view() as view:
                n_records += self.refresh(view)
                if load(view, epoch):
                    break
        return n_records

    def load(
        self,
        view: View,
        epoch: int,
        namespace: bytes,
        tokens: Tokens,
        page_tokens: int,
        *,
        snapshots: bool = False,
    ) -> bool:
        """Read what the index lacks of a sequence.

        Parameters
        ----------
        view
            Up to which the catalog was brought.
        epoch
            The catalog's, from before the view was opened.
        namespace, tokens, page_tokens
            The sequence.
        snapshots
            Whether the snapshots along it are wanted.

        Returns
        -------
        bool
            False if the view is too old by now.
        """
        with self._lock:
            unknown = self._unknown(namespace, tokens, page_tokens, snapshots=snapshots)
            if unknown is None:
                return True
        rest = tokens[unknown.at :].tobytes()
        keys = page_keys(unknown.parent, tokens[unknown.at :], page_tokens)
        step = page_tokens * TOKEN_BYTES
        pages = view.leading(keys) if keys else []
        # a key only nominates: the tokens decide
        are_good = (_holds(page, rest[i * step : (i + 1) * step]) for i, page in enumerate(pages))
        n_good = sum(1 for _ in itertools.takewhile(bool, are_good))
        parent = pages[n_good - 1].key if n_good else unknown.parent
        wanted = rest[n_good * step : (n_good + 1) * step]
        near = view.neighbors(parent, wanted) if wanted else []
        beside: list[Entry] = []
        parents = [*unknown.without_snapshots, *(page.key for page in pages[:n_good])]
        if snapshots and parents:
            beside = view.children(parents, SNAPSHOT)
        generation = view.generation
        with self._lock:
            if not self._may_learn(generation, epoch):
                return False
            contents = self._contents
            are_known = [contents.learn(entry) for entry in pages[:n_good]]
            for entry in pages[n_good : n_good + 1]:
                contents.learn(entry)
            if all(are_known) and wanted:
                contents.know_between(parent, namespace, wanted, near)
            if snapshots:
                contents.know_snapshots(parents, namespace, beside)
            return True

    def _unknown(self, namespace: bytes, tokens: Tokens, page_tokens: int, *, snapshots: bool) -> Unknown | None:
        index = self._contents.index
        find = index.snapshots_along if snapshots else index.match
        return find(namespace, tokens, page_tokens)[1]

    def _may_learn(self, generation: int, epoch: int) -> bool:
        """Whether what was read from a view is what is stored now, but for what the open transaction does."""
        return self._trusted and epoch == self._epoch and generation == self._generation

    def load_pages(self, view: View, epoch: int, keys: Collection[bytes]) -> bool:
        """Read what the index lacks of these pages and of those that they follow; false if the view is too old."""
        with self._lock:
            wanted = [key for key in keys if key not in self._contents.index]
        found = _with_ancestors(view, wanted)
        generation = view.generation
        with self._lock:
            if not self._may_learn(generation, epoch):
                return False
            for entry in sorted(found.values(), key=_start_of):
                self._contents.learn(entry)
            return True

    def with_all(self, backend: Backend, use: Callable[[Index], T]) -> T:
        """What a function makes of the index when that has all that is stored.

        For maintenance: it takes 3 KB of memory a page. The function is called under the lock, as the next lookup may
        forget pages again. A thread in a transaction calls `with_all_in` instead.

        Raises
        ------
        UnavailableError
            If others write to a location that is open read-only, and what was read is outdated each time.
        """
        for attempt in range(LOADS):
            # a commit of this process makes what was read useless: the next ones wait
            with self._turn if attempt else nullcontext():
                epoch = self._epoch
                with backend.view() as view:
                    self.refresh(view)
                    with self._lock:
                        # what a transaction has deleted comes back if it fails
                        if self._contents.is_complete and self._contents.journal is None:
                            return use(self._contents.index)
                    found, generation = _entries(view), view.generation
                with self._lock:
                    if self._may_learn(generation, epoch) and self._contents.journal is None:
                        self._contents.rebuild_all(found)
                        return use(self._contents.index)
        try:
            with self.update(backend) as transaction:
                return self.with_all_in(transaction, use)
        except UnavailableError as error:
            message = f"others have changed what is stored each time while it was read; try again ({error})"
            raise UnavailableError(message) from error

    def with_all_in(self, transaction: Transaction, use: Callable[[Index], T]) -> T:
        """As `with_all`, in a transaction for which the catalog is up to date, and that has changed nothing yet."""
        with self._lock:
            if self._contents.is_complete:
                return use(self._contents.index)
        found = _entries(transaction)
        with self._lock:
            self._contents.rebuild_all(found)
            return use(self._contents.index)

    # -- what eviction needs ------------------------------------------------------------------------------------------

    def load_table(self, backend: Backend) -> None:
        """Read what eviction needs of all pages, in slices, if that was not done yet."""
        with self._loading:
            after = b""
            while not self._table.is_loaded:
                epoch = self.epoch
                with backend.view() as view:
                    self.refresh(view)
                    facts, generation = view.facts(after, FACTS_AT_ONCE), view.generation
                    damaged = _damaged(view, facts)
                with self._lock:
                    if not self._table.is_loading:
                        # what was read before, if anything, was forgotten since
                        self._table.begin()
                        after = b""
                        continue
                    if not self._may_learn(generation, epoch):
                        continue
                    if len(facts):
                        after = self._enter(facts, damaged)
                        continue
                    steps = self._table.finish()
                self._finish_table(steps)

    def require_table(self, transaction: Transaction) -> None:
        """As `load_table`, in a transaction for which the catalog is up to date: others wait meanwhile."""
        after = b""
        with self._lock:
            if self._table.is_loaded:
                return
            self._table.begin()
        while len(facts := transaction.facts(after, FACTS_AT_ONCE)):
            damaged = _damaged(transaction, facts)
            with self._lock:
                after = self._enter(facts, damaged)
        with self._lock:
            steps = self._table.finish()
        self._finish_table(steps)

    def _enter(self, facts: Facts, damaged: Collection[bytes]) -> bytes:
        """Enter a slice into the table; up to which key it is filled now."""
        # a time in the future is not believed
        facts["last_used"][facts["last_used"] > time.time_ns() + CLOCK_SLACK] = self._contents.started
        self._table.fill(facts)
        self._contents.deferred.damaged |= set(damaged)
        journal = self._contents.journal
        for key in journal.deleted if journal is not None else ():
            self._table.deleted(key)
        return bytes(facts["key"][-1])

    def _finish_table(self, steps: Iterator[None]) -> None:
        """After the last slice: the lock is free between the steps."""
        while True:
            with self._lock:
                if not self._table.is_loading or next(steps, self) is self:
                    break
        with self._lock:
            if self._table.is_loaded:
                # uses that are not written yet
                for page in map(self._contents.index.get, self._contents.deferred.uses):
                    if page is not None:
                        self._table.used(page)
                self._contents.deferred.damaged |= set(self._table.strays())

    @property
    def has_table(self) -> bool:
        """Whether `victims`, `expiring` and `total` know all pages."""
        return self._table.is_loaded

    def victims(self, group: Group = None) -> Victims:
        """Stored leaves to evict, of a group of pages or of all, in the order of the policy."""
        with self._lock:
            return Victims(self._lock, self._table, self._table.victims(group))

    def expiring(self) -> Victims:
        """Stored leaves that expire, the first one first."""
        with self._lock:
            return Victims(self._lock, self._table, self._table.expiring())

    def total(self, group: Group = None) -> Total:
        """What a group of pages holds; see `Total`."""
        with self._lock:
            return replace(self._table.totals.of(group))

    def namespaces_without_salt(self) -> list[bytes]:
        """Namespaces with pages, for which `set_salt` was not called yet."""
        with self._lock:
            return list(self._table.totals.without_salt)

    def set_salt(self, namespace: bytes, salt: str | None) -> None:
        """Note whose pages those of a namespace are."""
        with self._lock:
            self._table.set_salt(namespace, salt)

    # -- looking pages up ---------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest known prefix of `tokens`, up to the last page that has not expired; see `load`."""
        now = time.time_ns()
        with self._lock:
            path, _ = self._contents.index.match(namespace, tokens, page_tokens)
            self._contents.index.used(path.pages)
            self._contents.trim()
            n_kept = next((i for i, page in enumerate(path.pages) if page.has_expired(now)), len(path.pages))
            if n_kept == len(path.pages):
                return path
            self._contents.deferred.expired = True
            pages = path.pages[:n_kept]
            return Path(pages, pages[-1].end if pages else 0)

    def match_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """The path to the deepest known snapshot among the first `limit` tokens, at a multiple of `multiple_of`."""
        now = time.time_ns()
        with self._lock:
            found = Path((), 0)
            for path in self._contents.index.snapshots_along(namespace, tokens[:limit], page_tokens)[0]:
                if any(page.has_expired(now) for page in path.pages):
                    self._contents.deferred.expired = True
                elif path.n_tokens % multiple_of == 0:
                    found = path
                    break
            self._contents.index.used(found.pages)
            self._contents.trim()
            return found

    def match_stored(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The path to the deepest snapshot of `tokens`, or the longest prefix where there are none; expired or not."""
        with self._lock:
            # where there are snapshots, pages alone cannot be restored
            snapshots, _ = self._contents.index.snapshots_along(namespace, tokens, page_tokens)
            return snapshots[0] if snapshots else self._contents.index.match(namespace, tokens, page_tokens)[0]

    def get(self, key: bytes) -> Page | None:
        """The page with this key, if it is in the index."""
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

    def pages(self, backend: Backend) -> list[Page]:
        """All pages, stored and pending, parents before their children; see `with_all`."""
        return self.with_all(backend, lambda index: list(depth_first(index.roots())))

    def select(self, backend: Backend, choose: Callable[[Index], Collection[bytes]]) -> list[Page]:
        """The pages whose keys a function of the index chooses, parents before their children; see `with_all`."""

        def chosen(index: Index) -> list[Page]:
            keys = choose(index)
            return [page for page in depth_first(index.roots()) if page.key in keys]

        return self.with_all(backend, chosen)

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
            new.page.is_stored = False
            is_new = self._contents.index.is_sealed(new.page)
            try:
                is_added = self._contents.index.add(new.page)
            except BaseException:
                # interrupted: the index may have half of it
                self._contents.index = Index()
                self._distrust()
                raise
            if not is_added:
                return Placement.ORPHAN
            if is_new:
                # it is not stored, so nothing is stored after it
                new.page.has_no_other_dependents()
            self._contents.pending[new.page.key] = new
            self._table.announced(new.page)
            older = self._contents.index.superseded_by(new.page)
            if older is not None and older.is_leaf and not self._contents.may_be_stored(older):
                # not written yet, and not needed any more; a stored one is deleted when the new page is written
                self._contents.forget(older.key, is_deleted=False)
            return place

    def hold(self, pages: Sequence[Page]) -> dict[bytes, PooledBuffer]:
        """Hold the buffers of those of these pages that are pending; the caller releases them."""
        with self._lock:
            pending = [(page, self._contents.pending[page.key]) for page in pages if page.key in self._contents.pending]
            buffers = {page.key: new.buffer for page, new in pending if is_same(new.page, page)}
            return {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.hold()}

    def touch(self, namespace: bytes, pages: Sequence[Page], ttl_ns: int | None, n_tokens: int | None = None) -> None:
        """Record a lookup and the pages it used, none for a miss; renew their time to live."""
        with self._lock:
            now = self._contents.time_of_use()
            expires = time.time_ns() + ttl_ns if ttl_ns is not None else 0
            self._table.looked_up(namespace, pages, n_tokens)
            self.n_lookups += 1
            for page in reversed(pages):
                page.last_used = max(page.last_used, now)
                if page.expires and page.expires < expires:
                    page.expires = expires
                self._table.used(page)
                page.hits += 1
                self._contents.deferred.uses[page.key] = self._contents.deferred.uses.get(page.key, 0) + 1
            self._ram.want([page for page in pages if page.key not in self._contents.pending])

    def thin(self, view: View, namespace: bytes, tokens: Tokens, page_tokens: int, keep: int, interval: int) -> int:
        """Give up all but `keep` of the known snapshots along `tokens`, except pinned ones; how many."""
        with self._lock:
            paths = self._contents.index.snapshots_along(namespace, tokens, page_tokens)[0][::-1]
            if len(paths) <= keep:
                return 0
            known = self._contents.index.match(namespace, tokens, page_tokens)[0].pages
        ends = {namespace: 0} | {page.key: page.end for page in known if page.end <= len(tokens)}
        others: dict[bytes, list[bytes]] = {key: [] for key in ends}
        for form in (PAGE, SNAPSHOT):
            for entry in view.children(list(ends), form, SIBLINGS_COMPARED):
                if isinstance(entry.record, Record):
                    others[entry.record.parent].append(entry.record.tokens)
        with self._lock:
            index = self._contents.index
            for key in ends:
                # pending ones too
                node = index.node(key, namespace) if key == namespace or key in index else None
                others[key] += [page.tokens for page in node.dependents[:SIBLINGS_COMPARED]] if node is not None else []
            positions = [path.n_tokens for path in paths]
            forks = branches([(end, others[key]) for key, end in ends.items()], tokens)
            # other sequences start from the last snapshot before the fork
            shared = {max((n for n in positions if n <= fork), default=0) for fork in forks}
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
                    self._contents.forget(page.key, is_deleted=False)
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

    @property
    def has_expired(self) -> bool:
        """Whether a lookup has come across an expired page, which is to be deleted."""
        return self._contents.deferred.expired

    def deferred(self) -> Deferred:
        """A copy of the deferred changes."""
        with self._lock:
            return self._contents.deferred.copy()

    def still_pending(self, batch: Iterable[PendingPage]) -> list[PendingPage]:
        """Those that still wait: not superseded, dropped, or cleared and captured again."""
        with self._lock:
            return [new for new in batch if self._contents.is_pending(new)]

    def load_beside(self, transaction: Transaction, page: Page) -> None:
        """Read the siblings of a page that is about to be written: what it continues, or what continues it."""
        with self._lock:
            if page.form == SNAPSHOT or self._contents.index.is_sealed(page):
                return
        wanted, near = page.tokens, transaction.neighbors(page.parent, page.tokens)
        with self._lock:
            self._contents.know_between(page.parent, page.namespace, wanted, near)
        if any(_holds(entry, wanted) for entry in near):
            # it is stored: a tail that it continues comes just before
            wanted = page.tokens[:-TOKEN_BYTES]
            near = transaction.neighbors(page.parent, wanted)
            with self._lock:
                self._contents.know_between(page.parent, page.namespace, wanted, near)

    def tail_before(self, new: PendingPage) -> Page | None:
        """The stored tail that a pending page continues."""
        with self._lock:
            older = self._contents.index.superseded_by(new.page) if self._contents.is_pending(new) else None
            return older if older is not None and self._contents.may_be_stored(older) else None

    def claim(self, new: PendingPage, *, keeps_tail: bool = False) -> Claim | None:
        """Mark a page as being written, and take the tail that it continues out of the index, unless it has to stay.

        None if the page is no longer pending, or need not be written, as a longer one is stored.
        """
        page = new.page
        with self._lock:
            if not self._contents.is_pending(new):
                return None
            if page.is_leaf and self._contents.index.covers(page):
                del self._contents.pending[page.key]
                self._contents.forget(page.key, is_deleted=False)
                return None
            self._contents.writing.add(page.key)
            older = self._contents.index.superseded_by(page)
            # one that another thread is writing has been written: transactions take turns
            if keeps_tail or older is None or not older.is_leaf or not self._contents.may_be_stored(older):
                return Claim(None)
            if older.pinned and not page.pinned:
                self._set_pinned(page, pinned=True)
            return Claim(older, tuple(self._contents.delete(older.key, older.namespace)))

    def keep_superseded(self, claim: Claim) -> None:
        """The page that was to replace a tail is refused: the tail, which was not deleted, stays."""
        with self._lock:
            self._contents.put_back(claim.taken)

    def put(self, new: PendingPage, record: Record, usage: Usage, *, may_be_victim: bool) -> None:
        """The open transaction has stored a page with this record and usage, or found them there.

        An imported page competes with the others for the space from now on.
        """
        with self._lock:
            if not new.page.is_stored:
                self._contents.uncommitted.add(new.page.key)
            self._contents.put(new.page, Entry(new.page.key, record, usage), may_be_victim=may_be_victim)

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
                    self._table.committed(new.page.key)
                    new.page.announced_expiry = new.page.expires
            self._contents.deferred.subtract(deferred)

    def refuse(self, new: PendingPage, reason: DropReason) -> None:
        """There is no space for a page, or no parent: give it up."""
        with self._lock:
            if self._contents.is_pending(new):
                if reason is DropReason.ADMISSION:
                    self._table.not_admitted(new.page)
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
                self._table.given_up(page.key)
                if self._contents.index.get(page.key) is page:
                    self._contents.drop(page.key, DropReason.ORPHAN)

    def end_writing(self, batch: Iterable[PendingPage]) -> None:
        """The transaction of these pages has ended, one way or the other."""
        with self._lock:
            keys = {new.page.key for new in batch}
            self._contents.writing -= keys
            self._contents.uncommitted -= keys

    # -- packing ------------------------------------------------------------------------------------------------------

    def coldest(self, n: int, codec: int = 0) -> list[Victim]:
        """Stored pages with this codec that the policy would evict first if they were leaves, in order; at most `n`.

        The table has to be loaded: see `load_table`. Pending pages are not among them.
        """
        with self._lock:
            search = self._table.coldest(n, codec)
        while True:
            with self._lock:
                try:
                    next(search)
                except StopIteration as end:
                    return [self._table.table.entry(slot) for slot in end.value]

    # -- deleting -----------------------------------------------------------------------------------------------------

    def put_back(self, key: bytes) -> None:
        """A victim was passed over."""
        with self._lock:
            self._table.put_back(key)

    def remove_victim(self, victim: Victim, usage: Usage | None, *, evicting: bool) -> bool:
        """Take a victim out of the index, so that it is not matched any more; whether it may be deleted.

        It is spared if it is not a leaf any more, or if its stored usage says that another process has used or pinned
        it.
        """
        with self._lock:
            page = self._contents.index.get(victim.key)
            if self._contents.is_held(victim.key) or (page is not None and not page.is_leaf):
                return False
            last_used = time_of_use(usage.last_used, time.time_ns()) if usage is not None else 0
            if usage is not None and (last_used > victim.last_used or usage.expires > victim.expires or usage.pinned):
                if page is not None:
                    page.last_used, page.hits = max(last_used, page.last_used), max(usage.hits, page.hits)
                    page.pinned, page.expires = usage.pinned, max(usage.expires, page.expires)
                self._table.spare(victim, usage, last_used)
                return False
            if evicting:
                self.after_commit(partial(self._table.evicted, victim.key, *self._table.noted(victim.key)))
            self._contents.delete(victim.key, victim.namespace)
            return True

    def admits(self, new: PendingPage, victim: Victim) -> bool:
        """Whether a new page is worth more than a victim, by the policy."""
        with self._lock:
            return self._table.admits(new.page.key, victim.key)

    @property
    def policy_note(self) -> bytes | None:
        """The name of the note with what the policy has learned; None if it learns nothing."""
        return self._table.policy.note

    def learned(self) -> dict[str, bytes]:
        """What the policy has learned."""
        with self._lock:
            return self._table.policy.parts()

    def load_policy(self, note: bytes) -> bool:
        """Have the policy go on with what was learned before; whether that can be read."""
        with self._lock:
            return self._table.policy.load(note)

    def remove_leaf(self, key: bytes, namespace: bytes) -> bool:
        """Take a page on which nothing stored depends out of the index, pinned or not; whether it may be deleted."""
        with self._lock:
            page = self._contents.index.get(key)
            if page is not None and not page.is_leaf:
                return False
            self._contents.delete(key, namespace)
            return True

    def remove_snapshot(self, key: bytes, usage: Usage | None) -> bool:
        """Take a snapshot that was thinned out of the index; not one that is pinned, gone, or was captured again."""
        with self._lock:
            doomed = usage is not None and not usage.pinned and key not in self._contents.pending
            if doomed:
                page = self._contents.index.get(key)
                self._contents.delete(key, page.namespace if page is not None else None)
            return doomed

    def lose(self, key: bytes, namespace: bytes | None = None) -> None:
        """The open transaction deletes a page, whatever is known of it; not one that was captured again."""
        with self._lock:
            here = self._contents.index.get(key)
            if here is None or key not in self._contents.pending:
                self._contents.delete(key, namespace)
                # whose page it was may not be known
                self._contents.sweeps = self._contents.sweeps or (here is None and namespace is None)
            elif here.is_stored:
                self._contents.undo(partial(setattr, here, "is_stored", True))
                here.is_stored = False
                self._contents.note_deleted(key, here.namespace)

    def set_expiry(self, page: Page, expires: int) -> None:
        """The open transaction changes when a page expires."""
        with self._lock:
            self._contents.undo(partial(self._contents.set_expiry, page, page.expires))
            self._contents.set_expiry(page, expires)

    def set_pinned(self, pages: Iterable[Page], *, pinned: bool) -> None:
        """These pages are pinned now, or not any more."""
        with self._lock:
            for page in pages:
                self._set_pinned(page, pinned=pinned)
            # what was refused may find space now
            self._refused.clear()

    def _set_pinned(self, page: Page, *, pinned: bool) -> None:
        self._contents.undo(partial(self._contents.set_pinned, page, pinned=page.pinned))
        self._contents.set_pinned(page, pinned=pinned)

    def pinned_with(self, page: Page, *, pinned: bool) -> list[Page]:
        """What changes when a page is pinned or unpinned: its descendants too, and its ancestors; see `with_all_in`.

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


def depth_first(start: Iterable[Page]) -> Iterator[Page]:
    """Pages and their descendants, parents before their children."""
    waiting = list(start)[::-1]
    while waiting:
        page = waiting.pop()
        yield page
        waiting += page.dependents[::-1]


def _entries(view: View) -> dict[bytes, Entry]:
    """All that is stored."""
    return {key: Entry(key, record, usage) for key, record, usage in view.scan()}


def _with_ancestors(view: View, keys: Collection[bytes]) -> dict[bytes, Entry]:
    """What is stored of these pages, and of those that they follow."""
    found: dict[bytes, Entry] = {}
    wanted = list(keys)
    while wanted:
        new = {key: Entry(key, *one) for key, one in view.records(wanted).items()}
        found |= new
        records = [one.record for one in new.values() if isinstance(one.record, Record)]
        parents = {record.parent for record in records if record.parent != record.namespace}
        wanted = [key for key in parents if key not in found and key not in keys]
    return found


def _damaged(view: View, facts: Facts) -> list[bytes]:
    """Those of these pages whose records are damaged."""
    unreadable = [bytes(key) for key in facts["key"][~facts["is_readable"]]]
    return [key for key, (error, _) in view.records(unreadable).items() if isinstance(error, CorruptError)]


def _holds(entry: Entry, tokens: bytes) -> bool:
    return isinstance(entry.record, Record) and entry.record.tokens == tokens


def _start_of(entry: Entry) -> int:
    return entry.record.start if isinstance(entry.record, Record) else -1
