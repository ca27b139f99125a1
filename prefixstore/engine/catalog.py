"""What is stored, as far as this process knows, and the pages that are still to be written."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from prefixstore.backends.base import Backend, Transaction, View
from prefixstore.buffers import PooledBuffer
from prefixstore.engine.eviction import Candidates, Policy
from prefixstore.engine.index import Index, Page, Path
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.keys import Tokens, page_key
from prefixstore.format.record import PAGE, Record, Usage
from prefixstore.stats import Counters

__all__ = ["Catalog", "Fits", "NewPage"]


@dataclass(slots=True, eq=False)
class NewPage:
    """A page that is not committed yet: a node of the index, and the buffer with its state."""

    page: Page
    settings: bytes
    buffer: PooledBuffer

    @classmethod
    def of(
        cls,
        namespace: bytes,
        settings: bytes,
        parent: bytes,
        start: int,
        tokens: bytes,
        buffer: PooledBuffer,
        compute_us: int = 0,
        form: int = PAGE,
    ) -> NewPage:
        """The page with these token bytes behind `parent`, in a namespace with these canonical settings."""
        now = time.time_ns()
        key = page_key(parent, tokens, form)
        page = Page(key, parent, namespace, start, tokens, len(buffer.view), 0, compute_us, now, now, form=form)
        return cls(page, settings, buffer)


log = logging.getLogger("prefixstore")

Fits: TypeAlias = Callable[[memoryview, int, int], bool]
"""Whether a state is one of the page that begins at a position and has so many tokens."""


class Catalog:
    """The index and what it does not show: generation, pending pages, uses to be noted, damaged pages to be deleted."""

    def __init__(self, policy: Policy, counters: Counters) -> None:
        self._policy = policy
        self._counters = counters
        self.after_fork()

    def after_fork(self) -> None:
        """Know nothing: in a forked child the parent writes what is pending, and the rest comes from the backend."""
        self.lock = threading.RLock()
        self._start_index()
        self.pending: dict[bytes, NewPage] = {}
        # of the pending pages those that are in a transaction, or were until just now: they may be stored already
        self.writing: set[bytes] = set()
        # of the pending pages those that another process has stored meanwhile
        self._twins: set[bytes] = set()
        self.touched: dict[bytes, int] = {}
        self.damaged: set[bytes] = set()
        # of pages whose states are what was written: whether one is of use at all
        self.fits: dict[bytes, Fits] = {}
        self.thinned: set[bytes] = set()
        self.refused: set[bytes] = set()
        self._generation = -1
        self._trusted = False
        # of the last use of any page: what is used later is newer, even if the clock was set back meanwhile
        self._latest = 0
        # a lookup has met a page that has expired
        self.overdue = False

    def _start_index(self) -> None:
        self.index = Index()
        self.candidates = Candidates(self.index, self._policy, lambda page: page.key not in self.pending)

    # -- keeping up with the backend ----------------------------------------------------------------------------------

    def refresh(self, view: View, *, newest: bool = False) -> int:
        """Bring the index to the generation of the view, unless it is ahead of it.

        The backend is asked without the lock. As every transaction begins with this, what it changes in the index is
        never undone by what somebody has read before.

        Parameters
        ----------
        view
            Of the backend.
        newest
            Whether nothing newer can be stored. Then an index that is ahead of it is of a store that is not there any
            more: another one, or an older copy, was put in its place.

        Returns
        -------
        int
            How many records were read.
        """
        generation = view.generation
        n_records = 0
        while True:
            with self.lock:
                if newest and generation < self._generation:
                    self._generation, self._trusted = -1, False
                known = self._generation if self._trusted else None
                if generation < self._generation or generation == known:
                    # a view that was opened before the last refresh tells nothing new
                    return n_records
            changed = view.changes(known) if known is not None else None
            found: Mapping[bytes, tuple[Record | StorageError, Usage]]
            if changed is None:
                found = {key: (record, usage) for key, record, usage in view.scan()}
            else:
                found = view.records(changed)
            n_records += len(found)
            with self.lock:
                if generation < self._generation or (generation == self._generation and self._trusted):
                    return n_records  # somebody was quicker
                if changed is not None and not self._trusted:
                    continue  # somebody has failed meanwhile: changes are not enough any more
                if changed is None:
                    self._rebuild(found)
                else:
                    for key in changed:
                        self._refresh_page(key, *found.get(key, (None, None)))
                self.refused.clear()
                self._generation, self._trusted = generation, True
                return n_records

    # -- all from here on under the lock, but for `transaction` -------------------------------------------------------

    def contradict(self, key: bytes, generation: int) -> None:
        """A page is not in a view of this generation. If the index should know, it is of another store."""
        with self.lock:
            if key in self.index and key not in self.pending and generation <= self._generation:
                log.warning("the index does not fit what is stored; it is made anew")
                self._generation, self._trusted = -1, False

    def distrust(self) -> None:
        """The index may know less than is stored: rebuild it at the next refresh."""
        self._trusted = False

    @contextmanager
    def transaction(self, backend: Backend) -> Iterator[Transaction]:
        """A transaction, for which the index is up to date. If it fails, the index is not to be trusted."""
        try:
            with backend.update() as transaction:
                self.refresh(transaction, newest=True)
                yield transaction
        except BaseException:
            with self.lock:
                self.distrust()
            raise

    def _refresh_page(self, key: bytes, record: Record | StorageError | None, usage: Usage | None) -> None:
        if isinstance(record, Record) and usage is not None:
            self._know(key, record, usage)
            return
        if record is not None:
            log.warning("a page cannot be read: %s", record)
        if isinstance(record, CorruptError):
            self.damaged.add(key)
        self._twins.discard(key)
        if key not in self.pending:
            self.lose(key)

    def _rebuild(self, found: Mapping[bytes, tuple[Record | StorageError, Usage]]) -> None:
        stored: dict[bytes, tuple[Record, Usage]] = {}
        for key, (record, usage) in found.items():
            if isinstance(record, Record):
                stored[key] = record, usage
            elif isinstance(record, CorruptError):
                self.damaged.add(key)
            elif not isinstance(record, IncompatibleError):
                raise record
        self._start_index()
        self._twins.clear()
        # parents first; a page that is both pending and stored is the pending node
        places = [(new.page.start, 0, key) for key, new in self.pending.items()]
        places += [(record.start, 1, key) for key, (record, _) in stored.items()]
        for _, is_stored, key in sorted(places):
            if is_stored:
                record, usage = stored[key]
                before, _ = found.get(record.parent, (None, None))
                is_known = self._know(key, record, usage)
                if not is_known and not isinstance(before, StorageError) and not record.follows(before):
                    self.damaged.add(key)
            else:
                # a node of the old index: what hung on it is added anew, if it is still there
                page = self.pending[key].page
                page.cut_off()
                if not self.index.add(page):
                    self.drop(key, "orphan")

    def _know(self, key: bytes, record: Record, usage: Usage) -> bool:
        """Note a stored page; whether it has its place in the index."""
        self._latest = max(self._latest, usage.last_used)
        page = self.index.get(key)
        if page is not None:
            self.index.resize(page, record.stored_bytes)
            page.last_used = max(page.last_used, usage.last_used)
            page.pinned, page.priority, page.expires = usage.pinned, usage.priority, usage.expires
        else:
            page = Page.stored(key, record, usage)
            if not self.index.add(page):
                return False
        if key not in self.pending:
            self.candidates.offer(page)
        else:
            self._twins.add(key)
        return True

    # -- pages come and go; all under the lock ------------------------------------------------------------------------

    def wants(self, page: Page) -> bool:
        """Whether a page is worth taking: not here, not covered by a sibling, not refused, and its parent is here."""
        known = page.key in self.index or page.key in self.refused or self.index.covers(page)
        return not known and self.index.has_parent_of(page)

    def is_pending(self, new: NewPage) -> bool:
        """Whether this very page still waits: it was not superseded, dropped, or cleared and captured anew."""
        return self.pending.get(new.page.key) is new

    def announce(self, new: NewPage) -> bool:
        """Put a pending page into the index; False, and nothing happens, if it is not wanted."""
        if not self.wants(new.page):
            return False
        new.page.last_used = self._now()
        if not self.index.add(new.page):
            return False
        self.pending[new.page.key] = new
        self._policy.added(new.page)
        older = self.index.superseded_by(new.page)
        may_be_stored = older is not None and older.key in (self.writing | self._twins)
        if older is not None and older.is_leaf and older.key in self.pending and not may_be_stored:
            # not written yet, and not needed any more; what is written is deleted when the new page is
            self.forget(older.key)
        return True

    def thin(self, page: Page) -> None:
        """A snapshot is not needed any more: if it is stored, have it deleted with the next batch.

        Until then it stays in the index, or what it depends on would seem to be free to go.
        """
        if page.key not in self.pending or page.key in self.writing:
            self.thinned.add(page.key)
        else:
            self.forget(page.key)

    def committed(self, news: Iterable[NewPage]) -> None:
        """These pages are in the backend now."""
        for new in news:
            if self.is_pending(new):
                del self.pending[new.page.key]
                self._twins.discard(new.page.key)
                self.candidates.offer(new.page)

    def forget(self, key: bytes) -> list[Page]:
        """Take a page, and what depends on it, out of the index; they are returned, deepest first."""
        page = self.index.get(key)
        gone = self.index.remove(key)
        for lost in gone:
            self.pending.pop(lost.key, None)
            self.touched.pop(lost.key, None)
            if lost.key in self._twins:
                # it is stored all the same, and what it follows is no leaf
                self._twins.discard(lost.key)
                self.distrust()
        parent = self.index.get(page.parent) if page is not None else None
        if parent is not None and parent.is_leaf and parent.key not in self.pending:
            self.candidates.offer(parent)
        return gone

    def drop(self, key: bytes, reason: str) -> None:
        """Give a pending page up, with what is pending behind it, and count them."""
        pending = len(self.pending)
        self.pending.pop(key, None)
        self.forget(key)
        if lost := pending - len(self.pending):
            self._counters.count(f"dropped:{reason}", lost)

    def lose(self, key: bytes) -> None:
        """A stored page is gone: forget it, and count what was pending behind it."""
        self.drop(key, "orphan")

    def damage(self, key: bytes) -> None:
        """A page is damaged: forget it and what depends on it, and have them deleted with the next batch."""
        self.damaged.add(key)
        self.lose(key)

    def condemn(self, key: bytes, fits: Fits) -> None:
        """A page is what was written, but no state: as `damage`, for what the writer finds does not fit either."""
        self.fits[key] = fits
        self.damage(key)

    def touch(self, namespace: bytes, pages: Sequence[Page], expires: int) -> None:
        """Note that a prompt began with these pages; it is written with the next batch.

        Those that will expire do so not before `expires`.
        """
        now = self._now()
        self._policy.looked_up(namespace, pages)
        for page in pages:
            page.last_used = max(page.last_used, now)
            page.expires = max(page.expires, expires) if page.expires else 0
            page.hits += 1
            self.touched[page.key] = self.touched.get(page.key, 0) + 1

    def _now(self) -> int:
        """The time of a use: nanoseconds since the epoch, and never before another."""
        self._latest = max(self._latest, time.time_ns())
        return self._latest

    # -- who goes first; all under the lock ---------------------------------------------------------------------------

    def evict(self, page: Page) -> None:
        """A page is deleted for want of room."""
        self._policy.evicted(page)
        self.forget(page.key)

    def unexpired(self, path: Path) -> Path:
        """A path up to the last page that has not expired, or has such a page behind it."""
        pages, now = list(path.pages), time.time_ns()
        while pages and _has_expired(pages[-1], now):
            del pages[-1]
        if len(pages) == len(path.pages):
            return path
        self.overdue = True
        return Path(tuple(pages), pages[-1].end if pages else 0)

    def deepest(self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int) -> Path:
        """The path to the deepest snapshot of `tokens` that may be used."""
        now = time.time_ns()
        for path in self.index.standing(namespace, tokens[:limit], page_tokens):
            if _has_expired(path.pages[-1], now):
                self.overdue = True
            elif path.n_tokens % multiple_of == 0:
                return path
        return Path((), 0)


def _has_expired(page: Page, now: int) -> bool:
    """Whether a page and all pages behind it have expired."""
    return 0 < page.expires <= now and not page.pinned and all(_has_expired(other, now) for other in page.dependents)
