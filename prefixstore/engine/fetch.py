"""Delivers the verified states of pages, in order: from the buffers of pending pages, from RAM, or from the backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.index import Page
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages
from prefixstore.engine.ram import RamTier
from prefixstore.engine.readers import (
    Admit,
    Look,
    ReadAhead,
    ReadAlong,
    Reader,
    ReaderPool,
    ShapeError,
    check_shape,
)
from prefixstore.errors import CorruptError, IncompatibleError, StorageError, UnavailableError
from prefixstore.format.autocodec import ReadRate
from prefixstore.stats import Counters

__all__ = ["Deadline", "Fetcher", "LateError", "Shifted", "States"]

log = logging.getLogger("prefixstore")

# How far behind its deadline a location on this machine may be: it may be the machine that has paused.
LOCAL_SECONDS = 0.5


class Deadline(Protocol):
    """How long a caller is willing to wait for states."""

    def left(self, n_given: int, arrived: float = 0.0) -> float:
        """Seconds left for the next state, after `n_given` states, if this share of it has arrived.

        Negative if that is over.
        """


class Shifted:
    """A deadline for the pages after some others, or if `start` is negative, with some more before its own."""

    def __init__(self, deadline: Deadline, start: int) -> None:
        self._deadline = deadline
        self._start = start

    def left(self, n_given: int, arrived: float = 0.0) -> float:
        """As `Deadline.left`."""
        n = self._start + n_given
        return self._deadline.left(max(n, 0), arrived if n >= 0 else 0.0)


class LateError(UnavailableError):
    """A state has not come within the deadline of the caller."""


class States(Iterator[memoryview]):
    """The states of some pages, in order, up to the first page that is gone or damaged.

    Parameters
    ----------
    pages
        The wanted pages.
    in_memory
        States that need not be read, by key.
    reader
        Reads the others.
    breaker
        Guards the location.
    give_up
        Called with the page that ends the iteration, and the reason: the error, or None for a page that is gone.
    look
        Whether a state in memory can be used; the reader checks the others.
    refused
        The page whose size the caller does not accept, if there is one: the iteration ends there.
    deadline
        How long the caller waits; it is looked at between two pages.

    Attributes
    ----------
    n_given
        How many states were returned.
    n_verified
        How many of them are verified so far; `verified` waits until all are.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        in_memory: Mapping[bytes, memoryview],
        reader: Reader,
        breaker: CircuitBreaker,
        give_up: Callable[[Page, StorageError | None], None],
        look: Look | None = None,
        refused: Page | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._pages = pages
        self._in_memory = in_memory
        self._reader = reader
        self._breaker = breaker
        self._give_up = give_up
        self._look = look
        self._refused = refused
        self._deadline = deadline
        self.n_given = 0
        self.n_verified = 0
        self._ended = False

    def __next__(self) -> memoryview:
        if self.verified() == len(self._pages) or self._ended:
            raise StopIteration
        page = self._pages[self.n_given]
        error = None
        try:
            if page is self._refused:
                raise ShapeError(f"page {page.key.hex()} claims a state of {page.raw_bytes} bytes, more than possible")
            state = self._in_memory.get(page.key)
            if state is not None:
                check_shape(self._look, page, state)
            else:
                if self._deadline is not None and self._deadline.left(self.n_given) < -LOCAL_SECONDS:
                    raise LateError("the location is slower than computing")
                with self._breaker.asking(page):
                    state = self._reader.next()
        except StorageError as raised:
            state, error = None, raised
        if state is None:
            self._end(page, error)
            raise StopIteration
        self.n_given += 1
        return state

    def verified(self) -> int:
        """How many returned states are verified; if fewer than all, the last one is bad."""
        if self.n_verified < self.n_given and not self._ended:
            try:
                self._reader.wait_verified()
                self.n_verified = self.n_given
            except StorageError as error:
                self._end(self._pages[self.n_verified], error)
        return self.n_verified

    def close(self) -> None:
        """Give out no more states."""
        self._ended = True

    def _end(self, page: Page, error: StorageError | None) -> None:
        self._ended = True
        self._give_up(page, error)


