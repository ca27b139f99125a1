"""Reads the states of stored pages in order, in threads of its own, and verifies them.

`ReadAhead` verifies each state before it gives it out, and unpacks packed pages in several threads. `ReadAlong` gives
out raw pages first and verifies them in a thread while the caller copies them, so that they come out of memory once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple, TypeAlias, TypeVar

from prefixstore.backends.threads import Job, Outcome, Threads
from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.index import Page, is_same
from prefixstore.engine.page_view import View
from prefixstore.errors import ClosedError, CorruptError, IncompatibleError, PrefixStoreError, UnavailableError
from prefixstore.format.autocodec import UNPACKERS, ReadRate
from prefixstore.format.codec import CODECS, decode, decode_into, inspect, verify, verify_checksum
from prefixstore.format.record import Buffer, Record

__all__ = ["Admit", "Look", "ReadAhead", "ReadAlong", "Reader", "ReaderPool", "ShapeError", "check_shape", "job_for"]

# for all restores of an engine together; they are started as they are needed
THREADS = 64

T = TypeVar("T")

Look: TypeAlias = Callable[[Page, memoryview], bool]
"""Whether a state can be used for a page."""

Admit: TypeAlias = Callable[[Page], bool]
"""Whether a page may be read: its state has a size that it can have."""


class ShapeError(IncompatibleError):
    """A state is what was written, but the caller cannot use it."""


def check_shape(look: Look | None, page: Page, state: memoryview) -> None:
    """Raise `ShapeError` if the caller cannot use a state."""
    if look is not None and not look(page, state):
        raise ShapeError(f"page {page.key.hex()} does not have the shape that the caller expects")


def _check_record(page: Page, record: Record) -> None:
    """Refuse a record that is not that of a page.

    Raises
    ------
    CorruptError
        If it has other tokens.
    ShapeError
        If its state does not have the size that the caller has accepted. Nothing is allocated for it.
    """
    if not is_same(page, record) or record.start != page.start:
        raise CorruptError(f"page {page.key.hex()} has tokens that do not match its key")
    if record.raw_bytes != page.raw_bytes:
        raise ShapeError(f"page {page.key.hex()} holds {record.raw_bytes} bytes of state, not {page.raw_bytes}")


def _for_caller(error: BaseException) -> Exception:
    """What the caller gets for an error in a reader's thread: the same, unless it is about the thread alone."""
    if isinstance(error, MemoryError):
        translated: Exception = UnavailableError("no memory to read a page")
    elif isinstance(error, Exception):
        return error
    else:
        translated = UnavailableError(f"a thread that reads pages was ended by {error!r}")
    translated.__cause__ = error
    return translated


def _fetch(view: View, keys: Sequence[bytes]) -> Generator[tuple[Record, Buffer], None, None]:
    """As `View.fetch`, but nothing happens before the first `next`, and it can be closed."""
    yield from view.fetch(keys)


class ReaderPool:
    """The threads of all readers of an engine, and the buffers that pages are decoded into."""

    def __init__(self) -> None:
        self._threads = Threads(THREADS, "prefixstore-read")
        self._closed = False
        # without a limit of its own: each reader bounds what it uses
        self.buffers = BufferPool(limit=None)

    def check_open(self) -> None:
        """Raise `ClosedError` if the store was closed."""
        if self._closed:
            raise ClosedError("the store was closed while it was read; open a new PrefixStore")

    def submit(self, job: Job[Any]) -> None:
        """Have a thread do a job, which `job_for` has made.

        Raises
        ------
        ClosedError
            If the store was closed.
        UnavailableError
            If no thread can be started.
        """
        try:
            self._threads.submit(job)
        except RuntimeError as error:
            self.check_open()
            raise UnavailableError(f"no thread can be started to read pages: {error}") from error

    def close(self) -> None:
        """End the threads, each when it has done its work."""
        self._closed = True
        # not waiting: this thread may be the one that a reader waits for
        self._threads.close()


