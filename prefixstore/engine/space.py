"""Makes space: evicts leaves until what is to be written fits, in the transaction that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.eviction import Group, Victim, Victims
from prefixstore.engine.eviction_log import Cause
from prefixstore.engine.index import Page
from prefixstore.engine.keyspace import Count
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import Used, View
from prefixstore.engine.pages import Pages, fewer, retried
from prefixstore.engine.pending import PackedPage
from prefixstore.engine.waiting import DropReason
from prefixstore.errors import FullError, StorageError
from prefixstore.format.namespace import salt_in
from prefixstore.format.record import time_of_use
from prefixstore.results import Shortage
from prefixstore.stats import Counters

__all__ = ["PAGES_AT_ONCE", "Evictor", "Space"]

# other processes wait while a transaction is open: it evicts so many pages and bytes, and no more
PAGES_AT_ONCE = 512
BYTES_AT_ONCE = 256 << 20


class _TakenBackError(StorageError):
    """Ends a transaction that only tries something; what it has changed is undone."""


class Evictor:
    """Evicts leaves of a location.

    Parameters
    ----------
    catalog
        Chooses the victims.
    budget
        What the location may hold.
    counters
        Counts what is deleted.
    cause
        Why it evicts, apart from quotas and from pages that have expired; for the log of evictions.

    Attributes
    ----------
    used
        What the location held after the last transaction; None before the first.
    """

    def __init__(
        self,
        catalog: Catalog,
        budget: Budget,
        counters: Counters,
        cause: Cause = Cause.SPACE,
    ) -> None:
        self.catalog = catalog
        self.budget = budget
        self.cause = cause
        self._counters = counters
        self.used: Used | None = None

    def shrink(self, backend: Pages, max_bytes: int) -> tuple[list[bytes], int]:
        """Evict, in transactions of bounded length, until the location holds `max_bytes`, or nothing is left to evict.

        Returns
        -------
        tuple of list and int
            The keys of the pages that were evicted; and what the location holds now, in bytes.

        Raises
        ------
        FullError
            If the location has no space to delete even one page.
        """
        evicted: list[bytes] = []
        at_once = PAGES_AT_ONCE
        while True:
            try:
                some, used, is_done = self._shrink_some(backend, max_bytes, at_once)
            except FullError as error:
                at_once = fewer(backend, at_once, error)
                continue
            evicted += some
            if is_done:
                return evicted, used

    @retried
    def _shrink_some(self, backend: Pages, max_bytes: int, at_once: int) -> tuple[list[bytes], int, bool]:
        with self.catalog.update(backend) as transaction:
            enough = max(max_bytes, transaction.used.bytes - BYTES_AT_ONCE)
            evicted, is_left = Space(self, transaction).shrink(enough, at_most=at_once)
            used = transaction.used.bytes
        return evicted, used, used <= max_bytes or not is_left

    def trial(self, backend: Pages, max_bytes: int) -> tuple[list[bytes], int]:
        """What `shrink` would evict, and what the location would hold after it. Nothing is changed.

        It is tried in one transaction, which is taken back; other writers wait meanwhile. Raises `FullError`.
        """
        chosen: list[bytes] = []
        used = 0
        with suppress(_TakenBackError), self.catalog.update(backend) as transaction:
            chosen, _ = Space(self, transaction).shrink(max_bytes)
            used = transaction.used.bytes
            raise _TakenBackError
        return chosen, used

    def respect_budget(self, backend: Pages) -> None:
        """If more is stored than the budget allows, since it was larger before, evict the excess in short transactions.

        Nothing is evicted if too much is pinned. Raises `FullError`.
        """
        most = self.budget.max_bytes
        if self.used is not None and self.used.bytes <= most:
            return
        try:
            with backend.view() as view:
                self.used, least = view.used, least_of(view).bytes
        except StorageError:
            return  # the transaction finds out
        if least <= most < self.used.bytes:
            self.used = replace(self.used, bytes=self.shrink(backend, most)[1])

    def deleted(self, victim: Victim, now: int, cause: Cause) -> None:
        """Count and report a page that is deleted, and how long after its last use it is evicted, if that is known."""
        evicting = cause is not Cause.EXPIRED
        self.catalog.evicted(victim, cause, now)
        self._counters.count("evictions" if evicting else "expired", namespace=victim.namespace)
        if evicting and time_of_use(victim.leaf.last_used, now):
            self._counters.observe("eviction_age", ((now - victim.last_used) / 1e9,))


class Space:
    """Makes space in one transaction.

    Parameters
    ----------
    evictor
        Whose catalog, budget and cause.
    transaction
        In which pages are deleted, and those that need the space are put.
    """

    def __init__(self, evictor: Evictor, transaction: Transaction) -> None:
        self._evictor = evictor
        self._budget = evictor.budget
        self._transaction = transaction
        # the leaves of tenants, and of all, in the order in which to evict them
        self._victims: dict[_Tenant | None, Victims] = {}

    def make(self, one: PackedPage, admits: Callable[[Victim], bool]) -> DropReason | None:
        """Evict until a page fits, as long as it is worth more. Nothing is evicted for a page that cannot fit.

        A tenant with a quota makes space among its own pages first, so it does not evict those of others as long as it
        has any.

        Parameters
        ----------
        one
            The page, which is put next.
        admits
            Whether it is worth more than a victim.

        Returns
        -------
        DropReason or None
            Why the page is not to be put: `BUDGET`, `QUOTA` or `ADMISSION`; None if it fits.
        """
        tenants, cost = self._tenants(one), self._transaction.cost(one.record, len(one.payload))
        size = len(one.payload) + len(one.record.tokens)
        is_too_much = partial(self._exceeds_budget, cost)
        # known before anything is evicted: what is pinned stays
        if any(self._held(tenant).pinned_bytes + size > tenant.quota for tenant in tenants):
            return DropReason.QUOTA
        if is_too_much() and self._budget.exceeded(least_of(self._transaction), adding=cost, entries=1):
            return DropReason.BUDGET
        for tenant in tenants:
            exceeds = partial(self._exceeds_quota, tenant, size)
            reason = self._evict_while(exceeds, tenant, admits)
            if reason is not None or exceeds():
                return reason or DropReason.QUOTA
        for group in (*tenants[-1:], None):
            reason = self._evict_while(is_too_much, group, admits)
            if reason is not None:
                return reason
        return DropReason.BUDGET if is_too_much() else None

    def _evict_while(
        self, exceeds: Callable[[], bool], tenant: _Tenant | None, admits: Callable[[Victim], bool]
    ) -> DropReason | None:
        """Evict pages of a tenant, or any, while there is too much; `ADMISSION` if one of them is worth more."""
        while exceeds() and (victim := self._next(tenant)) is not None:
            if not admits(victim):
                # other pages may take its place
                self._victims_of(tenant).give_back(victim)
                return DropReason.ADMISSION
            self._take(victim, tenant)
        return None

    def put(self, page: Page) -> None:
        """A page was put: it is a leaf now, and an imported one may be older than others."""
        for victims in self._victims.values():
            victims.added(page.namespace, page.key)

    def shrink(self, n_bytes: int, *, at_most: int | None = None) -> tuple[list[bytes], bool]:
        """Evict until the location holds so many bytes, or `at_most` so many pages.

        Returns their keys, and whether more may be left.
        """
        evicted: list[bytes] = []
        n_taken = 0
        while self._transaction.used.bytes > n_bytes and (at_most is None or n_taken < at_most):
            victim = self._next(None)
            if victim is None:
                return evicted, False
            n_taken += 1
            if self._take(victim, None):
                evicted.append(victim.key)
        return evicted, True

    def delete_expired(self, at_most: int) -> bool:
        """Delete expired leaves, and parents that become such leaves, as far as they are found.

        Returns whether more may be left.
        """
        for _ in range(at_most):
            victim = self._next(None)
            if victim is None or not victim.is_expired:
                if victim is not None:
                    self._victims_of(None).give_back(victim)
                return False
            self._take(victim, None)
        return True

    def shortage(self, one: PackedPage, reason: DropReason, n_pages: int) -> Shortage:
        """How much space a page needed that was refused for this reason, and how much there was.

        Available is what is free, and what eviction could free; of a page that was not admitted, only what is free.
        """
        transaction, asked = self._transaction, len(one.payload)
        if reason is DropReason.QUOTA:
            available = min(tenant.quota - self._held(tenant).pinned_bytes for tenant in self._tenants(one))
        else:
            asked = transaction.cost(one.record, asked)
            kept = least_of(transaction) if reason is DropReason.BUDGET else transaction.used
            available = self._budget.max_bytes - kept.bytes
        return Shortage(reason.value, n_pages, asked, max(available, 0))

    # -- limits -------------------------------------------------------------------------------------------------------

    def _tenants(self, one: PackedPage) -> list[_Tenant]:
        """Whose quotas bound a page; the one for the largest group last."""
        quota, namespace = self._budget.quota, one.record.namespace
        found: list[_Tenant] = []
        if quota.namespace is not None:
            found.append(_Tenant(namespace, None, quota.namespace))
        # without a salt there is no tenant
        salt = salt_in(one.pending.settings) if quota.salt is not None else None
        if quota.salt is not None and salt is not None:
            found.append(_Tenant(None, salt, quota.salt))
        return found

    def _held(self, tenant: _Tenant) -> Count:
        """What a tenant holds now."""
        if tenant.salt is not None:
            return self._transaction.count_of(tenant.salt)
        return self._transaction.count(tenant.namespace)

    def _exceeds_quota(self, tenant: _Tenant, size: int) -> bool:
        return self._held(tenant).quota_bytes + size > tenant.quota

    def _exceeds_budget(self, cost: int) -> bool:
        return self._budget.exceeded(self._transaction.used, adding=cost, entries=1)

    # -- victims ------------------------------------------------------------------------------------------------------

    def _victims_of(self, tenant: _Tenant | None) -> Victims:
        if tenant not in self._victims:
            group = None
            if tenant is not None and tenant.namespace is not None:
                group = Group(tenant.namespace, {tenant.namespace: self._held(tenant).leaves})
            elif tenant is not None and tenant.salt is not None:
                spaces = self._transaction.namespaces_of(tenant.salt)
                name = b"salt " + tenant.salt.encode("utf-8", "surrogatepass")
                group = Group(name, {space: count.leaves for space, count in spaces.items()})
            self._victims[tenant] = self._evictor.catalog.victims(self._transaction, group)
        return self._victims[tenant]

    def _next(self, tenant: _Tenant | None) -> Victim | None:
        """The next leaf to be evicted, of a tenant or of all, that is not in use."""
        victims = self._victims_of(tenant)
        while (victim := victims.next()) is not None and not self._evictor.catalog.may_evict(victim):
            victims.spare(victim)
        return victim

    def _take(self, victim: Victim, tenant: _Tenant | None) -> bool:
        """Delete a victim; whether it was an eviction: its page may have gone before."""
        transaction = self._transaction
        is_stored = transaction.delete(victim.key)
        if not is_stored:
            transaction.drop_leaf(victim.namespace, victim.key)
        for victims in self._victims.values():
            victims.taken(victim)
        if is_stored:
            cause = self._evictor.cause if tenant is None else Cause.QUOTA
            cause = Cause.EXPIRED if victim.is_expired else cause
            transaction.after_commit.append(partial(self._evictor.deleted, victim, time.time_ns(), cause))
        return is_stored


class _Tenant(NamedTuple):
    """A namespace, or all namespaces of a salt together, and how many bytes they may hold."""

    namespace: bytes | None
    salt: str | None
    quota: int


def least_of(view: View) -> Used:
    """What stays in a location if all is evicted: what is pinned, estimated from the size of an average byte there."""
    count = view.count()
    share = count.pinned_bytes / count.quota_bytes if count.quota_bytes > 0 else 0.0
    return Used(int(view.used.bytes * min(max(share, 0.0), 1.0)), count.pinned)
