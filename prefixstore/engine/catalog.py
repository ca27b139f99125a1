"""What is stored, as far as this process knows, and the pages that are still to be written.

Two kinds of pages are in the index: committed ones, as far as lookups have found them, and pending ones, whose bytes
wait in a buffer. Both are matched and restored alike. The catalog is built in four modules, each extending the one
before: `engine.follow` keeps up with the location, `engine.load` reads what the index lacks, `engine.choose` chooses
what is evicted, and this one looks pages up, takes captured ones, and records their commits and deletions.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.choose import Chooser
from prefixstore.engine.contents import DropReason, Outdated, Taken
from prefixstore.engine.index import Index, Page, Path, branches, depth_first, is_same
from prefixstore.engine.page_view import Entry, View
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import Deferred, PendingPage, Suspicion
from prefixstore.engine.policy import Policy
from prefixstore.engine.ram import RamTier
from prefixstore.engine.snapshot_policy import thin
from prefixstore.errors import CorruptError
from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES, Tokens
from prefixstore.format.record import Record, Usage
from prefixstore.stats import Counters

__all__ = ["Catalog", "Claim", "Placement"]

# siblings compared at each page to find out where sequences fork: where there are many, they fork in few places
SIBLINGS_COMPARED = 64


class Placement(Enum):
    """The outcome of announcing a page."""

    ADDED = "added"
    KNOWN = "known"
    """It is here, or a longer page covers it."""
    REFUSED = "refused"
    """There was no space for it earlier, or another page has its key."""
    ORPHAN = "orphan"
    """Its parent is not here, or does not end where it starts."""


class Claim(NamedTuple):
    """A pending page that its transaction may write, and the stored tail that it replaces."""

    superseded: Page | None
    taken: tuple[Taken, ...] = ()


class Catalog(Chooser):
    """What is known of the location, kept up to date, and what waits for a commit. Parameters as for `Chooser`."""

    def __init__(self, policy: Policy, counters: Counters, ram: RamTier) -> None:
        super().__init__(policy, counters, ram)
        # since the start of this process
        self.n_lookups = 0

    # -- looking pages up ---------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest known prefix of `tokens`, up to the last page that has not expired; see `load`."""
        now = time.time_ns()
        with self._lock, self._guard:
            path, _ = self._contents.index.match(namespace, tokens, page_tokens)
            self._contents.index.used(path.pages)
            self._contents.trim(path.pages)
            n_kept = next((i for i, page in enumerate(path.pages) if page.has_expired(now)), len(path.pages))
            if n_kept == len(path.pages):
                return path
            self._contents.deferred.expired = True
            pages = path.pages[:n_kept]
            return Path(pages, pages[-1].end if pages else 0)

    def match_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """The path to the deepest known snapshot among the first `limit` tokens, at a multiple of `multiple_of`."""
        now = time.time_ns()
        with self._lock, self._guard:
            found = Path((), 0)
            for path in self._contents.index.snapshots_along(namespace, tokens[:limit], page_tokens)[0]:
                if any(page.has_expired(now) for page in path.pages):
                    self._contents.deferred.expired = True
                elif path.n_tokens % multiple_of == 0:
                    found = path
                    break
            self._contents.index.used(found.pages)
            self._contents.trim(found.pages)
            return found

    def match_stored(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The path to the deepest snapshot of `tokens`, or the longest prefix where there are none; expired or not."""
        with self._lock:
            # where there are snapshots, pages alone cannot be restored
            snapshots, _ = self._contents.index.snapshots_along(namespace, tokens, page_tokens)
            return snapshots[0] if snapshots else self._contents.index.match(namespace, tokens, page_tokens)[0]

    def get(self, key: bytes) -> Page | None:
        """The page with this key, if it is in the index."""
        with self._lock:
            return self._contents.index.get(key)

    def known_children(self, parent: bytes, namespace: bytes) -> list[Page]:
        """The pages in the index that follow this one, or the namespace; pending ones too."""
        with self._lock:
            index = self._contents.index
            return list(index.node(parent, namespace).children) if parent == namespace or parent in index else []

    def is_current(self, page: Page) -> bool:
        """Whether this node object is in the index."""
        return self.get(page.key) is page

    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        path = [page]
        with self._lock:
            while (parent := self._contents.index.get(path[-1].parent)) is not None:
                path.append(parent)
        return path[::-1]

    def path_of(self, key: bytes) -> list[Page]:
        """The pages from the start of a sequence up to the one with this key; none if it is not in the index."""
        page = self.get(key)
        return self.path(page) if page is not None else []

    def pages(self, backend: Pages) -> list[Page]:
        """All pages, stored and pending, parents before their children."""
        return list(depth_first(self.whole_index(backend).roots()))

    def select(self, backend: Pages, choose: Callable[[Index], Collection[bytes]]) -> list[Page]:
        """The pages whose keys a function of an index of all pages chooses, parents before their children."""
        index = self.whole_index(backend)
        keys = choose(index)
        return [page for page in depth_first(index.roots()) if page.key in keys]

    # -- capturing ----------------------------------------------------------------------------------------------------

    def wants(self, page: Page) -> bool:
        """Whether a page is worth capturing."""
        with self._lock:
            return self._place_of(page) is Placement.ADDED

    def missing(self, namespace: bytes, keys: Sequence[bytes], tokens: Tokens, page_tokens: int) -> list[int]:
        """Which full pages of a sequence, given by all their keys, to capture: up to the first that was refused.

        Raises
        ------
        CorruptError
            If another page has one of the keys: nothing may be stored after it.
        """
        raw, step = tokens.tobytes(), page_tokens * TOKEN_BYTES
        with self._lock:
            missing: list[int] = []
            parent = namespace
            for i, key in enumerate(keys):
                page = self._contents.index.get(key)
                if page is None:
                    missing.append(i)
                elif (page.tokens, page.parent) != (raw[i * step : (i + 1) * step], parent):
                    raise CorruptError(f"page {key.hex()} has tokens that do not match its key")
                parent = key
            return list(itertools.takewhile(lambda i: keys[i] not in self._refused, missing))

    def needs_no_capture(self, key: bytes) -> bool:
        """Whether a page or snapshot is here, or was refused."""
        with self._lock:
            return key in self._contents.index or key in self._refused

    def _place_of(self, page: Page) -> Placement:
        known = self._contents.index.get(page.key)
        if known is not None:
            return Placement.KNOWN if is_same(known, page) else Placement.REFUSED
        if self._contents.index.covers(page):
            return Placement.KNOWN
        if page.key in self._refused:
            return Placement.REFUSED
        return Placement.ADDED if self._contents.index.has_parent_of(page) else Placement.ORPHAN

    def announce(self, new: PendingPage) -> Placement:
        """Put a pending page into the index, where it is matched from now on. Nothing changes unless it is `ADDED`."""
        with self._lock, self._guard:
            place = self._place_of(new.page)
            if place is not Placement.ADDED:
                return place
            new.announced(self._contents.time_of_use())
            new.page.is_stored = False
            is_new = self._contents.index.is_sealed(new.page)
            if not self._contents.index.add(new.page):
                return Placement.ORPHAN
            if is_new:
                # it is not stored, so nothing is stored after it
                new.page.has_no_other_dependents()
            self._contents.pending[new.page.key] = new
            self._announced(new.page)
            older = self._contents.index.superseded_by(new.page)
            if older is not None and older.is_leaf and not self._contents.may_be_stored(older):
                # not written yet, and not needed any more; a stored one is deleted when the new page is written
                self._contents.give_up(older.key, Outdated.SUPERSEDED)
            return place

    def hold(self, pages: Sequence[Page]) -> dict[bytes, PooledBuffer]:
        """Hold the buffers of those of these pages that are pending; the caller releases them."""
        with self._lock:
            pending = [(page, self._contents.pending[page.key]) for page in pages if page.key in self._contents.pending]
            buffers = {page.key: new.buffer for page, new in pending if is_same(new.page, page)}
            return {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.hold()}

    def touch(
        self,
        namespace: bytes,
        pages: Sequence[Page],
        ttl_ns: int | None,
        n_tokens: int | None = None,
        *,
        is_written: bool = True,
    ) -> None:
        """Record a lookup and the pages it used, none for a miss; renew their time to live.

        Without `is_written`, nothing waits for a commit.
        """
        fresh: list[int] = []
        with self._lock, self._guard:
            now = self._contents.time_of_use()
            expires = time.time_ns() + ttl_ns if ttl_ns is not None else 0
            self._policy.looked_up(namespace, pages, n_tokens, now)
            self.n_lookups += 1
            for page in reversed(pages):
                page.last_used = max(page.last_used, now)
                if page.expires and page.expires < expires:
                    page.expires = expires
                if not page.hits:
                    fresh.append(page.created)
                page.hits += 1
                if is_written:
                    self._contents.deferred.uses[page.key] = self._contents.deferred.uses.get(page.key, 0) + 1
            self._ram.want([page for page in pages if page.key not in self._contents.pending])
        if fresh:
            self._counters.observe("first_reuse", [(now - created) / 1e9 for created in fresh])

    def thin(
        self,
        view: View,
        namespace: bytes,
        tokens: Tokens,
        page_tokens: int,
        keep: int,
        interval: int,
        valued: Collection[int] = (),
    ) -> int:
        """Give up all but `keep` of the known snapshots along `tokens`, except pinned ones; how many."""
        with self._lock, self._guard:
            paths = self._contents.index.snapshots_along(namespace, tokens, page_tokens)[0][::-1]
            if len(paths) <= keep:
                return 0
            known = self._contents.index.match(namespace, tokens, page_tokens)[0].pages
        ends = {namespace: 0} | {page.key: page.end for page in known if page.end <= len(tokens)}
        others: dict[bytes, list[bytes]] = {key: [] for key in ends}
        for form in (PAGE, SNAPSHOT):
            for entry in view.children(list(ends), form, SIBLINGS_COMPARED):
                if isinstance(entry.record, Record):
                    others[entry.record.parent].append(entry.record.tokens)
        with self._lock, self._guard:
            index = self._contents.index
            for key in ends:
                # pending ones too
                node = index.node(key, namespace) if key == namespace or key in index else None
                others[key] += [page.tokens for page in node.dependents[:SIBLINGS_COMPARED]] if node is not None else []
            positions = [path.n_tokens for path in paths]
            forks = branches([(end, others[key]) for key, end in ends.items()], tokens)
            # other sequences start from the last snapshot before the fork
            shared = {max((n for n in positions if n <= fork), default=0) for fork in forks}
            doomed = thin(positions, keep, interval, shared.union(valued))
            discarded = [path.pages[-1] for path in paths if path.n_tokens in doomed and not path.pages[-1].pinned]
            for page in discarded:
                self.discard_snapshot(page)
            return len(discarded)

    def discard_snapshot(self, page: Page) -> None:
        """Give up a snapshot that is no longer wanted; if it is stored, the next commit deletes it.

        Until then it stays in the index, or the pages that it depends on would seem to be leaves.
        """
        with self._lock, self._guard:
            if page.key in self._contents.pending and page.key not in self._contents.writing:
                if not page.is_stored:
                    self._contents.give_up(page.key, Outdated.THINNED)
                    return
                self._contents.keep_as_stored(page)
            self._contents.deferred.thinned.add(page.key)

    def mark_damaged(self, key: bytes, suspicion: Suspicion | None = None) -> None:
        """Forget a damaged page and its descendants, and have them deleted with the next commit.

        With a `suspicion` its checksum is right, but its state is not usable: it is deleted unless the page stored by
        then is.
        """
        with self._lock, self._guard:
            if suspicion is not None:
                self._contents.deferred.suspicions[key] = suspicion
            self._contents.deferred.damaged.add(key)
            self._contents.lose(key)

    # -- committing ---------------------------------------------------------------------------------------------------

    @property
    def pending_counts(self) -> tuple[int, int]:
        """How many captured pages, and how many snapshots, wait for a commit."""
        with self._lock:
            forms = [new.page.form for new in self._contents.pending.values() if new.buffer is not None]
        n_snapshots = forms.count(SNAPSHOT)
        return len(forms) - n_snapshots, n_snapshots

    @property
    def has_deferred(self) -> bool:
        """Whether uses, or pages to be deleted, wait for the next commit."""
        return bool(self._contents.deferred)

    @property
    def has_pending(self) -> bool:
        """Whether pages wait for a commit."""
        return bool(self._contents.pending)

    @property
    def has_expired(self) -> bool:
        """Whether a lookup has found an expired page, which is to be deleted."""
        return self._contents.deferred.expired

    def deferred(self) -> Deferred:
        """A copy of the deferred changes."""
        with self._lock:
            return self._contents.deferred.copy()

    def still_pending(self, batch: Iterable[PendingPage]) -> list[PendingPage]:
        """Those that still wait: not superseded, dropped, or cleared and captured again."""
        with self._lock:
            return [new for new in batch if self._contents.is_pending(new)]

    def tail_before(self, new: PendingPage) -> Page | None:
        """The stored tail that a pending page continues."""
        with self._lock:
            older = self._contents.index.superseded_by(new.page) if self._contents.is_pending(new) else None
            return older if older is not None and self._contents.may_be_stored(older) else None

    def claim(self, new: PendingPage, *, keeps_tail: bool = False) -> Claim | None:
        """Mark a page as being written, and take the tail that it continues out of the index, unless it has to stay.

        None if the page is no longer pending, or need not be written, as a longer one is stored.
        """
        page = new.page
        with self._lock, self._guard:
            if not self._contents.is_pending(new):
                return None
            if page.is_leaf and self._contents.index.covers(page):
                self._contents.give_up(page.key, Outdated.SUPERSEDED)
                return None
            self._contents.writing.add(page.key)
            older = self._contents.index.superseded_by(page)
            # one that another thread is writing has been written: transactions take turns
            if keeps_tail or older is None or not older.is_leaf or not self._contents.may_be_stored(older):
                return Claim(None)
            if older.pinned and not page.pinned:
                self._set_pinned(page, pinned=True)
            return Claim(older, tuple(self._contents.delete(older.key, older.namespace)))

    def keep_superseded(self, claim: Claim) -> None:
        """Keep a tail that was not deleted, since the page that was to replace it is refused."""
        with self._lock, self._guard:
            self._contents.put_back(claim.taken)

    def put(self, new: PendingPage, record: Record, usage: Usage) -> None:
        """Record that the open transaction has put a page with this record and usage, or found them stored."""
        with self._lock, self._guard:
            if not new.page.is_stored:
                self._contents.uncommitted.add(new.page.key)
            self._contents.put(new.page, Entry(new.page.key, record, usage))

    def after_commit(self, step: Callable[[], None]) -> None:
        """Have a function called when the open transaction is committed; not if it fails."""
        with self._lock:
            if self._contents.journal is not None:
                self._contents.journal.after_commit(step)
            else:
                step()

    def no_longer_pending(self, written: Iterable[PendingPage]) -> list[PendingPage]:
        """Those of these pages that were given up while they were written."""
        with self._lock:
            return [new for new in written if not self._contents.is_pending(new)]

    def committed(self, written: Iterable[PendingPage], deferred: Deferred) -> None:
        """Record that these pages are stored now, and the deferred changes made."""
        with self._lock, self._guard:
            for new in written:
                self._contents.uncommitted.discard(new.page.key)
                if self._contents.is_pending(new):
                    del self._contents.pending[new.page.key]
                    new.page.announced_expiry = new.page.expires
            self._contents.deferred.subtract(deferred)

    def refuse(self, new: PendingPage, reason: DropReason) -> None:
        """Give up a page for which there is no space, or no parent."""
        with self._lock, self._guard:
            if self._contents.is_pending(new):
                if reason is DropReason.ADMISSION:
                    self._not_admitted(new.page)
                self._contents.drop(new.page.key, reason)
                if reason is DropReason.BUDGET:
                    self._refused.add(new.page.key)

    def drop(self, batch: Iterable[PendingPage], reason: DropReason) -> None:
        """Give these pages up, those that are still pending, and count them."""
        with self._lock, self._guard:
            for new in batch:
                if self._contents.is_pending(new):
                    self._contents.drop(new.page.key, reason)

    def abandon(self, batch: Iterable[PendingPage]) -> None:
        """Give these pages up, uncounted; pending pages that depend on them are counted."""
        with self._lock, self._guard:
            # all of them first: their buffers go back to the pool now
            pages = [self._contents.pending.pop(new.page.key).page for new in batch if self._contents.is_pending(new)]
            for page in pages:
                if self._contents.index.get(page.key) is page:
                    self._contents.drop(page.key, DropReason.ORPHAN)

    def end_writing(self, batch: Iterable[PendingPage]) -> None:
        """Record that the transaction of these pages has ended, committed or not."""
        with self._lock, self._guard:
            keys = {new.page.key for new in batch}
            self._contents.writing -= keys
            self._contents.uncommitted -= keys

    # -- deleting -----------------------------------------------------------------------------------------------------

    def remove_leaf(self, key: bytes, namespace: bytes) -> bool:
        """Take a page without stored descendants out of the index, pinned or not; returns whether it may be deleted."""
        with self._lock, self._guard:
            page = self._contents.index.get(key)
            if page is not None and not page.is_leaf:
                return False
            self._contents.delete(key, namespace)
            return True

    def remove_snapshot(self, key: bytes, usage: Usage | None) -> bool:
        """Take a snapshot that was thinned out of the index; not one that is pinned, gone, or was captured again."""
        with self._lock, self._guard:
            doomed = usage is not None and not usage.pinned and key not in self._contents.pending
            if doomed:
                page = self._contents.index.get(key)
                self._contents.delete(key, page.namespace if page is not None else None)
            return doomed

    def lose(self, key: bytes, namespace: bytes | None = None) -> None:
        """Record that the open transaction deletes a page, whatever is known of it, unless it was captured again."""
        with self._lock, self._guard:
            here = self._contents.index.get(key)
            if here is None or key not in self._contents.pending:
                self._contents.delete(key, namespace)
                # whose page it was may not be known
                self._contents.sweeps = self._contents.sweeps or (here is None and namespace is None)
            elif here.is_stored:
                self._contents.undo(partial(setattr, here, "is_stored", True))
                here.is_stored = False
                self._contents.note_deleted(key, here.namespace)

    def set_expiry(self, page: Page, expires: int) -> None:
        """Record that the open transaction changes when a page expires."""
        with self._lock, self._guard:
            self._contents.undo(partial(self._contents.set_expiry, page, page.expires))
            self._contents.set_expiry(page, expires)

    def set_pinned(self, keys: Iterable[bytes], *, pinned: bool) -> None:
        """Record that these pages are pinned now, or no longer."""
        with self._lock, self._guard:
            for key in keys:
                page = self._contents.index.get(key)
                if page is not None:
                    self._set_pinned(page, pinned=pinned)
            # what was refused may find space now
            self._refused.clear()

    def _set_pinned(self, page: Page, *, pinned: bool) -> None:
        self._contents.undo(partial(self._contents.set_pinned, page, pinned=page.pinned))
        self._contents.set_pinned(page, pinned=pinned)

    def known_descendants(self, key: bytes) -> list[bytes]:
        """A page in the index and those after it there; pending ones too."""
        with self._lock:
            page = self._contents.index.get(key)
            return [one.key for one in depth_first([page] if page is not None else [])]
