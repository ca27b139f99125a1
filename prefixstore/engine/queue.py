"""Writing behind: a bounded queue and one thread, so that the foreground pays for a copy only."""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial

from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.catalog import NewPage
from prefixstore.engine.engine import Engine
from prefixstore.errors import PrefixStoreError, UnavailableError
from prefixstore.stats import Counters

__all__ = ["Writer"]

log = logging.getLogger("prefixstore")

# One commit costs one flush of the disk: pages that wait together are written together.
BATCH_BYTES = 64 << 20
# Uses of pages are written with the next batch, or after this many seconds without one.
NOTES_AFTER = 2.0
# Who waits until all is written waits so long for the next batch: somebody may hold a lock, or the location not answer.
PATIENCE = 30.0


class Writer:
    """Takes captured pages and has the engine commit them.

    Parameters
    ----------
    engine
        Commits the pages.
    queue_bytes
        How many bytes may wait; one page of any size always may.
    behind
        Whether a thread commits, or the caller of `submit`.
    counters
        Counts what is dropped.
    read_only
        Whether uses and damaged pages are not noted in the backend.
    """

    def __init__(self, engine: Engine, queue_bytes: int, behind: bool, counters: Counters, *, read_only: bool) -> None:
        self._engine = engine
        self._queue_bytes = queue_bytes
        self._behind = behind
        self._counters = counters
        self._read_only = read_only
        self.after_fork()

    def after_fork(self) -> None:
        """An empty queue: the parent writes what it has captured."""
        self._buffers = BufferPool(self._queue_bytes)
        self._queue: deque[NewPage] = deque()
        self._wake = threading.Condition()
        self._busy = False
        self._closing = False
        # the thread is to write notes now, and how often it was done with something
        self._hurry = False
        self._done = 0
        # nobody waits for the thread any more
        self.is_stuck = False
        self._thread: threading.Thread | None = None

    @property
    def queued_bytes(self) -> int:
        """Bytes captured and not yet written."""
        return self._buffers.leased

    @property
    def limit(self) -> int:
        """How many bytes may wait."""
        return self._queue_bytes

    def acquire(self, size: int, *, wait: bool = False) -> PooledBuffer | None:
        """A buffer to capture a page into; None if too much is queued already and `wait` is false."""
        return self._buffers.acquire(size, wait=wait)

    def submit(self, new: NewPage) -> bool:
        """Have a page written; its buffer is the writer's from now on. False if the page is not wanted."""
        if not self._engine.announce(new):
            new.buffer.release()
            return False
        with self._wake:
            # once the thread has been told to end, nobody would take it from the queue
            queued = self._behind and not self._closing
            if queued:
                self._queue.append(new)
                self._start()
                self._wake.notify_all()
        if not queued:
            self._commit([new])
        return True

    def nudge(self) -> None:
        """Uses or damaged pages were noted: see to it that they are written some time."""
        if not self._read_only or self._engine.has_hot_pages:
            with self._wake:
                self._start()

    def _start(self) -> None:
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="prefixstore-write", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Return when everything submitted so far is durable.

        Raises
        ------
        StorageError
            If the backend cannot make it so, or does not write anything for `PATIENCE` seconds.
        """
        self.drain()
        if not self._read_only:
            self._engine.sync()

    def drain(self) -> None:
        """Return when nothing is queued or noted any more: all that was submitted is committed, or dropped.

        Raises
        ------
        UnavailableError
            If the backend does not write anything for `PATIENCE` seconds.
        """
        with self._wake:
            if self._has_notes and not self._closing:
                if self._behind:
                    self._start()
                self._hurry = self._thread is not None
                self._wake.notify_all()
            if not self._is_idle_in_time():
                raise UnavailableError(
                    f"nothing was written for {PATIENCE:.0f} s, and {self.queued_bytes:,} bytes wait: the location "
                    "does not answer, or another process holds its lock"
                )
        if self._thread is None and self._has_notes:
            self._engine.commit([])

    @property
    def _has_notes(self) -> bool:
        return self._engine.has_notes and not self._read_only

    def _is_idle_in_time(self) -> bool:
        """Wait until the thread has nothing to do; false if it is done with nothing for too long. With the lock."""
        while self._queue or self._busy or self._hurry:
            before = self._done
            if not self._wake.wait_for(partial(self._has_moved, before), PATIENCE):
                return False
        return True

    def _has_moved(self, before: int) -> bool:
        return self._done != before

    def close(self) -> None:
        """Write what is queued and noted, make it durable, and end the thread.

        Raises
        ------
        StorageError
            As `flush`. What is queued then is dropped, and the thread closes the engine when it can.
        """
        left: list[NewPage] = []
        with self._wake:
            self._closing = True
            thread, self._hurry = self._thread, self._thread is not None
            self._wake.notify_all()
            if not self._is_idle_in_time():
                self.is_stuck, self._hurry = True, False
                left += self._queue
                self._queue.clear()
        if self.is_stuck:
            for new in left:
                new.buffer.release()
            self._counters.count("dropped:unavailable", len(left))
            raise UnavailableError(
                f"closed, and {len(left)} pages that waited are dropped: nothing was written for {PATIENCE:.0f} s"
            )
        if thread is None:
            self.drain()
        else:
            thread.join()
            self._thread = None
        if not self._read_only:
            self._engine.sync()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._done += 1
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._queue or self._closing or self._hurry, timeout=NOTES_AFTER)
                if self._closing and not self._queue and not self._hurry:
                    break
                batch = self._next_batch()
                # with the last batch the notes are written
                self._hurry = self._hurry and bool(self._queue)
                self._busy = True
            if batch or self._has_notes:
                self._commit(batch)
            if not batch and not self._closing:
                self._keep_states()
        if self.is_stuck:
            self._engine.close()

    def _next_batch(self) -> list[NewPage]:
        batch: list[NewPage] = []
        size = 0
        while self._queue and (not batch or size + len(self._queue[0].buffer.view) <= BATCH_BYTES):
            batch.append(self._queue.popleft())
            size += len(batch[-1].buffer.view)
        return batch

    def _keep_states(self) -> None:
        try:
            self._engine.keep_states()
        except PrefixStoreError as error:
            log.warning("hot pages are not kept in RAM: %s", error)
        except Exception:  # a fault of the store must not end the thread that keeps it
            log.exception("hot pages are not kept in RAM")

    def _commit(self, batch: list[NewPage]) -> None:
        try:
            self._engine.commit(batch)
        except PrefixStoreError as error:
            log.warning("a batch of %d pages is dropped: %s", len(batch), error)
        except Exception:  # a fault of the store must not end the thread that keeps it
            log.exception("a batch of %d pages is dropped", len(batch))
            self._counters.count("dropped:error", len(batch))
        finally:
            for new in batch:
                new.buffer.release()
