"""The engine: stores, finds and delivers pages by their tokens, over any backend, without a model.

read:   match, match_snapshot -> catalog, lookup        fetching -> fetch (RAM, backend, codec)    (`engine.reading`)
write:  submit -> catalog (pending), queue -> (thread) commit (codec, budget, backend)

Checks, pins, deletions and evictions that are asked for are in `engine.upkeep`, and how it ends is in `engine.closing`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from prefixstore.backends.forks import ForkLevel, register_at_fork
from prefixstore.backends.threads import Threads, handed_over
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.bookmark import BookmarkChange
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.breaker import LOCAL_PATIENCE, CircuitBreaker
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.closing import Closing
from prefixstore.engine.commit import Committer
from prefixstore.engine.delete import Deleter
from prefixstore.engine.importing import Importer
from prefixstore.engine.index import Page
from prefixstore.engine.page_view import Used
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.policy import Policy
from prefixstore.engine.queue import Drained, WriteQueue
from prefixstore.engine.ram import RamTier
from prefixstore.engine.saved_notes import SavedNotes
from prefixstore.engine.source import Fetcher
from prefixstore.engine.space import Evictor
from prefixstore.engine.tap import Tap
from prefixstore.engine.upkeep import Upkeep
from prefixstore.engine.waiting import Placement
from prefixstore.errors import StorageError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.figures import DIGITS, History
from prefixstore.format.namespace import Namespace
from prefixstore.results import SessionCounts, Shortage, TierStats
from prefixstore.stats import Counters

__all__ = ["Engine"]

log = logging.getLogger("prefixstore")

QUEUE_BYTES = 256 << 20


class Engine(Upkeep, Closing):
    """Stores and finds pages by tokens, in one location. May be used from many threads.

    Parameters
    ----------
    backend
        Where bytes are kept; the engine closes it.
    budget
        What the backend may hold.
    policy
        The order of eviction.
    encode
        Packs states: ``(namespace, state) -> (codec number, stored bytes)``. It learns from here how fast the location
        is.
    counters
        Counts what happens. In a forked child the engine has a copy: reach it as `Engine.counters`.
    ttl
        Seconds after their last use when pages that are captured here expire; None for never.
    priority
        Of the pages that are captured here.
    ram_bytes
        Memory for states of hot pages; 0 for none.
    queue_bytes
        Memory for pages that wait to be written.
    write_behind
        Whether a thread writes them; if not, `submit` writes them.
    read_only
        Whether nothing is ever written.
    housekeeping
        Whether commits also delete damaged, thinned and expired pages, and record uses. An `Archive` deletes only what
        it is told to.
    clock
        Seconds, by which the circuit breaker tells whether the location is slow.

    Attributes
    ----------
    wants_all
        Whether what is captured now is stored even if the policy finds it worth less than what is evicted for it.
    budget, read_only, ram_budget
        As given; the last as `ram_bytes`.
    peak_bytes
        The largest size of the location that this process has seen, in bytes.
    deleter, importer, bookmarks
        Delete pages and mend the index; import pages; name sequences.
    tap
        Receives lookups, uses and captures; None for no listener.
    token_seconds
        What computing a token takes, as last measured; None if it is not known.
    """

    def __init__(
        self,
        backend: Pages,
        budget: Budget,
        policy: Policy,
        encode: Encoder,
        counters: Counters,
        *,
        ttl: float | None = None,
        priority: int = 0,
        ram_bytes: int = 0,
        queue_bytes: int = QUEUE_BYTES,
        write_behind: bool = True,
        read_only: bool = False,
        housekeeping: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = counters
        self._backend = backend
        self._trie = backend.trie
        self.budget = budget
        self._policy = policy
        self._encode = encode
        self._ttl_ns = round(ttl * 1e9) if ttl is not None else None
        self._priority = priority
        self.ram_budget = ram_bytes
        self._queue_bytes = queue_bytes
        self._write_behind = write_behind
        self.read_only = read_only
        self._housekeeping = housekeeping
        self._clock = clock
        self._sizes = (0, 0)
        # for the figures
        self._models: dict[str, str] = {}
        self._stores_all = 0
        self.wants_all = False
        # what counts the sessions of its store; kept by a weak reference
        self.sessions: Callable[[], Callable[[], SessionCounts] | None] = lambda: None
        self.tap: Tap | None = None
        self.token_seconds: float | None = None
        self._closed = False
        self._start()
        register_at_fork(self, ForkLevel.ENGINE)

    def _start(self) -> None:
        """Everything that has locks, threads or buffers of this process."""
        backend, counters = self._backend, self.counters
        self.threads = Threads("prefixstore-work")
        # held by the thread that closes the engine
        self._ending = threading.RLock()
        self._ram = RamTier(self.ram_budget)
        self._catalog = catalog = Catalog(self._policy, counters, self._ram)
        patience = LOCAL_PATIENCE if backend.is_local else 1
        self._breaker = CircuitBreaker(self._probe, counters, patience=patience, clock=self._clock)
        self._fetcher = Fetcher(
            backend, catalog, self._ram, self.threads, counters, self._encode.read_rate, self._breaker
        )
        self.deleter = Deleter(self.threads, backend, catalog)
        # what the location was seen to hold: last, and at most
        self._last_used = Used(0, 0)
        self.peak_bytes = 0
        self._committer = Committer(
            backend,
            catalog,
            self.deleter,
            self.budget,
            self._encode,
            counters,
            on_used=self._saw,
            housekeeping=self._housekeeping,
        )
        self._notes = SavedNotes(
            backend,
            Evictor(catalog, self.budget, counters),
            counters,
            self._models,
            notes_budget=self._housekeeping,
        )
        self.bookmarks = Bookmarks(self.threads, backend, self.budget, lambda: catalog.has_pending)
        self.importer = Importer(self.threads, backend, catalog, self._committer, self._load_policy)
        self._queue = WriteQueue(
            self,
            self._queue_bytes,
            counters,
            in_background=self._write_behind,
            read_only=self.read_only,
            on_released=self._end,
        )

    def before_fork(self) -> None:
        """Nothing to hold: the handles are held by the backends."""

    def after_fork_in_parent(self) -> None:
        """Nothing to release."""

    def after_fork_in_child(self) -> None:
        """Start over with new locks, threads and handles. What the parent has captured, the parent writes."""
        if not self._closed:
            self._backend.after_fork()
            self.counters = self.counters.copy()
            self._start()

    @property
    def is_closed(self) -> bool:
        """Whether the engine has released the location."""
        return self._closed

    def n_near(self, pages: Sequence[Page]) -> int:
        """How many of these pages, counted from the first, are in this location and not only in the far one."""
        return len(pages)

    @property
    def late(self) -> int:
        """Restores that were given up midway, and lookups that did not wait for the far location."""
        return self.counters["late"]

    def tiers(self) -> tuple[TierStats, ...]:
        """Statistics of each location, if there are several."""
        return ()

    @property
    def ram_bytes(self) -> int:
        """Bytes of states in RAM."""
        return self._ram.used

    @handed_over
    def history(self) -> History:
        """How the location was used, by all processes; see `History`. Raises `StorageError`."""
        return self._notes.history()

    @handed_over
    def describe(self, namespace: Namespace, model: str | None = None) -> None:
        """Have the name of the model of a namespace kept in the location, with the figures."""
        digest = namespace.settings.get("model")
        if model and isinstance(digest, str):
            self._models[digest[:DIGITS]] = model

    # -- names of sequences -------------------------------------------------------------------------------------------

    @handed_over
    def set_bookmark(self, namespace: bytes, name: str, bookmark: BookmarkChange) -> None:
        """Name a sequence, with the commit after those of its pages; None or `Unset` removes the name."""
        if self.read_only:
            return
        self.bookmarks.set(namespace, name, bookmark)
        if self._write_behind:
            self._queue.nudge()
        else:
            self._write_bookmarks()

    def _write_bookmarks(self) -> None:
        try:
            self.bookmarks.write()
        except StorageError as error:
            log.warning("names of stored sequences were not written yet: %s", error)

    @handed_over
    def keep(self, owner: str, keys: Collection[bytes]) -> None:
        """Have these pages evicted after all others; see `Catalog.keep`."""
        self._catalog.keep(owner, keys)

    @handed_over
    def keep_nothing(self) -> None:
        """Undo every `keep`."""
        self._catalog.keep_nothing()

    # -- capturing ----------------------------------------------------------------------------------------------------

    def acquire(self, size: int, *, wait: bool = False) -> PooledBuffer | None:
        """A buffer to capture a page into; None if too much is queued already and `wait` is false."""
        # handed over only to wait: while another thread computes, that takes longer than copying a page
        buffer = self._queue.acquire(size)
        return self._acquire_later(size) if buffer is None and wait else buffer

    @handed_over
    def _acquire_later(self, size: int) -> PooledBuffer | None:
        return self._queue.acquire(size, wait=True)

    @handed_over
    def submit(self, *news: PendingPage) -> list[PendingPage]:
        """Have captured pages written, parents first; those that are wanted. The engine owns the buffers then."""
        return [new for new in news if self._take(new, self.tap)]

    def _take(self, new: PendingPage, tap: Tap | None) -> bool:
        """Have a page written, telling only this tap; whether it is wanted."""
        is_wanted = self.announce(new)
        if is_wanted:
            if tap is not None:
                tap.captured(new.page)
            self._queue.put(new)
        else:
            new.release()
        return is_wanted

    def announce(self, new: PendingPage) -> bool:
        """Have a captured page matched from now on, as one that waits; False if it is not wanted."""
        return self.place(new) is Placement.ADDED

    @handed_over
    def place(self, new: PendingPage) -> Placement:
        """As `announce`; what became of the page."""
        page = new.page
        page.priority = self._priority
        new.is_wanted = new.is_wanted or self._stores_all > 0 or self.wants_all
        # one that comes from another location may have been used, and so renewed, there
        page.expires = max(page.expires, page.created + self._ttl_ns) if self._ttl_ns is not None else 0
        return self._catalog.announce(new)

    @contextmanager
    def storing_all(self) -> Iterator[None]:
        """In this block, captured pages are stored even if the policy ranks them below what is evicted for them."""
        self._stores_all += 1
        try:
            yield
        finally:
            self._stores_all -= 1

    @handed_over
    def commit(self, batch: Sequence[PendingPage]) -> int:
        """Write announced pages, and what is deferred. Used by the queue.

        Returns
        -------
        int
            How many pages of the batch are stored now. What cannot be written is dropped, counted and logged.
        """
        try:
            self._load_policy()
            n_written = len(self._committer.commit(batch))
        except StorageError as error:
            log.warning("%d pages were dropped: %s", len(batch), error)
            return 0
        self._backend.mend()
        self._write_bookmarks()
        self._notes.save()
        return n_written

    @property
    def has_deferred(self) -> bool:
        """Whether uses, bookmarks, or pages to be deleted wait for the next commit."""
        return (self._housekeeping and self._catalog.has_deferred) or self.bookmarks.has_pending

    # -- the queue ----------------------------------------------------------------------------------------------------

    @property
    def queue_bytes(self) -> int:
        """How many bytes may wait to be written."""
        return self._queue_bytes

    @property
    def queued_bytes(self) -> int:
        """Bytes captured and not yet written."""
        return self._queue.n_bytes

    @handed_over
    def nudge(self) -> None:
        """Have deferred changes committed soon."""
        self._queue.nudge()

    @handed_over
    def drain(self, pages: int | None = None, n_bytes: int | None = None, seconds: float | None = None) -> Drained:
        """Wait until the queue is empty: everything submitted is committed or dropped; see `WriteQueue.drain`.

        Raises
        ------
        UnavailableError
            If the location does not take anything for half a minute.
        """
        drained = self._queue.drain(pages, n_bytes, seconds)
        return drained._replace(left=sum(self.pending))

    @property
    def pending(self) -> tuple[int, int]:
        """How many pages and how many snapshots are captured and not written yet."""
        return self._catalog.pending_counts

    def session_counts(self) -> SessionCounts | None:
        """What the sessions of its store have done; None if there are none."""
        counts = self.sessions()
        return counts() if counts is not None else None

    @property
    def shortage(self) -> Shortage | None:
        """The last time that a captured page found no space; None if all have."""
        return self._committer.shortage

    @handed_over
    def flush(self) -> None:
        """Return when everything submitted so far is durable. Raises `StorageError`."""
        self.drain()
        if not self.read_only:
            self.sync()

    @handed_over
    def sync(self) -> None:
        """Return when everything committed so far is durable, and what was counted until then."""
        self._notes.save_figures()
        self._backend.sync()

    @property
    def is_failing(self) -> bool:
        """Whether the location failed or was too slow, and has not recovered yet."""
        return self._breaker.is_open
