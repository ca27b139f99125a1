"""Chooses what is evicted, by the policy and by what this process knows of uses that are not written yet."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from prefixstore.engine.eviction import GROUPS, KEPT, Group, Victim, Victims
from prefixstore.engine.eviction_log import Cause, EvictionLog
from prefixstore.engine.keyspace import Leaf
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pending import PackedPage, PendingPage
from prefixstore.engine.policy import Leaves, Policy, Ranks
from prefixstore.engine.ram import RamTier
from prefixstore.engine.waiting import DropReason, Placement, WaitingPages
from prefixstore.format.record import CLOCK_SLACK, Usage, head_of
from prefixstore.stats import Counters

__all__ = ["Chooser"]


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
        self.policy = policy
        # low leaves that were found earlier, of all and of groups; the group that was asked for last is the last one
        self._pools: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()
        # the pages that are to be kept, by their owners, and all of them
        self._kept_by: dict[str, Collection[bytes]] = {}
        self._kept: set[bytes] = set()
        self.evictions = EvictionLog()

    def victims(self, transaction: Transaction, group: Group | None = None) -> Victims:
        """Stored leaves to evict, of a group or of all, in the order of the policy."""
        pages = transaction.used.entries
        name = b"" if group is None else group.name
        with self._lock:
            self.policy.prepare(pages)
            pool = self._pools.setdefault(name, {})
            self._pools.move_to_end(name)
            if len(self._pools) > GROUPS:
                self._pools.popitem(last=False)
        return Victims(transaction, self._ranks, pool, group)

    def _ranks(self, keys: Sequence[bytes], leaves: Leaves) -> Ranks:
        with self._lock:
            # a time in the future is not believed, unless this process has seen such uses before its clock was set back
            times = leaves["last_used"]
            times[times > max(time.time_ns() + CLOCK_SLACK, self._latest)] = self._started
            used = self._deferred.uses
            here = [i for i, key in enumerate(keys) if key in used and used[key].last_used >= times[i]]
            for i in here:
                use, leaf = used[keys[i]], leaves[i]
                leaf["last_used"], leaf["uses"], leaf["page_class"] = use.last_used, use.uses, use.page_class
                leaf["expires"] = max(leaf["expires"], use.expires) if leaf["expires"] else 0
            ranks = self.policy.ranks(leaves)
            if self._kept:
                ranks = np.where([key in self._kept for key in keys], KEPT, ranks)
            return ranks

    def admits(self, new: PackedPage, victim: Victim) -> bool:
        """Whether a new page is worth more than a victim, by the policy."""
        page = new.pending.page
        head = head_of(new.record.pack())
        assert head is not None
        leaf = Leaf.of(head, Usage(page.last_used, 0, False, page.priority, page.expires, page.uses, page.page_class))
        with self._lock:
            return self.policy.admits(leaf, victim.leaf)

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
            is_imported = new.buffer is None and new.is_writing
            if is_imported:
                self._forget(key)
            return is_imported

    def evicted(self, victim: Victim, cause: Cause, now: int) -> None:
        """A victim is deleted, at this time, in nanoseconds since the epoch."""
        with self._lock:
            if cause is not Cause.EXPIRED:
                self.policy.evicted(victim.key, victim.leaf.uses, victim.last_used)
            self.evictions.add(victim.key, cause, now / 1e9)

    def keep(self, owner: str, keys: Collection[bytes]) -> None:
        """Have these pages evicted after all others, stored or not yet, instead of those that this owner named before.

        Several owners may name one page. Only this process knows of it, as long as it lives.
        """
        with self._lock:
            self._kept_by[owner] = keys
            if not keys:
                del self._kept_by[owner]
            self._kept = set().union(*self._kept_by.values())

    def keep_nothing(self) -> None:
        """Undo every `keep`."""
        with self._lock:
            self._kept.clear()
            self._kept_by.clear()

    # -- what the policy learns ---------------------------------------------------------------------------------------

    def announce(self, new: PendingPage) -> Placement:
        with self._lock:
            place = super().announce(new)
            if place is Placement.ADDED:
                self.policy.added(new.page)
            return place

    def refuse(self, new: PendingPage, reason: DropReason) -> None:
        """Give up a page for which there is no space, or no parent, or that is worth less than what is stored."""
        with self._lock:
            if reason is DropReason.ADMISSION and self.is_pending(new):
                # if it is captured again, that is another use
                self.policy.evicted(new.page.key, new.page.uses, new.page.last_used)
            self.drop([new], reason)

    def learned(self) -> bytes:
        """What the policy has learned, as a note."""
        with self._lock:
            return self.policy.save()

    def load_policy(self, note: bytes) -> bool:
        """Have the policy go on with what was learned before; whether that could be read."""
        with self._lock:
            return self.policy.load(note)
