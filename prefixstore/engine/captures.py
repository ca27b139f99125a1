"""Captured pages, until they are stored: taken into buffers, matched from then on, queued, committed, or given up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from prefixstore.backends.threads import handed_over
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.bookmark import BookmarkChange
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.commit import Committer
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.queue import WriteQueue
from prefixstore.engine.saved_notes import SavedNotes
from prefixstore.engine.snapshot_policy import too_many
from prefixstore.engine.tap import Tap
from prefixstore.engine.waiting import Placement
from prefixstore.errors import StorageError
from prefixstore.format.keys import Tokens
from prefixstore.results import Shortage

if TYPE_CHECKING:
    from prefixstore.engine.tiers import FarEngine

__all__ = ["Captures"]

log = logging.getLogger("prefixstore")


class Captures(Part):
    """Takes captured pages, and has them written.

    Parameters
    ----------
    shared, lookups, committer, bookmarks, notes, queue
        Of the engine.
    tap
        Its listener, if there is one.
    ttl_ns, priority
        Of what is captured: nanoseconds after their last use when pages expire, and their priority.

    Attributes
    ----------
    stores_all
        How many blocks of `storing_all` are open.
    wants_all
        Whether what is captured now is stored even if the policy finds it worth less than what is evicted for it.
    behind
        Gives the engine of the far one of two locations, where captured pages are written, too; None for one location.
    """

    behind: Callable[[], FarEngine] | None = None

    def __init__(
        self,
        shared: Shared,
        lookups: Lookups,
        committer: Committer,
        bookmarks: Bookmarks,
        notes: SavedNotes,
        queue: WriteQueue,
        tap: Callable[[], Tap | None],
        ttl_ns: int | None,
        priority: int,
    ) -> None:
        super().__init__(shared)
        self._lookups = lookups
        self._committer = committer
        self._bookmarks = bookmarks
        self._notes = notes
        self._queue = queue
        self._tap = tap
        self._ttl_ns = ttl_ns
        self._priority = priority
        self.stores_all = 0
        self.wants_all = False

    def acquire(self, size: int, *, wait: bool = False) -> PooledBuffer | None:
        """A buffer to capture a page into; None if too much is queued already and `wait` is false."""
        # handed over only to wait: while another thread computes, that takes longer than copying a page
        buffer = self._queue.acquire(size)
        return self._acquire_later(size) if buffer is None and wait else buffer

    @handed_over
    def _acquire_later(self, size: int) -> PooledBuffer | None:
        return self._queue.acquire(size, wait=True)

    @handed_over
    def submit(self, *news: PendingPage) -> list[PendingPage]:
        """Have captured pages written, parents first; those that are wanted. The queue owns the buffers then."""
        return [new for new in news if self._submit(new)]

    def _submit(self, new: PendingPage) -> bool:
        # held for the far queue: the nearer location may have written it before this returns
        held = new.buffer if self.behind is not None and new.buffer is not None and new.buffer.hold() else None
        try:
            is_wanted = self.take(new, self._tap())
            if is_wanted and held is not None and self.behind is not None:
                self.behind().offer(PendingPage(new.page, new.settings, held, is_wanted=new.is_wanted))
            return is_wanted
        finally:
            if held is not None:
                held.release()

    def take(self, new: PendingPage, tap: Tap | None) -> bool:
        """Have a page written to this location, telling only this tap; whether it is wanted."""
        is_wanted = self.announce(new)
        if is_wanted:
            if tap is not None:
                tap.captured(new.page)
            self._queue.put(new)
        else:
            new.release()
        return is_wanted

    def announce(self, new: PendingPage) -> bool:
        """Have a captured page matched from now on, as one that waits; False if it is not wanted."""
        page = new.page
        page.priority = self._priority
        new.is_wanted = new.is_wanted or self.stores_all > 0 or self.wants_all
        # one that comes from another location may have been used, and so renewed, there
        page.expires = max(page.expires, page.created + self._ttl_ns) if self._ttl_ns is not None else 0
        return self._catalog.announce(new) is Placement.ADDED

    @contextmanager
    def storing_all(self) -> Iterator[None]:
        """In this block, captured pages are stored even if the policy ranks them below what is evicted for them."""
        self.stores_all += 1
        try:
            with self.behind().captures.storing_all() if self.behind is not None else nullcontext():
                yield
        finally:
            self.stores_all -= 1

    @handed_over
    def thin(
        self,
        namespace: bytes,
        tokens: Tokens,
        page_tokens: int,
        keep: int,
        interval: int,
        valued: Collection[int] = (),
    ) -> int:
        """Give up all but `keep` of the snapshots along `tokens`, and pinned ones; how many. See `too_many`.

        The far location follows later, and is not waited for.
        """
        if self._read_only:
            return 0
        if self.behind is not None:
            far = self.behind().captures
            with suppress(RuntimeError):  # it was closed
                far.threads.start(far.thin, namespace, tokens.copy(), page_tokens, keep, interval, valued)
        prompt = self._lookups.prompt(namespace, tokens, page_tokens)
        with self._lookups.locating(prompt, snapshots=True) as (view, found):
            doomed = too_many(view, self._catalog, found, keep, interval, valued)
        for page in doomed:
            self._catalog.discard_snapshot(page)
        return len(doomed)

    @handed_over
    def set_bookmark(self, namespace: bytes, name: str, bookmark: BookmarkChange) -> None:
        """Name a sequence, with the commit after those of its pages; None or `Unset` removes the name."""
        if self._read_only:
            return
        self._bookmarks.set(namespace, name, bookmark)
        if self._queue.in_background:
            self._queue.nudge()
        else:
            self._write_bookmarks()

    def _write_bookmarks(self) -> None:
        try:
            self._bookmarks.write()
        except StorageError as error:
            log.warning("names of stored sequences were not written yet: %s", error)

    @handed_over
    def nudge(self) -> None:
        """Have deferred changes committed soon."""
        self._queue.nudge()

    def commit(self, batch: Sequence[PendingPage]) -> int:
        """Write announced pages, and what is deferred; see `Engine.commit`."""
        try:
            n_written = len(self._committer.commit(batch))
        except StorageError as error:
            log.warning("%d pages were dropped: %s", len(batch), error)
            return 0
        try:
            self._backend.mend()
            self._write_bookmarks()
            self._notes.save()
        except Exception:  # they handle faults of the location; others must not cost the pages, which are stored
            log.exception("what follows a commit was not done")
        return n_written

    @property
    def has_deferred(self) -> bool:
        """Whether uses, bookmarks, figures, or pages to be deleted wait for the next commit."""
        return self._committer.has_deferred or self._bookmarks.has_pending or self._notes.figures_are_due

    @property
    def shortage(self) -> Shortage | None:
        """The last time that a captured page found no space; None if all have."""
        return self._committer.shortage

    @property
    def pending(self) -> tuple[int, int]:
        """How many pages and how many snapshots are captured and not written yet."""
        return self._catalog.pending_counts
