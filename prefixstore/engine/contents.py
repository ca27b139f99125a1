"""What a location contains, as far as this process knows, and the pages that are still to be written.

Used by the catalog, under its lock: nothing here takes a lock, or asks the backend.

In the index are the pages that lookups find: stored ones, and pending ones, whose bytes wait in a buffer. Strays are
stored pages that have no place in the index. What the open transaction changes is noted in its journal, so that a
failure takes back exactly that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from prefixstore.engine.eviction import Candidates
from prefixstore.engine.index import Index, Page, is_same
from prefixstore.engine.journal import Journal
from prefixstore.engine.pending import Deferred, PendingPage
from prefixstore.engine.policy import Policy
from prefixstore.engine.ram import RamTier
from prefixstore.engine.strays import Strays
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.record import Record, Usage, time_of_use
from prefixstore.stats import Counters

__all__ = ["Contents", "DropReason", "Taken"]

log = logging.getLogger("prefixstore")


class DropReason(str, Enum):
    """Why a captured page is not stored: the names in ``Stats.dropped``."""

    BUDGET = "budget"
    QUOTA = "quota"
    FULL = "full"
    ORPHAN = "orphan"
    UNAVAILABLE = "unavailable"
    ERROR = "error"
    ADMISSION = "admission"


class Taken(NamedTuple):
    """A page that was taken out of the index, and what else it takes to put it back."""

    page: Page
    new: PendingPage | None
    n_uses: int


class Contents:
    """The index, the pages that wait for a commit, and the stored pages without a place.

    Parameters
    ----------
    policy
        The order of eviction.
    counters
        Counts what is dropped.
    ram
        Is told which pages have left the location.

    Attributes
    ----------
    index
        The pages that lookups find.
    candidates
        Those of them that may be deleted.
    strays
        Stored pages that have no place in the index.
    pending
        Pages that wait for a commit, by key.
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
    latest
        Time of the last use of any page: what is used later is newer, even if the clock was set back meanwhile.
    """

    def __init__(self, policy: Policy, counters: Counters, ram: RamTier) -> None:
        self._policy = policy
        self._counters = counters
        self._ram = ram
        self.start()
        self.pending: dict[bytes, PendingPage] = {}
        self.writing: set[bytes] = set()
        self.uncommitted: set[bytes] = set()
        self.deferred = Deferred()
        self.journal: Journal | None = None
        self.latest = 0

    def start(self) -> None:
        """Begin with an empty index and no strays."""
        self.index = Index()
        self.candidates = Candidates(self.index.table, self._policy)
        self.strays = Strays()
        # keys of what has come into, or left, the index or the strays: strays there may have a place now
        self._moved: set[bytes] = set()
        self.sweeps = True

    def add(self, page: Page) -> bool:
        """Add a page to the index; see `Index.add`."""
        is_added = self.index.add(page)
        if is_added:
            self.moved(page.key)
        return is_added

    def add_stray(self, page: Page) -> None:
        """A stored page has no place in the index."""
        self.strays.add(page)
        self.moved(page.key)

    def moved(self, key: bytes) -> None:
        """A page has come, has gone, or is not taken for damaged any more: strays may have a place in the index now."""
        if self.strays.get(key) is not None or self.strays.follow(key):
            self._moved.add(key)

    def refresh_page(self, key: bytes, record: Record | StorageError | None, usage: Usage | None) -> None:
        """Follow a change of one page: what is stored of it now, or why that cannot be read, or None."""
        self.strays.remove_unreadable(key)
        if isinstance(record, Record) and usage is not None:
            is_known = self.know(key, record, usage)
            if not is_known and record.parent not in self.strays and key not in self.index:
                self.deferred.damaged.add(key)
            return
        self.remove_stray(key)
        if record is not None:
            log.warning("a page cannot be read: %s", record)
            self.strays.add_unreadable(key, is_newer=not isinstance(record, CorruptError))
        if isinstance(record, CorruptError):
            self.deferred.damaged.add(key)
        page = self.index.get(key)
        if page is not None:
            self.index.change(page, is_stored=False)
        if key not in self.pending:
            self.lose(key)

    def rebuild(self, found: Mapping[bytes, tuple[Record | StorageError, Usage]]) -> None:
        """Begin anew with all that is stored, and with the pending pages."""
        stored: dict[bytes, tuple[Record, Usage]] = {}
        corrupt: set[bytes] = set()
        newer: set[bytes] = set()
        for key, (record, usage) in found.items():
            if isinstance(record, Record):
                stored[key] = record, usage
            elif isinstance(record, (CorruptError, IncompatibleError)):
                (newer if isinstance(record, IncompatibleError) else corrupt).add(key)
            else:
                raise record
        self.start()
        self.strays.corrupt, self.strays.newer = corrupt, newer
        self.deferred.damaged |= corrupt
        # parents first; a page that is both pending and stored is the pending node
        places = [(new.page.start, 0, key) for key, new in self.pending.items()]
        places += [(record.start, 1, key) for key, (record, _) in stored.items()]
        with self.index.adding_many():
            for _, is_stored, key in sorted(places):
                if is_stored:
                    record, usage = stored[key]
                    parent, _ = found.get(record.parent, (None, None))
                    is_known = self.know(key, record, usage)
                    if not is_known and not isinstance(parent, StorageError) and not record.follows(parent):
                        self.deferred.damaged.add(key)
                elif key in self.pending:
                    # a node of the old index: its children are added again, if they are still there
                    page = self.pending[key].page
                    page.drop_children()
                    page.is_stored = page.may_be_victim = False
                    if not self.add(page):
                        self.drop(key, DropReason.ORPHAN)

    def know(self, key: bytes, record: Record, usage: Usage) -> bool:
        """Note a stored page; whether it has its place in the index."""
        now = time.time_ns()
        last_used = time_of_use(usage.last_used, now)
        self.latest = max(self.latest, last_used)
        stored = Page.stored(key, record, usage)
        stored.last_used = last_used or now
        self.remove_stray(key)
        if self.strays.get(record.parent) is not None:
            # what it was computed after has no place in the index, even if a pending page has that key
            self.add_stray(stored)
            return False
        page = self.index.get(key)
        if page is not None and not (is_same(page, record) and page.start == record.start):
            log.warning("two different pages have the key %s", key.hex())
            if key in self.pending:
                # the stored one is deleted when the pending one is written
                self.index.change(page, is_stored=False)
                self.add_stray(stored)
                return False
            # another process has replaced it
            self.lose(key)
            self.remove_stray(key)
            page = None
        if page is not None:
            self.used_elsewhere(page, last_used)
            self._take_over(page, stored)
        elif self.add(stored):
            self._policy.found(self.index.table, self.index.table.find(key), stored)
            self.candidates.add(stored.key)
        else:
            self.add_stray(stored)
            return False
        return True

    def place_again(self) -> None:
        """Put stored pages into the index that had no place, as far as they have one now.

        Looks only at those whose parent, or whose key, something has happened to since.
        """
        while self._moved:
            key = self._moved.pop()
            try:
                here = self.strays.get(key)
                for page in (*([here] if here is not None else []), *self.strays.after(key)):
                    # what follows one that is placed has its turn later
                    self._place(page)
            except BaseException:
                self._moved.add(key)
                raise

    def _place(self, page: Page) -> None:
        here = self.index.get(page.key)
        if self.strays.get(page.parent) is not None or (here is not None and not is_same(here, page)):
            return  # it follows, or is, another page than the one in the index
        if here is not None:
            # captured again meanwhile
            self._take_over(here, page)
            self.remove_stray(page.key)
        elif page.key not in self.deferred.damaged:
            page.may_be_victim = True
            page.drop_children()
            if self.add(page):
                self.remove_stray(page.key)
                self.candidates.add(page.key)

    def _take_over(self, here: Page, stored: Page) -> None:
        """A page that is in the index is stored: what is stored of it holds."""
        here.announced_expiry = stored.announced_expiry
        self.index.change(
            here,
            stored_bytes=stored.stored_bytes,
            codec=stored.codec,
            priority=stored.priority,
            pinned=stored.pinned,
            expires=_later(here.expires, stored.expires),
            is_stored=True,
            may_be_victim=here.key not in self.pending,
        )
        self.candidates.add(here.key)

    def used_elsewhere(self, page: Page, last_used: int) -> None:
        """Another process used a page, at this time."""
        if last_used > page.last_used:
            page.last_used = last_used
            slot = self.index.table.use(page.key, last_used)
            if slot >= 0:
                self._policy.used_elsewhere(self.index.table, slot)

    def remove_stray(self, key: bytes) -> Page | None:
        """A stored page has a place in the index now, or is gone; the page."""
        page = self.strays.remove(key)
        if page is not None:
            self.moved(key)
        parent = self.index.get(page.parent) if page is not None else None
        if parent is not None:
            # it may be a leaf now
            self.candidates.add(parent.key)
        return page

    def is_pending(self, new: PendingPage) -> bool:
        """Whether a page still waits: not superseded, dropped, or cleared and captured again."""
        return self.pending.get(new.page.key) is new

    def may_be_stored(self, page: Page) -> bool:
        """Whether a page is stored, or is being written."""
        return page.is_stored or page.key in self.writing

    def may_be_deleted(self, page: Page) -> bool:
        """Whether nothing that is stored depends on a page, in the index or not."""
        return page.is_leaf and not self.strays.follow(page.key)

    def take_back(self, page: Page, stored_bytes: int, is_stored: bool, may_be_victim: bool) -> None:
        """A page was not put after all."""
        self.uncommitted.discard(page.key)
        # one that another process has stored may have been given up here meanwhile
        may_be_victim = may_be_victim or (is_stored and page.key not in self.pending)
        self.index.change(page, stored_bytes=stored_bytes, is_stored=is_stored, may_be_victim=may_be_victim)
        if may_be_victim and self.index.get(page.key) is page:
            self.candidates.add(page.key)
        if not is_stored and self.strays.get(page.key) is page:
            # given up while it was written
            self.remove_stray(page.key)

    def undo(self, step: Callable[[], None]) -> None:
        """If a transaction is open and fails, call this."""
        if self.journal is not None:
            self.journal.undo(step)

    def note_deleted_from(self, namespace: bytes) -> None:
        """The open transaction deletes a page of this namespace."""
        if self.journal is not None:
            self.journal.deleted_from.add(namespace)

    def forget(self, key: bytes) -> list[Taken]:
        """Take a page, and what depends on it, out of the index; what was taken, children before their parents."""
        page = self.index.get(key)
        lost_pages = self.index.remove(key)
        self._ram.drop(lost.key for lost in lost_pages)
        for lost in lost_pages:
            self.moved(lost.key)
        taken = [
            Taken(lost, self.pending.pop(lost.key, None), self.deferred.uses.pop(lost.key, 0)) for lost in lost_pages
        ]
        parent = self.index.get(page.parent) if page is not None else None
        if parent is not None:
            self.candidates.add(parent.key)
        for namespace in {lost.namespace for lost in lost_pages}:
            salt = self.index.totals.salt_of(namespace)
            if self.index.totals.forget_if_empty(namespace):
                self.candidates.forget(namespace)
                if salt is not None:
                    self.candidates.forget(salt)
        return taken

    def delete(self, key: bytes) -> list[Taken]:
        """The open transaction deletes a page: take it out of the index; what was taken."""
        taken = self.forget(key)
        for one in taken:
            self.note_deleted_from(one.page.namespace)
        self.undo(partial(self.put_back, taken))
        self._leave_as_strays(one for one in taken if one.page.key != key)
        return taken

    def put_back(self, taken: Sequence[Taken]) -> None:
        """Put stored pages back into the index, because they are not deleted after all."""
        for page, new, n_uses in reversed(taken):
            self.remove_stray(page.key)
            here = self.index.get(page.key)
            if not page.is_stored:
                continue
            if here is not None:
                # captured again meanwhile
                self._take_over(here, page)
                continue
            is_imported = new is not None and page.may_be_victim
            page.may_be_victim = True
            page.drop_children()
            if not self.add(page):
                self.add_stray(page)
                continue
            if new is not None and is_imported:
                self.pending[page.key] = new
            if n_uses:
                self.deferred.uses[page.key] = self.deferred.uses.get(page.key, 0) + n_uses
            self.candidates.add(page.key)

    def _leave_as_strays(self, taken: Iterable[Taken]) -> None:
        """Remember pages that are not in the index any more, but still stored.

        Where another page is stored under the key of one that was given up, that one takes its place.
        """
        are_other = False
        for one in taken:
            if one.page.is_stored:
                self.add_stray(one.page)
            else:
                are_other = are_other or self.strays.get(one.page.key) is not None
        if are_other:
            self.place_again()

    def drop(self, key: bytes, reason: DropReason) -> None:
        """Give a pending page up, with the pending pages that depend on it, and count them.

        One that another process has stored meanwhile stays in the index.
        """
        page = self.index.get(key)
        if page is not None and page.is_stored and key not in self.uncommitted:
            self.keep_as_stored(page)
            return
        lost = 1 if self.pending.pop(key, None) is not None else 0
        taken = self.forget(key)
        self._leave_as_strays(taken)
        lost += sum(1 for one in taken if one.new is not None)
        if lost:
            self._counters.count(f"dropped:{reason.value}", lost)

    def keep_as_stored(self, page: Page) -> None:
        """A page that another process has stored is not pending here any more."""
        self.pending.pop(page.key, None)
        self.index.change(page, may_be_victim=True)
        self.candidates.add(page.key)

    def lose(self, key: bytes) -> None:
        """A stored page is gone or damaged: forget it, and count the pending pages that depended on it."""
        taken = self.forget(key)
        self._leave_as_strays(taken)
        if lost := sum(1 for one in taken if one.new is not None):
            self._counters.count(f"dropped:{DropReason.ORPHAN.value}", lost)

    def time_of_use(self) -> int:
        """The time of a use: nanoseconds since the epoch, and later than every other."""
        self.latest = max(self.latest + 1, time.time_ns())
        return self.latest


def _later(known: int, stored: int) -> int:
    """When a stored page expires: an expiry that is to be written with the next uses is later than the stored one."""
    return max(known, stored) if known and stored else stored
