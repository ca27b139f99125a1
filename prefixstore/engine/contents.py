"""What this process knows of a location, and the pages that are still to be written.

Used by the catalog, under its lock: nothing here takes a lock, or calls the backend.

The index has the pages that lookups have found and the pending ones, whose bytes wait in a buffer. What the open
transaction changes is recorded in its journal, so that a failure undoes exactly that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from prefixstore.engine.index import Index, Page, is_same
from prefixstore.engine.journal import Journal
from prefixstore.engine.page_view import Entry
from prefixstore.engine.pending import Deferred, PendingPage
from prefixstore.engine.ram import RamTier
from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.keys import PAGE
from prefixstore.format.record import Record, Usage, time_of_use
from prefixstore.stats import Counters

__all__ = ["Contents", "DropReason", "Outdated", "Taken"]

log = logging.getLogger("prefixstore")

# Pages in the index beyond which those that were not looked up for long are forgotten: 2.5 KB each.
CACHED_PAGES = 8192


class DropReason(str, Enum):
    """Why a captured page is not stored: the names in ``Stats.dropped``."""

    BUDGET = "budget"
    QUOTA = "quota"
    FULL = "full"
    ORPHAN = "orphan"
    UNAVAILABLE = "unavailable"
    ERROR = "error"
    ADMISSION = "admission"


class Outdated(str, Enum):
    """Why a captured page was given up before it was written: the names in ``Stats.outdated``."""

    SUPERSEDED = "superseded"
    THINNED = "thinned"
    DELETED = "deleted"


class Taken(NamedTuple):
    """A page that was taken out of the index, with what is needed to put it back."""

    page: Page
    new: PendingPage | None
    n_uses: int


class Contents:
    """The index, and the pages that wait for a commit.

    Parameters
    ----------
    counters
        Counts what is dropped.
    ram
        Drops pages that were deleted from the location.

    Attributes
    ----------
    index
        The pages that lookups find without asking the location.
    pending
        Pages that wait for a commit, by key.
    contested
        Keys of pending pages under which another page is stored.
    writing
        Keys of pending pages that are in a transaction, or were until just now: they may be stored already.
    uncommitted
        Keys of those that the open transaction has put.
    deferred
        What waits for the next commit, beside pages.
    journal
        What the open transaction of this process has changed; None if there is none.
    sweeps
        Whether there may be settings of namespaces without pages.
    expects_expiry
        Whether there may be pages that have expired: one that expires was seen.
    latest
        Time of the last use of any page: what is used later is newer, even if the clock was set back meanwhile.
    """

    def __init__(self, counters: Counters, ram: RamTier) -> None:
        self._counters = counters
        self._ram = ram
        self.expects_expiry = False
        self.index = Index(CACHED_PAGES)
        self.pending: dict[bytes, PendingPage] = {}
        self.contested: set[bytes] = set()
        self.writing: set[bytes] = set()
        self.uncommitted: set[bytes] = set()
        self.deferred = Deferred()
        self.journal: Journal | None = None
        self.sweeps = True
        self.latest = 0
        self.started = time.time_ns()

    # -- what is stored -----------------------------------------------------------------------------------------------

    def learn(self, entry: Entry) -> bool:
        """Learn what the location has under a key, if the index has the page or its parent; whether it has it now."""
        key, record, usage = entry
        if self.is_deleting(key):
            return False
        if not isinstance(record, Record):
            self._unreadable(key, record)
            return False
        if key in self.deferred.damaged:
            # looked for again when the next commit has found out whether it is
            self.index.unseal(record.parent, record.namespace)
            return False
        page = self.index.get(key)
        stored = self._node_of(key, record, usage)
        if page is not None and not (is_same(page, record) and page.start == record.start):
            log.warning("two different pages have the key %s", key.hex())
            if key in self.pending:
                # the stored one is deleted when the pending one is written, and what follows it
                page.is_stored = False
                self.contested.add(key)
                return False
            # another process has replaced it
            self.lose(key)
            page = None
        if page is None:
            return self._add(stored)
        self._take_over(page, stored)
        return True

    def _add(self, stored: Page) -> bool:
        """Add a stored page to the index, if its parent is there."""
        if not self.index.has_parent_of(stored) or stored.parent in self.contested:
            return False
        is_added = self.index.add(stored)
        if not is_added:
            # its parent ends elsewhere
            self.deferred.damaged.add(stored.key)
        return is_added

    def refresh_page(self, key: bytes, entry: Entry | None) -> None:
        """Follow a change of one page, given what is stored of it now, None for nothing."""
        # it may have been replaced: if it is still damaged, the next restore finds that again
        self.deferred.damaged.discard(key)
        self.deferred.suspicions.pop(key, None)
        if entry is not None:
            self.learn(entry)
            return
        page = self.index.get(key)
        if page is not None:
            page.is_stored = False
            if key not in self.pending:
                self.lose(key)

    def forget_stored(self) -> None:
        """Forget what is stored; the index is empty until it is rebuilt."""
        self.index = Index(CACHED_PAGES)
        for new in self.pending.values():
            new.page.is_stored = False

    def rebuild(self, found: Mapping[bytes, Entry]) -> None:
        """Start over with the pending pages and these stored ones, which include the ancestors of the pending ones."""
        self.forget_stored()
        # parents first; a page that is both pending and stored is the pending node
        places = [(new.page.start, 0, key) for key, new in self.pending.items()]
        places += [(one.record.start, 1, key) for key, one in found.items() if isinstance(one.record, Record)]
        for _, is_stored, key in sorted(places):
            if is_stored:
                self.learn(found[key])
            elif key in self.pending:
                page = self.pending[key].page
                page.forget_dependents()
                if not self.index.add(page):
                    self.drop(key, DropReason.ORPHAN)
        for key, one in found.items():
            if not isinstance(one.record, Record):
                self._unreadable(key, one.record)

    def know_between(self, parent: bytes, namespace: bytes, tokens: bytes, near: Sequence[Entry]) -> None:
        """Learn that the location has these children of a page, and none between them around these tokens."""
        are_known = [
            isinstance(one.record, Record)
            and (one.record.parent, one.record.form) == (parent, PAGE)
            and self.learn(one)
            for one in near
        ]
        if all(are_known) and (parent == namespace or parent in self.index):
            is_stored = any(isinstance(one.record, Record) and one.record.tokens == tokens for one in near)
            self.index.seal(parent, namespace, tokens, is_stored=is_stored)

    def know_snapshots(self, parents: Iterable[bytes], namespace: bytes, found: Iterable[Entry]) -> None:
        """Learn that the location has these snapshots after these pages, and no others."""
        incomplete = {one.record.parent for one in found if isinstance(one.record, Record) and not self.learn(one)}
        for parent in parents:
            if parent not in incomplete and (parent == namespace or parent in self.index):
                self.index.node(parent, namespace).knows_snapshots = True

    def trim(self, found: Iterable[Page] = ()) -> None:
        """Forget pages that were not looked up for long, if there are many; not those that were just found."""
        if not self.index.is_full:
            return
        found_keys = {page.key for page in found}
        self.index.trim(self.pending.keys() | self.writing | self.deferred.uses.keys() | found_keys)

    def _node_of(self, key: bytes, record: Record, usage: Usage) -> Page:
        now = time.time_ns()
        last_used = time_of_use(usage.last_used, now)
        self.latest = max(self.latest, last_used)
        stored = Page.stored(key, record, usage)
        # a time that is not believable: no use of it was seen by this process
        stored.last_used = last_used or self.started
        self.expects_expiry = self.expects_expiry or stored.expires > 0
        return stored

    def _unreadable(self, key: bytes, error: StorageError) -> None:
        log.warning("a page cannot be read: %s", error)
        if isinstance(error, CorruptError):
            self.deferred.damaged.add(key)
        page = self.index.get(key)
        if page is not None:
            page.is_stored = False
            if key not in self.pending:
                self.lose(key)

    def _take_over(self, here: Page, stored: Page) -> None:
        """A page that is in the index is stored: what is stored of it holds."""
        here.priority = stored.priority
        here.announced_expiry = stored.announced_expiry
        if stored.last_used > here.last_used:
            here.last_used, here.uses, here.page_class = stored.last_used, stored.uses, stored.page_class
        here.stored_bytes, here.pinned, here.is_stored = stored.stored_bytes, stored.pinned, True
        # an expiry that is to be written with the next uses is later than the stored one
        here.expires = max(here.expires, stored.expires) if here.expires and stored.expires else stored.expires

    # -- pending pages ------------------------------------------------------------------------------------------------

    def is_pending(self, new: PendingPage) -> bool:
        """Whether a page still waits: not superseded, dropped, or cleared and captured again."""
        return self.pending.get(new.page.key) is new

    def is_held(self, key: bytes) -> bool:
        """Whether a page must stay for the commit that writes it; an imported one may be evicted at once."""
        new = self.pending.get(key)
        return new is not None and not (new.buffer is None and key in self.uncommitted)

    def may_be_stored(self, page: Page) -> bool:
        """Whether a page is stored, or is being written."""
        return page.is_stored or page.key in self.writing

    def take_back(self, page: Page, before: tuple[int, bool, int, int, int], *, is_stored: bool) -> None:
        """Record that a page was not put after all."""
        self.uncommitted.discard(page.key)
        page.stored_bytes, page.pinned, page.priority, page.expires, page.announced_expiry = before
        page.is_stored = is_stored

    def drop(self, key: bytes, reason: DropReason) -> None:
        """Give up a pending page, with the pending pages that depend on it, and count them.

        One that another process has stored meanwhile stays in the index.
        """
        page = self.index.get(key)
        if page is not None and page.is_stored and key not in self.uncommitted:
            self.keep_as_stored(page)
            return
        lost = 1 if self.pending.pop(key, None) is not None else 0
        lost += sum(1 for one in self.forget(key, is_deleted=False) if one.new is not None)
        if lost:
            self._counters.count(f"dropped:{reason.value}", lost)

    def give_up(self, key: bytes, reason: Outdated) -> None:
        """Give up a pending page that is no longer needed, with what depends on it, and count them as outdated."""
        self._count_outdated(self.forget(key, is_deleted=False), reason)

    def _count_outdated(self, taken: Iterable[Taken], reason: Outdated) -> None:
        # imported pages were not captured
        if lost := sum(1 for one in taken if one.new is not None and one.new.buffer is not None):
            self._counters.count(f"outdated:{reason.value}", lost)

    def keep_as_stored(self, page: Page) -> None:
        """End the wait of a pending page that another process has stored."""
        self.pending.pop(page.key, None)

    # -- taking out ---------------------------------------------------------------------------------------------------

    def undo(self, step: Callable[[], None]) -> None:
        """If a transaction is open and fails, call this."""
        if self.journal is not None:
            self.journal.undo(step)

    def is_deleting(self, key: bytes) -> bool:
        """Whether the open transaction has deleted a page, and has not put it again."""
        return self.journal is not None and key in self.journal.deleted

    def forget(self, key: bytes, *, is_deleted: bool) -> list[Taken]:
        """Take a page, and what depends on it, out of the index; what was taken, children before their parents."""
        lost_pages = self.index.remove(key, is_deleted=is_deleted)
        self.contested -= {lost.key for lost in lost_pages}
        self._ram.drop(lost.key for lost in lost_pages)
        return [
            Taken(lost, self.pending.pop(lost.key, None), self.deferred.uses.pop(lost.key, 0)) for lost in lost_pages
        ]

    def delete(self, key: bytes, namespace: bytes | None) -> list[Taken]:
        """Take a page that the open transaction deletes out of the index; returns what was taken."""
        taken = self.forget(key, is_deleted=True)
        self._count_outdated(taken, Outdated.DELETED)
        self.note_deleted(key, taken[-1].page.namespace if taken else namespace)
        self.undo(partial(self.put_back, taken))
        return taken

    def note_deleted(self, key: bytes, namespace: bytes | None) -> None:
        """Record that the open transaction deletes a page, whatever happens to its place in the index."""
        if self.journal is not None:
            self.journal.deleted.add(key)
            if namespace is not None:
                self.journal.deleted_from.add(namespace)

    def put(self, page: Page, entry: Entry) -> None:
        """Record that the open transaction has put a page, or found it stored."""
        assert isinstance(entry.record, Record)
        self.contested.discard(page.key)
        before = page.stored_bytes, page.pinned, page.priority, page.expires, page.announced_expiry
        self.undo(partial(self.take_back, page, before, is_stored=page.is_stored))
        self._take_over(page, Page.stored(page.key, entry.record, entry.usage))
        self.expects_expiry = self.expects_expiry or page.expires > 0
        if self.journal is not None:
            self.journal.deleted.discard(page.key)

    def set_expiry(self, page: Page, expires: int) -> None:
        """Set when a page expires, 0 for never."""
        page.expires = page.announced_expiry = expires

    def set_pinned(self, page: Page, *, pinned: bool) -> None:
        """Record that a page is pinned now, or no longer."""
        page.pinned = pinned

    def put_back(self, taken: Sequence[Taken]) -> None:
        """Put stored pages back into the index, because they are not deleted after all."""
        for page, new, n_uses in reversed(taken):
            if self.journal is not None:
                self.journal.deleted.discard(page.key)
            here = self.index.get(page.key)
            if not page.is_stored:
                continue
            if here is not None:
                # captured again meanwhile
                self._take_over(here, page)
                continue
            page.forget_dependents()
            if self.index.add(page):
                if new is not None and new.buffer is None:
                    # imported by the transaction that fails
                    self.pending[page.key] = new
                if n_uses:
                    self.deferred.uses[page.key] = self.deferred.uses.get(page.key, 0) + n_uses

    def lose(self, key: bytes) -> None:
        """Forget a stored page that is gone or damaged, and count the pending pages that depended on it."""
        page = self.index.get(key)
        taken = self.forget(key, is_deleted=page is not None and not page.is_stored)
        if lost := sum(1 for one in taken if one.new is not None):
            self._counters.count(f"dropped:{DropReason.ORPHAN.value}", lost)

    def time_of_use(self) -> int:
        """The time of a use: nanoseconds since the epoch, and later than every other."""
        self.latest = max(self.latest + 1, time.time_ns())
        return self.latest
