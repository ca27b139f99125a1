"""Verified states of pages, in order: from the buffers they wait in, from RAM, or from the backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from prefixstore.backends.base import Backend, View
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.breaker import Breaker
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.index import Page
from prefixstore.engine.ram import RamTier
from prefixstore.engine.readers import Look, MisfitError, ReadAhead, ReadAlong, Readers, accept
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.autocodec import ReadPace
from prefixstore.stats import Counters

__all__ = ["Fetcher", "States"]


class States(Iterator[memoryview]):
    """The states of some pages, in order, up to the first that is gone or damaged.

    Parameters
    ----------
    pages
        What is wanted.
    at_hand
        States that need not be read, by key.
    reader
        Reads the others.
    breaker
        Guards the location.
    give_up
        Called with the page that ends them, and why: the error, or None for a page that is gone.
    look
        Whether a state at hand can be used; the reader asks it about the others.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        at_hand: Mapping[bytes, memoryview],
        reader: ReadAhead | ReadAlong,
        breaker: Breaker,
        give_up: Callable[[Page, StorageError | None], None],
        look: Look | None = None,
    ) -> None:
        self._pages = pages
        self._at_hand = at_hand
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
            state = self._at_hand.get(page.key)
            if state is not None:
                accept(self._look, page, state)
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
        """How many of the states given out are what was written; if not all of them, the last one is not."""
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


log = logging.getLogger("prefixstore")


class Fetcher:
    """Reads pages from the buffers they wait in, from RAM, or from the backend.

    Parameters
    ----------
    backend, catalog, ram
        Of the engine.
    counters
        Counts pages that cannot be read, by reason.
    pace
        Is told how fast the location delivers bytes.
    breaker
        Guards the location.
    """

    def __init__(
        self, backend: Backend, catalog: Catalog, ram: RamTier, counters: Counters, pace: ReadPace, breaker: Breaker
    ) -> None:
        self._backend = backend
        self._catalog = catalog
        self._ram = ram
        self._counters = counters
        self._pace = pace
        self._breaker = breaker
        self._readers = Readers()

    def close(self) -> None:
        """End the threads."""
        self._readers.close()

    @contextmanager
    def fetching(self, pages: Sequence[Page], *, streamed: bool = False, look: Look | None = None) -> Iterator[States]:
        """The verified states of `pages`, in order; they end early at a page that is gone or damaged.

        Parameters
        ----------
        pages
            What is wanted, in this order.
        streamed
            For callers that can undo what they did with a state. They get states earlier: before the checksum is known;
            asking for the next state, or for `States.verified`, waits for it. A state is valid until the next one is
            asked for, and its buffer is used again. Otherwise states are verified, and valid until the block is left.
        look
            Whether a state can be used; a state that it refuses ends them too. It is called with one state at a time,
            with the first one in the calling thread.

        Raises
        ------
        StorageError
            If the backend cannot be read at all.
        """
        # held before the view opens: what is committed in between is in one of the two
        held = self._catalog.hold(pages)
        try:
            with ExitStack() as opened:
                with self._breaker.asking():
                    view = opened.enter_context(self._backend.view())
                at_hand = self._at_hand(pages, held)
                stored = [page for page in pages if page.key not in at_hand]
                reader: ReadAhead | ReadAlong
                if streamed and all(page.stored_bytes == page.raw_bytes for page in stored):
                    reader = ReadAlong(self._readers, view, stored, self._pace, look)
                else:
                    reader = ReadAhead(self._readers, view, stored, self._pace, look, streamed=streamed)
                give_up = partial(self._give_up, view=view)
                # states outlive their iterator: buffers go back when the block is left
                with closing(reader), closing(States(pages, at_hand, reader, self._breaker, give_up, look)) as states:
                    yield states
        finally:
            for buffer in held.values():
                buffer.release()

    def _at_hand(self, pages: Sequence[Page], held: Mapping[bytes, PooledBuffer]) -> dict[bytes, memoryview]:
        """States that need not be read."""
        at_hand = {key: buffer.view for key, buffer in held.items()}
        for page in pages:
            if page.key not in at_hand and (state := self._ram.state(page)) is not None:
                at_hand[page.key] = state
        return at_hand

    def _give_up(self, page: Page, error: StorageError | None, view: View) -> None:
        """Log and count why a page ended a fetch, and have it deleted if it is damaged."""
        if error is None:
            self._counters.count("unreadable:vanished")
            # no thread reads any more
            self._catalog.contradict(page.key, view.generation)
        elif isinstance(error, CorruptError):
            log.warning("a damaged page will be deleted: %s", error)
            self._counters.count("unreadable:corrupt")
            self._catalog.damage(page.key)
        elif isinstance(error, MisfitError):
            log.warning("a page is not used: %s", error)
            self._counters.count("unreadable:shape")
        elif isinstance(error, IncompatibleError):
            log.warning("a page that needs a newer version is not used: %s", error)
            self._counters.count("unreadable:incompatible")
        else:
            log.warning("a page cannot be read: %s", error)
            self._counters.count("unreadable:unavailable")
