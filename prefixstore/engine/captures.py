"""Captured pages, until they are stored: taken into buffers, matched from then on, queued, committed, or given up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from prefixstore.backends.threads import handed_over
from prefixstore.engine.bookmarks import BookmarkChange, Bookmarks
from prefixstore.engine.commit import Committer
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.part import Shared, Tap
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.queue import WriteQueue
from prefixstore.engine.snapshot_policy import too_many
from prefixstore.errors import PrefixStoreError
from prefixstore.format.keys import Tokens
from prefixstore.results import Shortage

if TYPE_CHECKING:
    from prefixstore.engine.tiers import FarEngine

__all__ = ["Captures"]

log = logging.getLogger("prefixstore")


class Captures(WriteQueue):
    """Takes captured pages, and has them written.

    Parameters
    ----------
    ttl_ns, priority
        Of what is captured: nanoseconds after their last use when pages expire, and their priority.
    options
        As for `WriteQueue`.

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
        tap: Callable[[], Tap | None],
        ttl_ns: int | None,
        priority: int,
        **options: Any,
    ) -> None:
        super().__init__(shared, committer, **options)
        self._lookups = lookups
        self._bookmarks = bookmarks
        self._tap = tap
        self._ttl_ns = ttl_ns
        self._priority = priority
        self.stores_all = 0
        self.wants_all = False

    @handed_over
    def submit(self, *news: PendingPage) -> list[PendingPage]:
        """Have captured pages written, parents first; those that are wanted. The queue owns the buffers then."""
        return [new for new in news if self._submit(new)]

    def _submit(self, new: PendingPage) -> bool:
        # the nearer location may have written it, and given the buffer back, before this returns
        state = new.buffer.view if new.buffer is not None else None
        is_wanted = self.take(new, self._tap())
        if is_wanted and state is not None and self.behind is not None:
            self.behind().offer(new, state)
        return is_wanted

    def take(self, new: PendingPage, tap: Tap | None) -> bool:
        """Have a page written to this location, telling only this tap; whether it is wanted."""
        is_wanted = self.announce(new)
        if is_wanted:
            if tap is not None:
                tap.captured(new.page)
            self.put(new)
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
        return self._catalog.announce(new)

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
                # of this class
                later = far._thin_later  # noqa: SLF001
                far.threads.start(later, namespace, tokens.copy(), page_tokens, keep, interval, valued)
        prompt = self._lookups.prompt(namespace, tokens, page_tokens)
        with self._lookups.locating(prompt, snapshots=True) as (view, found):
            doomed = too_many(view, self._catalog, found, keep, interval, valued)
        for page in doomed:
            self._catalog.discard_snapshot(page)
        return len(doomed)

    def _thin_later(self, *arguments: Any) -> None:
        """As `thin`, when no caller waits for it."""
        try:
            self.thin(*arguments)
        except PrefixStoreError as error:
            log.info("snapshots were not thinned: %s", error)
        except Exception:  # a fault of the store must not end its thread unseen
            log.exception("snapshots were not thinned")

    @handed_over
    def set_bookmark(self, namespace: bytes, name: str, bookmark: BookmarkChange) -> None:
        """Name a sequence, with the commit of its last pages, or remove the name."""
        if self._read_only:
            return
        self._bookmarks.set(namespace, name, bookmark)
        if self._in_background:
            self.nudge()
        else:
            self._commit([])

    @property
    def shortage(self) -> Shortage | None:
        """The last time that a captured page found no space; None if all have."""
        return self._committer.shortage

    @property
    def pending(self) -> tuple[int, int]:
        """How many pages and how many snapshots are captured and not written yet."""
        return self._catalog.pending_counts
