"""The states of some pages given out one after the other, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prefixstore.engine.breaker import Breaker
from prefixstore.engine.index import Page
from prefixstore.engine.read_ahead import ReadAhead
from prefixstore.engine.read_along import ReadAlong
from prefixstore.engine.reading import Look, accept
from prefixstore.errors import StorageError

__all__ = ["States"]


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
