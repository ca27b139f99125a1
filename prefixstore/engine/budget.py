"""Limits, quotas and admission: evicts leaves until a new page fits, in the transaction that writes it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from prefixstore.backends.contract import ConflictError
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.eviction import Group, Victim, Victims
from prefixstore.engine.evictions import Cause
from prefixstore.engine.index import Page
from prefixstore.engine.keyspace import Count
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import Used
from prefixstore.engine.pages import CONFLICTS, Pages, fewer
from prefixstore.engine.pending import PackedPage
from prefixstore.engine.relatives import ancestors_of, siblings_of
from prefixstore.engine.waiting import DropReason
from prefixstore.errors import CorruptError, FullError, InvalidParameterError, StorageError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import CHECKSUM_BYTES, Record, time_of_use
from prefixstore.stats import Counters, Shortage
from prefixstore.units import parse_bytes

__all__ = ["PAGES_AT_ONCE", "Budget", "Evicted", "Evictor", "Quota"]

# so large that what a page costs beside its payload does not matter
MANY_BYTES = 1 << 40
# other processes wait while a transaction is open: it evicts so many pages and bytes, and no more
PAGES_AT_ONCE = 512
BYTES_AT_ONCE = 256 << 20
# so many stored pages say what a page takes beside its payload and tokens
PAGES_TO_JUDGE_BY = 16


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
                    f"quota: {size} bytes for each {name} exceed max_bytes={max_bytes}; lower it, or raise that"
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
        Shares of `max_bytes`: above the first, new pages are packed, until no more than the second is in use.
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


@dataclass(frozen=True)
class Evicted:
    """What was evicted, or would have been.

    Attributes
    ----------
    pages
        Keys of the pages, in the order in which they were chosen.
    bytes
        By how much the location became smaller, index included.
    policy
        The policy that chose them.
    target_bytes
        What the location was to hold.
    bytes_left
        What it holds now; after a dry run, what it would.
    dry_run
        Whether nothing was evicted.
    """

    pages: tuple[str, ...]
    bytes: int
    policy: str
    target_bytes: int
    bytes_left: int
    dry_run: bool

    @property
    def is_enough(self) -> bool:
        """Whether the target is reached. If not, everything else is pinned, or the index is larger than the target."""
        return self.bytes_left <= self.target_bytes


class _TakenBackError(StorageError):
    """Ends a transaction that only tries something; what it has changed is undone."""


class Evictor:
    """Makes space for pages: deletes leaves in the transaction that will use the space.

    Parameters
    ----------
    catalog
        Chooses the victims.
    budget
        What the location may hold.
    counters
        Counts what is deleted.
    on_evicted
        Called with the key of each page that was evicted, when its transaction is committed.
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
        on_evicted: Callable[[bytes], None] | None = None,
        cause: Cause = Cause.SPACE,
    ) -> None:
        self._catalog = catalog
        self._cause = cause
        self._budget = budget
        self._counters = counters
        self._on_evicted = on_evicted
        self.used: Used | None = None

    def make_space(
        self,
        transaction: Transaction,
        record: Record,
        n_bytes: int,
        settings: bytes,
        replaced: Page | None = None,
    ) -> DropReason | None:
        """Evict until a page with a payload of `n_bytes` fits. Nothing is evicted for a page that cannot fit.

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
        if not quotas and not exceeded():
            return None
        own, size = ancestors_of(transaction, record), n_bytes + len(record.tokens)
        # Known before anything is evicted: the page fits if all were evicted that can be.
        for quota in quotas:
            total = quota.held()
            if total.quota_bytes - _evictable(total, own).bytes > quota.limit - size:
                return DropReason.QUOTA
        if exceeded() and self._is_hopeless(transaction, cost - freed.bytes, 1 - freed.entries, own):
            return DropReason.BUDGET
        for quota in quotas:
            if not self._shrink(transaction, quota, size):
                return DropReason.QUOTA
        if quotas and self._evict(transaction, exceeded, quotas[-1]):
            return None
        return None if self._evict(transaction, exceeded) else DropReason.BUDGET

    def admit(self, transaction: Transaction, chain: Sequence[PackedPage]) -> tuple[int, DropReason]:
        """Evict for new pages of one prompt, from the lowest leaf on, as long as their last one is worth more.

        If it is not, it is given up, and the one before it is the last. So no page is written whose parent is not.

        Parameters
        ----------
        transaction
            In which the pages will be put.
        chain
            The pages, each the parent of the next.

        Returns
        -------
        int
            How many of them to put.
        DropReason
            Why not the others.
        """
        quotas = self._quotas(transaction, chain[0].record.namespace, chain[0].pending.settings)
        bounds = [self._bound_of_quota(chain, quota) for quota in quotas]
        bounds.append(self._bound(transaction, chain))
        n, reason = len(chain), DropReason.ADMISSION
        if not any(bound.exceeded(n) for bound in bounds):
            return n, reason
        own = ancestors_of(transaction, chain[0].record)
        for bound in bounds:
            # more than can ever fit: nothing is evicted for that
            while n and bound.is_hopeless(n, own):
                n, reason = n - 1, bound.reason
        for i, bound in enumerate(bounds):
            whose = [bound.quota] if i < len(quotas) or not quotas else [quotas[-1], None]
            for quota in whose:
                n_before = n
                n = self._contest(transaction, chain, n, bound, quota)
                if n < n_before:
                    reason = DropReason.ADMISSION
        return n, reason

    def shortage(self, transaction: Transaction, one: PackedPage, reason: DropReason, n_pages: int) -> Shortage:
        """How much space a page needed that was refused for this reason, and how much there was.

        Available is what is free, and what eviction could free; of a page that was not admitted, only what is free.
        """
        size = len(one.payload)
        if reason is DropReason.QUOTA:
            left = [
                quota.limit - total.quota_bytes + _evictable(total).bytes
                for quota in self._quotas(transaction, one.record.namespace, one.pending.settings)
                for total in [quota.held()]
            ]
            return Shortage(reason.value, n_pages, size, max(min(left, default=0), 0))
        available = self._budget.max_bytes - transaction.used.bytes
        if reason is DropReason.BUDGET:
            available += _most_freed(transaction, _evictable(transaction.count()))
        return Shortage(reason.value, n_pages, transaction.cost(one.record, size), max(available, 0))

    def _contest(
        self, transaction: Transaction, chain: Sequence[PackedPage], n: int, bound: _Bound, quota: _Quota | None
    ) -> int:
        """How many of the first `n` pages are admitted, if they are too much for a bound."""
        if not bound.exceeded(n):
            return n
        # a tail is deleted when the page that continues it is written, and stays if that is refused
        tail = siblings_of(transaction, chain[0].pending.page)[0]
        victims = self._catalog.victims(transaction, quota.group() if quota is not None else None)
        victim = victims.next()
        while n and victim is not None and bound.exceeded(n):
            if tail is not None and victim.key == tail.key:
                victims.spare(victim)
                victim = victims.next()
            elif self._catalog.admits(chain[n - 1], victim):
                self._take(transaction, victims, victim, self._cause if quota is None else Cause.QUOTA)
                victim = victims.next()
            else:
                n -= 1
        return n

    def _bound_of_quota(self, chain: Sequence[PackedPage], quota: _Quota) -> _Bound:
        """What the first pages of a chain may not exceed: a quota."""
        sizes = [0, *itertools.accumulate(len(one.payload) + len(one.record.tokens) for one in chain)]

        def too_much(n: int, evictable: _Evictable) -> bool:
            return quota.held().quota_bytes - evictable.bytes + sizes[n] > quota.limit

        return _Bound(DropReason.QUOTA, too_much, quota.held, quota)

    def _bound(self, transaction: Transaction, chain: Sequence[PackedPage]) -> _Bound:
        """What the first pages of a chain may not exceed: the budget of the location."""
        least, likely = self._costs(transaction, chain)
        # the tail that the first page continues is deleted when that is written
        tail = siblings_of(transaction, chain[0].pending.page)[0]
        freed = Used(_cost(transaction, len(tail.tokens), tail.stored_bytes), 1) if tail is not None else Used(0, 0)

        def exceeded(n: int, evictable: _Evictable) -> bool:
            used, adding, entries = transaction.used, likely[n], n
            if evictable.pages:
                adding = least[n]
                # the tail is among them
                most = _most_freed(transaction, evictable)
                used = Used(max(used.bytes - most, 0), used.entries - evictable.pages)
            else:
                adding, entries = adding - freed.bytes, entries - freed.entries
            return self._budget.exceeded(used, adding=adding, entries=entries)

        return _Bound(DropReason.BUDGET, exceeded, transaction.count)

    def _costs(self, transaction: Transaction, chain: Sequence[PackedPage]) -> tuple[list[int], list[int]]:
        """What the first pages of a chain take, by their number: at least, and judging by the pages that are here.

        The last one of them counts as much as it can take: so much has to be free when it is put.
        """
        used, total = transaction.used.bytes, transaction.count()
        usual = used / total.quota_bytes if total.pages >= PAGES_TO_JUDGE_BY and total.quota_bytes else 1.0
        least, likely = [0], [0]
        sum_least = sum_likely = 0
        for one in chain:
            most, size = transaction.cost(one.record, len(one.payload)), len(one.payload) + len(one.record.tokens)
            least.append(sum_least + most)
            likely.append(sum_likely + most)
            sum_least += min(size, most)
            sum_likely += min(math.ceil(size * max(usual, 1.0)), most)
        return least, likely

    def _is_hopeless(self, transaction: Transaction, adding: int, entries: int, own: Sequence[Page] = ()) -> bool:
        """Whether there is too much even if all is evicted but these pages, and what is pinned."""
        used, evictable = transaction.used, _evictable(transaction.count(), own)
        left = used.bytes - _most_freed(transaction, evictable)
        return self._budget.exceeded(Used(max(left, 0), used.entries - evictable.pages), adding=adding, entries=entries)

    def shrink(self, backend: Pages, max_bytes: int) -> int:
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
        at_once, conflicts = PAGES_AT_ONCE, 0
        while True:
            try:
                with self._catalog.update(backend) as transaction:
                    enough = max(max_bytes, transaction.used.bytes - BYTES_AT_ONCE)
                    is_left = self._evict(transaction, partial(_holds_more, transaction, enough), at_most=at_once)
                    used = transaction.used.bytes
            except ConflictError:
                conflicts += 1
                if conflicts == CONFLICTS:
                    raise
                continue
            except FullError as error:
                at_once = fewer(backend, at_once, error)
                continue
            if used <= max_bytes or not is_left:
                return used

    def trial(self, backend: Pages, max_bytes: int) -> tuple[list[bytes], int]:
        """What `shrink` would evict, and what the location would hold after it. Nothing is changed.

        It is tried in one transaction, which is taken back; other writers wait meanwhile. Raises `FullError`.
        """
        chosen: list[bytes] = []
        used = 0
        try:
            with self._catalog.update(backend) as transaction:
                self._evict(transaction, partial(_holds_more, transaction, max_bytes), chosen=chosen)
                used = transaction.used.bytes
                raise _TakenBackError
        except _TakenBackError:
            return chosen, used

    def respect_budget(self, backend: Pages) -> None:
        """If more is stored than the budget allows, since it was larger before, evict the excess in short transactions.

        Nothing is evicted if too much is pinned. Raises `FullError`.
        """
        if self.used is None:
            # if that fails, the transaction finds out
            with suppress(StorageError), backend.view() as view:
                self.used = view.used
        if self.used is None or self.used.bytes <= self._budget.max_bytes:
            return
        with self._catalog.update(backend) as transaction:
            is_hopeless = self._is_hopeless(transaction, 0, 0)
        if not is_hopeless:
            self.used = replace(self.used, bytes=self.shrink(backend, self._budget.max_bytes))

    def delete_expired(self, transaction: Transaction, at_most: int) -> bool:
        """Delete expired leaves, and parents that become such leaves, as far as they are found.

        Returns whether more may be left.
        """
        victims = self._catalog.victims(transaction)
        for _ in range(at_most):
            victim = victims.next()
            if victim is None or not victim.is_expired:
                return False
            self._take(transaction, victims, victim, Cause.EXPIRED)
        return True

    def _quotas(self, transaction: Transaction, namespace: bytes, settings: bytes) -> list[_Quota]:
        """The quotas that bound a namespace; that for the largest group last."""
        quota = self._budget.quota
        found: list[_Quota] = []
        if quota.namespace is not None:
            found.append(_Quota(transaction, namespace, None, quota.namespace))
        # without a salt there is no tenant
        salt = _salt(settings) if quota.salt is not None else None
        if quota.salt is not None and salt is not None:
            found.append(_Quota(transaction, namespace, salt, quota.salt))
        return found

    def _shrink(self, transaction: Transaction, quota: _Quota, n_bytes: int) -> bool:
        """Evict until there is space for so many bytes in a quota; whether there is."""
        return self._evict(transaction, lambda: quota.held().quota_bytes > quota.limit - n_bytes, quota)

    def _evict(
        self,
        transaction: Transaction,
        exceeded: Callable[[], bool],
        quota: _Quota | None = None,
        *,
        at_most: int | None = None,
        chosen: list[bytes] | None = None,
    ) -> bool:
        """Delete leaves, first victim first, while there is too much, or `at_most` so many; false if none are left.

        Their keys are added to `chosen`.
        """
        if not exceeded():
            return True
        cause = self._cause if quota is None else Cause.QUOTA
        victims = self._catalog.victims(transaction, quota.group() if quota is not None else None)
        for _ in itertools.count() if at_most is None else range(at_most):
            if not exceeded():
                break
            victim = victims.next()
            if victim is None:
                return False
            if self._take(transaction, victims, victim, cause) and chosen is not None:
                chosen.append(victim.key)
        return True

    def _take(self, transaction: Transaction, victims: Victims, victim: Victim, cause: Cause) -> bool:
        """Delete a victim, unless it is in use; whether it was deleted."""
        if not self._catalog.may_evict(victim):
            victims.spare(victim)
            return False
        if not transaction.delete(victim.key):
            # its page has gone before: no eviction
            transaction.drop_leaf(victim.namespace, victim.key)
            victims.taken(victim)
            return False
        victims.taken(victim)
        cause = Cause.EXPIRED if victim.is_expired else cause
        transaction.after_commit.append(partial(self._deleted, victim, time.time_ns(), cause))
        return True

    def _deleted(self, victim: Victim, now: int, cause: Cause) -> None:
        """Count and report a page that is deleted, and how long after its last use it is evicted, if that is known."""
        evicting = cause is not Cause.EXPIRED
        self._catalog.evicted(victim, cause, now)
        self._counters.count("evictions" if evicting else "expired", namespace=victim.namespace)
        if evicting and time_of_use(victim.leaf.last_used, now):
            self._counters.observe("eviction_age", ((now - victim.last_used) / 1e9,))
        if evicting and self._on_evicted is not None:
            self._on_evicted(victim.key)


class _Quota(NamedTuple):
    """What a namespace may hold, or all namespaces of a salt together, in bytes."""

    transaction: Transaction
    namespace: bytes
    salt: str | None
    limit: int

    def held(self) -> Count:
        """What they hold now."""
        return self.transaction.count(self.namespace) if self.salt is None else self.transaction.count_of(self.salt)

    def group(self) -> Group:
        """Their leaves."""
        if self.salt is None:
            return Group(self.namespace, {self.namespace: self.held().leaves})
        spaces = self.transaction.namespaces_of(self.salt)
        name = b"salt " + self.salt.encode("utf-8", "surrogatepass")
        return Group(name, {space: count.leaves for space, count in spaces.items()})


class _Evictable(NamedTuple):
    """How many pages, and how many bytes as a quota counts them, eviction could delete."""

    pages: int = 0
    bytes: int = 0


def _evictable(total: Count, own: Iterable[Page] = ()) -> _Evictable:
    """What eviction could delete of these pages: not what is pinned, and not these."""
    free = [page for page in own if not page.pinned]
    n_bytes = sum(page.stored_bytes + len(page.tokens) for page in free)
    return _Evictable(
        max(total.pages - total.pinned - len(free), 0),
        max(total.quota_bytes - total.pinned_bytes - n_bytes, 0),
    )


@dataclass(frozen=True)
class _Bound:
    """A bound for the first pages of a chain: whether `n` of them are too much, with all that is evictable gone."""

    reason: DropReason
    too_much: Callable[[int, _Evictable], bool]
    count: Callable[[], Count]
    quota: _Quota | None = None

    def exceeded(self, n: int) -> bool:
        """Whether `n` pages are too much as it is."""
        return self.too_much(n, _Evictable())

    def is_hopeless(self, n: int, own: Iterable[Page]) -> bool:
        """Whether `n` pages are too much even if everything is evicted but these pages, and what is pinned."""
        return self.too_much(n, _evictable(self.count(), own))


def _holds_more(transaction: Transaction, n_bytes: int) -> bool:
    return transaction.used.bytes > n_bytes


def _most_freed(transaction: Transaction, evictable: _Evictable) -> int:
    """The most that deleting all evictable pages can free: no more than putting them can have cost."""
    empty = _cost(transaction, 0, 0)
    per_byte = (_cost(transaction, 0, MANY_BYTES) - empty) / MANY_BYTES
    return evictable.pages * empty + math.ceil(evictable.bytes * per_byte)


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
