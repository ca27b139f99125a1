"""What those who read stored pages have in common: threads, buffers, and how a page is known to be the wanted one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Lock, Semaphore
from typing import NamedTuple, TypeAlias

from prefixstore.backends.base import View
from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError, IncompatibleError, StorageError, UnavailableError
from prefixstore.format.autocodec import UNPACKERS, ReadPace
from prefixstore.format.codec import CODECS, decode, decode_into, inspect, verify, verify_checksum
from prefixstore.format.record import Buffer, Record

__all__ = ["Look", "MisfitError", "ReadAhead", "ReadAlong", "Readers", "accept", "compare", "fetched"]

# of all restores that go on at a time; they are started as they are needed
THREADS = 64


class Readers:
    """The threads of all restores, and the buffers that pages are decoded into."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prefixstore-read")
        # bounded by the room of each restore
        self.buffers = BufferPool(1 << 62)

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown()


def fetched(view: View, keys: Sequence[bytes]) -> Generator[tuple[Record, Buffer], None, None]:
    """As `View.fetch`; nothing happens before the first is asked for, and it can be closed."""
    yield from view.fetch(keys)


class MisfitError(IncompatibleError):
    """A state is what was written, and not what its user can use."""


Look: TypeAlias = Callable[[Page, memoryview], bool]
"""Whether a state can be used for a page."""


def compare(page: Page, record: Record) -> None:
    """The hash nominated a page; its tokens prove it. Raises `CorruptError`."""
    if (record.tokens, record.parent, record.start) != (page.tokens, page.parent, page.start):
        raise CorruptError(f"page {page.key.hex()} holds other tokens than its key stands for")


def accept(look: Look | None, page: Page, state: memoryview) -> memoryview:
    """The state, which is what was written, if its user can use it; otherwise raise `MisfitError`."""
    if look is not None and not look(page, state):
        raise MisfitError(f"page {page.key.hex()} has another shape than what it is for")
    return state


class _State(NamedTuple):
    """The state of a page, and the buffer that it was decoded into."""

    view: memoryview
    buffer: PooledBuffer | None


class ReadAhead:
    """The states of some pages of a view, one after the other.

    Parameters
    ----------
    readers
        Lends threads and buffers.
    view
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
        view: View,
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
        self._fetched = fetched(view, [page.key for page in pages])
        self._turn = Lock()
        n_workers = UNPACKERS if any(page.stored_bytes != page.raw_bytes for page in pages) else 1
        # a page for each of them, and one that is in use
        self._room = Semaphore(n_workers + 1)
        # in the order of the pages; whoever takes a page promises its state, or the error
        self._promised: SimpleQueue[Future[_State | None]] = SimpleQueue()
        self._streamed = streamed
        self._in_use: list[PooledBuffer] = []
        self._n_taken = 0
        self._ended = False
        self._workers = [readers.threads.submit(self._work) for _ in pages[:n_workers]]

    def close(self) -> None:
        """Return when no thread uses the view any more, and all buffers were given back."""
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

    def wait_verified(self) -> None:
        """Return when the state that `next` returned last is verified: it was before."""

    def _take(self, state: _State | None) -> memoryview | None:
        self._n_taken += 1
        if state is None:
            return None
        if state.buffer is not None:
            self._in_use.append(state.buffer)
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


class _Found(NamedTuple):
    """A stored page, the bytes of its state, and the seconds that it took to get them."""

    record: Record
    view: memoryview
    seconds: float


class ReadAlong:
    """The states of some pages of a view, one after the other.

    Parameters
    ----------
    readers
        Lends a thread.
    view
        Is used by nobody else until `close` returns.
    pages
        What is wanted, in this order.
    pace
        Is told how fast stored bytes were read.
    look
        Called with each state before it is given out: with the first one where it is asked for, with the others in
        the thread, as what it looks at is not in the cache of a core yet.
    """

    def __init__(self, readers: Readers, view: View, pages: Sequence[Page], pace: ReadPace, look: Look | None) -> None:
        self._threads = readers.threads
        self._pace = pace
        self._look = look
        self._pages = iter(pages)
        self._fetched = fetched(view, [page.key for page in pages])
        # verifies the state that was given out last, then reads the next one: what comes, why it does not, or None
        self._job: Future[_Found | StorageError | None] | None = None
        self._coming: _Found | StorageError | None = None
        self._started = False

    def close(self) -> None:
        """Return when no thread uses the view any more."""
        if self._job is not None:
            wait([self._job])
        self._fetched.close()

    def next(self) -> memoryview | None:
        """The state of the next page, not verified yet: see `wait_verified`; None if the page is gone.

        Raises
        ------
        StorageError
            If the page cannot be had. There is no next page after this, nor after None.
        """
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
        """Return when the state that `next` returned last is verified.

        Raises
        ------
        CorruptError
            If it is not what was written. There is no next page then.
        """
        job, self._job = self._job, None
        if job is not None:
            self._coming = None
            self._coming = job.result()

    def _verify_and_read(self, given: _Found) -> _Found | StorageError | None:
        started = time.perf_counter()
        if given.record.codec == CODECS["raw"]:
            verify_checksum(given.record, given.view)
            # where the location is mapped into memory, it is the checksum that reads
            self._pace.note(len(given.view), given.seconds + time.perf_counter() - started)
        return self._read()

    def _read(self) -> _Found | StorageError | None:
        started = time.perf_counter()
        try:
            found, page = next(self._fetched, None), next(self._pages, None)
            if found is None or page is None:
                return None
            record, payload = found
            compare(page, record)
            # it may be packed all the same: written anew since it came into the index
            raw = record.codec == CODECS["raw"]
            view = inspect(record, payload) if raw else decode(record, payload)
            try:
                accept(self._look, page, view)
            except MisfitError:
                # unless it is damaged
                verify(record, payload)
                raise
        except StorageError as error:
            return error
        return _Found(record, view, time.perf_counter() - started)