def job_for(work: Callable[..., T], *args: Any) -> Job[T]:
    """Work for a thread of a `ReaderPool`, whose error is one for the caller."""
    return Job(_translated, work, *args)


def _translated(work: Callable[..., T], *args: Any) -> T:
    try:
        return work(*args)
    except BaseException as error:  # noqa: BLE001 - raised by `Job.result`
        raise _for_caller(error)  # noqa: B904 - it has its cause


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
        """Return when no thread uses the view any longer, and all buffers have been released. May be called again."""


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
        self._promised: SimpleQueue[Outcome[_State | None]] = SimpleQueue()
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
        self._pool = pool
        self._n_workers = min(n_workers, len(pages))
        self._workers: list[Job[None]] = []

    def _start(self) -> None:
        for _ in range(self._n_workers):
            worker = job_for(self._work)
            # before it begins: `close` has to know of it
            self._workers.append(worker)
            try:
                self._pool.submit(worker)
            except UnavailableError:
                self._workers.remove(worker)
                # those that were started do all the work
                if not self._workers:
                    raise
                break

    def next(self) -> memoryview | None:
        if not self._workers:
            self._start()
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
        for worker in self._workers:
            worker.end()
        self._fetched.close()
        while not self._promised.empty():
            promise = self._promised.get()
            if promise.error() is None:
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
            promise: Outcome[_State | None] = Outcome()
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
                promise.set_error(_for_caller(error))

    def _decode(self, page: Page, record: Record, payload: Buffer, seconds: float) -> _State:
        _check_record(page, record)
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
        self._pool = pool
        self._read_rate = read_rate
        self._look = look
        self._pages = iter(pages)
        self._fetched = _fetch(view, [page.key for page in pages])
        # Verifies the state that was given out last, then reads the next one. Its result: the next page, the reason why
        # it cannot be read, or None if it is gone. It fails if the state is not verified.
        self._job: Job[_Found | Exception | None] | None = None
        self._coming: _Found | Exception | None = None
        self._started = False

    def next(self) -> memoryview | None:
        """The state of the next page, not verified yet (see `wait_verified`); None if the page is gone."""
        self.wait_verified()
        coming = self._coming if self._started else self._read()
        self._started = True
        if isinstance(coming, Exception):
            raise coming
        if coming is None:
            return None
        # kept before it begins: `close` has to know of it
        self._job = job_for(self._verify_and_read, coming)
        try:
            self._pool.submit(self._job)
        except PrefixStoreError:
            self._job = None
            raise
        return coming.view

    def wait_verified(self) -> None:
        # The job is forgotten only when its state is verified: a caller who is interrupted here, or asks again after an
        # error, must not take the state for a good one, nor leave the view to the thread.
        if self._job is not None:
            self._coming = self._job.result()
            self._job = None

    def close(self) -> None:
        if self._job is not None:
            self._job.end()
        self._fetched.close()

    def _verify_and_read(self, given: _Found) -> _Found | Exception | None:
        started = time.perf_counter()
        if given.record.codec == CODECS["raw"]:
            verify_checksum(given.record, given.view)
            # in a location that is mapped into memory, it is the checksum that reads the bytes
            self._read_rate.observe(len(given.view), given.seconds + time.perf_counter() - started)
        return self._read()

    def _read(self) -> _Found | Exception | None:
        started = time.perf_counter()
        try:
            found, page = next(self._fetched, None), next(self._pages, None)
            if found is None or page is None:
                return None
            record, payload = found
            _check_record(page, record)
            # it may be packed after all, if it was written again since it was looked up
            raw = record.codec == CODECS["raw"]
            view = inspect(record, payload) if raw else decode(record, payload)
            try:
                check_shape(self._look, page, view)
            except ShapeError:
                # a damaged page may have any shape: report the damage instead
                verify(record, payload)
                raise
        except Exception as error:  # noqa: BLE001 - raised by `next`: the page before is not at fault
            return _for_caller(error)
        return _Found(record, view, time.perf_counter() - started)
