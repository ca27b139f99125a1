"""Verified states of pages, in order: out of the buffers they wait in, memory of the backend, or what it stores."""

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
from prefixstore.engine.readers import Look, MisfitError, ReadAhead, ReadAlong, Readers, accept
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.autocodec import ReadPace
from prefixstore.stats import Counters

__all__ = ["Fetcher", "States"]


class States(Iterator[memoryview]):
    """The states of some pages, in order, up to the first that is gone or damaged.

    Streamed, a state may be given out before its checksum is known; asking for the next one, or for `verified`, waits
    for it.

    Parameters
    ----------
    pages
        What is wanted.
    at_hand
        States that need not be read.
    reader
        Reads the others.
    breaker
        Lets them be read.
    give_up
        Called with the page that ends it, and why: the error, or None for a page that is gone.
    look
        Tells of a state at hand whether it can be used; of the others the reader asks it.
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
        """How many of those given out are what was written; if it is not all of them, the last one is not."""
        if self._n_verified < self._n_given and not self._ended:
            try:
                self._reader.settle()
                self._n_verified = self._n_given
            except StorageError as error:
                self._end(self._pages[self._n_verified], error)
        return self._n_verified

    def close(self) -> None:
        """No state is given out any more."""
        self._ended = True

    def _end(self, page: Page, error: StorageError | None) -> None:
        self._ended = True
        self._give_up(page, error)


log = logging.getLogger("prefixstore")


class Fetcher:
    """Reads pages out of the buffers they wait in, out of the memory of the backend, or out of what it stores.

    Parameters
    ----------
    pace
        Is told how fast the location gives bytes.
    breaker
        Lets questions to the location through.
    """

    def __init__(
        self, backend: Backend, catalog: Catalog, counters: Counters, pace: ReadPace, breaker: Breaker
    ) -> None:
        self._backend = backend
        self._catalog = catalog
        self._counters = counters
        self._pace = pace
        self._breaker = breaker
        self.after_fork()

    def after_fork(self) -> None:
        """Threads and buffers of this process."""
        self._readers = Readers()

    def close(self) -> None:
        """End the threads."""
        self._readers.close()

    @contextmanager
    def fetching(self, pages: Sequence[Page], *, streamed: bool = False, look: Look | None = None) -> Iterator[States]:
        """The verified states of `pages`, in order; they end early at a page that is gone or damaged.

        A state is valid until the block is left. With `streamed`, until the next one is asked for, and it may turn out
        then, or from `States.verified`, that it is not what was written: whoever can take back what he did with it
        gets it sooner so, and buffers are used again. A state that `look` refuses ends them too; it is called with one
        at a time, and in the thread that asks for the first.

        Raises
        ------
        StorageError
            If the backend cannot be read at all.
        """
        # held before the view opens: what is committed in between is in one of the two
        held = self._hold(pages)
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

    def _hold(self, pages: Sequence[Page]) -> dict[bytes, PooledBuffer]:
        with self._catalog.lock:
            waiting = [self._catalog.pending[page.key] for page in pages if page.key in self._catalog.pending]
            return {new.page.key: new.buffer for new in waiting if new.buffer.hold()}

    def _at_hand(self, pages: Sequence[Page], held: Mapping[bytes, PooledBuffer]) -> dict[bytes, memoryview]:
        """States that need not be read."""
        at_hand = {key: buffer.view for key, buffer in held.items()}
        for page in pages:
            if page.key not in at_hand and (state := self._backend.state(page.key, page.tokens)) is not None:
                at_hand[page.key] = state
        return at_hand

    def _give_up(self, page: Page, error: StorageError | None, view: View) -> None:
        if error is None:
            self._counters.count("unreadable:vanished")
            # nobody reads on
            self._catalog.contradict(page.key, view.generation)
        elif isinstance(error, CorruptError):
            log.warning("a damaged page is removed: %s", error)
            self._counters.count("unreadable:corrupt")
            with self._catalog.lock:
                self._catalog.damage(page.key)
        elif isinstance(error, MisfitError):
            log.warning("a page is not used: %s", error)
            self._counters.count("unreadable:shape")
        elif isinstance(error, IncompatibleError):
            log.warning("a page is left to a newer version: %s", error)
            self._counters.count("unreadable:incompatible")
        else:
            log.warning("a page cannot be read: %s", error)
            self._counters.count("unreadable:unavailable")
