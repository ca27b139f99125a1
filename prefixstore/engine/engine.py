"""The engine: stores, finds and delivers pages by their tokens, over any backend, without a model.

read:   match, match_snapshot -> lookups            fetching -> fetch -> source (backend, codec)
write:  write_queue.submit -> catalog (pending), write_queue -> (thread) commit (codec, budget, backend)

Callers use its parts directly for what one of them does alone: `Engine.lookups`, `upkeep`, `deleter`, `importer`, ...
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from prefixstore.backends.forks import register_at_fork, release_interrupted_frames
from prefixstore.backends.threads import Threads, close_soon, handed_over
from prefixstore.counters import Counters
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.breaker import LOCAL_PATIENCE, CircuitBreaker, probe
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.commit import Committer
from prefixstore.engine.delete import Deleter
from prefixstore.engine.fetch import Deadline, States
from prefixstore.engine.importing import Importer
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.page import Page, Path
from prefixstore.engine.page_view import PageView
from prefixstore.engine.pages import Pages
from prefixstore.engine.part import Shared, Tap
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.policy import Policy
from prefixstore.engine.saved_notes import SavedNotes
from prefixstore.engine.source import Admit, Fetcher, Look, Source
from prefixstore.engine.space import Evictor
from prefixstore.engine.upkeep import Upkeep
from prefixstore.engine.write_queue import WriteQueue
from prefixstore.errors import MisuseError, StorageError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.figures import History
from prefixstore.format.keys import Tokens
from prefixstore.format.namespace import Namespace, model_digits
from prefixstore.results import SessionCounts, TierStats

log = logging.getLogger("prefixstore")

QUEUE_BYTES = 256 << 20


class Engine:
    """Stores and finds pages by tokens, in one location. May be used from many threads.

    It closes the backend. In a forked child the counters are copied: always read them as `Engine.counters`.

    Parameters
    ----------
    encode
        Packs states: ``(namespace, state) -> (codec number, stored bytes)``. The engine tells it how fast the location
        is.
    ttl
        How many seconds after their last use captured pages expire; None for never.
    write_behind
        Whether a thread writes captured pages; if not, `submit` does.
    housekeeping
        Whether commits also delete damaged, thinned and expired pages, and record uses. Those of an `Archive` do not.
    clock
        In seconds; the circuit breaker uses it to tell whether the location is slow.

    Attributes
    ----------
    tap
        Listens to lookups, uses and captures; may be None.
    token_seconds
        How long computing a token takes, as last measured; None if unknown.
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
        queue_bytes: int = QUEUE_BYTES,
        write_behind: bool = True,
        read_only: bool = False,
        housekeeping: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = counters
        self._backend = backend
        self.budget = budget
        self._policy = policy
        self._encode = encode
        self._ttl_ns = round(ttl * 1e9) if ttl is not None else None
        self._priority = priority
        self.queue_bytes = queue_bytes
        self._write_behind = write_behind
        self.read_only = read_only
        self._housekeeping = housekeeping
        self._clock = clock
        # names of models, for the figures
        self._models: dict[str, str] = {}
        # a weak reference to what counts the sessions of the store
        self.sessions: Callable[[], Callable[[], SessionCounts] | None] = lambda: None
        self.tap: Tap | None = None
        self.token_seconds: float | None = None
        self.is_closed = False
        self._start()
        register_at_fork(self)

    def _start(self) -> None:
        """Make everything that has locks, threads or buffers, which a forked child cannot inherit."""
        backend, counters = self._backend, self.counters
        self.threads = Threads("prefixstore-work")
        # held while the engine is closed
        self._ending = threading.RLock()
        self._catalog = catalog = Catalog(self._policy, counters)
        patience = LOCAL_PATIENCE if backend.is_local else 1
        self._breaker = CircuitBreaker(partial(probe, backend), counters, patience=patience, clock=self._clock)
        shared = Shared(self.threads, backend, catalog, self._breaker, self.budget, self.read_only, counters)
        self._fetcher = Fetcher(shared, self._encode.read_rate)
        self.lookups = Lookups(shared)
        self.bookmarks = Bookmarks(shared)
        self.deleter = Deleter(shared, self.bookmarks)
        self.evictor = Evictor(shared)
        self._notes = SavedNotes(shared, self.evictor, self._models, notes_budget=self._housekeeping)
        self.upkeep = Upkeep(shared, self.lookups, self.deleter, self.evictor)
        self._committer = Committer(
            shared,
            self.evictor,
            self.deleter,
            self.bookmarks,
            self._notes,
            self._encode,
            housekeeping=self._housekeeping,
        )
        self.importer = Importer(shared, self._committer)
        self.write_queue = WriteQueue(
            shared,
            self.lookups,
            self._committer,
            self.bookmarks,
            lambda: self.tap,
            self._ttl_ns,
            self._priority,
            commit=self.commit,
            limit=self.queue_bytes,
            in_background=self._write_behind,
            on_released=self._end,
        )

    def after_fork(self) -> None:
        """Start over with new locks, threads and handles. The parent writes what it has captured."""
        if not self.is_closed:
            self._backend.after_fork()
            self.counters = self.counters.copy()
            self._start()

    @property
    def location(self) -> str:
        """The location as a URL."""
        return self._backend.location

    def n_near(self, pages: Sequence[Page]) -> int:
        """How many of these pages, counted from the first, are in this location and not only in the far one."""
        return next((n for n, page in enumerate(pages) if page.is_far), len(pages))

    @property
    def late(self) -> int:
        """Restores that were given up midway, and lookups that did not wait for the far location."""
        return self.counters["late"]

    def tiers(self) -> tuple[TierStats, ...]:
        """Statistics of each location, if there are several."""
        return ()

    @handed_over
    def history(self) -> History:
        """How the location was used, by all processes; see `History`. Raises `StorageError`."""
        return self._notes.history()

    @handed_over
    def describe(self, namespace: Namespace, model: str | None = None) -> None:
        """Save the name of the model of a namespace with the figures of the location."""
        digits = model_digits(namespace.settings)
        if model and digits:
            self._models[digits] = model

    # -- reading ------------------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest prefix of `tokens` among pages that any process has committed, or that are pending here.

        Raises
        ------
        StorageError
            If the location cannot be read; while the circuit is open, at once.
        """
        path = self._found(lambda lookups: lookups.longest(namespace, tokens, page_tokens), len(tokens))
        return self._tell_lookup(namespace, tokens, page_tokens, path)

    def match_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """The path to the deepest snapshot of `tokens` at a position up to `limit` that is a multiple of `multiple_of`.

        Raises what `match` raises.
        """
        most = min(limit, len(tokens))
        path = self._found(
            lambda lookups: lookups.deepest_snapshot(namespace, tokens, page_tokens, limit, multiple_of),
            most - most % multiple_of,
        )
        return self._tell_lookup(namespace, tokens, page_tokens, path)

    def _found(self, ask: Callable[[Lookups], Path], most: int) -> Path:
        """The result of a lookup that can find `most` tokens."""
        return ask(self.lookups)

    def _tell_lookup(self, namespace: bytes, tokens: Tokens, page_tokens: int, path: Path) -> Path:
        if self.tap is not None:
            self.tap.asked(namespace, tokens, page_tokens, path.n_tokens)
        return path

    def fetching(
        self,
        pages: Sequence[Page],
        *,
        streamed: bool = False,
        along: bool = True,
        look: Look | None = None,
        admit: Admit | None = None,
        deadline: Deadline | None = None,
    ) -> AbstractContextManager[States]:
        """The verified states of `pages`, in order: see `States`."""
        sources = self._sources(pages)
        return States(sources, streamed=streamed, along=along, look=look, admit=admit, deadline=deadline)

    def _sources(self, pages: Sequence[Page]) -> list[Source]:
        return [(self._fetcher, pages, None)]

    @handed_over
    def touch(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None = None) -> None:
        """Note that a prompt was served with these pages (none for a miss); the next commit writes that.

        `n_tokens` is the length of the prompt, from which a policy learns how far from its end a page is.
        """
        self._note_use(pages, n_tokens)
        self._tell_use(namespace, pages, n_tokens)

    def _note_use(self, pages: Sequence[Page], n_tokens: int | None) -> None:
        self._catalog.touch(pages, self._ttl_ns, n_tokens, is_written=not self.read_only)

    def _tell_use(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None) -> None:
        if self.tap is not None and n_tokens is not None:
            self.tap.used(namespace, pages, n_tokens)

    @handed_over
    def condemn(self, page: Page) -> None:
        """Let the next commit delete a page that fits no context of its namespace, and its descendants.

        A page that is stored under its key meanwhile stays.
        """
        self._catalog.mark_damaged(page, is_useless=True)

    def view(self) -> AbstractContextManager[PageView]:
        """A view, for callers that read pages directly."""
        return self.threads.lending(self._backend.view())

    @property
    def losses(self) -> int:
        """How often this process has evicted, deleted or dropped pages, except tails that a longer page replaced."""
        counters = self.counters
        n_dropped = sum(counters.group("dropped").values())
        return counters["evictions"] + counters["expired"] + n_dropped + self.deleter.n_begun

    # -- writing ------------------------------------------------------------------------------------------------------

    def commit(self, batch: Sequence[PendingPage]) -> int:
        """Write pending pages and deferred changes, for the queue; returns how many of the pages are stored now.

        Pages that cannot be written are dropped, counted and logged.
        """
        return self._committer.commit_all(batch)

    @property
    def queued_bytes(self) -> int:
        """Bytes captured and not yet written."""
        return self.write_queue.n_bytes

    @handed_over
    def drain(self) -> None:
        """Wait until the queue is empty: everything that was submitted is committed or dropped.

        Raises
        ------
        UnavailableError
            If the location does not take anything for half a minute.
        """
        self.write_queue.drain()

    def session_counts(self) -> SessionCounts | None:
        """What the sessions of the store have done; None without sessions."""
        counts = self.sessions()
        return counts() if counts is not None else None

    @handed_over
    def flush(self) -> None:
        """Return when everything submitted so far is durable. Raises `StorageError`."""
        self.drain()
        if not self.read_only:
            self.sync()

    @handed_over
    def sync(self) -> None:
        """Return when everything committed and counted so far is durable."""
        self._notes.save_figures()
        self._backend.sync()

    @property
    def is_failing(self) -> bool:
        """Whether the location failed or was too slow, and has not recovered yet."""
        return self._breaker.is_open

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is queued and deferred, make it durable, and release the backend.

        A second call waits for the first one. The write thread, which cannot wait for itself, leaves it to another one.

        Raises
        ------
        StorageError
            If something cannot be written, or made durable. The engine is closed all the same.
        MisuseError
            If the calling thread is in the block of a view or of `fetching`.
        """
        if self._has_lent():
            # if `with store:` was interrupted, only the traceback refers to what is open
            release_interrupted_frames()
            if self._has_lent():
                raise MisuseError("this thread is in the block of a view, or of a restore; leave it first")
        self._close()

    def _has_lent(self) -> bool:
        """Whether the calling thread is in the block of a view or of `fetching`."""
        return self.threads.has_lent()

    @handed_over
    def _close(self) -> None:
        if self.write_queue.is_here:
            close_soon(self)
            return
        with self._ending:
            # a write thread that was given up on releases the backend when it ends
            if self.is_closed or self.write_queue.is_on_its_own:
                return
            try:
                self.write_queue.close()
                if not self.read_only and not self.write_queue.is_on_its_own:
                    self._notes.save(closing=True)
                    self.sync()
            finally:
                if not self.write_queue.is_on_its_own:
                    self._release()

    def _end(self) -> None:
        """The rest of `close`, done by the write thread if `close` has given up waiting for it."""
        try:
            if not self.read_only:
                self.sync()
        except StorageError as error:
            log.warning("written pages could not be made durable: %s", error)
        finally:
            self._release()

    def _release(self) -> None:
        self.is_closed = True
        self._breaker.close()
        try:
            # waits until open views are closed, so that a running restore can end
            self._backend.close()
        finally:
            self._fetcher.close()
            self.threads.close()
            if self.tap is not None:
                self.tap.close()
