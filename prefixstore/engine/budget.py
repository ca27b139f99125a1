"""What a location may hold, and how space is made in it: limits, quotas of tenants, eviction, expiry."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from prefixstore.backends.base import Backend, Transaction, Used
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.contents import DropReason
from prefixstore.engine.index import Page
from prefixstore.engine.totals import Group, Total
from prefixstore.errors import CorruptError, FullError, InvalidParameterError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import CHECKSUM_BYTES, Record
from prefixstore.stats import Counters
from prefixstore.units import parse_bytes

__all__ = ["NO_LIMIT", "PAGES_AT_ONCE", "Budget", "Evictor", "Quota", "fewer"]

# so large that what a page costs beside its payload does not matter
MANY_BYTES = 1 << 40
NO_LIMIT = 2**63
# other processes wait while a transaction is open: it evicts so many pages and bytes, and no more
PAGES_AT_ONCE = 512
BYTES_AT_ONCE = 256 << 20


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

    Attributes
    ----------
    max_bytes, max_entries
        The limits; None for no limit.
    quota
        Of each tenant.
    high_water, low_water
        Shares of both limits: beyond the first, room is made in idle time, until no more than the second is in use.
    """

    max_bytes: int
    max_entries: int | None = None
    quota: Quota = Quota()
    high_water: float = 0.95
    low_water: float = 0.9

    def __str__(self) -> str:
        entries = f" in {self.max_entries:,} pages" if self.max_entries is not None else ""
        return f"the limit of {self.max_bytes:,} bytes{entries}"

    def exceeded(self, used: Used, *, adding: int = 0, entries: int = 0) -> bool:
        """Whether `used` and `adding` bytes in `entries` more entries are too much."""
        too_many = self.max_entries is not None and used.entries + entries > self.max_entries
        return too_many or used.bytes + adding > self.max_bytes

    def share(self, share: float) -> Used:
        """What a location holds when this share of both limits is in use.

        Entries are rounded up, as a share of a few of them may be less than one page below all.
        """
        entries = NO_LIMIT if self.max_entries is None else math.ceil(self.max_entries * share)
        return Used(math.floor(self.max_bytes * share), entries)


