"""The engine of two locations: a local one that answers fast, in front of one that several machines share.

To its callers it is one engine: that of the near location, which also asks the far one, keeps what it gets from there,
and passes new pages on. The far one may fail at any time; then the near one works alone.

    match, match_snapshot                          the near one, and for `max_delay` the far one if it may have more
    fetching                                       the first pages from the near one, the others from the far one
    touch, condemn                                 each for its own pages
    write_queue.submit, write_queue.thin           the near one now, the far one later
    flush, drain(), sync, close                    both
    describe, upkeep.check, clear, pin, namespaces both
    all others (evict, delete, used, bookmarks)    the near one
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty
from typing import Any

from prefixstore.backends import is_persistent
from prefixstore.backends.threads import Answer, handed_over
from prefixstore.engine.compute_rate import MAX_SHARE
from prefixstore.engine.engine import Engine
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.page import Page, Path
from prefixstore.engine.pending import DropReason, PendingPage
from prefixstore.engine.source import Keep, Source
from prefixstore.engine.write_queue import BATCH_BYTES
from prefixstore.errors import ClosedError, CorruptError, IncompatibleError, StorageError, UnavailableError
from prefixstore.format.codec import verify_payload
from prefixstore.format.keys import SNAPSHOT
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import StoredPage, Usage
from prefixstore.results import TierStats

log = logging.getLogger("prefixstore")

# what a lookup may take beside `max_delay` while the time of computing is unknown
UNKNOWN_SECONDS = 0.5
# of how many namespaces, the latest, settings are remembered; far pages of others are not kept
KEPT_SETTINGS = 4096

Ask = Callable[[Lookups], Path]


def page_for(page: Page, *, is_far: bool) -> Page:
    """A copy of a page for the other location."""
    return replace(page, stored_bytes=0, hits=0, pinned=False, children=[], is_far=is_far)


class FarEngine(Engine):
    """The engine of the far location, to which new pages are written later, as far as its queue has room.

    Its queue shares the memory of captured pages with that of the near engine (`nearer`). If ancestors of a page are
    missing here, because the location was unreachable when they were captured, they are copied first. The other
    parameters are those of `Engine`.
    """

    def __init__(self, *arguments: Any, nearer: TieredEngine, **options: Any) -> None:
        self._nearer = nearer
        super().__init__(*arguments, **options)

    def _start(self) -> None:
        super()._start()
        self._catalog.is_far = True

    def offer(self, new: PendingPage, state: memoryview) -> None:
        """Queue a captured page here as well, from the same memory; dropped and counted if the queue is full."""
        if self.read_only:
            return
        buffer = self.write_queue.adopt(state)
        if buffer is None:
            self.counters.count("dropped:queue_full")
        else:
            page = page_for(new.page, is_far=True)
            self.write_queue.take(PendingPage(page, new.settings, buffer, is_wanted=new.is_wanted), None)

    def commit(self, batch: Sequence[PendingPage]) -> int:
        """As `Engine.commit`; missing ancestors are written first."""
        n_written = 0
        some: list[PendingPage] = []
        try:
            # the parent of a first page is its namespace
            here = {new.page.namespace for new in batch} | self._stored([new.page.parent for new in batch])
            for new in batch:
                if new.page.parent not in here and self._catalog.is_pending(new):
                    n_written += super().commit(some)
                    some = []
                    self._copy_before(new)
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
        """Which of these pages are stored or pending here."""
        with self._breaker.asking(), self._backend.view() as view:
            return view.records(keys).keys() | {key for key in keys if self._catalog.get(key) is not None}

    def _copy_before(self, new: PendingPage) -> None:
        """Copy the ancestors of a page that are missing here from the near location."""
        path = [page.key for page in self._nearer.lookups.path(new.page)[:-1]]
        stored = self._stored(path)
        missing = [key for key in path if key not in stored]
        while missing and (some := self._nearer.stored(missing, min(BATCH_BYTES, self.queue_bytes // 2))):
            done = self.importer.import_pages(some, {new.page.namespace: new.settings})
            # after one that was refused, the others would have no parent
            missing = missing[len(some) :] if not done.refused else []


class TieredEngine(Engine):
    """The engine of the near one of two locations; `make_far` makes the engine of the other one, given this one.

    A lookup waits for the far location for `max_delay` seconds, or for a share of the time that computing the rest of
    the prompt takes if that is longer; with None it waits without limit. The other parameters are those of `Engine`.
    """

    def __init__(
        self,
        *arguments: Any,
        make_far: Callable[[TieredEngine], FarEngine],
        max_delay: float | None = None,
        **options: Any,
    ) -> None:
        self._max_delay = max_delay
        # canonical settings of the namespaces that this process uses: pages are kept with them
        self._settings: dict[bytes, bytes] = {}
        super().__init__(*arguments, **options)
        try:
            self.far = make_far(self)
        except Exception:
            # nothing was written
            self._release()
            raise

    def _start(self) -> None:
        super()._start()
        self.upkeep.behind = self.write_queue.behind = lambda: self.far
        # a lookup in the far location that nobody waits for any more
        self._overdue: Answer[Path] | None = None

    def _has_lent(self) -> bool:
        return super()._has_lent() or self.far._has_lent()  # noqa: SLF001 - of the same class

    @handed_over
    def _close(self) -> None:
        """Closes the far engine first, which writes what is queued for it."""
        try:
            self._without_far("was not closed cleanly", self.far.close)
        finally:
            super()._close()

    @property
    def location(self) -> str:
        """Both locations."""
        return f"{super().location}, {self.far.location}"

    def _without_far(self, what: str, work: Callable[[], object]) -> None:
        """Do something with the far location; a failure is only logged."""
        try:
            work()
        except (StorageError, ClosedError) as error:
            log.warning("the far location %s: %s", what, error)

    def stored(self, keys: Sequence[bytes], n_bytes: int) -> list[StoredPage]:
        """The first of these pages as the near location has them: about `n_bytes`, up to the first damaged one.

        Raises `StorageError`.
        """
        found: list[StoredPage] = []
        with suppress(CorruptError, IncompatibleError), self._backend.view() as view:
            for key, (record, payload) in zip(keys, view.fetch(keys), strict=False):
                usage = replace(view.usage(key) or Usage(0), hits=0, pinned=False)
                found.append(StoredPage(key, record, usage, bytes(verify_payload(record, payload))))
                n_bytes -= len(payload)
                if n_bytes <= 0:
                    break
        return found

    # -- looking up ---------------------------------------------------------------------------------------------------

    @handed_over
    def _found(self, ask: Ask, most: int) -> Path:
        """What the near location has of a prompt, or the far one if that has more; `most` tokens are all of it."""
        failed: StorageError | None = None
        try:
            near = ask(self.lookups)
        except StorageError as error:
            near, failed = Path((), 0), error
        far = self._ask_far(ask, most - near.n_tokens) if near.n_tokens < most else None
        if far is None or far.n_tokens <= near.n_tokens:
            if failed is not None:
                raise failed
            return near
        here = {page.key: page for page in near.pages}
        return Path(tuple(here.get(page.key, page) for page in far.pages), far.n_tokens)

    def _ask_far(self, ask: Ask, n_tokens: int) -> Path | None:
        """What the far location has; None if it fails, is late, or has not answered an earlier lookup.

        Without it `n_tokens` have to be computed.
        """
        seconds = None
        if self._max_delay is not None and not self.write_queue.stores_all:
            known = self.token_seconds
            seconds = max(self._max_delay, MAX_SHARE * n_tokens * known) if known else self._max_delay + UNKNOWN_SECONDS
        # read once: another thread may clear it
        overdue = self._overdue
        if seconds is not None and overdue is not None and not overdue.is_there:
            self.far.counters.count("late_lookups")
            return None
        self._overdue = None
        if self.far.is_failing:
            return None
        try:
            asked = self.threads.start(ask, self.far.lookups)
            try:
                return asked.get(min(seconds, threading.TIMEOUT_MAX) if seconds is not None else None)
            except Empty:
                self._overdue = asked
                self.far.counters.count("late_lookups")
                return None
        except Exception as error:  # a fault of the far location must not cost what the near one has
            is_expected = isinstance(error, StorageError | ClosedError) or self.far.is_closed
            level = logging.INFO if is_expected else logging.ERROR
            log.log(level, "the far location was not queried: %s", error, exc_info=None if is_expected else error)
            return None

    # -- reading ------------------------------------------------------------------------------------------------------

    def _sources(self, pages: Sequence[Page]) -> list[Source]:
        """Each page from the nearest location that has it. Far pages are kept here."""
        # lookups find a page in the near location only if they find its ancestors there
        n_near = 0 if self._breaker.is_open else self.n_near(pages)
        near: list[Source] = [(self._fetcher, pages[:n_near], None)] if n_near else []
        if n_near == len(pages):
            return near
        # both start together, so that far pages arrive while near ones are used
        return [*near, (self.far._fetcher, pages[n_near:], self._keeping(pages))]  # noqa: SLF001 - of this module

    def _keeping(self, pages: Sequence[Page]) -> Keep:
        """A function that keeps far pages in the near location, until one cannot be kept.

        A restore must not wait for the near location, which may hang: what is stored there already, or has no parent
        there, its commit finds out.
        """
        fetched, goes_on = {page.key for page in pages}, not self.read_only

        def keep(page: Page, state: memoryview) -> None:
            nonlocal goes_on
            if not goes_on or self.is_closed or self._breaker.is_open:
                return
            # pages of recurrent memory hold only tokens, and are never fetched
            is_alone = page.form == SNAPSHOT and page.parent != page.namespace and page.parent not in fetched
            path = self.far.lookups.path(page)[:-1] if is_alone else []
            before = [one for one in path if one.raw_bytes == 0]
            goes_on = all(self._keep_one(one, memoryview(b"")) for one in before) and self._keep_one(page, state)

        return keep

    def _keep_one(self, page: Page, state: memoryview) -> bool:
        """Keep a page unless it is pending already; returns whether pages after it can be kept."""
        if self._catalog.get(page.key) is not None:
            return True
        settings = self._settings.get(page.namespace)
        buffer = self.write_queue.acquire(len(state)) if settings is not None else None
        if settings is None or buffer is None:
            return False
        new = PendingPage(page_for(page, is_far=False), settings, buffer)
        buffer.view[:] = state
        # not a new page: it is neither passed on to the far location nor recorded
        is_kept = self.write_queue.take(new, None)
        if is_kept:
            self.counters.count("kept")
        return is_kept

    @handed_over
    def touch(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None = None) -> None:
        """As `Engine.touch`, in both locations."""
        self._note_use([page for page in pages if not page.is_far], n_tokens)
        self._tell_use(namespace, pages, n_tokens)
        if not self.far.read_only and not self.far.is_failing:
            far = [page if page.is_far else page_for(page, is_far=True) for page in pages]
            self.far.touch(namespace, far, n_tokens)
            self.far.write_queue.nudge()

    def condemn(self, page: Page) -> None:
        """As `Engine.condemn`, in the location that has given the page."""
        if not page.is_far:
            super().condemn(page)
        else:
            self.far.condemn(page)

    # -- writing ------------------------------------------------------------------------------------------------------

    @handed_over
    def drain(self) -> None:
        """As `Engine.drain`, of both locations."""
        super().drain()
        if not self.is_closed:
            self._without_far("has not taken all pages queued for it", self.far.drain)

    @handed_over
    def sync(self) -> None:
        """As `Engine.sync`, of both locations; if the near one is memory, a failure of the far one is raised."""
        super().sync()
        far, is_kept = self.far, is_persistent(super().location)
        if far.read_only or far.is_closed or (far.is_failing and is_kept):
            return
        if is_kept:
            self._without_far("has not confirmed that all is durable", far.sync)
        elif far.is_failing:
            raise UnavailableError(f"{far.location} fails, and nothing else keeps the pages")
        else:
            far.sync()

    # -- notes, statistics --------------------------------------------------------------------------------------------

    @handed_over
    def describe(self, namespace: Namespace, model: str | None = None) -> None:
        """As `Engine.describe`, in both locations."""
        self._settings.pop(namespace.key, None)
        self._settings[namespace.key] = namespace.canonical
        while len(self._settings) > KEPT_SETTINGS:
            del self._settings[next(iter(self._settings))]
        super().describe(namespace, model)
        self.far.describe(namespace, model)

    @property
    def late(self) -> int:
        """As `Engine.late`, of both locations."""
        far = self.far.counters
        return super().late + far["late"] + far["late_lookups"]

    def tiers(self) -> tuple[TierStats, ...]:
        """What came from which location, the nearest first."""
        kept = self.counters["kept"]
        return self._tier(self, self._backend.location, kept), self._tier(self.far, self.far.location, 0)

    def _tier(self, engine: Engine, location: str, kept: int) -> TierStats:
        counters = engine.counters
        used = engine.upkeep.last_used()[0]
        return TierStats(
            location=location,
            is_available=not engine.is_failing,
            pages=counters["given_pages"],
            bytes=counters["given_bytes"],
            kept=kept,
            late=counters["late"] + counters["late_lookups"],
            entries=used.entries,
            bytes_used=used.bytes,
            queued_bytes=engine.queued_bytes,
            dropped=counters.group("dropped"),
            unreadable=counters.group("unreadable"),
            outages=counters["outages"],
        )
