"""Makes space: evicts leaves until a page fits, in the transaction that writes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from prefixstore.backends.threads import handed_over
from prefixstore.engine.budget import Evicted
from prefixstore.engine.eviction import ALL, Group, Victim, Victims
from prefixstore.engine.keyspace import Leaf
from prefixstore.engine.page import Page
from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.page_view import PageView, Used
from prefixstore.engine.pages import fewer, retried
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.pending import DropReason, PendingPage
from prefixstore.engine.policy import Leaves, Ranks
from prefixstore.errors import FullError, StorageError
from prefixstore.format.namespace import salt_in
from prefixstore.format.record import time_of_use

log = logging.getLogger("prefixstore")

# other processes wait while a transaction is open: it evicts no more pages and bytes than these
PAGES_AT_ONCE = 512
BYTES_AT_ONCE = 256 << 20
# how many of the latest evictions are remembered
REMEMBERED = 4096


class _TakenBackError(StorageError):
    """Rolls a trial transaction back."""


class Evictor(Part):
    """Evicts leaves of a location, in the order of the policy.

    Attributes
    ----------
    used, peak_bytes
        What the location held when this process last looked (None before that), and the most that it ever saw.
    has_loaded
        Whether the policy has been given what earlier processes learned.
    """

    has_loaded = False

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.catalog, self.budget = shared.catalog, shared.budget
        self.used: Used | None = None
        self.peak_bytes = 0
        # the latest evictions, each key once
        self._evicted: dict[bytes, None] = {}

    def saw(self, used: Used) -> None:
        """Note what the location holds."""
        self.used, self.peak_bytes = used, max(self.peak_bytes, used.bytes)

    def load(self, transaction: PageUpdate) -> None:
        """Give the policy what earlier processes learned, before the first eviction."""
        name = self.catalog.policy.note
        if self.has_loaded or name is None:
            return
        note, self.has_loaded = transaction.note(name), True
        with self.catalog.lock:
            is_sound = note is None or self.catalog.policy.load(note)
        if not is_sound:
            log.warning("the saved state of the eviction policy cannot be read; it starts afresh")

    @handed_over
    def evict(self, max_bytes: int, *, dry_run: bool = False) -> Evicted:
        """Evict in the order of the policy until the location holds `max_bytes`, or nothing but pinned pages.

        A `dry_run` reports what would be evicted, and changes nothing. Raises `StorageError`.
        """
        chosen: list[bytes] = []
        before = self._stored_bytes()
        if dry_run:
            chosen, left = self._trial(max_bytes)
        else:
            n_before, left = -1, max_bytes + 1
            # the exact size of a location is known only after a commit
            while left > max_bytes and len(chosen) > n_before:
                n_before = len(chosen)
                chosen += self.shrink(max_bytes)[0]
                self._backend.rows.reclaim()
                left = self._stored_bytes()
            self._backend.mend()
        keys = tuple(key.hex() for key in chosen)
        return Evicted(keys, max(before - left, 0), self.catalog.policy.name, max_bytes, left, dry_run)

    def _stored_bytes(self) -> int:
        with self._backend.view() as view:
            return view.used.bytes

    def shrink(self, max_bytes: int) -> tuple[list[bytes], int]:
        """Evict, in short transactions, until the location holds `max_bytes`, or nothing can be evicted any more.

        Returns the keys of the evicted pages, and the bytes that the location holds now. Raises `FullError` if there is
        no space to delete even one page.
        """
        evicted: list[bytes] = []
        at_once = PAGES_AT_ONCE
        while True:
            try:
                some, used, is_done = self._shrink_some(max_bytes, at_once)
            except FullError as error:
                at_once = fewer(self._backend, at_once, error)
                continue
            evicted += some
            if is_done:
                return evicted, used

    @retried
    def _shrink_some(self, max_bytes: int, at_once: int) -> tuple[list[bytes], int, bool]:
        with self.catalog.update(self._backend) as transaction:
            self.load(transaction)
            enough = max(max_bytes, transaction.used.bytes - BYTES_AT_ONCE)
            evicted, is_left = Space(self, transaction).shrink(enough, at_most=at_once)
            used = transaction.used.bytes
        return evicted, used, used <= max_bytes or not is_left

    def _trial(self, max_bytes: int) -> tuple[list[bytes], int]:
        """What `shrink` would evict, and what the location would hold then: tried in one transaction, and rolled back.

        Other writers wait meanwhile. Raises `FullError`.
        """
        chosen: list[bytes] = []
        used = 0
        with suppress(_TakenBackError), self.catalog.update(self._backend) as transaction:
            self.load(transaction)
            chosen, _ = Space(self, transaction).shrink(max_bytes)
            used = transaction.used.bytes
            raise _TakenBackError
        return chosen, used

    def respect_budget(self) -> None:
        """Evict, in short transactions, what exceeds a budget that was larger before.

        Nothing is evicted if too much is pinned. Raises `FullError`.
        """
        most = self.budget.max_bytes
        if self.used is not None and self.used.bytes <= most:
            return
        try:
            with self._backend.view() as view:
                self.saw(used := view.used)
                least = _least_of(view).bytes
        except StorageError:
            return  # the transaction finds out
        if least <= most < used.bytes:
            self.saw(replace(used, bytes=self.shrink(most)[1]))

    # -- what is evicted ----------------------------------------------------------------------------------------------

    def ranks(self, keys: Sequence[bytes], leaves: Leaves) -> Ranks:
        """The ranks of leaves with these page keys, deferred uses included."""
        with self.catalog.lock:
            self.catalog.enter_uses(keys, leaves)
            return self.catalog.policy.ranks(leaves)

    def admits(self, new: PendingPage, victim: Victim) -> bool:
        """Whether the policy finds a new page worth more than a victim."""
        with self.catalog.lock:
            return self.catalog.policy.admits(Leaf.of(new.record.head, new.page.usage), victim.leaf)

    def evicted(self, victim: Victim, now: int) -> None:
        """Count and remember that a victim was deleted, `now` in nanoseconds since the epoch."""
        with self.catalog.lock:
            if not victim.is_expired:
                self.catalog.policy.evicted(victim.key, victim.leaf.uses, victim.last_used)
            self._evicted.pop(victim.key, None)
            self._evicted[victim.key] = None
            if len(self._evicted) > REMEMBERED:
                del self._evicted[next(iter(self._evicted))]
        self._counters.count("expired" if victim.is_expired else "evictions", namespace=victim.namespace)
        if not victim.is_expired and time_of_use(victim.leaf.last_used, now):
            self._counters.observe("eviction_age", ((now - victim.last_used) / 1e9,))

    def has_evicted(self, key: bytes) -> bool:
        """Whether this process has evicted this page recently."""
        return key in self._evicted


class Space:
    """Makes space in one transaction."""

    def __init__(self, evictor: Evictor, transaction: PageUpdate) -> None:
        self._evictor = evictor
        self._budget = evictor.budget
        self._transaction = transaction
        # by group: its leaves in the order of eviction
        self._victims: dict[Group, Victims] = {}
        # the stored page that the new one replaces
        self._replaced: bytes | None = None

    def make(
        self, new: PendingPage, admits: Callable[[Victim], bool], replaced: Page | None = None
    ) -> DropReason | None:
        """Evict until a new page fits, as long as it is worth more than the victims (`admits`).

        Returns None if it fits, else why it is not to be put: `BUDGET`, `QUOTA` or `ADMISSION`. Nothing is evicted for
        a page that cannot fit. A tenant with a quota evicts its own pages first, and those of others only when it has
        none left. The stored page that the new one replaces (`replaced`) is not evicted.
        """
        group, self._replaced = self._group(new), replaced.key if replaced is not None else None
        need = self._need(new, replaced)
        # what is pinned stays: so it is known beforehand whether the page can fit
        kept = need if replaced is not None and replaced.pinned else self._need(new)
        if group is not None and group.held(self._transaction).pinned_bytes + kept.size > group.quota:
            return DropReason.QUOTA
        is_too_much = partial(self._budget_is_exceeded, need)
        is_full = is_too_much()
        if is_full and self._budget_is_exceeded(kept, _least_of(self._transaction)):
            return DropReason.BUDGET
        limits: list[tuple[DropReason, Callable[[], bool], Sequence[Group]]] = []
        if group is not None:
            limits.append((DropReason.QUOTA, partial(self._quota_is_exceeded, group, need), (group,)))
        if is_full:
            limits.append((DropReason.BUDGET, is_too_much, (ALL,) if group is None else (group, ALL)))
        for reason, exceeds, leaves_of in limits:
            is_exceeded = exceeds()
            for one in leaves_of:
                while is_exceeded and (victim := self._lowest(one)) is not None:
                    if not admits(victim):
                        return DropReason.ADMISSION
                    self._take(victim)
                    is_exceeded = exceeds()
            if is_exceeded:
                return reason
        return None

    def added(self, namespace: bytes, key: bytes) -> None:
        """Consider a page that may have become a leaf: it was put, or lost its last child."""
        for victims in self._victims.values():
            victims.added(namespace, key)

    def shrink(self, n_bytes: int, *, at_most: int | None = None) -> tuple[list[bytes], bool]:
        """Evict until the location holds no more than `n_bytes`, but not more than `at_most` pages.

        Returns the keys of the evicted pages, and whether there may be more.
        """
        evicted: list[bytes] = []
        n_taken = 0
        while self._transaction.used.bytes > n_bytes and (at_most is None or n_taken < at_most):
            victim = self._lowest(ALL)
            if victim is None:
                return evicted, False
            n_taken += 1
            if self._take(victim):
                evicted.append(victim.key)
        return evicted, True

    def delete_expired(self, at_most: int) -> bool:
        """Delete expired leaves that are found, and their parents if those become expired leaves.

        Returns whether there may be more.
        """
        for _ in range(at_most):
            victim = self._lowest(ALL)
            if victim is None or not victim.is_expired:
                return False
            self._take(victim)
        return True

    # -- limits -------------------------------------------------------------------------------------------------------

    def _group(self, new: PendingPage) -> Group | None:
        """The pages that share a quota with a new page; None without a quota."""
        if self._budget.quota is None:
            return None
        salt = salt_in(new.settings)
        return Group(new.page.namespace if salt is None else salt, self._budget.quota)

    def _need(self, new: PendingPage, replaced: Page | None = None) -> _Need:
        """What a new page needs if it replaces a stored one."""
        cost, size = self._transaction.cost(new.record, len(new.payload)), len(new.payload) + len(new.record.tokens)
        if replaced is None:
            return _Need(cost, size, 1)
        # how much the rows of the replaced page take is known only when they are gone
        return _Need(cost - replaced.stored_bytes, size - replaced.stored_bytes - len(replaced.tokens), 0)

    def _quota_is_exceeded(self, group: Group, need: _Need) -> bool:
        return group.held(self._transaction).quota_bytes + need.size > group.quota

    def _budget_is_exceeded(self, need: _Need, used: Used | None = None) -> bool:
        return self._budget.exceeded(used or self._transaction.used, adding=need.cost, entries=need.entries)

    # -- victims ------------------------------------------------------------------------------------------------------

    def _lowest(self, group: Group) -> Victim | None:
        """The leaf of a group to evict next, if it may be evicted."""
        if group not in self._victims:
            catalog, n_pages = self._evictor.catalog, self._transaction.used.entries
            with catalog.lock:
                catalog.policy.prepare(n_pages)
            self._victims[group] = Victims(self._transaction, self._evictor.ranks, group)
        victims = self._victims[group]
        while (victim := victims.lowest()) is not None:
            if victim.key != self._replaced and self._evictor.catalog.may_evict(victim):
                return victim
            victims.spare(victim)
        return None

    def _take(self, victim: Victim) -> bool:
        """Evict a victim; False if its page was gone already."""
        transaction = self._transaction
        is_stored = transaction.delete(victim.key)
        if not is_stored:
            transaction.drop_leaf(victim.namespace, victim.key)
        self.added(victim.namespace, victim.leaf.parent)
        if is_stored:
            transaction.after_commit.append(partial(self._evictor.evicted, victim, time.time_ns()))
        return is_stored


class _Need(NamedTuple):
    """What a page needs: bytes of the location, bytes of a quota, and entries."""

    cost: int
    size: int
    entries: int


def _least_of(view: PageView) -> Used:
    """What would be left if everything but pinned pages was evicted, estimated from their share of the quota bytes."""
    count = view.count()
    share = count.pinned_bytes / count.quota_bytes if count.quota_bytes > 0 else 0.0
    return Used(int(view.used.bytes * min(max(share, 0.0), 1.0)), count.pinned)
