"""The engine of the far one of two locations: new pages are written there too, later, and as far as its queue has room.

It has its own write queue, whose pages share the buffers of the nearer engine. If the parent of a page is missing
here, since the location was unreachable when the parent was captured, both are written, the parent from the nearer
location.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from prefixstore.engine.engine import Engine
from prefixstore.engine.far_pages import NamedPage, Nearer, SharedPage, Thinning, chains, node_of, pieces
from prefixstore.engine.index import Page
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.queue import BATCH_BYTES
from prefixstore.engine.waiting import DropReason, Placement
from prefixstore.errors import StorageError

__all__ = ["FarEngine"]

log = logging.getLogger("prefixstore")

# Pages that wait by name only; and how long, and of how many, it is remembered that they were named already.
NAMED = 4096
REMEMBERED = 16384
REMEMBERED_SECONDS = 60.0
# conversations whose snapshots wait to be thinned
THINNED = 64


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
        self._n_named = 0
        self._named: OrderedDict[bytes, float] = OrderedDict()
        self._thinning: list[Thinning] = []

    # -- what the nearer engine calls ---------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Bytes of captured pages that wait to be written here."""
        return self._held

    def offer(self, new: PendingPage) -> None:
        """Have a captured page written here, too, with the same buffer. Dropped and counted if too much waits."""
        buffer = new.buffer
        if buffer is None or self._catalog.get(new.page.key) is not None:
            return
        size = new.n_bytes
        shared = SharedPage(
            node_of(new.page), new.settings, None, is_wanted=new.is_wanted, on_release=self._shared_released
        )
        with self._lock:
            fits = not self._held or self._held + size <= self.queue_bytes
            # the caller holds it as well, so it has not returned to the pool
            if fits and buffer.hold():
                shared.buffer = buffer
                shared.weight = size
                self._held += size
        if shared.buffer is not None:
            self._queue.put(shared)
        else:
            self.counters.count("dropped:queue_full")

    def offer_stored(self, pages: Sequence[Page]) -> None:
        """Have pages of the nearer location written here, too, if they are missing; not tried again within a minute."""
        for page in pages:
            if self._catalog.get(page.key) is not None:
                continue
            now = time.monotonic()
            with self._lock:
                is_new = now >= self._named.get(page.key, now) and self._n_named < NAMED
                if is_new:
                    self._n_named += 1
                    self._named[page.key] = now + REMEMBERED_SECONDS
                    self._named.move_to_end(page.key)
                    while len(self._named) > REMEMBERED:
                        self._named.popitem(last=False)
            if is_new:
                self._queue.put(NamedPage(node_of(page), b"", None, on_release=self._named_released))

    def _shared_released(self, page: SharedPage) -> None:
        with self._lock:
            self._held -= page.weight
            page.weight = 0

    def _named_released(self) -> None:
        with self._lock:
            self._n_named -= 1

    def forget_offers(self, keys: Iterable[bytes]) -> None:
        """Allow these pages, which were not written, to be offered again."""
        with self._lock:
            for key in keys:
                self._named.pop(key, None)

    def thin_later(self, new: Thinning) -> None:
        """As `Engine.thin`, with one of the next commits."""
        if self.read_only:
            return
        with self._lock:
            # a conversation grows: the last call stands for those about its beginning
            self._thinning = [*(one for one in self._thinning if not new.continues(one)), new][-THINNED:]

    @property
    def has_deferred(self) -> bool:
        """As `Engine.has_deferred`, or there are snapshots to be thinned."""
        return bool(self._thinning) or super().has_deferred

    # -- the thread of the queue --------------------------------------------------------------------------------------

    def commit(self, batch: Sequence[PendingPage]) -> int:
        """Write offered pages, with their missing ancestors. What cannot be written is dropped and counted."""
        try:
            stored = self._stored(key for new in batch for key in (new.page.key, new.page.parent))
        except StorageError as error:
            self._give_up(batch, error)
            return 0
        announced: list[PendingPage] = []
        waiting = {new.page.key: new for new in batch}
        n_written = 0
        try:
            for is_named, news in groupby(batch, lambda new: isinstance(new, NamedPage)):
                if is_named:
                    # after those before them that were announced: they may follow these
                    n_written += self._commit_announced(announced)
                    n_written += self._copy_named([new.page for new in news], waiting, stored)
                    continue
                for new in news:
                    if self._announce(new, stored):
                        announced.append(new)
                    waiting.pop(new.page.key, None)
        except StorageError as error:
            self._give_up([new for key, new in waiting.items() if key not in stored], error)
        except Exception:
            self._catalog.drop(announced)
            raise
        n_written += super().commit(announced)
        self._thin()
        return n_written

    def _give_up(self, news: Sequence[PendingPage], error: StorageError) -> None:
        """Drop pages, and count them; they may be offered again."""
        log.info("%d pages were not written to %s: %s", len(news), self.location, error)
        self.counters.count(f"dropped:{DropReason.UNAVAILABLE.value}", len(news))
        self.forget_offers(new.page.key for new in news)

    def _thin(self) -> None:
        with self._lock:
            waiting, self._thinning = self._thinning, []
        for one in waiting:
            with suppress(StorageError):
                self.thin(*one)

    def _commit_announced(self, announced: list[PendingPage]) -> int:
        waiting = list(announced)
        announced.clear()
        return super().commit(waiting) if waiting else 0

    def _stored(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of these pages that are here, or wait here."""
        keys = list(dict.fromkeys(keys))
        with self._breaker.asking(), self._backend.view() as view:
            return view.records(keys).keys() | {key for key in keys if self._catalog.get(key) is not None}

    def _announce(self, new: PendingPage, stored: set[bytes]) -> bool:
        """Announce a page, and write what is missing before it first."""
        page = new.page
        if page.key in stored:
            return False
        is_first = page.parent in (page.namespace, *stored) or self._catalog.get(page.parent) is not None
        if not is_first:
            self._copy(self._nearer.path(page)[:-1], new.settings)
            if not self._stored([page.parent]):
                self.counters.count(f"dropped:{DropReason.ORPHAN.value}")
                return False
        return self.place(new) is Placement.ADDED

    def _copy_named(self, pages: Sequence[Page], waiting: dict[bytes, PendingPage], stored: set[bytes]) -> int:
        """Copy those of these pages that are missing here; how many. Those that are done no longer wait."""
        n_written = 0
        for chain in chains([page for page in pages if page.key not in stored]):
            n_written += self._copy(chain, None)
            for page in chain:
                waiting.pop(page.key, None)
        return n_written

    def _copy(self, pages: Sequence[Page], settings: bytes | None) -> int:
        """Write those of some consecutive pages that are missing here, out of the nearer location; how many.

        `settings` are those of their namespace; if there are none, the nearer location is asked.
        """
        if not pages:
            return 0
        wanted = self._nearer.path(pages[0])[:-1] + list(pages)
        stored = self._stored(page.key for page in wanted)
        missing = [page for page in wanted if page.key not in stored]
        if not missing:
            return 0
        settings = settings or self._nearer.settings_of(pages[0].namespace)
        if settings is None:
            return 0
        n_written = 0
        for piece in pieces(missing, min(BATCH_BYTES, self.queue_bytes // 2)):
            n_piece = self._copy_piece(piece, settings)
            n_written += n_piece
            if n_piece < len(piece):
                # those after it may have no parent
                break
        return n_written

    def _copy_piece(self, pages: Sequence[Page], settings: bytes) -> int:
        """Read some of the pages, then write them: a view of the nearer location is not kept open for a commit here."""
        news: list[PendingPage] = []
        try:
            with self._nearer.states_of(pages) as states:
                for page, state in zip(pages, states, strict=False):
                    buffer = self.acquire(len(state), wait=True)
                    if buffer is None:
                        break
                    news.append(PendingPage(node_of(page), settings, buffer))
                    buffer.view[:] = state
            return super().commit([new for new in news if self.place(new) is Placement.ADDED])
        except Exception:
            self._catalog.drop(news)
            raise
        finally:
            for new in news:
                new.release()
