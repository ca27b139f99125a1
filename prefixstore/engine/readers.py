"""Reads the states of stored pages in order, for the thread that has the view, and verifies them.

`ReadAhead` verifies each state before it gives it out, and unpacks packed pages in several threads. `ReadAlong` gives
out raw pages first and verifies them while the caller copies them, so that they come out of memory once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple, TypeAlias

from prefixstore.backends.threads import Answer, Threads
from prefixstore.buffers import BufferPool, PooledBuffer, released_on_error
from prefixstore.engine.index import Page, is_same
from prefixstore.engine.page_view import View
from prefixstore.errors import CorruptError, IncompatibleError, UnavailableError
from prefixstore.format.autocodec import UNPACKERS, ReadRate
from prefixstore.format.codec import CODECS, decode, decode_into, inspect, verify, verify_checksum
from prefixstore.format.record import Buffer, Record

__all__ = ["Admit", "Look", "ReadAhead", "ReadAlong", "Reader", "ShapeError", "for_caller"]

Look: TypeAlias = Callable[[Page, memoryview], bool]
"""Whether a state can be used for a page."""

Admit: TypeAlias = Callable[[Page], bool]
"""Whether a page may be read: its state has a size that it can have."""


class ShapeError(IncompatibleError):
    """A state is what was written, but the caller cannot use it."""


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


def for_caller(error: BaseException) -> Exception:
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


class Reader(ABC):
    """The states of some pages of a view, one after the other, for one thread.

    Attributes
    ----------
    verifies_first
        Whether states are verified when they are returned; otherwise `verify` does that.
    """

    verifies_first: bool

    @abstractmethod
    def next(self) -> memoryview | None:
        """The state of the next page; None if the page is gone.

        Raises
        ------
        StorageError
            If the page cannot be read. There is no next page after this, nor after None.
        """

    @abstractmethod
    def verify(self) -> None:
        """Verify the state that `next` returned last, if that is still to be done.

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
    threads, buffers
        Do the work, and hold what is unpacked. The buffers have no limit: each reader bounds what it uses.
    view
        Is used by these threads only, until `close` returns.
    pages
        The wanted pages, in this order.
    read_rate
        Learns how fast stored bytes were read.
    streamed
        Whether a state is valid only until the next call of `next`, and its buffer used again; otherwise until `close`.
    """

    verifies_first = True

    def __init__(
        self,
        threads: Threads,
        buffers: BufferPool,
        view: View,
        pages: Sequence[Page],
        read_rate: ReadRate,
        *,
        streamed: bool,
    ) -> None:
        self._buffers = buffers
        self._read_rate = read_rate
        self._streamed = streamed
        # used by the worker whose turn it is
        self._turn = Lock()
        self._pages = iter(pages)
        self._fetched = _fetch(view, [page.key for page in pages])
        self._ended = False
        # In the order of the pages: the worker that takes a page promises its state, or the error.
        self._promised: SimpleQueue[Answer[_State | None]] = SimpleQueue()
        # used by the caller
        self._in_use: list[PooledBuffer] = []
        self._has_taken = False
        n_workers = UNPACKERS if any(page.stored_bytes != page.raw_bytes for page in pages) else 1
        # one for each page that may be read: one for each worker, and one that the caller uses
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(n_workers + 1):
            self._free.put(None)
        self._workers: list[Answer[None]] = []
        try:
            for _ in range(min(n_workers, len(pages))):
                self._workers.append(threads.start(self._work))
        except RuntimeError as error:
            # those that were started do all the work
            if not self._workers:
                raise UnavailableError(f"no thread can be started to read pages: {error}") from error

    def next(self) -> memoryview | None:
        if self._streamed:
            self._release_buffers()
        if self._has_taken:
            # the caller has finished with the previous state
            self._free.put(None)
        self._has_taken = True
        return self._take(self._promised.get().get())

    def verify(self) -> None:
        """Nothing to do: every state was verified before it was given out."""

    def close(self) -> None:
        self._ended = True
        for _ in self._workers:
            self._free.put(None)
        for worker in self._workers:
            worker.get()
        self._fetched.close()
        while not self._promised.empty():
            # what was read and not taken
            with suppress(Exception):
                self._take(self._promised.get().get())
        self._release_buffers()

    def _take(self, state: _State | None) -> memoryview | None:
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
            promise: Answer[_State | None] = Answer()
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
                        # never reset to False: `close` may have set it meanwhile
                        self._ended = True
                promise.put(self._decode(page, *found, seconds) if found is not None else None)
            except BaseException as error:  # noqa: BLE001 - raised by `next`
                self._ended = True
                promise.fail(for_caller(error))

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
        with released_on_error(buffer):
            decode_into(record, view, buffer.view, self._buffers)
        return _State(buffer.view, buffer)


# -- verified while they are used -------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A stored page, the bytes of its state, and the seconds that it took to read them."""

    record: Record
    view: memoryview
    seconds: float


class ReadAlong(Reader):
    """Gives out raw pages that are not verified yet; each is verified while the caller uses it.

    Parameters
    ----------
    view
        Is used by this reader only, until `close` returns.
    pages
        The wanted pages, in this order.
    read_rate
        Learns how fast stored bytes were read.
    """

    verifies_first = False

    def __init__(self, view: View, pages: Sequence[Page], read_rate: ReadRate) -> None:
        self._read_rate = read_rate
        self._pages = iter(pages)
        self._fetched = _fetch(view, [page.key for page in pages])
        self._found: _Found | None = None

    def next(self) -> memoryview | None:
        """The state of the next page, not verified yet; None if the page is gone."""
        self._found = None
        started = time.perf_counter()
        found, page = next(self._fetched, None), next(self._pages, None)
        if found is None or page is None:
            return None
        record, payload = found
        _check_record(page, record)
        # it may be packed after all, if it was written again since it was looked up
        is_raw = record.codec == CODECS["raw"]
        view = inspect(record, payload) if is_raw else decode(record, payload)
        self._found = _Found(record, view, time.perf_counter() - started) if is_raw else None
        return view

    def verify(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            started = time.perf_counter()
            verify_checksum(found.record, found.view)
            # in a location that is mapped into memory, it is the checksum that reads the bytes
            self._read_rate.observe(len(found.view), found.seconds + time.perf_counter() - started)

    def close(self) -> None:
        self._fetched.close()
