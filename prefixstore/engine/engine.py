"""The engine: stores, finds and delivers pages by their tokens, over any backend, without a model.

read:   match, match_snapshot -> catalog, lookup        fetching -> fetch (RAM, backend, codec)
write:  submit -> catalog (pending), queue -> (thread) commit (codec, budget, backend)
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from queue import Empty
from typing import Concatenate, ParamSpec, TypeVar

from prefixstore.backends.forks import ForkLevel, register_at_fork
from prefixstore.backends.handle_lock import release_interrupted_frames
from prefixstore.backends.threads import Threads, handed_over
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.bookmark import BookmarkChange
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.breaker import LOCAL_PATIENCE, CircuitBreaker
from prefixstore.engine.budget import Budget, Evicted
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.commit import Committer
from prefixstore.engine.delete import Choice, Deleter, Removed, of_namespaces
from prefixstore.engine.evictions import Cause, Eviction, EvictionNote
from prefixstore.engine.fetch import Deadline, Fetcher, Keep, States
from prefixstore.engine.figures import FigureKeeper
from prefixstore.engine.importing import Importer
from prefixstore.engine.index import Page, Path
from prefixstore.engine.invariants import Violation, violations
from prefixstore.engine.lookup import Located, Prompt
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import Used, View
from prefixstore.engine.pages import Pages, retried
from prefixstore.engine.pending import Fits, PendingPage, Suspicion
from prefixstore.engine.policy import Policy
from prefixstore.engine.policy_memory import PolicyMemory
from prefixstore.engine.queue import Drained, WriteQueue
from prefixstore.engine.ram import RamTier
from prefixstore.engine.readers import Admit, Look
from prefixstore.engine.relatives import pinned_with
from prefixstore.engine.space import Evictor
from prefixstore.engine.tap import Tap
from prefixstore.engine.waiting import Lock, LockT, Placement
from prefixstore.errors import ClosedError, CorruptError, MisuseError, StorageError, UnavailableError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.figures import History
from prefixstore.format.keys import KEY_BYTES, PAGE, Tokens, page_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, checksum
from prefixstore.stats import Counters, SessionCounts, Shortage, TierStats
from prefixstore.units import counted

__all__ = ["Engine"]

log = logging.getLogger("prefixstore")

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="Engine")

QUEUE_BYTES = 256 << 20


def asked(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """A method that reads the location for a completion: if it hangs, the caller gives up. See `Engine.in_time`."""

    @wraps(method)
    def asking(self: E, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.in_time(partial(method, self, *args, **kwargs))

    return asking  # type: ignore[return-value]  # of `wraps`: the same


class Engine:
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
    keeper, deleter, importer, bookmarks
        Keep in the location what was counted; delete pages and mend the index; import pages; name sequences.
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
        self.keeper = FigureKeeper(
            backend, counters, self.budget, self._waiting, notes_budget=self._housekeeping and not self.read_only
        )
        self._committer = Committer(
            backend,
            catalog,
            self.deleter,
            self._ram,
            self.budget,
            self._encode,
            counters,
            self.keeper,
            on_used=self._saw,
            housekeeping=self._housekeeping,
        )
        self._memory = PolicyMemory(backend, catalog, Evictor(catalog, self.budget, counters), self.budget)
        self._evictions = EvictionNote(backend, catalog.evictions, self.budget.max_bytes)
        self.bookmarks = Bookmarks(
            self.threads, backend, Evictor(catalog, self.budget, counters), self.budget, lambda: catalog.has_pending
        )
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
            before = self.keeper
            self._start()
            self.keeper.succeed(before)

    def close(self) -> None:
        """Write what is queued and deferred, make it durable, and release the backend.

        The write thread has another one do that, and waits for nothing. While another thread closes the engine, a
        second call waits for it.

        Raises
        ------
        StorageError
            If something cannot be written, or made durable. The engine is closed all the same.
        MisuseError
            If the calling thread is in the block of a view or of `fetching`.
        """
        if self.threads.has_lent():
            # `with store:` was interrupted: what it has is referred to by the exception that it handles
            release_interrupted_frames()
            if self.threads.has_lent():
                raise MisuseError("this thread is in the block of a view, or of a restore; leave it first")
        self._close()

    @handed_over
    def _close(self) -> None:
        if self._queue.is_here:
            self.close_soon()
            return
        with self._ending:
            # a write thread that no caller waits for releases the backend when it ends
            if self._closed or self._queue.is_on_its_own:
                return
            try:
                self.keeper.hurry()
                self._queue.close()
                if not self.read_only and not self._queue.is_on_its_own:
                    self._memory.save(closing=True)
                    self._evictions.save(closing=True)
                    self.sync()
            finally:
                if not self._queue.is_on_its_own:
                    self._release()

    def close_soon(self) -> None:
        """As `close`, in a thread of its own, at the latest at the end of the process; for the garbage collector.

        That may run in any thread at any moment: inside a view, in the write thread, while a lock is held. So this
        takes no lock and waits for nothing. `Thread.start` does both.
        """
        # keeps the engine until it is closed
        at_exit = weakref.finalize(self, self.close)
        with suppress(RuntimeError):  # no more threads, or the interpreter is shutting down
            _thread.start_new_thread(self._start_closing, (at_exit,))

    def _start_closing(self, at_exit: weakref.finalize[[], Engine]) -> None:
        # not a daemon: the end of the process waits for it
        thread = threading.Thread(target=self._close_collected, args=(at_exit,), name="prefixstore-close", daemon=False)
        with suppress(RuntimeError):
            thread.start()

    def _close_collected(self, at_exit: weakref.finalize[[], Engine]) -> None:
        try:
            self.close()
        except StorageError as error:
            log.warning("a garbage-collected store could not be closed: %s", error)
        finally:
            # not before: the end of the process waits for this thread in `close`
            at_exit.detach()

    def _end(self) -> None:
        """The rest of `close`, by the write thread, if no caller waits for it."""
        try:
            if not self.read_only:
                self.sync()
        except StorageError as error:
            log.warning("written pages could not be made durable: %s", error)
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        self._breaker.close()
        try:
            # waits for the views that are open: a restore that has begun ends first
            self._backend.close()
        finally:
            self._fetcher.close()
            self._ram.clear()
            self.threads.close()
            if self.tap is not None:
                self.tap.close()

    @property
    def location(self) -> str:
        """The location as a URL."""
        return self._backend.location

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

    def in_time(self, work: Callable[[], T]) -> T:
        """What a thread finds in the location.

        Raises
        ------
        UnavailableError
            If a location on this machine does not answer for ten seconds. Others have timeouts of their own.
        """
        try:
            return self.threads.answer(work, seconds=self._breaker.patience() if self._backend.is_local else None)
        except Empty:
            self._breaker.hangs()
            raise UnavailableError(f"{self.location} does not answer") from None

    # -- reading ------------------------------------------------------------------------------------------------------

    @asked
    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest stored prefix of `tokens`, among pages that any process has committed or that are pending here.

        Raises
        ------
        StorageError
            If the location cannot be read; immediately while the circuit breaker is open.
        """
        started = time.perf_counter()
        path = self._catalog.longest(self._locate(Prompt(namespace, tokens, page_tokens, self._trie)))
        self.counters.time("lookup", time.perf_counter() - started)
        return self._told(namespace, tokens, page_tokens, path)

    def _told(self, namespace: bytes, tokens: Tokens, page_tokens: int, path: Path) -> Path:
        if self.tap is not None:
            self.tap.asked(namespace, tokens, page_tokens, path.n_tokens)
        return path

    @asked
    def match_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """The pages of `tokens` up to the deepest snapshot among the first `limit`, and that snapshot.

        Parameters
        ----------
        namespace, tokens, page_tokens
            As for `match`.
        limit
            Tokens that may be restored.
        multiple_of
            The snapshot has to be at a multiple of this.
        """
        started = time.perf_counter()
        found = self._locate(Prompt(namespace, tokens[:limit], page_tokens, self._trie), snapshots=True)
        path = self._catalog.deepest_snapshot(found, multiple_of)
        self.counters.time("lookup", time.perf_counter() - started)
        return self._told(namespace, tokens, page_tokens, path)

    def _locate(self, prompt: Prompt, *, snapshots: bool = False) -> Located:
        """What there is of a prompt."""
        waiting = self._catalog.along(prompt)
        with self._breaker.asking() as request, self._backend.view() as view:
            found = self._catalog.locate(view, waiting, prompt, snapshots=snapshots)
            request.n_records = found.n_read
        return found

    def _probe(self, page: Page | None) -> int:
        """Repeat the request that failed or was slow; called by a thread of the breaker."""
        with self._backend.view() as view:
            view.record(page.key if page is not None else bytes(KEY_BYTES))
            for _, payload in view.fetch([page.key] if page is not None else []):
                checksum(payload)
        return 1

    def fetching(
        self,
        pages: Sequence[Page],
        *,
        streamed: bool = False,
        along: bool = True,
        look: Look | None = None,
        admit: Admit | None = None,
        deadline: Deadline | None = None,
        keep: Keep | None = None,
    ) -> AbstractContextManager[States]:
        """The verified states of `pages`, in order: see `Fetcher.fetching`."""
        return self._fetcher.fetching(
            pages, streamed=streamed, along=along, look=look, admit=admit, deadline=deadline, keep=keep
        )

    @handed_over
    def touch(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None = None) -> None:
        """Note that a prompt began with these pages, none for a miss; written with the next commit.

        With the length of the prompt, a policy can tell how far from its end a page is.
        """
        self._note_use(namespace, pages, n_tokens)
        self._tell_use(namespace, pages, n_tokens)

    def _note_use(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None) -> None:
        self._catalog.touch(namespace, pages, self._ttl_ns, n_tokens, is_written=not self.read_only)

    def _tell_use(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None) -> None:
        if self.tap is not None and n_tokens is not None:
            self.tap.used(namespace, pages, n_tokens)

    def view(self) -> AbstractContextManager[View]:
        """A view, for callers that read the location directly; a thread opens and closes it."""
        return self.threads.holding(self._backend.view())

    @handed_over
    def evictions(self, keys: Sequence[bytes]) -> dict[bytes, Eviction]:
        """When and why these pages were evicted, as far as it is remembered. Raises `StorageError`."""
        with self._backend.view() as view:
            return self._evictions.find(view, keys)

    def was_evicted(self, key: bytes) -> bool:
        """Whether this process has evicted a page lately. The location is not asked."""
        return self._catalog.evictions.find(key) is not None

    @property
    def losses(self) -> int:
        """How often this process has evicted, deleted or dropped pages, but for tails that others continue."""
        return self._catalog.evictions.n_added + self.deleter.n_begun + self.counters.n_dropped

    @handed_over
    def children(self, parent: bytes, at_most: int) -> list[Page]:
        """Children of this page, or of this namespace: some of the stored ones, and those that wait."""
        # before the view: what is committed meanwhile is stored
        waiting = [page for page in self._catalog.pending_after(parent) if page.form == PAGE]
        with self._backend.view() as view:
            found = view.children([parent], PAGE, at_most)
        stored = [Page.stored(key, record, usage) for key, record, usage in found if isinstance(record, Record)]
        return stored + waiting

    @handed_over
    def pages(self) -> list[Page]:
        """All pages, stored and pending, parents before their children."""
        return self._catalog.pages(self._backend)

    @handed_over
    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        with self._backend.view() as view:
            return self._catalog.path(view, page)

    @handed_over
    def used(self) -> tuple[Used, int, int]:
        """The size of the location, and the bytes of all payloads as stored and as states."""
        with self.view() as view:
            self._saw(view.used)
            self._sizes = view.sizes
        return self.last_used()

    def _saw(self, used: Used) -> None:
        """Note how much the location holds."""
        self._last_used = used
        self.peak_bytes = max(self.peak_bytes, used.bytes)

    def last_used(self) -> tuple[Used, int, int]:
        """The last known `used`; does not query the location."""
        return self._last_used, *self._sizes

    @handed_over
    def measure(self) -> bool:
        """Bring `last_used` up to date, for monitoring; whether the location answered.

        While the circuit is open, the location is not asked, so the call does not block. Never raises because of the
        location.
        """
        if self._closed:
            return False
        try:
            with self._breaker.asking(), self._backend.view() as view:
                self._saw(view.used)
                self._sizes = view.sizes
        except (ClosedError, StorageError):
            return False
        return True

    @property
    def ram_bytes(self) -> int:
        """Bytes of states in RAM."""
        return self._ram.used

    @handed_over
    def history(self) -> History:
        """How the location was used, by all processes; see `History`. Raises `StorageError`."""
        return self.keeper.read()

    @handed_over
    def keep_history(self) -> None:
        """Write what was counted, for an engine without housekeeping. What cannot be written is lost."""
        self.keeper.hurry()
        try:
            if self.keeper.has_unwritten and not self.read_only:
                with self._catalog.update(self._backend, self.keeper.committed) as transaction:
                    self.keeper.write(transaction)
        except StorageError as error:
            log.warning("figures were not written: %s", error)

    @handed_over
    def describe(self, namespace: Namespace, names: Mapping[str, str | None] | None = None) -> None:
        """Have the settings and names of a namespace kept in the location, with one of the next commits."""
        self.keeper.describe(namespace, names)

    def _waiting(self) -> tuple[int, int]:
        return sum(self.pending), self.queued_bytes

    @handed_over
    def namespaces(self) -> list[Namespace]:
        """The namespaces that have pages in the location, except those whose settings are damaged."""
        found: list[Namespace] = []
        with self._backend.view() as view:
            for settings in view.namespaces().values():
                with suppress(CorruptError):
                    found.append(Namespace.parse(settings))
        return found

    @handed_over
    def check(self, budget: Budget | None = None) -> list[Violation]:
        """Check every invariant of the location, every checksum, and a budget (by default the engine's)."""
        with self._backend.view() as view:
            found = violations(view, self.budget if budget is None else budget)
        if n_rows := self._backend.undecryptable():
            what = f"{counted(n_rows, 'row')} cannot be decrypted: changed, or of a forgotten tenant"
            found.append(Violation("undecryptable", "", what))
        return found

    def wrap_lock(self, wrap: Callable[[Lock], LockT]) -> LockT:
        """Have the catalog use what `wrap` makes of its lock; for measurements, before another thread uses the engine.

        Returns
        -------
        object
            What `wrap` has returned: a context manager that takes the lock.
        """
        return self._catalog.wrap_lock(wrap)

    # -- notes of jobs ------------------------------------------------------------------------------------------------

    @handed_over
    def note(self, name: bytes) -> bytes | None:
        """A note that a job has left in the location. Raises `StorageError`."""
        with self._backend.view() as view:
            return view.note(name)

    @handed_over
    @retried
    def change_note(self, name: bytes, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace a note by what `change` makes of it (None for no note), atomically. Raises `StorageError`.

        `change` is called again if another process has changed the note meanwhile.
        """
        with self._backend.update() as transaction:
            old = transaction.note(name)
            new = change(old)
            if new != old:
                transaction.put_note(name, new)

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

    @asked
    def wants(self, namespace: bytes, parent: bytes, tokens: bytes) -> bool:
        """Whether the page with these token bytes after `parent` is worth capturing."""
        page = Page(page_key(parent, tokens), parent, namespace, 0, tokens, 0, 0, 0, 0, 0)
        if self._catalog.place_of(page) is not Placement.ADDED:
            return False
        with suppress(StorageError), self._breaker.asking(), self._backend.view() as view:
            self._catalog.saw(view)
            return self._catalog.wants(view, namespace, parent, tokens)
        # what is stored already is found when it is to be written
        return True

    @asked
    def missing(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> list[int]:
        """Which full pages of a sequence to capture: up to the first that was refused.

        If the location cannot be asked, those that do not wait to be written.

        Raises
        ------
        CorruptError
            If another page has one of the keys: nothing may be stored after it.
        """
        prompt = Prompt(namespace, tokens[: len(tokens) // page_tokens * page_tokens], page_tokens, self._trie)
        waiting = self._catalog.along(prompt)
        try:
            with self._breaker.asking(), self._backend.view() as view:
                found = self._catalog.locate(view, waiting, prompt)
        except StorageError:
            n_here = next((i for i, key in enumerate(prompt.keys) if key not in waiting.pages), len(prompt.keys))
            found = Located(prompt, pages=[waiting.pages[key] for key in prompt.keys[:n_here]])
        return self._catalog.missing(found)

    @asked
    def needs_no_capture(self, key: bytes) -> bool:
        """Whether a page or snapshot need not be captured: it is here, or was refused."""
        if self._catalog.get(key) is not None or self._catalog.is_refused(key):
            return True
        with suppress(StorageError), self._breaker.asking(), self._backend.view() as view:
            record = view.record(key)
            return record is not None and not self._catalog.is_damaged(key, record)
        return False

    @handed_over
    def acquire(self, size: int, *, wait: bool = False) -> PooledBuffer | None:
        """A buffer to capture a page into; None if too much is queued already and `wait` is false."""
        return self._queue.acquire(size, wait=wait)

    @handed_over
    def submit(self, new: PendingPage) -> bool:
        """Have a captured page written; its buffer is the engine's from here on. False if the page is not wanted."""
        return self._take(new, self.tap)

    def _take(self, new: PendingPage, tap: Tap | None) -> bool:
        """As `submit`, telling only this tap."""
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
        self._write_bookmarks()
        self._memory.save()
        self._evictions.save()
        return n_written

    @property
    def has_deferred(self) -> bool:
        """Whether uses, bookmarks, figures, or pages to be deleted wait for the next commit."""
        is_kept = self._housekeeping and (self._catalog.has_deferred or self.keeper.is_due)
        return is_kept or self.bookmarks.has_pending

    @handed_over
    def thin(
        self,
        namespace: bytes,
        tokens: Tokens,
        page_tokens: int,
        keep: int,
        interval: int,
        valued: Collection[int] = (),
    ) -> int:
        """Give up all but `keep` of the snapshots along `tokens`; how many. See `snapshot_policy.thin`.

        Pinned ones stay, and those from which other prompts branch off, or which are `valued`, stay before others.
        """
        prompt = Prompt(namespace, tokens, page_tokens, self._trie)
        waiting = self._catalog.along(prompt)
        with self._breaker.asking(), self._backend.view() as view:
            found = self._catalog.locate(view, waiting, prompt, snapshots=True)
            return self._catalog.thin(view, found, keep, interval, valued)

    @handed_over
    def condemn(self, page: Page, fits: Fits, size: int | None = None) -> None:
        """Have a page and its descendants deleted with the next commit, if its state still does not fit then.

        `fits` must hold for every context of the namespace. Another thread may call it. With `size`, the most bytes
        that the state can have, one that claims more is not unpacked for it.
        """
        self._catalog.mark_damaged(page, Suspicion(fits, size))

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
        self.keeper.hurry()
        self.drain()
        if not self.read_only:
            self.sync()

    @handed_over
    def sync(self) -> None:
        """Return when everything committed so far is durable."""
        self._backend.sync()

    @property
    def is_failing(self) -> bool:
        """Whether the location failed or was too slow, and has not recovered yet."""
        return self._breaker.is_open

    # -- pinning, deleting --------------------------------------------------------------------------------------------

    @handed_over
    def pin(self, namespace: bytes, tokens: Tokens, page_tokens: int, *, pinned: bool) -> int:
        """Pin or unpin the committed pages of the longest stored prefix; the number of tokens they cover."""
        path = Path((), 0)

        def chosen(transaction: Transaction) -> Sequence[bytes]:
            nonlocal path
            prompt = Prompt(namespace, tokens, page_tokens, self._trie)
            found = self._catalog.locate(transaction, self._catalog.along(prompt), prompt, snapshots=True)
            # where there are snapshots, pages alone cannot be restored
            path = next((found.path_to(*one) for one in found.fitting_snapshots()), found.path())
            return [page.key for page in path.pages]

        self._set_pinned(chosen, pinned=pinned)
        return path.n_tokens

    @handed_over
    def pin_page(self, page: Page, *, pinned: bool) -> int:
        """Pin or unpin a page with its descendants and its ancestors; how many pages changed.

        An ancestor of an unpinned page stays pinned if it leads to another pinned page.
        """

        def chosen(transaction: Transaction) -> Sequence[bytes]:
            return pinned_with(transaction, page.key, pinned=pinned)

        return self._set_pinned(chosen, pinned=pinned)

    @retried
    def _set_pinned(self, choose: Callable[[Transaction], Sequence[bytes]], *, pinned: bool) -> int:
        changed = 0
        with self._catalog.update(self._backend) as transaction:
            keys = choose(transaction)
            for key in keys:
                usage = transaction.usage(key)
                if usage is not None and usage.pinned != pinned:
                    transaction.touch(key, replace(usage, pinned=pinned))
                    changed += 1
        return changed

    @handed_over
    def delete(self, choices: Sequence[Choice]) -> Removed:
        """Delete the pages that all choices have in common, pinned ones too; see `engine.delete`."""
        removed = self.deleter.delete(choices)
        self.bookmarks.prune()
        return removed

    def clear(self, namespace: bytes | None) -> int:
        """Delete all pages of a namespace, pinned ones too (None: of the location); how many.

        In several transactions, so that others need not wait for all of it. Pages captured meanwhile stay, unless they
        continue a deleted one. Raises `StorageError`; what was deleted until then stays deleted.
        """
        choices = [] if namespace is None else [partial(of_namespaces, namespaces={namespace})]
        return self.delete(choices).pages

    @handed_over
    def evict(self, max_bytes: int, *, dry_run: bool = False) -> Evicted:
        """Evict in the order of the policy until the location holds `max_bytes`, or only what is pinned.

        A `dry_run` finds out what that would be, and changes nothing. Raises `StorageError`.
        """
        self._load_policy()
        chosen: list[bytes] = []
        evictor = Evictor(self._catalog, self.budget, self.counters, chosen.append, Cause.ASKED)
        before = self.used()[0].bytes
        if dry_run:
            chosen, left = evictor.trial(self._backend, max_bytes)
        else:
            n_before, left = -1, max_bytes + 1
            # what a location takes is known exactly only after a commit
            while left > max_bytes and len(chosen) > n_before:
                n_before = len(chosen)
                evictor.shrink(self._backend, max_bytes)
                self._backend.reclaim()
                left = self.used()[0].bytes
        keys = tuple(key.hex() for key in chosen)
        return Evicted(keys, max(before - left, 0), self._policy.name, max_bytes, left, dry_run)

    def _load_policy(self) -> None:
        """Have the policy know what was learned before; what cannot be read now is asked for again."""
        with suppress(StorageError):
            self._memory.load()

    @handed_over
    def scrub(self) -> None:
        """Overwrite what deletions have freed. Raises `UnavailableError` if another process still reads it."""
        self._backend.scrub()

    @handed_over
    def compact(self) -> int:
        """Return free space to the disk; how many bytes. Raises `UnavailableError`."""
        return self._backend.compact()
