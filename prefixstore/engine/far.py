"""The engine of the far one of two locations: new pages are written there too, later, and as far as its queue has room.

It has its own write queue, in which a captured page waits in the memory of the nearer engine. If pages before it are
missing here, since the location was unreachable when they were captured, they are read from the nearer location and
written first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from prefixstore.buffers import BufferPool
from prefixstore.engine.engine import Engine
from prefixstore.engine.fetch import States
from prefixstore.engine.index import Page
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.pending import DropReason, PendingPage
from prefixstore.engine.queue import BATCH_BYTES
from prefixstore.engine.source import Keep, Source
from prefixstore.errors import StorageError

__all__ = ["FarEngine", "Nearer", "page_for"]

log = logging.getLogger("prefixstore")


class Nearer(Protocol):
    """The nearer location, as the far engine sees it."""

    lookups: Lookups

    def states_of(self, pages: Sequence[Page]) -> AbstractContextManager[States]:
        """Their verified states, each valid until the next one is requested."""


def page_for(page: Page, *, is_far: bool) -> Page:
    """The same page, for the other location."""
    return replace(page, stored_bytes=0, hits=0, pinned=False, children=[], is_far=is_far)


class FarEngine(Engine):
    """The engine of the far location. Parameters as for `Engine`; `queue_bytes` bounds what may wait for it.

    Parameters
    ----------
    nearer
        The location in front.
    """

    def __init__(self, *arguments: Any, nearer: Nearer, **options: Any) -> None:
        self._nearer = nearer
        super().__init__(*arguments, **options)

    def _start(self) -> None:
        super()._start()
        self._catalog.is_far = True
        self._copies = BufferPool(limit=None)

    # -- what the nearer engine calls ---------------------------------------------------------------------------------

    def source(self, pages: Sequence[Page], keep: Keep) -> Source:
        """These pages, from this location."""
        return Source(self._fetcher, pages, keep)

    def offer(self, new: PendingPage, state: memoryview) -> None:
        """Have a captured page written here, too, from the same memory. Dropped and counted if too much waits."""
        if self.read_only:
            return
        buffer = self.captures.adopt(state)
        if buffer is None:
            self.counters.count("dropped:queue_full")
        else:
            page = page_for(new.page, is_far=True)
            self.captures.take(PendingPage(page, new.settings, buffer, is_wanted=new.is_wanted), None)

    # -- the thread of the queue --------------------------------------------------------------------------------------

    def commit(self, batch: Sequence[PendingPage]) -> int:
        """As `Engine.commit`; pages that are missing here before these are written first."""
        n_written = 0
        some: list[PendingPage] = []
        try:
            # first pages follow their namespaces
            here = {new.page.namespace for new in batch} | self._stored([new.page.parent for new in batch])
            for new in batch:
                if new.page.parent not in here and self._catalog.is_pending(new):
                    n_written += super().commit(some) + self._copy_before(new)
                    some = []
                some.append(new)
            return n_written + super().commit(some)
        except StorageError as error:
            log.info("%d pages were not written to %s: %s", len(batch) - n_written, self.location, error)
            self._catalog.give_up(batch, DropReason.UNAVAILABLE)
            return n_written
        except Exception:
            self._catalog.give_up(batch)
            raise

    def _stored(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of these pages that are here, or wait here."""
        with self._breaker.asking(), self._backend.view() as view:
            return view.records(keys).keys() | {key for key in keys if self._catalog.get(key) is not None}

    def _copy_before(self, new: PendingPage) -> int:
        """Write the pages before this one that are missing here, out of the nearer location; how many."""
        path = self._nearer.lookups.path(new.page)[:-1]
        stored = self._stored([page.key for page in path])
        missing = [page for page in path if page.key not in stored]
        n_written = 0
        while missing:
            n_read, n_new = self._copy_some(missing, new.settings)
            n_written += n_new
            # those after one that was not written would have no parent
            missing = missing[n_read:] if n_new == n_read > 0 else []
        return n_written

    def _copy_some(self, pages: Sequence[Page], settings: bytes) -> tuple[int, int]:
        """Read some of the pages, then write them; how many were read and written.

        A view of the nearer location is not kept open for a commit here.
        """
        news: list[PendingPage] = []
        most, size = min(BATCH_BYTES, self.queue_bytes // 2), 0
        try:
            with self._nearer.states_of(pages) as states:
                for page, state in zip(pages, states, strict=False):
                    size += len(state)
                    if size > most and news:
                        break
                    buffer = self._copies.acquire(len(state))
                    assert buffer is not None, "they have no limit"
                    news.append(PendingPage(page_for(page, is_far=True), settings, buffer))
                    buffer.view[:] = state
            return len(news), super().commit([new for new in news if self.captures.announce(new)])
        except Exception:
            self._catalog.give_up(news)
            raise
        finally:
            for new in news:
                new.release()
