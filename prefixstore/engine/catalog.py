"""What this process has not written yet: pending pages, and deferred changes of stored pages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from prefixstore.counters import Counters
from prefixstore.engine.eviction import Victim
from prefixstore.engine.located import PagedPrompt, Waiting
from prefixstore.engine.page import Page, is_same, later
from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import Damage, Deferred, DropReason, Outdated, PendingPage, Use
from prefixstore.engine.policy import Leaves, Policy
from prefixstore.engine.trie import Entry
from prefixstore.errors import CorruptError
from prefixstore.format.keys import PAGE, SNAPSHOT
from prefixstore.format.record import CLOCK_SLACK, Record

log = logging.getLogger("prefixstore")


class Catalog:
    """Pending pages and deferred changes. No location is called while the lock is held.

    Attributes
    ----------
    n_lookups
        How many lookups were recorded, hits and misses, since this engine was opened.
    is_far
        Whether this is the catalog of the far location.
    """

    n_lookups = 0
    is_far = False

    def __init__(self, policy: Policy, counters: Counters) -> None:
        self.policy = policy
        self._counters = counters
        # also held while the policy is called
        self.lock = threading.RLock()
        self._pending: dict[bytes, PendingPage] = {}
        # by parent and key
        self._after: dict[bytes, dict[bytes, PendingPage]] = {}
        self._deferred = Deferred()
        # The last use of any page. The next one is dated later, even if the clock was set back meanwhile.
        self._latest = 0
        self._started = time.time_ns()

    def time_of_use(self) -> int:
        """The time of a use that happens now, in nanoseconds since the epoch, and later than every other."""
        self._latest = max(self._latest + 1, time.time_ns())
        return self._latest

    # -- for lookups --------------------------------------------------------------------------------------------------

    def along(self, prompt: PagedPrompt) -> Waiting:
        """What is pending along a prompt."""
        with self.lock:
            damaged = {key: one.created for key, one in self._deferred.damaged.items()}
            if not self._pending:
                return Waiting({}, {}, damaged)
            pages = {key: self._pending[key].page for key in prompt.keys if key in self._pending}
            parents = [key for key in (prompt.namespace, *prompt.keys) if key in self._after]
            after = {key: [new.page for new in self._after[key].values()] for key in parents}
            return Waiting(pages, after, damaged)

    def all_waiting(self) -> tuple[list[Page], Mapping[bytes, Use]]:
        """Copies of all pending pages, and the deferred uses."""
        with self.lock:
            return [replace(new.page, children=[]) for new in self._pending.values()], dict(self._deferred.uses)

    def with_uses(self, entries: Sequence[Entry]) -> list[Page]:
        """The pages of these entries, deferred uses included."""
        found: list[Page] = []
        with self.lock:
            uses, newest, latest = self._deferred.uses, time.time_ns() + CLOCK_SLACK, self._latest
            for key, record, usage in entries:
                assert isinstance(record, Record)
                page = Page.stored(key, record, usage)
                if page.last_used > newest:
                    # a time in the future is not believed; this process has not used the page
                    page.last_used = self._started
                elif page.last_used > latest:
                    latest = page.last_used
                if page.expires and key in self._pending:
                    # it was captured again, and expires no earlier than the new capture
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
        """Log that a stored page cannot be read; if it is damaged, the next commit deletes it."""
        key, record, _ = entry
        if isinstance(record, (Record, CorruptError)):
            with self.lock:
                self._deferred.damaged[key] = Damage(record.created if isinstance(record, Record) else 0)
        why = "it does not start where its parent ends" if isinstance(record, Record) else record
        log.warning("a page cannot be read: %s", why)

    # -- pending pages ------------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> Page | None:
        """The page with this key, if it is pending."""
        with self.lock:
            new = self._pending.get(key)
            return new.page if new is not None else None

    def pending_after(self, parent: bytes) -> list[Page]:
        """The pending pages and snapshots that follow this page or namespace."""
        with self.lock:
            return [new.page for new in self._after.get(parent, {}).values()]

    def announce(self, new: PendingPage) -> bool:
        """Make a page pending, for lookups to find; False if it is already, or a longer page that covers it."""
        page = new.page
        with self.lock:
            beside = list(self._after.get(page.parent, {}).values()) if page.form == PAGE else []
            if page.key in self._pending or any(_continues(other, page) for other in beside):
                return False
            if new.is_captured:
                # importing a page is not a use of it
                page.last_used = self.time_of_use()
            self._deferred.expired = self._deferred.expired or page.expires > 0
            for tail in beside:
                # a pending tail that the new page covers; a stored one is deleted when the new page is written
                if _continues(new, tail.page) and not tail.is_writing and tail.page.key not in self._after:
                    self.give_up([tail], Outdated.SUPERSEDED)
            self._pending[page.key] = new
            self._after.setdefault(page.parent, {})[page.key] = new
            self.policy.added(page)
            return True

    def states(self, pages: Sequence[Page]) -> dict[bytes, memoryview]:
        """The states of those of these pages that are pending; valid as long as they are referenced."""
        found: dict[bytes, memoryview] = {}
        with self.lock:
            for page in pages:
                new = self._pending.get(page.key)
                buffer = new.buffer if new is not None and is_same(new.page, page) else None
                state = buffer.view if buffer is not None else memoryview(b"")
                # not a buffer that is being released, as when the queue is closed
                if buffer is not None and len(state) == page.raw_bytes:
                    found[page.key] = state
        return found

    def _forget(self, key: bytes) -> list[PendingPage]:
        """Remove a pending page and its pending descendants; returns what was removed."""
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

    def give_up(self, news: Iterable[PendingPage], reason: DropReason | Outdated | None = None) -> None:
        """Drop those of these pages that are still pending, with their descendants; counted if there is a reason."""
        with self.lock:
            for new in news:
                if not self.is_pending(new):
                    continue
                if reason is DropReason.ADMISSION:
                    # remembered: if it is captured again, that is another use
                    self.policy.evicted(new.page.key, new.page.uses, new.page.last_used)
                lost = self._forget(new.page.key)
                if isinstance(reason, DropReason):
                    self._counters.count(f"dropped:{reason.value}", len(lost))
                elif reason is not None and (n_captured := sum(one.is_captured for one in lost)):
                    self._counters.count(f"outdated:{reason.value}", n_captured)

    def is_pending(self, new: PendingPage) -> bool:
        """Whether this very page is still pending: not superseded, dropped, or cleared and captured again."""
        return self._pending.get(new.page.key) is new

    def claim(self, new: PendingPage, *, is_covered: bool) -> bool:
        """Mark a page as being written; False if it is no longer pending, or if a longer page covers it."""
        with self.lock:
            if not self.is_pending(new):
                return False
            if is_covered and new.page.key not in self._after:
                self.give_up([new], Outdated.SUPERSEDED)
                return False
            new.is_writing = True
            return True

    def committed(self, written: Sequence[PendingPage], deferred: Deferred) -> None:
        """Note that these pages are stored now, and that these deferred changes were made."""
        with self.lock:
            for new in written:
                if self.is_pending(new):
                    self._take_out(new.page.key)
            self._deferred.subtract(deferred)

    @property
    def pending_counts(self) -> tuple[int, int]:
        """How many captured pages and how many captured snapshots are pending."""
        with self.lock:
            forms = [new.page.form for new in self._pending.values() if new.is_captured]
        n_snapshots = forms.count(SNAPSHOT)
        return len(forms) - n_snapshots, n_snapshots

    def waits_beside(self, batch: Collection[bytes]) -> bool:
        """Whether pages other than these are pending."""
        with self.lock:
            return any(key not in batch for key in self._pending)

    # -- deferred changes ---------------------------------------------------------------------------------------------

    @property
    def has_deferred(self) -> bool:
        """Whether anything waits for the next commit besides pending pages."""
        return bool(self._deferred)

    def deferred(self, batch: Collection[bytes] = ()) -> Deferred:
        """The deferred changes to be committed with a batch. Uses of other pending pages wait for those."""
        with self.lock:
            deferred = self._deferred.copy()
            for key in deferred.uses.keys() & self._pending.keys() - set(batch):
                del deferred.uses[key]
            return deferred

    def touch(
        self,
        pages: Sequence[Page],
        ttl_ns: int | None,
        n_tokens: int | None = None,
        *,
        is_written: bool = True,
    ) -> None:
        """Note a lookup and the pages that it used (none for a miss), and renew their time to live.

        Without `is_written`, the uses are not written to the location.
        """
        fresh: list[int] = []
        with self.lock:
            now = self.time_of_use()
            expires = time.time_ns() + ttl_ns if ttl_ns is not None else 0
            self.policy.looked_up(pages, n_tokens, now)
            self.n_lookups += 1
            uses = self._deferred.uses
            for page in reversed(pages):
                page.last_used = max(page.last_used, now)
                if page.expires and page.expires < expires:
                    page.expires = expires
                if not page.hits:
                    fresh.append(page.created)
                page.hits += 1
                if is_written:
                    n = uses[page.key].n if page.key in uses else 0
                    uses[page.key] = Use(n + 1, page.last_used, page.expires, page.uses, page.page_class)
        if fresh:
            self._counters.observe("first_reuse", [(now - created) / 1e9 for created in fresh])

    def discard_snapshot(self, page: Page) -> None:
        """Drop a snapshot that is no longer wanted; if it is stored, the next commit deletes it."""
        with self.lock:
            new = self._pending.get(page.key)
            if new is not None and not new.is_writing:
                self.give_up([new], Outdated.THINNED)
            self._deferred.thinned.add(page.key)

    def is_thinned(self, key: bytes) -> bool:
        """Whether `discard_snapshot` was called for this one."""
        return key in self._deferred.thinned

    def mark_damaged(self, page: Page, *, is_useless: bool = False) -> None:
        """Let the next commit delete a damaged page and its descendants; until then lookups do not find it."""
        with self.lock:
            known = self._deferred.damaged.get(page.key)
            is_useless = is_useless or (known is not None and known.is_useless and known.created == page.created)
            self._deferred.damaged[page.key] = Damage(page.created, is_useless)

    def is_damaged(self, key: bytes, page: Page | Record) -> bool:
        """Whether this page was marked as damaged, and not another one that was stored under its key."""
        found = self._deferred.damaged.get(key)
        return found is not None and found.created == page.created

    def forget(self, page: Page) -> None:
        """Drop a page that is to be deleted, if it is pending and was not captured again since."""
        with self.lock:
            new = self._pending.get(page.key)
            if new is not None and new.page.created == page.created:
                self.give_up([new], Outdated.DELETED)

    def expired(self) -> None:
        """Note that a lookup has found an expired page."""
        self._deferred.expired = True

    # -- eviction -----------------------------------------------------------------------------------------------------

    def enter_uses(self, keys: Sequence[bytes], leaves: Leaves) -> None:
        """Add the deferred uses of these pages to their leaves."""
        with self.lock:
            # a time in the future is not believed, unless this process saw such uses before its clock was set back
            times = leaves["last_used"]
            times[times > max(time.time_ns() + CLOCK_SLACK, self._latest)] = self._started
            used = self._deferred.uses
            here = [i for i, key in enumerate(keys) if key in used and used[key].last_used >= times[i]]
            for i in here:
                use, leaf = used[keys[i]], leaves[i]
                leaf["last_used"], leaf["uses"], leaf["page_class"] = use.last_used, use.uses, use.page_class
                leaf["expires"] = max(leaf["expires"], use.expires) if leaf["expires"] else 0

    def may_evict(self, victim: Victim) -> bool:
        """Whether a victim may be deleted: no pending page follows it, and it was not used since it was ranked.

        A captured page may not be evicted by the commit that writes it; an imported one may.
        """
        key = victim.key
        with self.lock:
            use, new = self._deferred.uses.get(key), self._pending.get(key)
            if key in self._after or (use is not None and use.last_used > victim.last_used):
                return False
            if new is None:
                return True
            is_imported = new.is_writing and not new.is_captured
            if is_imported:
                self._forget(key)
            return is_imported

    # -- transactions -------------------------------------------------------------------------------------------------

    @contextmanager
    def update(self, backend: Pages) -> Iterator[PageUpdate]:
        """An update, followed by its `after_commit` steps; pages that it has deleted are counted."""
        with backend.update() as transaction:
            try:
                yield transaction
            finally:
                # the steps refer to the update: without this the garbage collector would have to break the cycle
                steps, transaction.after_commit = transaction.after_commit, []
        self._counters.count("frees", len(transaction.deleted))
        for step in steps:
            step()


def _continues(longer: PendingPage, page: Page) -> bool:
    """Whether a pending sibling begins with all tokens of a page."""
    return longer.page.form == page.form and longer.page.tokens.startswith(page.tokens)