class Fetcher:
    """Gets the states of pages from the buffers of pending pages, from RAM, or from the backend.

    Parameters
    ----------
    backend, catalog, ram
        Of the engine.
    counters
        Counts pages that cannot be read, by reason.
    read_rate
        Learns how fast the location delivers bytes.
    breaker
        Guards the location.
    """

    def __init__(
        self,
        backend: Pages,
        catalog: Catalog,
        ram: RamTier,
        counters: Counters,
        read_rate: ReadRate,
        breaker: CircuitBreaker,
    ) -> None:
        self._backend = backend
        self._catalog = catalog
        self._ram = ram
        self._counters = counters
        self._read_rate = read_rate
        self._breaker = breaker
        self._pool = ReaderPool()

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    @contextmanager
    def fetching(
        self,
        pages: Sequence[Page],
        *,
        streamed: bool = False,
        along: bool = True,
        look: Look | None = None,
        admit: Admit | None = None,
        deadline: Deadline | None = None,
        opened: Callable[[View], None] | None = None,
    ) -> Iterator[States]:
        """The verified states of `pages`, in order; they end early at a page that is gone or damaged.

        Parameters
        ----------
        pages
            The wanted pages, in this order.
        streamed
            A state is valid only until the next one is requested, and its buffer is used again. Otherwise states are
            verified when they are given out, and valid until the block is left.
        along
            If streamed: for callers that can undo a load. They get raw states earlier: before the checksum is known;
            the next state, and `States.verified`, wait for it.
        look
            Whether a state can be used; a state that it refuses ends the iteration too. It is called with one state at
            a time, with the first one in the calling thread.
        admit
            Whether a page may be read, judged by the size of its state; one that may not ends the iteration too. It is
            called before anything is read, in the calling thread.
        deadline
            How long the caller waits. A page that is being read is waited for; see `engine.relay`.
        opened
            Called with the view before anything is read from it.

        Raises
        ------
        ClosedError
            If the store was closed, also if that happens while states are read.
        StorageError
            If the backend cannot be read at all.
        """
        self._pool.check_open()
        # Held before the view opens: a page that is committed in between is in one of the two.
        held = self._catalog.hold(pages)
        try:
            with self._view() as view:
                if opened is not None:
                    with self._breaker.asking():
                        opened(view)
                in_memory = self._in_memory(pages, held)
                refused = next((page for page in pages if admit is not None and not admit(page)), None)
                admitted = pages if refused is None else pages[: pages.index(refused)]
                stored = [page for page in admitted if page.key not in in_memory]
                reader = self._reader(view, stored, look, streamed=streamed, along=along)
                states = States(pages, in_memory, reader, self._breaker, self.give_up, look, refused, deadline)
                try:
                    try:
                        yield states
                    finally:
                        states.close()
                        # states outlive their iterator: their buffers are released here
                        reader.close()
                finally:
                    # Again, should a Ctrl-C have come in between: the view closes next, which no thread may read then.
                    reader.close()
        finally:
            for buffer in held.values():
                buffer.release()

    @contextmanager
    def _view(self) -> Iterator[View]:
        """A view, guarded by the breaker while it opens.

        Not by an `ExitStack`: if a Ctrl-C ends its exit, the view would be open until the garbage collector runs.
        """
        opening = self._backend.view()
        with self._breaker.asking():
            view = opening.__enter__()
        try:
            yield view
        except BaseException as error:
            if not opening.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            opening.__exit__(None, None, None)

    def _in_memory(self, pages: Sequence[Page], held: Mapping[bytes, PooledBuffer]) -> dict[bytes, memoryview]:
        """States that need not be read."""
        in_memory = {key: buffer.view for key, buffer in held.items()}
        for page in pages:
            if page.key not in in_memory and (state := self._ram.state(page)) is not None:
                in_memory[page.key] = state
        return in_memory

    def _reader(self, view: View, pages: Sequence[Page], look: Look | None, *, streamed: bool, along: bool) -> Reader:
        if streamed and along and all(page.stored_bytes == page.raw_bytes for page in pages):
            return ReadAlong(self._pool, view, pages, self._read_rate, look)
        return ReadAhead(self._pool, view, pages, self._read_rate, look, streamed=streamed)

    def give_up(self, page: Page, error: StorageError | None) -> None:
        """Log and count why a page ended a fetch, and have it deleted if it is damaged."""
        if error is None:
            self._counters.count("unreadable:vanished")
        elif isinstance(error, LateError):
            log.info("a restore continues without the pages that have not arrived: %s", error)
            self._counters.count("late")
        elif isinstance(error, CorruptError):
            log.warning("a damaged page will be deleted: %s", error)
            self._counters.count("unreadable:corrupt")
            self._catalog.mark_damaged(page)
        elif isinstance(error, ShapeError):
            log.warning("a page was not used: %s", error)
            self._counters.count("unreadable:shape")
        elif isinstance(error, IncompatibleError):
            log.warning("a page that needs a newer version was not used: %s", error)
            self._counters.count("unreadable:incompatible")
        else:
            log.warning("a page cannot be read: %s", error)
            self._counters.count("unreadable:unavailable")
