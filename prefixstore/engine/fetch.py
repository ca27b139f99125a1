"""Verified states of pages, in order: from the buffers of pending pages, from RAM, or from the backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial

from prefixstore.backends.base import Backend, View
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.index import Page
from prefixstore.engine.ram import RamTier
from prefixstore.engine.readers import Look, ReadAhead, ReadAlong, Reader, ReaderPool, ShapeError, check_shape
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.autocodec import ReadRate
from prefixstore.stats import Counters

__all__ = ["Fetcher", "States"]

log = logging.getLogger("prefixstore")


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
    """

    def __init__(
        self,
        pages: Sequence[Page],
        in_memory: Mapping[bytes, memoryview],
        reader: Reader,
        breaker: CircuitBreaker,
        give_up: Callable[[Page, StorageError | None], None],
        look: Look | None = None,
    ) -> None:
        self._pages = pages
        self._in_memory = in_memory
        self._reader = reader
        self._breaker = breaker
        self._give_up = give_up
        self._look = look
        self._n_given = 0
        self._n_verified = 0
        self._ended = False

    def __next__(self) -> memoryview:
        if self.verified() == len(self._pages) or self._ended:
            raise StopIteration
        page = self._pages[self._n_given]
        error = None
        try:
            state = self._in_memory.get(page.key)
            if state is not None:
                check_shape(self._look, page, state)
            else:
                with self._breaker.asking(page):
                    state = self._reader.next()
        except StorageError as raised:
            state, error = None, raised
        if state is None:
            self._end(page, error)
            raise StopIteration
        self._n_given += 1
        return state

    def verified(self) -> int:
        """How many returned states are verified; if fewer than all, the last one is bad."""
        if self._n_verified < self._n_given and not self._ended:
            try:
                self._reader.wait_verified()
                self._n_verified = self._n_given
            except StorageError as error:
                self._end(self._pages[self._n_verified], error)
        return self._n_verified

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
        backend: Backend,
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
    def fetching(self, pages: Sequence[Page], *, streamed: bool = False, look: Look | None = None) -> Iterator[States]:
        """The verified states of `pages`, in order; they end early at a page that is gone or damaged.

        Parameters
        ----------
        pages
            The wanted pages, in this order.
        streamed
            For callers that can undo a load. They get states earlier: before the checksum is known; the next state, and
            `States.verified`, wait for it. A state is valid only until the next one is requested, and its buffer is
            used again. Otherwise states are verified when they are given out, and valid until the block is left.
        look
            Whether a state can be used; a state that it refuses ends the iteration too. It is called with one state at
            a time, with the first one in the calling thread.

        Raises
        ------
        StorageError
            If the backend cannot be read at all.
        """
        # Held before the view opens: a page that is committed in between is in one of the two.
        held = self._catalog.hold(pages)
        try:
            with self._view() as view:
                in_memory = self._in_memory(pages, held)
                stored = [page for page in pages if page.key not in in_memory]
                give_up = partial(self._give_up, view=view)
                # States outlive their iterator: their buffers are released when the block is left.
                with (
                    closing(self._reader(view, stored, look, streamed=streamed)) as reader,
                    closing(States(pages, in_memory, reader, self._breaker, give_up, look)) as states,
                ):
                    yield states
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

    def _reader(self, view: View, pages: Sequence[Page], look: Look | None, *, streamed: bool) -> Reader:
        if streamed and all(page.stored_bytes == page.raw_bytes for page in pages):
            return ReadAlong(self._pool, view, pages, self._read_rate, look)
        return ReadAhead(self._pool, view, pages, self._read_rate, look, streamed=streamed)

    def _give_up(self, page: Page, error: StorageError | None, view: View) -> None:
        """Log and count why a page ended a fetch, and have it deleted if it is damaged."""
        if error is None:
            self._counters.count("unreadable:vanished")
            # no thread reads the view any longer
            self._catalog.contradict(page.key, view.generation)
        elif isinstance(error, CorruptError):
            log.warning("a damaged page will be deleted: %s", error)
            self._counters.count("unreadable:corrupt")
            self._catalog.mark_damaged(page.key)
        elif isinstance(error, ShapeError):
            log.warning("a page is not used: %s", error)
            self._counters.count("unreadable:shape")
        elif isinstance(error, IncompatibleError):
            log.warning("a page that needs a newer version is not used: %s", error)
            self._counters.count("unreadable:incompatible")
        else:
            log.warning("a page cannot be read: %s", error)
            self._counters.count("unreadable:unavailable")
