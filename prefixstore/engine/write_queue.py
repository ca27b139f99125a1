"""The write queue: captured pages wait in it, in bounded memory, for a thread that commits them in batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from prefixstore.backends.threads import OwnThread, handed_over
from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.bookmarks import BookmarkChange, Bookmarks
from prefixstore.engine.commit import Committer
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.part import Part, Shared, Tap
from prefixstore.engine.pending import DropReason, PendingPage
from prefixstore.engine.snapshot_policy import too_many
from prefixstore.errors import PrefixStoreError, UnavailableError
from prefixstore.format.keys import Tokens

if TYPE_CHECKING:
    from prefixstore.engine.tiers import FarEngine

log = logging.getLogger("prefixstore")

# One commit costs one flush of the disk: pages that wait together are written together.
BATCH_BYTES = 64 << 20
# Uses of pages are written with the next batch, or after this many seconds without one.
DEFERRED_SECONDS = 2.0
# A caller that waits for the queue gives up after this many seconds without progress: another process may hold a lock,
# or the location may not answer.
NO_PROGRESS_SECONDS = 30.0


class WriteQueue(Part):
    """Queues captured pages: lookups of this process find them at once, and a thread writes them.

    Parameters
    ----------
    ttl_ns, priority
        Nanoseconds after their last use when captured pages expire, and their priority.
    limit
        How many bytes may wait; a single page may have any size.
    in_background
        Whether a thread commits; if not, the caller of `put` does.
    on_released
        Called by the thread when it ends, if `close` did not wait for it.

    Attributes
    ----------
    stores_all
        How many `storing_all` blocks are open.
    wants_all
        Whether the policy may not refuse what is captured now.
    behind
        Returns the engine of the far location, to which captured pages are written as well; None for one location.
    is_on_its_own
        Whether `close` has given up waiting for the thread.
    """

    behind: Callable[[], FarEngine] | None = None

    def __init__(
        self,
        shared: Shared,
        lookups: Lookups,
        committer: Committer,
        bookmarks: Bookmarks,
        tap: Callable[[], Tap | None],
        ttl_ns: int | None,
        priority: int,
        *,
        commit: Callable[[Sequence[PendingPage]], int],
        limit: int,
        in_background: bool,
        on_released: Callable[[], None],
    ) -> None:
        super().__init__(shared)
        self._lookups = lookups
        self._committer = committer
        self._bookmarks = bookmarks
        self._tap = tap
        self._ttl_ns = ttl_ns
        self._priority = priority
        self.stores_all = 0
        self.wants_all = False
        self._commit_batch = commit
        self._in_background = in_background
        self._on_released = on_released
        self._buffers = BufferPool(limit)
        self._queue: deque[PendingPage] = deque()
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        # whether the thread is committing
        self._busy = False
        self._closing = False
        # whether the thread is to commit without waiting for more
        self._flush_requested = False
        # how often the thread has been through its loop
        self._steps = 0
        self.is_on_its_own = False
        self._thread: threading.Thread | None = None

    # -- captured pages ------------------------------------------------------------------------------------------------

    @handed_over
    def submit(self, *news: PendingPage) -> list[PendingPage]:
        """Queue captured pages, parents first; returns those that are wanted. The queue owns all the buffers now."""
        return [new for new in news if self._submit(new)]

    def _submit(self, new: PendingPage) -> bool:
        # taken first: the page may be written and its buffer released before `take` returns
        state = new.buffer.view if new.buffer is not None else None
        is_wanted = self.take(new, self._tap())
        if is_wanted and state is not None and self.behind is not None:
            self.behind().offer(new, state)
        return is_wanted

    def take(self, new: PendingPage, tap: Tap | None) -> bool:
        """Queue a page for this location only, and tell this tap; returns whether the page is wanted."""
        is_wanted = self.announce(new)
        if is_wanted:
            if tap is not None:
                tap.captured(new.page)
            self.put(new)
        else:
            new.release()
        return is_wanted

    def announce(self, new: PendingPage) -> bool:
        """Let lookups find a captured page from now on, as pending; returns whether it is wanted."""
        page = new.page
        page.priority = self._priority
        new.is_wanted = new.is_wanted or self.stores_all > 0 or self.wants_all
        # from now on, not from its creation: a page that comes from another location may be older than the ttl
        page.expires = time.time_ns() + self._ttl_ns if self._ttl_ns is not None else 0
        return self._catalog.announce(new)

    @contextmanager
    def storing_all(self) -> Iterator[None]:
        """A block in which the policy may not refuse captured pages, in either location."""
        self.stores_all += 1
        try:
            with self.behind().write_queue.storing_all() if self.behind is not None else nullcontext():
                yield
        finally:
            self.stores_all -= 1

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
        """Delete all but `keep` of the snapshots along `tokens`, except pinned ones; how many. See `too_many`.

        The far location does the same in a thread, which is not waited for.
        """
        if self._read_only:
            return 0
        if self.behind is not None:
            far = self.behind().write_queue
            with suppress(RuntimeError):  # it was closed
                # of this class
                later = far._thin_later  # noqa: SLF001
                far.threads.start(later, namespace, tokens.copy(), page_tokens, keep, interval, valued)
        prompt = self._lookups.prompt(namespace, tokens, page_tokens)
        with self._lookups.locating(prompt, snapshots=True) as (view, found):
            doomed = too_many(view, self._catalog, found, keep, interval, valued)
        for page in doomed:
            self._catalog.discard_snapshot(page)
        return len(doomed)

    def _thin_later(self, *arguments: Any) -> None:
        """As `thin`, in a thread of its own: logs what goes wrong."""
        try:
            self.thin(*arguments)
        except PrefixStoreError as error:
            log.info("snapshots were not thinned: %s", error)
        except Exception:  # a fault of the store must not end its thread unseen
            log.exception("snapshots were not thinned")

    @handed_over
    def set_bookmark(self, namespace: bytes, name: str, bookmark: BookmarkChange) -> None:
        """Name a sequence, with the commit of its last pages, or remove the name."""
        if self._read_only:
            return
        self._bookmarks.set(namespace, name, bookmark)
        if self._in_background:
            self.nudge()
        else:
            self._commit([])

    @property
    def pending(self) -> tuple[int, int]:
        """How many pages and how many snapshots are captured and not written yet."""
        return self._catalog.pending_counts

    # -- the queue -----------------------------------------------------------------------------------------------------

    @property
    def n_bytes(self) -> int:
        """Bytes captured and not yet written."""
        return self._buffers.in_use

    def acquire(self, size: int, *, wait: bool = False) -> PooledBuffer | None:
        """A buffer to capture a page into; None if too much is queued. With `wait`, None only if nothing is written."""
        # Only the wait is handed over: while another thread computes, that takes longer than copying a page.
        buffer = self._buffers.acquire(size)
        return self._acquire_later(size) if buffer is None and wait else buffer

    @handed_over
    def _acquire_later(self, size: int) -> PooledBuffer | None:
        return self._buffers.acquire(size, wait=True, timeout=NO_PROGRESS_SECONDS)

    def adopt(self, state: memoryview) -> PooledBuffer | None:
        """A buffer that shares the memory of another queue's buffer; None if too much is queued."""
        return self._buffers.adopt(state)

    def put(self, new: PendingPage) -> None:
        """Queue an announced page, and its buffer; without a thread, write it."""
        with self._lock:
            # a thread that was told to end takes no more pages
            taken = self._in_background and not self._closing and self._start()
            if taken:
                self._queue.append(new)
                self._wake.notify_all()
        if not taken:
            self._commit([new])

    @handed_over
    def nudge(self) -> None:
        """Start the thread, which commits deferred changes soon."""
        if self._in_background and not self._read_only:
            with self._lock:
                self._start()

    def _start(self) -> bool:
        """Start the thread unless it runs; returns whether it does. The caller holds the lock."""
        if self._thread is None and not self._closing:
            thread = OwnThread(self._run, name="prefixstore-write")
            try:
                thread.start()
            except RuntimeError as error:
                # no more threads, or the interpreter is shutting down: the caller commits
                log.warning("the write thread cannot be started: %s", error)
            else:
                self._thread = thread
        return self._thread is not None

    def drain(self) -> None:
        """Wait until the queue is empty: each page is committed or dropped.

        Raises
        ------
        UnavailableError
            If nothing is written for `NO_PROGRESS_SECONDS` seconds.
        """
        with self._lock:
            if self.has_deferred and not self._closing:
                if self._in_background:
                    self._start()
                self._flush_requested = self._thread is not None
                self._wake.notify_all()
            if not self._wait_until_idle():
                raise UnavailableError(
                    f"nothing was written for {NO_PROGRESS_SECONDS:.0f} s, and {self.n_bytes:,} bytes are "
                    "waiting: the location does not answer, or another process holds its lock"
                )
        if self._thread is None and self.has_deferred:
            self._commit([])

    @property
    def has_deferred(self) -> bool:
        """Whether uses, bookmarks, figures or deletions wait for the next commit; never if this only reads."""
        return self._committer.has_deferred and not self._read_only

    def _wait_until_idle(self) -> bool:
        """Wait, with the lock held, until the thread is idle; False if it makes no progress for too long."""
        while self._queue or self._busy or self._flush_requested:
            before = self._steps
            if not self._wake.wait_for(partial(self._has_progressed, before), NO_PROGRESS_SECONDS):
                return False
        return True

    def _has_progressed(self, before: int) -> bool:
        return self._steps != before

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the queue's own, which cannot wait for itself."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """Write what is queued, and end the thread.

        Raises
        ------
        UnavailableError
            As `drain`. What is queued is dropped then, and the thread calls `on_released` when it ends.
        """
        left: list[PendingPage] = []
        with self._lock:
            self._closing = True
            thread, self._flush_requested = self._thread, self._thread is not None
            self._wake.notify_all()
            self.is_on_its_own = not self._wait_until_idle()
            if self.is_on_its_own:
                self._flush_requested = False
                left += self._queue
                self._queue.clear()
        if self.is_on_its_own:
            for new in left:
                new.release()
            self._counters.count(f"dropped:{DropReason.UNAVAILABLE.value}", len(left))
            raise UnavailableError(
                f"the store was closed and {len(left)} queued pages were dropped: "
                f"nothing was written for {NO_PROGRESS_SECONDS:.0f} s"
            )
        if thread is None:
            self.drain()
        else:
            thread.join()
            self._thread = None

    def _run(self) -> None:
        # when deferred changes are committed even without pages
        due = time.monotonic() + DEFERRED_SECONDS
        while True:
            with self._lock:
                self._busy = False
                self._steps += 1
                self._wake.notify_all()
                self._wake.wait_for(
                    lambda: self._queue or self._closing or self._flush_requested,
                    timeout=max(due - time.monotonic(), 0.0),
                )
                if self._closing and not self._queue and not self._flush_requested:
                    break
                batch = self._next_batch()
                commits = bool(batch) or self._flush_requested or self._closing or time.monotonic() >= due
                # the last batch also writes the deferred changes
                self._flush_requested = self._flush_requested and bool(self._queue)
                self._busy = commits
            if batch or (commits and self.has_deferred):
                self._commit(batch)
            due = time.monotonic() + DEFERRED_SECONDS if commits else due
        if self.is_on_its_own:
            self._on_released()

    def _next_batch(self) -> list[PendingPage]:
        batch: list[PendingPage] = []
        size = 0
        while self._queue and (not batch or size + self._queue[0].n_bytes <= BATCH_BYTES):
            batch.append(self._queue.popleft())
            size += batch[-1].n_bytes
        return batch

    def _commit(self, batch: Sequence[PendingPage]) -> None:
        try:
            self._commit_batch(batch)
        except PrefixStoreError as error:
            log.warning("a batch of %d pages was dropped: %s", len(batch), error)
        except Exception:  # a fault of the store must not end the thread that serves it
            log.exception("a batch of %d pages was dropped", len(batch))
            self._counters.count(f"dropped:{DropReason.ERROR.value}", len(batch))
        finally:
            for new in batch:
                new.release()
