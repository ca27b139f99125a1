"""Reads the states of stored pages in order, for the thread that has the view, and verifies them.

`ReadAhead` verifies each state before it gives it out, and unpacks packed pages in several threads. `read_along` gives
out raw pages first, to be verified while the caller copies them, so that they come out of memory once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
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

__all__ = ["Admit", "Found", "Look", "ReadAhead", "ShapeError", "for_caller", "read_along"]

Look: TypeAlias = Callable[[Page, memoryview], bool]
"""Whether a state can be used for a page."""

Admit: TypeAlias = Callable[[Page], bool]
"""Whether a page may be read: its state has a size that it can have."""


class ShapeError(IncompatibleError):
    """A state is what was written, but the caller cannot use it."""


class Found(NamedTuple):
    """A state that was read.

    Attributes
    ----------
    state
        Its bytes.
    check
        Raises `CorruptError` if they are not what was written; None if that was found out before.
    """

    state: memoryview
    check: Callable[[], None] | None = None


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


# -- verified before they are given out -------------------------------------------------------------------------------


class _State(NamedTuple):
    """The state of a page, and the buffer that it was decoded into."""

    view: memoryview
    buffer: PooledBuffer | None


class ReadAhead(Iterator[Found]):
    """Reads, verifies and unpacks pages ahead of the caller.

    It ends at a page that is gone, or that cannot be read, and is not to be asked for more than the pages.

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
        Whether a state is valid only until the one after the next is requested, and its buffer used again; otherwise
        until `close`.
    """

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
        self._fetched = view.fetch([page.key for page in pages])
        self._ended = False
        # In the order of the pages: the worker that takes a page promises its state, or the error.
        self._promised: SimpleQueue[Answer[_State | None]] = SimpleQueue()
        # used by the thread that takes the states: their buffers, the oldest first
        self._in_use: deque[PooledBuffer | None] = deque()
        self._n_taken = 0
        n_workers = UNPACKERS if any(page.stored_bytes != page.raw_bytes for page in pages) else 1
        # one for each page that may be read: one for each worker, one that the caller uses, and the next one
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(n_workers + 2):
            self._free.put(None)
        self._workers: list[Answer[None]] = []
        try:
            for _ in range(min(n_workers, len(pages))):
                self._workers.append(threads.start(self._work))
        except RuntimeError as error:
            # those that were started do all the work
            if not self._workers:
                raise UnavailableError(f"no thread can be started to read pages: {error}") from error

    def __next__(self) -> Found:
        if self._n_taken > 1:
            # the caller has finished with the state before the last one
            self._free.put(None)
            if self._streamed:
                self._release_first()
        self._n_taken += 1
        found = self._promised.get().get()
        if found is None:
            raise StopIteration
        self._in_use.append(found.buffer)
        return Found(found.view)

    def _release_first(self) -> None:
        buffer = self._in_use.popleft()
        if buffer is not None:
            buffer.release()

    def close(self) -> None:
        """Return when no thread uses the view any longer, and all buffers have been released."""
        self._ended = True
        for _ in self._workers:
            self._free.put(None)
        for worker in self._workers:
            worker.get()
        del self._fetched
        while not self._promised.empty():
            # what was read and not taken
            with suppress(Exception):
                if (found := self._promised.get().get()) is not None:
                    self._in_use.append(found.buffer)
        while self._in_use:
            self._release_first()

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
            except BaseException as error:  # noqa: BLE001 - raised by `__next__`
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


def read_along(view: View, pages: Sequence[Page], read_rate: ReadRate) -> Generator[Found, None, None]:
    """The states of raw pages, in order, up to the first page that is gone: most are still to be verified.

    `view` is used by this only, until it is closed. `read_rate` learns how fast stored bytes were read.
    """
    started = time.perf_counter()
    for page, (record, payload) in zip(pages, view.fetch([page.key for page in pages]), strict=False):
        _check_record(page, record)
        if record.codec == CODECS["raw"]:
            state = inspect(record, payload)
            yield Found(state, partial(_verify, record, state, time.perf_counter() - started, read_rate))
        else:
            # packed after all: it was written again since it was looked up
            yield Found(decode(record, payload))
        started = time.perf_counter()


def _verify(record: Record, state: memoryview, seconds: float, read_rate: ReadRate) -> None:
    """Verify a state that took so many seconds to read."""
    started = time.perf_counter()
    verify_checksum(record, state)
    # in a location that is mapped into memory, it is the checksum that reads the bytes
    read_rate.observe(len(state), seconds + time.perf_counter() - started)
