"""Room for a page: in the location, and in the quotas of its tenant. Evicts, and deletes what has expired."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prefixstore.backends.base import Transaction
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, Usage
from prefixstore.stats import Counters

__all__ = ["Room"]


class Room:
    """Deletes within a transaction of somebody else, leaves first."""

    def __init__(self, catalog: Catalog, budget: Budget, counters: Counters) -> None:
        self._catalog = catalog
        self._budget = budget
        self._counters = counters

    def make_for(self, transaction: Transaction, record: Record, n_bytes: int, settings: bytes) -> str | None:
        """Evict until there is room for a page with a payload of `n_bytes`.

        A tenant with a quota makes room among its own pages first, so it does not evict the others as long as it can.

        Parameters
        ----------
        transaction
            In which the page will be put.
        record
            Of the page.
        n_bytes
            Length of its payload.
        settings
            Canonical settings of its namespace.

        Returns
        -------
        str or None
            Why there is no room: ``"budget"`` or ``"quota"``; None if there is.
        """
        cost = transaction.cost(record, n_bytes)
        if cost > self._budget.max_bytes:
            return "budget"

        def exceeded() -> bool:
            return self._budget.exceeded(transaction.used, adding=cost, entries=1)

        groups = self._groups(transaction, record.namespace, settings)
        for namespaces, limit in groups:
            if not self._make_in_group(transaction, namespaces, limit - n_bytes):
                return "quota"
        if groups and self._evict(transaction, exceeded, groups[-1][0]):
            return None
        return None if self._evict(transaction, exceeded) else "budget"

    def make_spare(self, transaction: Transaction, n_bytes: int) -> None:
        """Evict `n_bytes` more than the budget asks for."""
        spare = max(self._budget.max_bytes - transaction.used.bytes, 0)
        adding = min(spare + n_bytes, self._budget.max_bytes)
        self._evict(transaction, lambda: self._budget.exceeded(transaction.used, adding=adding))

    def remove_expired(self, transaction: Transaction) -> None:
        """Delete leaves that have expired, and what becomes such a leaf by it."""
        now = time.time_ns()
        catalog = self._catalog
        with catalog.lock:
            catalog.overdue = False
            expiring = catalog.candidates.expiring()
        while (page := self._next(expiring)) is not None:
            if page.expires > now:
                with catalog.lock:
                    catalog.candidates.offer(page)
                break
            self._delete(transaction, page, "expired")
        with catalog.lock:
            expiring.close()

    def _groups(
        self, transaction: Transaction, namespace: bytes, settings: bytes
    ) -> list[tuple[frozenset[bytes], int]]:
        """The groups of namespaces that a quota bounds and this one belongs to, the largest last."""
        quota = self._budget.quota
        groups: list[tuple[frozenset[bytes], int]] = []
        if quota.namespace is not None:
            groups.append((frozenset((namespace,)), quota.namespace))
        # without a salt there is no tenant
        mine = _salt(settings) if quota.salt is not None else None
        if quota.salt is not None and mine is not None:
            same = frozenset(key for key, other in transaction.namespaces().items() if _salt(other) == mine)
            groups.append((same | {namespace}, quota.salt))
        return groups

    def _make_in_group(self, transaction: Transaction, namespaces: frozenset[bytes], limit: int) -> bool:
        """Evict until these namespaces hold at most `limit` bytes; whether they do."""
        held = self._catalog.index.held
        return self._evict(transaction, lambda: sum(held[namespace] for namespace in namespaces) > limit, namespaces)

    def _evict(
        self, transaction: Transaction, exceeded: Callable[[], bool], namespaces: frozenset[bytes] | None = None
    ) -> bool:
        """Delete leaves, first victim first, while there is too much; whether there is room now."""
        catalog = self._catalog
        with catalog.lock:
            victims = catalog.candidates.victims(namespaces)
        try:
            while exceeded():
                victim = self._next(victims)
                if victim is None:
                    return False
                self._delete(transaction, victim, "evictions")
        finally:
            with catalog.lock:
                victims.close()
        return True

    def _next(self, pages: Iterator[Page]) -> Page | None:
        with self._catalog.lock:
            return next(pages, None)

    def _delete(self, transaction: Transaction, victim: Page, counted: str) -> None:
        """Delete a leaf, unless another process has used or pinned it, or this one put something behind it."""
        # asked without the lock: a completion may wait for that
        usage = transaction.usage(victim.key)
        catalog = self._catalog
        with catalog.lock:
            if catalog.index.get(victim.key) is not victim or not victim.is_leaf:
                return
            if usage is not None and _is_newer(usage, victim):
                victim.last_used = max(usage.last_used, victim.last_used)
                victim.expires = max(usage.expires, victim.expires)
                victim.hits, victim.pinned = max(usage.hits, victim.hits), usage.pinned
                catalog.candidates.offer(victim)
                return
            # first of all nobody finds it any more, nor puts anything behind it
            if counted == "evictions":
                catalog.evict(victim)
            else:
                catalog.forget(victim.key)
        transaction.delete(victim.key)
        self._counters.count(counted)


def _is_newer(usage: Usage, page: Page) -> bool:
    """Whether another process has used or pinned a page."""
    return usage.last_used > page.last_used or usage.expires > page.expires or usage.pinned


def _salt(settings: bytes) -> str | None:
    try:
        return Namespace.parse(settings).salt
    except CorruptError:
        return None
