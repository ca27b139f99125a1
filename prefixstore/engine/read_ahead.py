"""Stored pages read ahead: while one is used, the next ones are read, verified and decoded.

A few threads work for each restore. They take turns at the snapshot, which one thread at a time may use, and then
verify and decode what they got, each its own page, at the same time. What is stored raw is not copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Lock, Semaphore
from typing import NamedTuple

from prefixstore.backends.base import Snapshot
from prefixstore.buffers import Lease
from prefixstore.engine.index import Page
from prefixstore.engine.reading import Look, Readers, accept, compare, fetched
from prefixstore.errors import UnavailableError
from prefixstore.format.autocodec import UNPACKERS, ReadPace
from prefixstore.format.codec import CODECS, decode_into, verify
from prefixstore.format.record import Buffer, Record

__all__ = ["ReadAhead"]


class _State(NamedTuple):
    """The state of a page, and the buffer that it was decoded into."""

    view: memoryview
    lease: Lease | None


class ReadAhead:
    """The states of some pages of a snapshot, one after the other.

    Parameters
    ----------
    readers
        Lends threads and buffers.
    snapshot
        Is used by these threads, and by nobody else, until `close` returns.
    pages
        What is wanted, in this order.
    pace
        Is told how fast stored bytes were read.
    look
        Called with each state before it is given out, where it is asked for.
    streamed
        A state is valid until the next one is asked for only, and its buffer used again; otherwise until `close`.
    """

    def __init__(
        self,
        readers: Readers,
        snapshot: Snapshot,
        pages: Sequence[Page],
        pace: ReadPace,
        look: Look | None,
        *,
        streamed: bool,
    ) -> None:
        self._buffers = readers.buffers
        self._pace = pace
        self._look = look
        # those that wait to be read, and those that wait to be given out
        self._pages = iter(pages)
        self._promised_pages = iter(pages)
        self._fetched = fetched(snapshot, [page.key for page in pages])
        self._turn = Lock()
        n_workers = UNPACKERS if any(page.stored_bytes != page.raw_bytes for page in pages) else 1
        # a page for each of them, and one that is in use
        self._room = Semaphore(n_workers + 1)
        # in the order of the pages; whoever takes a page promises its state, or the error
        self._promised: SimpleQueue[Future[_State | None]] = SimpleQueue()
        self._streamed = streamed
        self._in_use: list[Lease] = []
        self._n_taken = 0
        self._ended = False
        self._workers = [readers.threads.submit(self._work) for _ in pages[:n_workers]]

    def close(self) -> None:
        """Return when no thread uses the snapshot any more, and all buffers were given back."""
        self._ended = True
        for _ in self._workers:
            self._room.release()
        wait([worker for worker in self._workers if not worker.cancel()])
        self._fetched.close()
        while not self._promised.empty():
            promise = self._promised.get()
            if promise.exception() is None:
                self._take(promise.result())
        self._give_back()

    def next(self) -> memoryview | None:
        """The state of the next page; None if the page is gone.

        Raises
        ------
        StorageError
            If the page cannot be had. There is no next page after this, nor after None.
        """
        if self._streamed:
            self._give_back()
        if self._n_taken:
            # of the state before: whoever asks for the next one is done with it
            self._room.release()
        state = self._take(self._promised.get().result())
        return accept(self._look, next(self._promised_pages), state) if state is not None else None

    def settle(self) -> None:
        """Return when the state that `next` returned last is verified: it was before."""

    def _take(self, state: _State | None) -> memoryview | None:
        self._n_taken += 1
        if state is None:
            return None
        if state.lease is not None:
            self._in_use.append(state.lease)
        return state.view

    def _give_back(self) -> None:
        while self._in_use:
            self._in_use.pop().release()

    def _work(self) -> None:
        while True:
            self._room.acquire()
            promise: Future[_State | None] = Future()
            try:
                with self._turn:
                    page = None if self._ended else next(self._pages, None)
                    if page is None:
                        self._ended = True
                        return
                    self._promised.put(promise)
                    started = time.perf_counter()
                    found = next(self._fetched, None)
                    seconds = time.perf_counter() - started
                    if found is None:
                        # never set back: `close` may have set it meanwhile
                        self._ended = True
                promise.set_result(self._decode(page, *found, seconds) if found is not None else None)
            except BaseException as error:  # noqa: BLE001 - raised where the state is asked for
                self._ended = True
                promise.set_exception(error)

    def _decode(self, page: Page, record: Record, payload: Buffer, seconds: float) -> _State:
        compare(page, record)
        started = time.perf_counter()
        view = verify(record, payload)
        # where the location is mapped into memory, it is the checksum that reads
        self._pace.note(len(view), seconds + time.perf_counter() - started)
        if record.codec == CODECS["raw"]:
            return _State(view, None)
        try:
            lease = self._buffers.lease(record.raw_bytes, wait=True)
        except (MemoryError, ValueError) as error:
            raise UnavailableError(f"page {page.key.hex()}: no memory for {record.raw_bytes} bytes") from error
        assert lease is not None, "it waits until there is one"
        try:
            decode_into(record, view, lease.view, self._buffers)
        except BaseException:
            lease.release()
            raise
        return _State(lease.view, lease)
