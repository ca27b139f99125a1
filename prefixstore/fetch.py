"""Verified states of pages, read ahead: while one is used, the next ones are read, verified and decoded."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Semaphore

from prefixstore.backends.base import Backend, Snapshot
from prefixstore.buffers import Lease
from prefixstore.catalog import Catalog
from prefixstore.codec import decode
from prefixstore.errors import CorruptError, StorageError
from prefixstore.index import Page
from prefixstore.stats import Counters

__all__ = ["Fetcher"]

log = logging.getLogger("prefixstore")

# pages that are ready before they are asked for
AHEAD = 2


class Fetcher:
    """Reads pages out of the buffers they wait in, or out of the backend."""

    def __init__(self, backend: Backend, catalog: Catalog, counters: Counters) -> None:
        self._backend = backend
        self._catalog = catalog
        self._counters = counters
        self.after_fork()

    def after_fork(self) -> None:
        """A thread of this process."""
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="prefixstore-read")

    def close(self) -> None:
        """End the thread."""
        self._ahead.shutdown()

    @contextmanager
    def fetching(self, pages: Sequence[Page]) -> Iterator[Iterator[memoryview]]:
        """The verified states of `pages`, in order; they end early at a page that is gone or damaged.

        A state is valid until the block is left. Raises `StorageError` if the backend cannot be read at all.
        """
        # held before the snapshot opens: what is committed in between is in one of the two
        held = self._hold(pages)
        try:
            with self._backend.snapshot() as snapshot:
                states = self._states(snapshot, pages, held)
                try:
                    yield states
                finally:
                    states.close()
        finally:
            for lease in held.values():
                lease.release()

    def _hold(self, pages: Sequence[Page]) -> dict[bytes, Lease]:
        with self._catalog.lock:
            waiting = [self._catalog.pending[page.key] for page in pages if page.key in self._catalog.pending]
            return {new.page.key: new.lease for new in waiting if new.lease.hold()}

    def _states(
        self, snapshot: Snapshot, pages: Sequence[Page], held: dict[bytes, Lease]
    ) -> Generator[memoryview, None, None]:
        ready: SimpleQueue[memoryview | None] = SimpleQueue()
        room = Semaphore(AHEAD)
        left = False

        def read() -> None:
            try:
                for page in pages:
                    room.acquire()
                    state = None if left else self._state(snapshot, page, held)
                    if state is None:
                        break
                    ready.put(state)
            finally:
                ready.put(None)

        # only this one thread uses the snapshot: the caller looks at bytes that it was given
        reading = self._ahead.submit(read)
        try:
            while (state := ready.get()) is not None:
                yield state
                room.release()
        finally:
            left = True
            room.release()
            reading.result()

    def _state(self, snapshot: Snapshot, page: Page, held: dict[bytes, Lease]) -> memoryview | None:
        if page.key in held:
            return held[page.key].view
        try:
            record = snapshot.record(page.key)
            if record is None:
                self._counters.count("unreadable:vanished")
                return None
            payload = snapshot.payload(page.key)
            if payload is None:
                raise CorruptError(f"page {page.key.hex()} has no payload")
            # the hash nominated it; the tokens prove it
            if (record.tokens, record.parent, record.start) != (page.tokens, page.parent, page.start):
                raise CorruptError(f"page {page.key.hex()} holds other tokens than its key stands for")
            return decode(record, payload)
        except CorruptError as error:
            log.warning("a damaged page is removed: %s", error)
            self._counters.count("unreadable:corrupt")
            with self._catalog.lock:
                self._catalog.damage(page.key)
        except StorageError as error:
            log.warning("a page cannot be read: %s", error)
            self._counters.count("unreadable:unavailable")
        return None
