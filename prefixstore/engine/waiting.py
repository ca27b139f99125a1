"""What this process has that is not in the location yet: captured pages, and uses and deletions to be written."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.index import Page, is_same, later
from prefixstore.engine.located import Prompt, Waiting
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import Damage, Deferred, PendingPage
from prefixstore.engine.ram import RamTier
from prefixstore.engine.trie import Entry
from prefixstore.errors import CorruptError
from prefixstore.format.keys import PAGE, SNAPSHOT
from prefixstore.format.record import CLOCK_SLACK, Record
from prefixstore.stats import Counters

__all__ = ["DropReason", "Outdated", "Placement", "WaitingPages"]

log = logging.getLogger("prefixstore")


class DropReason(str, Enum):
    """Why a commit does not store a captured page: the name in ``Stats.dropped``."""

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


class Placement(Enum):
    """The outcome of announcing a page."""

    ADDED = "added"
    KNOWN = "known"
    """It is here already, or a longer page that covers it does."""
    REFUSED = "refused"
    """Another page has its key."""


class WaitingPages:
    """Pages that wait for a commit, and what is written with them. The lock is never held while a location is asked.

    Parameters
    ----------
    counters
        Counts what is dropped.
    ram
        Drops pages that were deleted from the location.
    """

    def __init__(self, counters: Counters, ram: RamTier) -> None:
        self._counters = counters
        self._ram = ram
        self._lock = threading.RLock()
        self._pending: dict[bytes, PendingPage] = {}
        # by what they follow, and key
        self._after: dict[bytes, dict[bytes, PendingPage]] = {}
        self._deferred = Deferred()
        # Time of the last use of any page: what is used later is newer, even if the clock was set back meanwhile.
        self._latest = 0
        self._started = time.time_ns()
        # whether pages that are found are those of the far one of two locations
        self.is_far = False

    def time_of_use(self) -> int:
        """The time of a use: nanoseconds since the epoch, and later than every other."""
        self._latest = max(self._latest + 1, time.time_ns())
        return self._latest

    # -- for lookups --------------------------------------------------------------------------------------------------

    def along(self, prompt: Prompt) -> Waiting:
        """What waits along a prompt."""
        with self._lock:
            damaged = {key: one.created for key, one in self._deferred.damaged.items()}
            if not self._pending:
                return Waiting({}, {}, damaged)
            pages = {key: self._pending[key].page for key in prompt.keys if key in self._pending}
            parents = [key for key in (prompt.namespace, *prompt.keys) if key in self._after]
            after = {key: [new.page for new in self._after[key].values()] for key in parents}
            return Waiting(pages, after, damaged)

    def nodes(self, entries: Sequence[Entry]) -> list[Page]:
        """Stored pages, with the uses that are still to be written."""
        found: list[Page] = []
        with self._lock:
            uses, newest, latest = self._deferred.uses, time.time_ns() + CLOCK_SLACK, self._latest
            for key, record, usage in entries:
                assert isinstance(record, Record)
                page = Page.stored(key, record, usage)
                if page.last_used > newest:
                    # not believable: no use of it was seen by this process
                    page.last_used = self._started
                elif page.last_used > latest:
                    latest = page.last_used
                if page.expires and key in self._pending:
                    # it was captured again, and lasts as long as that
                    page.expires = later(page.expires, self._pending[key].page.expires)
                if key in uses:
                    uses[key].apply(page)
                found.append(page)
            self._latest = latest
        if self.is_far:
            for page in found:
                page.is_far = True
        return found

    def unreadable(self, entry: Entry) -> None:
        """A stored page cannot be read: if it is damaged, it is deleted with the next commit."""
        key, record, _ = entry
        if isinstance(record, (Record, CorruptError)):
            with self._lock:
                self._deferred.damaged[key] = Damage(record.created if isinstance(record, Record) else 0)
        why = "it does not start where its parent ends" if isinstance(record, Record) else record
        log.warning("a page cannot be read: %s", why)

    # -- pending pages ------------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> Page | None:
        """The page with this key, if it waits."""
        with self._lock:
            new = self._pending.get(key)
            return new.page if new is not None else None

    def pending_after(self, parent: bytes) -> list[Page]:
        """The pages and snapshots that wait, and follow this page or namespace."""
        with self._lock:
            return [new.page for new in self._after.get(parent, {}).values()]

    def announce(self, new: PendingPage) -> Placement:
        """Have a captured page matched from now on. Nothing changes unless it is `ADDED`."""
        page = new.page
        with self._lock:
            known = self._pending.get(page.key)
            if known is not None:
                return Placement.KNOWN if is_same(known.page, page) else Placement.REFUSED
            if page.form == PAGE and any(
                other.form == PAGE and other.tokens.startswith(page.tokens) for other in self.pending_after(page.parent)
            ):
                return Placement.KNOWN
            if new.buffer is not None:
                # importing a page is not a use of it
                page.last_used = self.time_of_use()
            self._deferred.expired = self._deferred.expired or page.expires > 0
            self._pending[page.key] = new
            beside = self._after.setdefault(page.parent, {})
            beside[page.key] = new
            for older in list(beside.values()) if page.form == PAGE else ():
                # not written yet, and not needed any more; a stored one is deleted when the new page is written
                tail = older.page
                is_tail = tail.form == PAGE and tail is not page and page.tokens.startswith(tail.tokens)
                if is_tail and not older.is_writing and tail.key not in self._after:
                    self._count_outdated(self._forget(tail.key), Outdated.SUPERSEDED)
            return Placement.ADDED

    def hold(self, pages: Sequence[Page]) -> dict[bytes, PooledBuffer]:
        """Hold the buffers of those of these pages that are pending; the caller releases them."""
        with self._lock:
            pending = [(page, self._pending[page.key]) for page in pages if page.key in self._pending]
            buffers = {page.key: new.buffer for page, new in pending if is_same(new.page, page)}
            return {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.hold()}

    def _forget(self, key: bytes) -> list[PendingPage]:
        """Take a pending page, and what waits after it, out; what was taken."""
        taken: list[PendingPage] = []
        waiting = [key]
        while waiting:
            here = waiting.pop()
            waiting += self._after.get(here, ())
            if here in self._pending:
                taken.append(self._take_out(here))
        return taken

    def _take_out(self, key: bytes) -> PendingPage:
        new = self._pending.pop(key)
        beside = self._after[new.page.parent]
        del beside[key]
        if not beside:
            del self._after[new.page.parent]
        return new

    def _count_outdated(self, taken: Iterable[PendingPage], reason: Outdated) -> None:
        # imported pages were not captured
        if lost := sum(1 for new in taken if new.buffer is not None):
            self._counters.count(f"outdated:{reason.value}", lost)

    def give_up(self, key: bytes, reason: Outdated) -> None:
        """Give up a pending page that is no longer needed, with what depends on it, and count them as outdated."""
        with self._lock:
            self._count_outdated(self._forget(key), reason)

    def drop(self, batch: Iterable[PendingPage], reason: DropReason | None = None) -> None:
        """Give these pages up, those that are still pending, with what depends on them; without a reason uncounted."""
        with self._lock:
            for new in batch:
                lost = len(self._forget(new.page.key)) if self.is_pending(new) else 0
                if lost and reason is not None:
                    self._counters.count(f"dropped:{reason.value}", lost)

    def is_pending(self, new: PendingPage) -> bool:
        """Whether a page still waits: not superseded, dropped, or cleared and captured again."""
        return self._pending.get(new.page.key) is new

    def claim(self, new: PendingPage, *, is_covered: bool) -> bool:
        """Mark a page as being written; whether it is to be: it still waits, and no longer page is stored."""
        with self._lock:
            if not self.is_pending(new):
                return False
            if is_covered and new.page.key not in self._after:
                self.give_up(new.page.key, Outdated.SUPERSEDED)
                return False
            new.is_writing = True
            return True

    def committed(self, written: Sequence[PendingPage], deferred: Deferred) -> None:
        """Keep the states of these pages in RAM; record that they are stored now, and the deferred changes made."""
        for new in written:
            # while their buffers are still here
            if new.buffer is not None:
                self._ram.keep(new.page, new.buffer.view)
        with self._lock:
            for new in written:
                if self.is_pending(new):
                    self._take_out(new.page.key)
            self._deferred.subtract(deferred)

    @property
    def pending_counts(self) -> tuple[int, int]:
        """How many captured pages, and how many snapshots, wait for a commit."""
        with self._lock:
            forms = [new.page.form for new in self._pending.values() if new.buffer is not None]
        n_snapshots = forms.count(SNAPSHOT)
        return len(forms) - n_snapshots, n_snapshots

    @property
    def has_pending(self) -> bool:
        """Whether pages wait for a commit."""
        return bool(self._pending)

    # -- other changes ------------------------------------------------------------------------------------------------

    @property
    def has_deferred(self) -> bool:
        """Whether uses, or pages to be deleted, wait for the next commit."""
        return bool(self._deferred)

    def deferred(self, batch: Collection[bytes] = ()) -> Deferred:
        """The deferred changes, to be made with these pages. Uses of others that wait are written with those."""
        with self._lock:
            deferred = self._deferred.copy()
            for key in deferred.uses.keys() & self._pending.keys() - set(batch):
                del deferred.uses[key]
            return deferred

    def expired(self) -> None:
        """A lookup has found an expired page, which is to be deleted."""
        self._deferred.expired = True

    # -- transactions -------------------------------------------------------------------------------------------------

    @contextmanager
    def update(self, backend: Pages) -> Iterator[Transaction]:
        """A transaction. When it is committed, what it has deleted is dropped from RAM and counted."""
        with backend.update() as transaction:
            yield transaction
        self._ram.drop(transaction.deleted)
        self._counters.count("frees", len(transaction.deleted))
        for step in transaction.after_commit:
            step()
