"""Reads the states of stored pages in order, in threads of its own, and verifies them.

`ReadAhead` verifies each state before it gives it out, and unpacks packed pages in several threads. `ReadAlong` gives
out raw pages first and verifies them in a thread while the caller copies them, so that they come out of memory once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple, TypeAlias

from prefixstore.backends.base import View
from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError, IncompatibleError, StorageError, UnavailableError
from prefixstore.format.autocodec import UNPACKERS, ReadRate
from prefixstore.format.codec import CODECS, decode, decode_into, inspect, verify, verify_checksum
from prefixstore.format.record import Buffer, Record

__all__ = ["Look", "ReadAhead", "ReadAlong", "Reader", "ReaderPool", "ShapeError", "check_shape"]

# for all restores of an engine together; they are started as they are needed
THREADS = 64

Look: TypeAlias = Callable[[Page, memoryview], bool]
"""Whether a state can be used for a page."""


class ShapeError(IncompatibleError):
    """A state is what was written, but the caller cannot use it."""


def check_shape(look: Look | None, page: Page, state: memoryview) -> None:
    """Raise `ShapeError` if the caller cannot use a state."""
    if look is not None and not look(page, state):
        raise ShapeError(f"page {page.key.hex()} does not have the shape that the caller expects")


def _check_tokens(page: Page, record: Record) -> None:
    """Raise `CorruptError` if a record is not that of a page: a hash only nominates, the tokens prove it."""
    if (record.tokens, record.parent, record.start) != (page.tokens, page.parent, page.start):
        raise CorruptError(f"page {page.key.hex()} holds other tokens than its key stands for")


def _fetch(view: View, keys: Sequence[bytes]) -> Generator[tuple[Record, Buffer], None, None]:
    """As `View.fetch`, but nothing happens before the first `next`, and it can be closed."""
    yield from view.fetch(keys)


class ReaderPool:
    """The threads of all readers of an engine, and the buffers that pages are decoded into."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prefixstore-read")
        # without a limit of its own: each reader bounds what it uses
        self.buffers = BufferPool(limit=None)

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown()


class Reader(ABC):
    """The states of some pages of a view, one after the other."""

    @abstractmethod
    def next(self) -> memoryview | None:
        """The state of the next page; None if the page is gone.

        Raises
        ------
        StorageError
            If the page cannot be read. There is no next page after this, nor after None.
        """

    @abstractmethod
    def wait_verified(self) -> None:
        """Return when the state that `next` returned last is verified.

        Raises
        ------
        CorruptError
            If it is not what was written. There is no next page after this.
        """

    @abstractmethod
    def close(self) -> None:
        """Return when no thread uses the view any longer, and all buffers have been released."""


# -- verified before they are given out -------------------------------------------------------------------------------


class _State(NamedTuple):
    """The state of a page, and the buffer that it was decoded into."""

    view: memoryview
    buffer: PooledBuffer | None


