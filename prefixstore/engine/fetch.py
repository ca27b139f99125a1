"""Verified states of pages, in order: out of the buffers they wait in, memory of the backend, or what it stores."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from prefixstore.backends.base import Backend, Snapshot
from prefixstore.buffers import Lease
from prefixstore.engine.breaker import Breaker
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.index import Page
from prefixstore.engine.read_ahead import ReadAhead
from prefixstore.engine.read_along import ReadAlong
from prefixstore.engine.reading import Look, MisfitError, Readers
from prefixstore.engine.serving import States
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.autocodec import ReadPace
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
        # held before the snapshot opens: what is committed in between is in one of the two
        held = self._hold(pages)
        try:
            with ExitStack() as opened:
                with self._breaker.asking():
                    snapshot = opened.enter_context(self._backend.snapshot())
                at_hand = self._at_hand(pages, held)
                stored = [page for page in pages if page.key not in at_hand]
                reader: ReadAhead | ReadAlong
                if streamed and all(page.stored_bytes == page.raw_bytes for page in stored):
                    reader = ReadAlong(self._readers, snapshot, stored, self._pace, look)
                else:
                    reader = ReadAhead(self._readers, snapshot, stored, self._pace, look, streamed=streamed)
                give_up = partial(self._give_up, snapshot=snapshot)
                # states outlive their iterator: buffers go back when the block is left
                with closing(reader), closing(States(pages, at_hand, reader, self._breaker, give_up, look)) as states:
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

    def _give_up(self, page: Page, error: StorageError | None, snapshot: Snapshot) -> None:
        if error is None:
            self._counters.count("unreadable:vanished")
            # nobody reads on
            self._catalog.contradict(page.key, snapshot.generation)
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
