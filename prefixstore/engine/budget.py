"""What a location may hold, and how space is made in it: limits, quotas of tenants, eviction, expiry."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prefixstore.backends.base import Backend, Transaction, Used
from prefixstore.engine.catalog import Catalog, DropReason
from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError, FullError, InvalidParameterError
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record
from prefixstore.stats import Counters
from prefixstore.units import parse_bytes

__all__ = ["Budget", "Evictor", "Quota"]

# other processes wait while a transaction is open: it evicts so many pages and bytes, and no more
PAGES_AT_ONCE = 512
BYTES_AT_ONCE = 256 << 20
# expired pages that a commit deletes beside its own work; the next one goes on
EXPIRED_AT_ONCE = 128


@dataclass(frozen=True)
class Quota:
    """What one tenant may hold, in bytes: stored bytes and tokens of its pages. None for no limit.

    Attributes
    ----------
    namespace
        One namespace: one model with its settings, one salt.
    salt
        All namespaces of one salt together.
    """

    namespace: int | None = None
    salt: int | None = None

    @classmethod
    def parse(cls, quota: int | str | Mapping[str, int | str] | None, max_bytes: int) -> Quota:
        """A quota from one size, which holds for each namespace and for each salt, or from sizes for either.

        Raises
        ------
        InvalidParameterError
            If a size cannot be read, or is above `max_bytes`.
        """
        if quota is None:
            return cls()
        if not isinstance(quota, Mapping):
            quota = {"namespace": quota, "salt": quota}
        if unknown := sorted(quota.keys() - {"namespace", "salt"}):
            raise InvalidParameterError(f'quota has {unknown[0]!r}; write a size, or {{"namespace": …, "salt": …}}')
        sizes = {name: parse_bytes(size, f"quota[{name!r}]") for name, size in quota.items()}
        for name, size in sizes.items():
            if size > max_bytes:
                raise InvalidParameterError(
                    f"quota: {size} bytes for each {name} are more than max_bytes={max_bytes}; lower it, or raise that"
                )
        return cls(**sizes)


@dataclass(frozen=True)
class Budget:
    """What a location may hold.

    A write checks, evicts and stores in one exclusive transaction, so no two processes claim the same space.
    """

    max_bytes: int
    max_entries: int | None = None
    quota: Quota = Quota()

    def __str__(self) -> str:
        entries = f" in {self.max_entries:,} pages" if self.max_entries is not None else ""
        return f"the limit of {self.max_bytes:,} bytes{entries}"

    def exceeded(self, used: Used, *, adding: int = 0, entries: int = 0) -> bool:
        """Whether `used` and `adding` bytes in `entries` more entries are too much."""
        too_many = self.max_entries is not None and used.entries + entries > self.max_entries
        return too_many or used.bytes + adding > self.max_bytes


class Evictor:
    """Makes space for pages: deletes leaves in the transaction that will use the space.

    Parameters
    ----------
    catalog
        Knows the victims.
    budget
        What the location may hold.
    counters
        Counts what is deleted.
    """

    def __init__(self, catalog: Catalog, budget: Budget, counters: Counters) -> None:
        self._catalog = catalog
        self._budget = budget
        self._counters = counters

    def make_space(self, transaction: Transaction, record: Record, n_bytes: int, settings: bytes) -> DropReason | None:
        """Evict until a page with a payload of `n_bytes` fits.

        A tenant with a quota makes space among its own pages first, so it does not evict those of others as long as it
        has any.

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
        DropReason or None
            Why the page does not fit, `BUDGET` or `QUOTA`; None if it does.
        """
        cost = transaction.cost(record, n_bytes)
        if cost > self._budget.max_bytes:
            return DropReason.BUDGET

        def exceeded() -> bool:
            return self._budget.exceeded(transaction.used, adding=cost, entries=1)

        groups = self._groups(transaction, record.namespace, settings)
        for namespaces, limit in groups:
            if not self._shrink(transaction, namespaces, limit - n_bytes):
                return DropReason.QUOTA
        if groups and self._evict(transaction, exceeded, groups[-1][0]):
            return None
        return None if self._evict(transaction, exceeded) else DropReason.BUDGET

    def shrink(self, backend: Backend, max_bytes: int) -> int:
        """Evict, in transactions of bounded length, until the location holds `max_bytes`, or nothing is left to evict.

        Returns
        -------
        int
            What the location holds now, in bytes.

        Raises
        ------
        FullError
            If the location has no space to delete even one page.
        """
        at_once = PAGES_AT_ONCE
        while True:
            try:
                with self._catalog.update(backend) as transaction:
                    enough = max(max_bytes, transaction.used.bytes - BYTES_AT_ONCE)
                    is_left = self._evict(transaction, lambda: transaction.used.bytes > enough, at_most=at_once)  # noqa: B023
                    used = transaction.used.bytes
            except FullError:
                if at_once == 1:
                    raise
                # to delete a page takes space as well, until the transaction is committed
                at_once = max(at_once // 4, 1)
                with suppress(FullError):
                    backend.reclaim()
                continue
            if used <= max_bytes or not is_left:
                return used

    def delete_expired(self, transaction: Transaction) -> None:
        """Delete leaves that have expired, and parents that become such leaves, up to a bounded number."""
        now = time.time_ns()
        expiring = self._catalog.expiring()
        try:
            for _ in range(EXPIRED_AT_ONCE):
                page = expiring.next()
                if page is None:
                    break
                if page.expires > now:
                    self._catalog.put_back(page)
                    break
                self._delete(transaction, page, evicting=False)
        finally:
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

    def _shrink(self, transaction: Transaction, namespaces: frozenset[bytes], limit: int) -> bool:
        """Evict until these namespaces hold at most `limit` bytes; whether they do."""
        return self._evict(transaction, lambda: self._catalog.held_bytes(namespaces) > limit, namespaces)

    def _evict(
        self,
        transaction: Transaction,
        exceeded: Callable[[], bool],
        namespaces: frozenset[bytes] | None = None,
        *,
        at_most: int | None = None,
    ) -> bool:
        """Delete leaves, first victim first, while there is too much, or `at_most` so many; false if none are left."""
        victims = self._catalog.victims(namespaces)
        turns = itertools.count() if at_most is None else range(at_most)
        try:
            for _ in turns:
                if not exceeded():
                    break
                victim = victims.next()
                if victim is None:
                    return False
                self._delete(transaction, victim, evicting=True)
        finally:
            victims.close()
        return True

    def _delete(self, transaction: Transaction, victim: Page, *, evicting: bool) -> None:
        # asked before the catalog's lock is taken: a completion may wait for that
        usage = transaction.usage(victim.key)
        # the index first, so that the page is not matched, nor continued, while it is deleted
        if self._catalog.remove_victim(victim, usage, evicting=evicting):
            transaction.delete(victim.key)
            self._counters.count("evictions" if evicting else "expired")


def _salt(settings: bytes) -> str | None:
    try:
        return Namespace.parse(settings).salt
    except CorruptError:
        return None