def fewer(backend: Backend, at_once: int, error: FullError) -> int:
    """How many pages to delete in one transaction, after a location had no space to delete `at_once`.

    Deleting a page takes space as well, until the transaction is committed. Raises `error` if it was only one.
    """
    if at_once == 1:
        raise error
    with suppress(FullError):
        backend.reclaim()
    return max(at_once // 4, 1)


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

    def make_space(
        self,
        transaction: Transaction,
        record: Record,
        n_bytes: int,
        settings: bytes,
        replaced: Page | None = None,
    ) -> DropReason | None:
        """Evict until a page with a payload of `n_bytes` fits. For one that cannot fit, nothing is evicted.

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
        replaced
            A page that will be deleted first, and is not in the catalog any more.

        Returns
        -------
        DropReason or None
            Why the page does not fit, `BUDGET` or `QUOTA`; None if it does.
        """
        cost = transaction.cost(record, n_bytes)
        freed = Used(0, 0)
        if replaced is not None:
            # at most: what the page is found to need beyond that is evicted when the tail is gone
            freed = Used(_cost(transaction, len(replaced.tokens), replaced.stored_bytes), 1)

        def exceeded() -> bool:
            return self._budget.exceeded(transaction.used, adding=cost - freed.bytes, entries=1 - freed.entries)

        quotas = self._quotas(transaction, record.namespace, settings)
        # Known before anything is evicted: the page fits if all were evicted that can be.
        for group, limit in quotas:
            total = self._catalog.total(group)
            if total.bytes - total.evictable_bytes > limit - n_bytes:
                return DropReason.QUOTA
        if self._is_hopeless(transaction, cost - freed.bytes, 1 - freed.entries):
            return DropReason.BUDGET
        for group, limit in quotas:
            if not self._shrink(transaction, group, limit - n_bytes):
                return DropReason.QUOTA
        if quotas and self._evict(transaction, exceeded, quotas[-1][0]):
            return None
        return None if self._evict(transaction, exceeded) else DropReason.BUDGET

    def _is_hopeless(self, transaction: Transaction, adding: int, entries: int) -> bool:
        """Whether there is too much even if all is evicted that can be. False if that is not certain."""
        used, total = transaction.used, self._catalog.evictable()
        left = used.bytes - _most_freed(transaction, total)
        return self._budget.exceeded(Used(max(left, 0), used.entries - total.evictable), adding=adding, entries=entries)

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
            except FullError as error:
                at_once = fewer(backend, at_once, error)
                continue
            if used <= max_bytes or not is_left:
                return used

    def evict(self, transaction: Transaction, limit: Used, at_most: int) -> bool:
        """Evict until the location holds no more than `limit`, but `at_most` so many pages; false if none are left."""

        def exceeded() -> bool:
            used = transaction.used
            return used.bytes > limit.bytes or used.entries > limit.entries

        return self._evict(transaction, exceeded, at_most=at_most)

    def delete_expired(self, transaction: Transaction, at_most: int) -> bool:
        """Delete leaves that have expired, and parents that become such leaves; whether more are left."""
        now = time.time_ns()
        expiring = self._catalog.expiring()
        try:
            for _ in range(at_most):
                page = expiring.next()
                if page is None:
                    return False
                if page.expires > now:
                    self._catalog.put_back(page)
                    return False
                self._delete(transaction, page, evicting=False)
        finally:
            expiring.close()
        return True

    def _quotas(self, transaction: Transaction, namespace: bytes, settings: bytes) -> list[tuple[bytes | str, int]]:
        """The groups that a quota bounds and this namespace belongs to, and the limits; the largest group last."""
        quota = self._budget.quota
        found: list[tuple[bytes | str, int]] = []
        if quota.namespace is not None:
            found.append((namespace, quota.namespace))
        # without a salt there is no tenant
        mine = _salt(settings) if quota.salt is not None else None
        if quota.salt is not None and mine is not None:
            self._catalog.set_salt(namespace, mine)
            for other in self._catalog.namespaces_without_salt():
                stored = transaction.namespace(other)
                self._catalog.set_salt(other, _salt(stored) if stored is not None else None)
            found.append((mine, quota.salt))
        return found

    def _shrink(self, transaction: Transaction, group: bytes | str, limit: int) -> bool:
        """Evict until this group holds at most `limit` bytes; whether it does."""
        return self._evict(transaction, lambda: self._catalog.total(group).bytes > limit, group)

    def _evict(
        self,
        transaction: Transaction,
        exceeded: Callable[[], bool],
        group: Group = None,
        *,
        at_most: int | None = None,
    ) -> bool:
        """Delete leaves, first victim first, while there is too much, or `at_most` so many; false if none are left.

        When the index has no more, and all pages are meant, those go that have no place in it: no lookup finds them.
        """
        victims = self._catalog.victims(group)
        turns = itertools.count() if at_most is None else range(at_most)
        try:
            for _ in turns:
                if not exceeded():
                    break
                victim = victims.next()
                if victim is not None:
                    self._delete(transaction, victim, evicting=True)
                elif group is not None or not self._delete_stray(transaction):
                    return False
        finally:
            victims.close()
        return True

    def _delete(self, transaction: Transaction, victim: Page, *, evicting: bool) -> None:
        # asked before the catalog's lock is taken: a completion may wait for that
        usage = transaction.usage(victim.key)
        # the index first, so that the page is not matched, nor continued, while it is deleted
        if self._catalog.remove_victim(victim, usage, evicting=evicting):
            transaction.delete(victim.key)
            self._catalog.after_commit(partial(self._counters.count, "evictions" if evicting else "expired"))

    def _delete_stray(self, transaction: Transaction) -> bool:
        """Delete one page that has no place in the index; whether there was one."""
        key = self._catalog.remove_stray_leaf()
        if key is None:
            return False
        transaction.delete(key)
        self._catalog.after_commit(partial(self._counters.count, "evictions"))
        return True


def _most_freed(transaction: Transaction, total: Total) -> int:
    """The most that deleting all evictable pages can free: no more than putting them can have cost."""
    empty = _cost(transaction, 0, 0)
    per_byte = (_cost(transaction, 0, MANY_BYTES) - empty) / MANY_BYTES
    return total.evictable * empty + math.ceil(total.evictable_bytes * per_byte)


def _cost(transaction: Transaction, n_token_bytes: int, n_bytes: int) -> int:
    """The most that a page with so many bytes of tokens and of payload costs."""
    key = bytes(KEY_BYTES)
    record = Record(key, key, 0, bytes(n_token_bytes), 0, n_bytes, n_bytes, bytes(CHECKSUM_BYTES), 0, 0)
    return transaction.cost(record, n_bytes)


def _salt(settings: bytes) -> str | None:
    try:
        return Namespace.parse(settings).salt
    except CorruptError:
        return None
