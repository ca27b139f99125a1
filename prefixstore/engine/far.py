"""The engine of the far one of two locations: new pages are written there too, later, and as far as its queue has room.

It has its own write queue. A captured page waits there with the buffer of the nearer engine. A page that only the
nearer location has waits by name, and is read there when its turn comes. In either case the pages before it are written
first if they are missing here, since the location was unreachable when they were captured.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
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

__all__ = ["FarEngine", "Nearer", "node_of"]

log = logging.getLogger("prefixstore")

# How many pages of the nearer location may have been offered within so many seconds; no page is twice.
OFFERED = 4096
OFFERED_SECONDS = 60.0


class Nearer(Protocol):
    """The nearer location, as the far engine sees it."""

    lookups: Lookups

    def settings_of(self, namespace: bytes) -> bytes | None:
        """Canonical settings of a namespace. Raises `StorageError`."""

    def states_of(self, pages: Sequence[Page]) -> AbstractContextManager[States]:
        """Their verified states, each valid until the next one is requested."""


def node_of(page: Page) -> Page:
    """The same page, for another location."""
    return replace(page, stored_bytes=0, hits=0, pinned=False, children=[], is_far=False)


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
        # pages that were offered by name, and when they may be again
        self._offered: dict[bytes, float] = {}

    # -- what the nearer engine calls ---------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Bytes of captured pages that wait to be written here."""
        return self._held

    def source(self, pages: Sequence[Page], keep: Keep) -> Source:
        """These pages, from this location."""
        return Source(self._fetcher, pages, keep)

    def offer(self, new: PendingPage) -> None:
        """Have a captured page written here, too, with the same buffer. Dropped and counted if too much waits."""
        buffer = new.buffer
        if self.read_only or buffer is None or self._catalog.get(new.page.key) is not None:
            return
        with self._lock:
            fits = not self._held or self._held + new.n_bytes <= self.queue_bytes
            # the caller holds it as well, so it has not returned to the pool
            is_held = fits and buffer.hold()
            self._held += new.n_bytes if is_held else 0
        if is_held:
            self._queue.put(PendingPage(node_of(new.page), new.settings, buffer, is_wanted=new.is_wanted))
        else:
            self.counters.count("dropped:queue_full")

    def offer_stored(self, page: Page) -> None:
        """Have a page of the nearer location written here, too, if it is missing; not tried again within a minute."""
        if self._catalog.get(page.key) is not None:
            return
        now = time.monotonic()
        with self._lock:
            if len(self._offered) >= OFFERED:
                self._offered = {key: until for key, until in self._offered.items() if until > now}
            if len(self._offered) >= OFFERED or self._offered.get(page.key, now) > now:
                return
            self._offered[page.key] = now + OFFERED_SECONDS
        self._queue.put(PendingPage(node_of(page), b"", None))

    def forget_offers(self, keys: Iterable[bytes]) -> None:
        """Allow these pages, which were not written, to be offered again."""
        with self._lock:
            for key in keys:
                self._offered.pop(key, None)

    # -- the thread of the queue --------------------------------------------------------------------------------------

    def commit(self, batch: Sequence[PendingPage]) -> int:
        """Write offered pages, with their missing ancestors. What cannot be written is dropped and counted."""
        announced: list[PendingPage] = []
        copied: list[PendingPage] = []
        n_written, n_left = 0, len(batch)
        try:
            stored = self._stored(key for new in batch for key in (new.page.key, new.page.parent))
            for new in batch:
                page = new.page
                follows = page.parent in (page.namespace, *stored) or self._catalog.get(page.parent) is not None
                if page.key not in stored and (new.buffer is None or not follows):
                    copied.append(new)
                    continue
                if page.key not in stored and self.captures.announce(new):
                    announced.append(new)
                n_left -= 1
            n_written += super().commit(announced)
            # the last ones first: they bring along those before them
            for new in reversed(copied):
                if new.page.key not in stored:
                    path = self._nearer.lookups.path(new.page)
                    n_written += self._copy(path, new.settings)
                    stored.update(page.key for page in path)
                n_left -= 1
        except StorageError as error:
            log.info("%d pages were not written to %s: %s", n_left, self.location, error)
            self._catalog.drop(announced, DropReason.UNAVAILABLE)
            self.counters.count(f"dropped:{DropReason.UNAVAILABLE.value}", n_left)
            self.forget_offers(new.page.key for new in copied)
        except Exception:
            self._catalog.drop(announced)
            raise
        finally:
            with self._lock:
                self._held -= sum(new.n_bytes for new in batch)
        return n_written

    def _stored(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of these pages that are here, or wait here."""
        keys = list(dict.fromkeys(keys))
        with self._breaker.asking(), self._backend.view() as view:
            return view.records(keys).keys() | {key for key in keys if self._catalog.get(key) is not None}

    def _copy(self, path: Sequence[Page], settings: bytes) -> int:
        """Write those pages of a path that are missing here, out of the nearer location; how many.

        `settings` are those of their namespace; if there are none, the nearer location is asked.
        """
        stored = self._stored(page.key for page in path)
        missing = [page for page in path if page.key not in stored]
        known = settings or (self._nearer.settings_of(missing[0].namespace) if missing else None)
        n_written = 0
        while missing and known is not None:
            n_read, n_new = self._copy_some(missing, known)
            n_written += n_new
            if n_read == 0:
                # gone from there, too
                self.counters.count(f"dropped:{DropReason.ORPHAN.value}")
            # those after one that was not written may have no parent
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
                    news.append(PendingPage(node_of(page), settings, buffer))
                    buffer.view[:] = state
            return len(news), super().commit([new for new in news if self.captures.announce(new)])
        except Exception:
            self._catalog.drop(news)
            raise
        finally:
            for new in news:
                new.release()
