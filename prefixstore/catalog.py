"""What is stored, as far as this process knows: the index, kept up with the backend, and the pages still to be written.

Two kinds of pages are in the index: committed ones, and pending ones, whose bytes wait in a buffer to be written. Both
are found and restored alike. A thread that holds a transaction of the backend may take the catalog's lock, not the
other way round; the lock is held for moments only, never while bytes are copied, packed or written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from prefixstore.backends.base import Snapshot
from prefixstore.boundaries import boundary_hash
from prefixstore.buffers import Lease
from prefixstore.codec import Record, Usage
from prefixstore.errors import StorageError
from prefixstore.eviction import Policy, VictimQueue
from prefixstore.index import Index, Page
from prefixstore.stats import Counters

__all__ = ["Catalog", "NewPage"]

log = logging.getLogger("prefixstore")


@dataclass(slots=True, eq=False)
class NewPage:
    """A page that is not committed yet: a node of the index, and the buffer with its state."""

    page: Page
    settings: bytes
    lease: Lease

    @classmethod
    def of(
        cls,
        namespace: bytes,
        settings: bytes,
        parent: bytes,
        start: int,
        tokens: bytes,
        lease: Lease,
        compute_us: int = 0,
    ) -> NewPage:
        """The page with these token bytes behind `parent`, in a namespace with these canonical settings."""
        now = time.time_ns()
        key = boundary_hash(parent, tokens)
        page = Page(key, parent, namespace, start, tokens, len(lease.view), 0, compute_us, now, now)
        return cls(page, settings, lease)


class Catalog:
    """The index and what it does not show: generation, pending pages, uses to be noted, damaged pages to be deleted."""

    def __init__(self, policy: Policy, counters: Counters) -> None:
        self._policy = policy
        self._counters = counters
        self.after_fork()

    def after_fork(self) -> None:
        """Know nothing: in a forked child the parent writes what is pending, and the rest comes from the backend."""
        self.lock = threading.RLock()
        self.index = Index()
        self.victims = VictimQueue(self.index, self._policy)
        self.pending: dict[bytes, NewPage] = {}
        self.touched: dict[bytes, int] = {}
        self.damaged: set[bytes] = set()
        self.refused: set[bytes] = set()
        self._generation = -1

    # -- keeping up with the backend; all under the lock --------------------------------------------------------------

    def refresh(self, snapshot: Snapshot) -> None:
        """Bring the index to the generation of the snapshot."""
        generation = snapshot.generation
        if generation == self._generation:
            return
        changed = snapshot.changes(self._generation) if 0 <= self._generation < generation else None
        if changed is None:
            self._rebuild(snapshot)
        else:
            for key in changed:
                self._refresh_page(snapshot, key)
        self.refused.clear()
        self._generation = generation

    def distrust(self) -> None:
        """The index was changed for a transaction that failed: rebuild it at the next refresh."""
        self._generation = -1

    def _refresh_page(self, snapshot: Snapshot, key: bytes) -> None:
        try:
            record, usage = snapshot.record(key), snapshot.usage(key)
        except StorageError as error:
            log.warning("a page cannot be read: %s", error)
            record, usage = None, None
        if record is not None:
            self._know(key, record, usage or Usage(record.created))
        elif key not in self.pending:
            self.forget(key)

    def _rebuild(self, snapshot: Snapshot) -> None:
        self.index = Index()
        self.victims = VictimQueue(self.index, self._policy)
        readable = [(record, key, usage) for key, record, usage in snapshot.scan() if isinstance(record, Record)]
        readable.sort(key=lambda found: found[0].start)
        for record, key, usage in readable:
            self._know(key, record, usage)
        for new in sorted(self.pending.values(), key=lambda new: new.page.start):
            # a node of the old index: what hung on it is added anew, if it is still there
            new.page.child_tokens, new.page.children = [], []
            if not self.index.add(new.page):
                self.drop(new.page.key, "orphan")

    def _know(self, key: bytes, record: Record, usage: Usage) -> None:
        page = self.index.get(key)
        if page is not None:
            self.index.resize(page, record.stored_bytes)
            page.last_used = max(page.last_used, usage.last_used)
            page.pinned = usage.pinned
        else:
            page = Page(
                key,
                record.parent,
                record.namespace,
                record.start,
                record.tokens,
                record.raw_bytes,
                record.stored_bytes,
                record.compute_us,
                record.created,
                usage.last_used,
                usage.hits,
                usage.pinned,
            )
            self.index.add(page)
        self.victims.push(page)

    # -- pages come and go; all under the lock ------------------------------------------------------------------------

    def wants(self, page: Page) -> bool:
        """Whether a page is worth taking: not here, not covered by a sibling, not refused, and its parent is here."""
        known = page.key in self.index or page.key in self.refused or self.index.covers(page)
        return not known and self.index.has_parent_of(page)

    def announce(self, new: NewPage) -> bool:
        """Put a pending page into the index; False, and nothing happens, if it is not wanted."""
        if not self.wants(new.page):
            return False
        self.index.add(new.page)
        self.pending[new.page.key] = new
        older = self.index.superseded_by(new.page)
        if older is not None and older.key in self.pending:
            # not written yet, and not needed any more
            self.forget(older.key)
        return True

    def committed(self, news: Iterable[NewPage]) -> None:
        """These pages are in the backend now."""
        for new in news:
            if self.pending.pop(new.page.key, None) is not None:
                self.victims.push(new.page)

    def forget(self, key: bytes) -> list[Page]:
        """Take a page, and what depends on it, out of the index; they are returned, deepest first."""
        page = self.index.get(key)
        gone = self.index.remove(key)
        for lost in gone:
            self.pending.pop(lost.key, None)
            self.touched.pop(lost.key, None)
        parent = self.index.get(page.parent) if page is not None else None
        if parent is not None and parent.is_leaf and parent.key not in self.pending:
            self.victims.push(parent)
        return gone

    def drop(self, key: bytes, reason: str) -> None:
        """Give a pending page up, with what depends on it, and count them."""
        if self.pending.pop(key, None) is not None:
            self._counters.count(f"dropped:{reason}")
        lost = [page.key for page in self.forget(key) if page.key != key]
        self._counters.count(f"dropped:{reason}", len(lost))

    def damage(self, key: bytes) -> None:
        """A page is damaged: forget it and what depends on it, and have it deleted with the next batch."""
        self.damaged.update([key, *(page.key for page in self.forget(key))])

    def touch(self, pages: Iterable[Page]) -> None:
        """Note that pages were used; it is written with the next batch."""
        now = time.time_ns()
        for page in pages:
            page.last_used = max(page.last_used, now)
            page.hits += 1
            self.touched[page.key] = self.touched.get(page.key, 0) + 1
