"""Chooses what is evicted, by the policy and by what this process knows of uses that are not written yet."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from prefixstore.engine.eviction import KEPT, Group, Sampler, Victim, Victims
from prefixstore.engine.evictions import Cause, EvictionLog
from prefixstore.engine.index import Page
from prefixstore.engine.keyspace import Leaf
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pending import PackedPage
from prefixstore.engine.policy import Leaves, Policy, Ranks
from prefixstore.engine.ram import RamTier
from prefixstore.engine.waiting import WaitingPages
from prefixstore.format.record import CLOCK_SLACK, Usage, head_of
from prefixstore.stats import Counters

__all__ = ["Chooser"]

# pages of which it is remembered when they were used
TIMES_KEPT = 4096


class Chooser(WaitingPages):
    """The part of the catalog that chooses pages to evict.

    Parameters
    ----------
    policy
        The order of eviction.
    counters, ram
        As for `WaitingPages`.
    """

    def __init__(self, policy: Policy, counters: Counters, ram: RamTier) -> None:
        super().__init__(counters, ram)
        self._policy = policy
        self._sampler = Sampler(self._ranks)
        # how often pages are to be kept, and by whom
        self._kept: Counter[bytes] = Counter()
        self._kept_by: dict[str, Collection[bytes]] = {}
        # when pages were used, the latest last
        self._last_used: OrderedDict[bytes, int] = OrderedDict()
        self.evictions = EvictionLog()

    def victims(self, transaction: Transaction, group: Group | None = None) -> Victims:
        """Stored leaves to evict, of a group or of all, in the order of the policy."""
        pages = transaction.used.entries
        with self._lock:
            self._policy.prepare(pages)
        return self._sampler.victims(transaction, group)

    def _ranks(self, keys: Sequence[bytes], leaves: Leaves) -> Ranks:
        with self._lock:
            # a time in the future is not believed
            times = leaves["last_used"]
            times[times > time.time_ns() + CLOCK_SLACK] = self._started
            used, last = self._deferred.uses, self._last_used
            for i, key in enumerate(keys):
                times[i] = max(times[i], last.get(key, 0))
            here = [i for i, key in enumerate(keys) if key in used and used[key].last_used >= times[i]]
            for i in here:
                use, leaf = used[keys[i]], leaves[i]
                leaf["last_used"], leaf["uses"], leaf["page_class"] = use.last_used, use.uses, use.page_class
                leaf["expires"] = max(leaf["expires"], use.expires) if leaf["expires"] else 0
            ranks = self._policy.ranks(leaves)
            if self._kept:
                ranks = np.where([key in self._kept for key in keys], KEPT, ranks)
            if not self.expects_expiry:
                self.expects_expiry = bool(leaves["expires"].any())
            return ranks

    def admits(self, new: PackedPage, victim: Victim) -> bool:
        """Whether a new page is worth more than a victim, by the policy."""
        page = new.pending.page
        head = head_of(new.record.pack())
        assert head is not None
        leaf = Leaf.of(head, Usage(page.last_used, 0, False, page.priority, page.expires, page.uses, page.page_class))
        with self._lock:
            return self._policy.admits(leaf, victim.leaf)

    def may_evict(self, victim: Victim) -> bool:
        """Whether a victim may be deleted: nothing that waits follows it, and it was not used since it was ranked.

        A captured page stays for the commit that writes it; an imported one may be evicted at once.
        """
        key = victim.key
        with self._lock:
            use, new = self._deferred.uses.get(key), self._pending.get(key)
            if key in self._after or (use is not None and use.last_used > victim.last_used):
                return False
            if new is None:
                return True
            is_imported = new.buffer is None and key in self._writing
            if is_imported:
                self._forget(key)
            return is_imported

    def evicted(self, victim: Victim, cause: Cause, now: int) -> None:
        """A victim is deleted, at this time, in nanoseconds since the epoch."""
        with self._lock:
            if cause is not Cause.EXPIRED:
                self._policy.evicted(victim.key, victim.leaf.uses, victim.last_used)
            self.evictions.add(victim.key, cause, now / 1e9)

    def keep(self, owner: str, keys: Collection[bytes]) -> None:
        """Have these pages evicted after all others, stored or not yet, instead of those that this owner named before.

        Several owners may name one page. Only this process knows of it, as long as it lives.
        """
        with self._lock:
            self._kept.subtract(self._kept_by.pop(owner, ()))
            if keys:
                self._kept_by[owner] = keys
            self._kept.update(keys)
            self._kept = +self._kept

    def keep_nothing(self) -> None:
        """Undo every `keep`."""
        with self._lock:
            self._kept.clear()
            self._kept_by.clear()

    # -- what the policy learns ---------------------------------------------------------------------------------------

    def _announced(self, page: Page) -> None:
        """A page was captured."""
        self._policy.added(page.namespace, page, self._last_used.get(page.parent))
        self._note_time(page)

    def _note_time(self, page: Page) -> None:
        """Remember when a page was used: a page that is captured after it belongs to the same prompt."""
        self._last_used[page.key] = page.last_used
        self._last_used.move_to_end(page.key)
        if len(self._last_used) > TIMES_KEPT:
            self._last_used.popitem(last=False)

    def _not_admitted(self, page: Page) -> None:
        """A captured page is not worth what would be evicted for it. If it is captured again, that is another use."""
        self._policy.evicted(page.key, page.uses, page.last_used)

    @property
    def policy_note(self) -> bytes | None:
        """The name of the note with what the policy has learned; None if it learns nothing."""
        return self._policy.note

    @property
    def policy_name(self) -> str:
        """The name of the policy, as in ``policy=``."""
        return self._policy.name

    def learned(self) -> dict[str, bytes]:
        """What the policy has learned."""
        with self._lock:
            return self._policy.parts()

    def load_policy(self, note: bytes) -> bool:
        """Have the policy go on with what was learned before; whether that can be read."""
        with self._lock:
            return self._policy.load(note)
