"""Chooses what is evicted, by the policy and by what this process knows of uses that are not written yet."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from prefixstore.engine.eviction import KEPT, Group, Sampler, Victim, Victims
from prefixstore.engine.evictions import Cause, EvictionLog
from prefixstore.engine.index import Page
from prefixstore.engine.keyspace import Leaf
from prefixstore.engine.load import Loader
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pending import PackedPage
from prefixstore.engine.policy import Leaves, Policy, Ranks
from prefixstore.engine.ram import RamTier
from prefixstore.format.record import CLOCK_SLACK, Usage, head_of
from prefixstore.stats import Counters

__all__ = ["Chooser"]


class Chooser(Loader):
    """The part of the catalog that chooses pages to evict.

    Parameters
    ----------
    policy
        The order of eviction.
    counters, ram
        As for `Follower`.
    """

    def __init__(self, policy: Policy, counters: Counters, ram: RamTier) -> None:
        super().__init__(counters, ram)
        self._policy = policy
        self._sampler = Sampler(self._ranks)
        # how often pages are to be kept, and by whom
        self._kept: Counter[bytes] = Counter()
        self._kept_by: dict[str, Collection[bytes]] = {}
        self.evictions = EvictionLog()

    def victims(self, transaction: Transaction, group: Group | None = None) -> Victims:
        """Stored leaves to evict, of a group or of all, in the order of the policy."""
        pages = transaction.used.entries
        with self._lock, self._guard:
            self._policy.prepare(pages)
        return self._sampler.victims(transaction, group)

    def _ranks(self, keys: Sequence[bytes], leaves: Leaves) -> Ranks:
        with self._lock, self._guard:
            # a time in the future is not believed
            times = leaves["last_used"]
            times[times > time.time_ns() + CLOCK_SLACK] = self._contents.started
            known = self._contents.index.pages
            here = [i for i, key in enumerate(keys) if key in known and known[key].last_used > times[i]]
            for i in here:
                page, leaf = known[keys[i]], leaves[i]
                leaf["last_used"], leaf["uses"], leaf["page_class"] = page.last_used, page.uses, page.page_class
                leaf["expires"] = max(leaf["expires"], page.expires) if leaf["expires"] else 0
            ranks = self._policy.ranks(leaves)
            if self._kept:
                ranks = np.where([key in self._kept for key in keys], KEPT, ranks)
            if not self._contents.expects_expiry:
                self._contents.expects_expiry = bool(leaves["expires"].any())
            return ranks

    def admits(self, new: PackedPage, victim: Victim) -> bool:
        """Whether a new page is worth more than a victim, by the policy."""
        page = new.pending.page
        head = head_of(new.record.pack())
        assert head is not None
        leaf = Leaf.of(head, Usage(page.last_used, 0, False, page.priority, page.expires, page.uses, page.page_class))
        with self._lock:
            return self._policy.admits(leaf, victim.leaf)

    def remove_victim(self, victim: Victim) -> bool:
        """Take a victim out of the index, so that it is no longer matched; returns whether it may be deleted.

        It is spared if something here depends on it, or if it was used since it was ranked.
        """
        with self._lock, self._guard:
            page = self._contents.index.get(victim.key)
            is_used = page is not None and (not page.is_leaf or page.last_used > victim.last_used)
            if self._contents.is_held(victim.key) or is_used:
                return False
            self._contents.delete(victim.key, victim.namespace)
            return True

    def evicted(self, victim: Victim, cause: Cause, now: int) -> None:
        """A victim is deleted, at this time, in nanoseconds since the epoch."""
        with self._lock:
            if cause is not Cause.EXPIRED:
                self._policy.evicted(victim.key, victim.leaf.uses, victim.last_used)
            self.evictions.add(victim.key, cause, now / 1e9)

    @property
    def expects_expiry(self) -> bool:
        """Whether there may be pages that have expired."""
        return self._contents.expects_expiry

    def keep(self, owner: str, keys: Collection[bytes]) -> None:
        """Have these pages evicted after all others, stored or not yet, instead of those that this owner named before.

        Several owners may name one page. Only this process knows of it, as long as it lives.
        """
        with self._lock, self._guard:
            self._kept.subtract(self._kept_by.pop(owner, ()))
            if keys:
                self._kept_by[owner] = keys
            self._kept.update(keys)
            self._kept = +self._kept

    def keep_nothing(self) -> None:
        """Undo every `keep`."""
        with self._lock, self._guard:
            self._kept.clear()
            self._kept_by.clear()

    # -- what the policy learns ---------------------------------------------------------------------------------------

    def _announced(self, page: Page) -> None:
        """A page was captured."""
        self._policy.added(page.namespace, page, self._contents.index.get(page.parent))

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
        with self._lock, self._guard:
            return self._policy.load(note)
