"""The engine of the far one of two locations: new pages are written there too, later, and as far as its queue has room.

It has its own write queue, in which a captured page waits with the buffer of the nearer engine. If pages before it are
missing here, since the location was unreachable when they were captured, they are read from the nearer location and
written first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from prefixstore.engine.engine import Engine
from prefixstore.engine.fetch import States
from prefixstore.engine.index import Page
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.queue import BATCH_BYTES
from prefixstore.engine.source import Keep, Source
from prefixstore.engine.waiting import DropReason
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
        self._lock = threading.Lock()
        self._held = 0

    # -- what the nearer engine calls ---------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Bytes of captured pages that wait to be written here."""
        return self._held

    def source(self, pages: Sequence[Page], keep: Keep) -> Source:
        """These pages, from this location."""
        return self._fetcher, pages, keep

    def offer(self, new: PendingPage) -> None:
        """Have a captured page written here, too, with the same buffer. Dropped and counted if too much waits."""
        buffer, size = new.buffer, new.n_bytes
        # the caller holds it as well, so it has not returned to the pool
        if self.read_only or buffer is None or not buffer.hold():
            return
        with self._lock:
            fits = not self._held or self._held + size <= self.queue_bytes
            self._held += size if fits else 0
        if not fits:
            buffer.release()
            self.counters.count("dropped:queue_full")
            return
        copy = PendingPage(page_for(new.page, is_far=True), new.settings, buffer, is_wanted=new.is_wanted)
        if not self.captures.take(copy, None):
            self._written(size)

    def _written(self, n_bytes: int) -> None:
        """So much waits no longer."""
        with self._lock:
            self._held -= n_bytes

    # -- the thread of the queue --------------------------------------------------------------------------------------

    def commit(self, batch: Sequence[PendingPage]) -> int:
        """As `Engine.commit`; pages that are missing here before these are written first."""
        size = sum(new.n_bytes for new in batch)
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
            self._catalog.drop(batch, DropReason.UNAVAILABLE)
            return n_written
        except Exception:
            self._catalog.drop(batch)
            raise
        finally:
            self._written(size)

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
                    buffer = self.captures.acquire(len(state), wait=True) if size <= most or not news else None
                    if buffer is None:
                        break
                    news.append(PendingPage(page_for(page, is_far=True), settings, buffer))
                    buffer.view[:] = state
            return len(news), super().commit([new for new in news if self.captures.announce(new)])
        except Exception:
            self._catalog.drop(news)
            raise
        finally:
            for new in news:
                new.release()
