"""Verified states of pages, in order: out of the buffers they wait in, memory of the backend, or what it stores."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager

from prefixstore.backends.base import Backend, Snapshot
from prefixstore.breaker import Breaker
from prefixstore.buffers import Lease
from prefixstore.catalog import Catalog
from prefixstore.encoder import ReadPace
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.index import Page
from prefixstore.read_ahead import ReadAhead, Readers
from prefixstore.stats import Counters

__all__ = ["Fetcher"]

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
    def fetching(self, pages: Sequence[Page], *, reuse: bool = False) -> Iterator[Iterator[memoryview]]:
        """The verified states of `pages`, in order; they end early at a page that is gone or damaged.

        A state is valid until the block is left; with `reuse`, until the next one is asked for: pages that must be
        unpacked are faster so, since their buffers are used again.

        Raises
        ------
        StorageError
            If the backend cannot be read at all.
        """
        # held before the snapshot opens: what is committed in between is in one of the two
        held = self._hold(pages)
        try:
            with ExitStack() as opened:
                with self._breaker.asking():
                    snapshot = opened.enter_context(self._backend.snapshot())
                at_hand = self._at_hand(pages, held)
                stored = [page for page in pages if page.key not in at_hand]
                ahead = ReadAhead(self._readers, snapshot, stored, self._pace, reuse=reuse)
                # states outlive their iterator: buffers go back when the block is left
                with closing(ahead), closing(self._states(pages, at_hand, ahead, snapshot)) as states:
                    yield states
        finally:
            for lease in held.values():
                lease.release()

    def _hold(self, pages: Sequence[Page]) -> dict[bytes, Lease]:
        with self._catalog.lock:
            waiting = [self._catalog.pending[page.key] for page in pages if page.key in self._catalog.pending]
            return {new.page.key: new.lease for new in waiting if new.lease.hold()}

    def _at_hand(self, pages: Sequence[Page], held: Mapping[bytes, Lease]) -> dict[bytes, memoryview]:
        """States that need not be read."""
        at_hand = {key: lease.view for key, lease in held.items()}
        for page in pages:
            if page.key not in at_hand and (state := self._backend.state(page.key, page.tokens)) is not None:
                at_hand[page.key] = state
        return at_hand

    def _states(
        self, pages: Sequence[Page], at_hand: Mapping[bytes, memoryview], ahead: ReadAhead, snapshot: Snapshot
    ) -> Generator[memoryview, None, None]:
        for page in pages:
            try:
                state = at_hand.get(page.key)
                if state is None:
                    with self._breaker.asking(page):
                        state = ahead.next()
                if state is None:
                    # nobody reads ahead any more
                    self._catalog.contradict(page.key, snapshot.generation)
            except StorageError as error:
                self._give_up(page, error)
                return
            if state is None:
                self._counters.count("unreadable:vanished")
                return
            yield state

    def _give_up(self, page: Page, error: StorageError) -> None:
        if isinstance(error, CorruptError):
            log.warning("a damaged page is removed: %s", error)
            self._counters.count("unreadable:corrupt")
            with self._catalog.lock:
                self._catalog.damage(page.key)
        elif isinstance(error, IncompatibleError):
            log.warning("a page is left to a newer version: %s", error)
            self._counters.count("unreadable:incompatible")
        else:
            log.warning("a page cannot be read: %s", error)
            self._counters.count("unreadable:unavailable")