class ReadAhead(Reader):
    """Reads, verifies and unpacks pages ahead of the caller.

    Parameters
    ----------
    pool
        Provides threads and buffers.
    view
        Is used by these threads only, until `close` returns.
    pages
        The wanted pages, in this order.
    read_rate
        Learns how fast stored bytes were read.
    look
        Called with each state before it is given out, in the thread of the caller.
    streamed
        Whether a state is valid only until the next call of `next`, and its buffer used again; otherwise until `close`.
    """

    def __init__(
        self,
        pool: ReaderPool,
        view: View,
        pages: Sequence[Page],
        read_rate: ReadRate,
        look: Look | None,
        *,
        streamed: bool,
    ) -> None:
        self._buffers = pool.buffers
        self._read_rate = read_rate
        self._look = look
        self._streamed = streamed
        # used by the worker whose turn it is
        self._turn = Lock()
        self._pages_to_read = iter(pages)
        self._fetched = _fetch(view, [page.key for page in pages])
        self._ended = False
        # In the order of the pages: the worker that takes a page promises its state, or the error.
        self._promised: SimpleQueue[Future[_State | None]] = SimpleQueue()
        # used by the caller
        self._pages_to_give = iter(pages)
        self._in_use: list[PooledBuffer] = []
        self._n_taken = 0
        n_workers = UNPACKERS if any(page.stored_bytes != page.raw_bytes for page in pages) else 1
        # One for each page that may be read: one for each worker, and one that the caller uses. A queue and not a
        # semaphore, whose methods a Ctrl-C may end while they hold its lock: `close` would wait forever.
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(n_workers + 1):
            self._free.put(None)
        # They start with the first `next`: a reader that is interrupted before it is used has nothing to end.
        self._threads = pool.threads
        self._n_workers = min(n_workers, len(pages))
        self._workers: list[Future[None]] = []

    def next(self) -> memoryview | None:
        if not self._workers:
            self._workers += [self._threads.submit(self._work) for _ in range(self._n_workers)]
        if self._streamed:
            self._release_buffers()
        if self._n_taken:
            # the caller has finished with the previous state
            self._free.put(None)
        state = self._take(self._promised.get().result())
        if state is not None:
            check_shape(self._look, next(self._pages_to_give), state)
        return state

    def wait_verified(self) -> None:
        """Return at once: every state was verified before it was given out."""

    def close(self) -> None:
        self._ended = True
        for _ in range(self._n_workers):
            self._free.put(None)
        wait([worker for worker in self._workers if not worker.cancel()])
        self._fetched.close()
        while not self._promised.empty():
            promise = self._promised.get()
            if promise.exception() is None:
                self._take(promise.result())
        self._release_buffers()

    def _take(self, state: _State | None) -> memoryview | None:
        self._n_taken += 1
        if state is None:
            return None
        if state.buffer is not None:
            self._in_use.append(state.buffer)
        return state.view

    def _release_buffers(self) -> None:
        while self._in_use:
            self._in_use.pop().release()

    def _work(self) -> None:
        """Read pages in turns with the other workers; verify and unpack them at the same time as the others."""
        while True:
            self._free.get()
            promise: Future[_State | None] = Future()
            try:
                with self._turn:
                    page = None if self._ended else next(self._pages_to_read, None)
                    if page is None:
                        self._ended = True
                        return
                    self._promised.put(promise)
                    started = time.perf_counter()
                    found = next(self._fetched, None)
                    seconds = time.perf_counter() - started
                    if found is None:
                        # never reset to False: `close` may have set it meanwhile
                        self._ended = True
                promise.set_result(self._decode(page, *found, seconds) if found is not None else None)
            except BaseException as error:  # noqa: BLE001 - raised by `next`
                self._ended = True
                promise.set_exception(error)

    def _decode(self, page: Page, record: Record, payload: Buffer, seconds: float) -> _State:
        _check_tokens(page, record)
        started = time.perf_counter()
        view = verify(record, payload)
        # in a location that is mapped into memory, it is the checksum that reads the bytes
        self._read_rate.observe(len(view), seconds + time.perf_counter() - started)
        if record.codec == CODECS["raw"]:
            return _State(view, None)
        try:
            buffer = self._buffers.acquire(record.raw_bytes, wait=True)
        except (MemoryError, ValueError) as error:
            raise UnavailableError(f"page {page.key.hex()}: no memory for {record.raw_bytes} bytes") from error
        assert buffer is not None, "it waits until there is one"
        try:
            decode_into(record, view, buffer.view, self._buffers)
        except BaseException:
            buffer.release()
            raise
        return _State(buffer.view, buffer)


# -- verified while they are used -------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A stored page, the bytes of its state, and the seconds that it took to read them."""

    record: Record
    view: memoryview
    seconds: float


class ReadAlong(Reader):
    """Gives out raw pages that are not verified yet, and verifies each while the caller uses it.

    Parameters
    ----------
    pool
        Provides a thread.
    view
        Is used by this reader only, until `close` returns.
    pages
        The wanted pages, in this order.
    read_rate
        Learns how fast stored bytes were read.
    look
        Called with each state before it is given out: with the first one in the thread of the caller, with the others
        in the reader's thread, as the bytes that it compares are not in a processor's cache yet.
    """

    def __init__(
        self, pool: ReaderPool, view: View, pages: Sequence[Page], read_rate: ReadRate, look: Look | None
    ) -> None:
        self._threads = pool.threads
        self._read_rate = read_rate
        self._look = look
        self._pages = iter(pages)
        self._fetched = _fetch(view, [page.key for page in pages])
        # Verifies the state that was given out last, then reads the next one. Its result: the next page, the reason why
        # it cannot be read, or None if it is gone.
        self._job: Future[_Found | StorageError | None] | None = None
        self._coming: _Found | StorageError | None = None
        self._started = False

    def next(self) -> memoryview | None:
        """The state of the next page, not verified yet (see `wait_verified`); None if the page is gone."""
        self.wait_verified()
        coming = self._coming if self._started else self._read()
        self._started = True
        if isinstance(coming, StorageError):
            raise coming
        if coming is None:
            return None
        self._job = self._threads.submit(self._verify_and_read, coming)
        return coming.view

    def wait_verified(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            self._coming = None
            self._coming = job.result()

    def close(self) -> None:
        if self._job is not None:
            wait([self._job])
        self._fetched.close()

    def _verify_and_read(self, given: _Found) -> _Found | StorageError | None:
        started = time.perf_counter()
        if given.record.codec == CODECS["raw"]:
            verify_checksum(given.record, given.view)
            # in a location that is mapped into memory, it is the checksum that reads the bytes
            self._read_rate.observe(len(given.view), given.seconds + time.perf_counter() - started)
        return self._read()

    def _read(self) -> _Found | StorageError | None:
        started = time.perf_counter()
        try:
            found, page = next(self._fetched, None), next(self._pages, None)
            if found is None or page is None:
                return None
            record, payload = found
            _check_tokens(page, record)
            # it may be packed after all, if it was written again since the index learned of it
            raw = record.codec == CODECS["raw"]
            view = inspect(record, payload) if raw else decode(record, payload)
            try:
                check_shape(self._look, page, view)
            except ShapeError:
                # a damaged page may have any shape: report the damage instead
                verify(record, payload)
                raise
        except StorageError as error:
            return error
        return _Found(record, view, time.perf_counter() - started)
