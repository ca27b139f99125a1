"""The write queue: a bounded queue and one thread that commits, so that the foreground pays for a copy only."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from prefixstore.backends.threads import OwnThread, handed_over
from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.commit import Committer
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.pending import DropReason, PendingPage
from prefixstore.errors import PrefixStoreError, UnavailableError

__all__ = ["BATCH_BYTES", "Drained", "WriteQueue"]

log = logging.getLogger("prefixstore")

# One commit costs one flush of the disk: pages that wait together are written together.
BATCH_BYTES = 64 << 20
# Uses of pages are written with the next batch, or after this many seconds without one.
DEFERRED_SECONDS = 2.0
# A caller that waits for the queue gives up after so many seconds without progress: another process may hold a lock, or
# the location may not answer.
NO_PROGRESS_SECONDS = 30.0


class Drained(NamedTuple):
    """What left the queue while a caller waited, and what still waits.

    Attributes
    ----------
    pages, bytes
        Pages and snapshots that were committed or dropped meanwhile, and the bytes of their states.
    left
        Pages and snapshots that are captured and not written yet.
    """

    pages: int
    bytes: int
    left: int = 0


class WriteQueue(Part):
    """Announced pages that wait for a commit, and the thread that commits them.

    Parameters
    ----------
    limit
        How many bytes may wait; one page of any size always may.
    in_background
        Whether a thread commits, or the caller of `put`.
    on_released
        Called by the thread when it finally ends, if `close` did not wait for that.

    Attributes
    ----------
    is_on_its_own
        Whether no caller waits for the thread any more.
    """

    def __init__(
        self,
        shared: Shared,
        committer: Committer,
        commit: Callable[[Sequence[PendingPage]], int],
        limit: int,
        *,
        in_background: bool,
        on_released: Callable[[], None],
    ) -> None:
        super().__init__(shared)
        self._committer = committer
        self._commit_batch = commit
        self._in_background = in_background
        self._on_released = on_released
        self._buffers = BufferPool(limit)
        self._queue: deque[PendingPage] = deque()
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        # the thread commits
        self._busy = False
        self._closing = False
        # the thread should commit now
        self._flush_requested = False
        # steps of the thread; pages that have left the queue, and the bytes of their states
        self._steps = self._done = self._done_bytes = 0
        self.is_on_its_own = False
        self._thread: threading.Thread | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes captured and not yet written."""
        return self._buffers.in_use

    def acquire(self, size: int, *, wait: bool = False) -> PooledBuffer | None:
        """A buffer to capture a page into; None if too much is queued. With `wait`, None only if nothing is written."""
        # handed over only to wait: while another thread computes, that takes longer than copying a page
        buffer = self._buffers.acquire(size)
        return self._acquire_later(size) if buffer is None and wait else buffer

    @handed_over
    def _acquire_later(self, size: int) -> PooledBuffer | None:
        return self._buffers.acquire(size, wait=True, timeout=NO_PROGRESS_SECONDS)

    def adopt(self, state: memoryview) -> PooledBuffer | None:
        """A buffer with the memory of another queue's; None if too much is queued."""
        return self._buffers.adopt(state)

    def put(self, new: PendingPage) -> None:
        """Have an announced page written; its buffer is the queue's from here on."""
        with self._lock:
            # once the thread has been told to end, it would not take it from the queue
            taken = self._in_background and not self._closing and self._start()
            if taken:
                self._queue.append(new)
                self._wake.notify_all()
        if not taken:
            self._commit([new])

    @handed_over
    def nudge(self) -> None:
        """Have deferred changes committed soon."""
        if self._in_background and not self._read_only:
            with self._lock:
                self._start()

    def _start(self) -> bool:
        """Start the thread unless it runs; whether it does. The caller holds the lock, which the thread takes first."""
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

    def drain(self, pages: int | None = None, n_bytes: int | None = None, seconds: float | None = None) -> Drained:
        """Wait until the queue is empty: everything put is committed or dropped. With a limit, perhaps earlier.

        Parameters
        ----------
        pages, n_bytes
            Return as soon as so much has left the queue since this call. What is committed together leaves together.
        seconds
            Return after this time at the latest.

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
            before = self._done, self._done_bytes

            def is_enough() -> bool:
                return (pages is not None and self._done - before[0] >= pages) or (
                    n_bytes is not None and self._done_bytes - before[1] >= n_bytes
                )

            until = time.monotonic() + seconds if seconds is not None else None
            if not self._wait_until_idle(is_enough, until):
                raise UnavailableError(
                    f"nothing was written for {NO_PROGRESS_SECONDS:.0f} s, and {self.n_bytes:,} bytes are "
                    "waiting: the location does not answer, or another process holds its lock"
                )
        if self._thread is None and self.has_deferred:
            self._commit([])
        with self._lock:
            return Drained(self._done - before[0], self._done_bytes - before[1])

    @property
    def has_deferred(self) -> bool:
        """Whether uses, bookmarks, figures, or pages to be deleted wait for the next commit; of a reader, never."""
        return self._committer.has_deferred and not self._read_only

    def _wait_until_idle(self, is_enough: Callable[[], bool] = lambda: False, until: float | None = None) -> bool:
        """Wait, holding the lock, until the thread has nothing to write; false if it makes no progress for too long.

        The wait ends early if `is_enough`, or at the time `until`.
        """
        while (self._queue or self._busy or self._flush_requested) and not is_enough():
            before, wait = self._steps, NO_PROGRESS_SECONDS
            if until is not None:
                wait = min(wait, max(until - time.monotonic(), 0.0))
            if not self._wake.wait_for(partial(self._has_progressed, before), wait):
                return until is not None and time.monotonic() >= until
        return True

    def _has_progressed(self, before: int) -> bool:
        return self._steps != before

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the queue, which cannot wait for itself."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """Write what waits, and end the thread.

        Raises
        ------
        UnavailableError
            As `drain`. What waits is dropped then, and the thread calls `on_released` when it finally ends.
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
        # when changes without pages are committed
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
        size = sum(new.n_bytes for new in batch)
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
            with self._lock:
                self._done, self._done_bytes = self._done + len(batch), self._done_bytes + size
