"""Makes space: evicts leaves until what is to be written fits, in the transaction that writes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from prefixstore.backends.contract import ConflictError
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.eviction import Group, Victim, Victims
from prefixstore.engine.evictions import Cause
from prefixstore.engine.index import Page
from prefixstore.engine.keyspace import Count
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import Used
from prefixstore.engine.pages import CONFLICTS, Pages, fewer
from prefixstore.engine.pending import PackedPage
from prefixstore.engine.relatives import ancestors_of
from prefixstore.engine.waiting import DropReason
from prefixstore.errors import CorruptError, FullError, StorageError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import CHECKSUM_BYTES, Record, time_of_use
from prefixstore.results import Shortage
from prefixstore.stats import Counters

__all__ = ["PAGES_AT_ONCE", "Evictor", "Space"]

# so large that what a page costs beside its payload does not matter
MANY_BYTES = 1 << 40
# what the names of groups with the leaves of a tenant begin with
OF_SALT = b"salt "
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
        self.catalog = catalog
        self.budget = budget
        self.cause = cause
        self._counters = counters
        self._on_evicted = on_evicted
        self.used: Used | None = None

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
                with self.catalog.update(backend) as transaction:
                    enough = max(max_bytes, transaction.used.bytes - BYTES_AT_ONCE)
                    is_left = Space(self, transaction).shrink(enough, at_most=at_once)
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
            with self.catalog.update(backend) as transaction:
                Space(self, transaction).shrink(max_bytes, chosen=chosen)
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
        if self.used is None or self.used.bytes <= self.budget.max_bytes:
            return
        with self.catalog.update(backend) as transaction:
            is_hopeless = Space(self, transaction).is_hopeless()
        if not is_hopeless:
            self.used = replace(self.used, bytes=self.shrink(backend, self.budget.max_bytes))

    def deleted(self, victim: Victim, now: int, cause: Cause) -> None:
        """Count and report a page that is deleted, and how long after its last use it is evicted, if that is known."""
        evicting = cause is not Cause.EXPIRED
        self.catalog.evicted(victim, cause, now)
        self._counters.count("evictions" if evicting else "expired", namespace=victim.namespace)
        if evicting and time_of_use(victim.leaf.last_used, now):
            self._counters.observe("eviction_age", ((now - victim.last_used) / 1e9,))
        if evicting and self._on_evicted is not None:
            self._on_evicted(victim.key)


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
        # the leaves of groups, in the order in which to evict them
        self._victims: dict[bytes, Victims] = {}
        # the page for which space was made last, and the pages before it
        self._last: tuple[Page, list[Page]] | None = None

    def make(
        self, one: PackedPage, admits: Callable[[Victim], bool], replaced: Page | None = None
    ) -> DropReason | None:
        """Evict until a page fits, as long as it is worth more. Nothing is evicted for a page that cannot fit.

        A tenant with a quota makes space among its own pages first, so it does not evict those of others as long as it
        has any.

        Parameters
        ----------
        one
            The page, which is put next.
        admits
            Whether it is worth more than a victim.
        replaced
            A tail that will be deleted when the page is put, and stays if that is refused.

        Returns
        -------
        DropReason or None
            Why the page is not to be put: `BUDGET`, `QUOTA` or `ADMISSION`; None if it fits.
        """
        limits = self._limits(one, replaced)
        if not any(limit.exceeded() for limit in limits):
            return None
        before = self._before(one)
        # known before anything is evicted: the page fits if all were evicted that can be
        for limit in limits:
            if limit.exceeded(_evictable(limit.held(), before)):
                return limit.reason
        with ExitStack() as after:
            for limit in limits:
                for quota in limit.groups:
                    while limit.exceeded() and (victim := self._next(quota)) is not None:
                        is_tail = replaced is not None and victim.key == replaced.key
                        if not is_tail and admits(victim):
                            self._take(victim, quota)
                            continue
                        # other pages may take its place
                        after.callback(self._victims_of(quota).give_back, victim)
                        if not is_tail:
                            return DropReason.ADMISSION
                if limit.exceeded():
                    return limit.reason
        self._last = one.pending.page, before
        return None

    def put(self, page: Page) -> None:
        """A page was put: it is a leaf now, and an imported one may be older than others."""
        for name, victims in list(self._victims.items()):
            if not victims.added(page.namespace, page.key) and name.startswith(OF_SALT):
                # the tenant may have a namespace more
                del self._victims[name]

    def shrink(self, n_bytes: int, *, at_most: int | None = None, chosen: list[bytes] | None = None) -> bool:
        """Evict until the location holds so many bytes, or `at_most` so many pages; false if none are left.

        Their keys are added to `chosen`.
        """
        n_taken = 0
        while self._transaction.used.bytes > n_bytes and (at_most is None or n_taken < at_most):
            victim = self._next(None)
            if victim is None:
                return False
            n_taken += 1
            if self._take(victim, None) and chosen is not None:
                chosen.append(victim.key)
        return True

    def delete_expired(self, at_most: int) -> bool:
        """Delete expired leaves, and parents that become such leaves, as far as they are found.

        Returns whether more may be left.
        """
        self._victims_of(None).read_more()
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
        size = len(one.payload)
        if reason is DropReason.QUOTA:
            quotas = self._quotas(one)
            left = [quota.limit - quota.held().quota_bytes + _evictable(quota.held()).bytes for quota in quotas]
            return Shortage(reason.value, n_pages, size, max(min(left, default=0), 0))
        transaction = self._transaction
        available = self._budget.max_bytes - transaction.used.bytes
        if reason is DropReason.BUDGET:
            available += _most_freed(transaction, _evictable(transaction.count()))
        return Shortage(reason.value, n_pages, transaction.cost(one.record, size), max(available, 0))

    def is_hopeless(self) -> bool:
        """Whether there is too much even if all is evicted but what is pinned."""
        return self._exceeds(_evictable(self._transaction.count()))

    # -- limits -------------------------------------------------------------------------------------------------------

    def _limits(self, one: PackedPage, replaced: Page | None) -> list[_Limit]:
        """What a page may not exceed."""
        transaction, quotas = self._transaction, self._quotas(one)
        size = len(one.payload) + len(one.record.tokens)
        adding, entries = transaction.cost(one.record, len(one.payload)), 1
        if replaced is not None:
            size -= replaced.stored_bytes + len(replaced.tokens)
            # at most: what the page is found to need beyond that is evicted when the tail is gone
            adding -= _cost(transaction, len(replaced.tokens), replaced.stored_bytes)
            entries -= 1
        limits = [_Limit(DropReason.QUOTA, [quota], quota.held, partial(quota.exceeds, size)) for quota in quotas]
        groups = [quotas[-1], None] if quotas else [None]
        exceeds = partial(self._exceeds, adding=adding, entries=entries)
        return [*limits, _Limit(DropReason.BUDGET, groups, transaction.count, exceeds)]

    def _exceeds(self, evictable: _Evictable, *, adding: int = 0, entries: int = 0) -> bool:
        """Whether so much more is too much for the budget, even if all this is evicted."""
        used = self._transaction.used
        if evictable.pages:
            left = used.bytes - _most_freed(self._transaction, evictable)
            used = Used(max(left, 0), used.entries - evictable.pages)
        return self._budget.exceeded(used, adding=adding, entries=entries)

    def _quotas(self, one: PackedPage) -> list[_Quota]:
        """The quotas that bound the namespace of a page; that for the largest group last."""
        quota, namespace = self._budget.quota, one.record.namespace
        found: list[_Quota] = []
        if quota.namespace is not None:
            found.append(_Quota(self._transaction, namespace, None, quota.namespace))
        # without a salt there is no tenant
        salt = _salt(one.pending.settings) if quota.salt is not None else None
        if quota.salt is not None and salt is not None:
            found.append(_Quota(self._transaction, namespace, salt, quota.salt))
        return found

    def _before(self, one: PackedPage) -> list[Page]:
        """The pages that a page follows: they are not evicted for it."""
        if self._last is not None and self._last[0].key == one.record.parent:
            page, before = self._last
            return [*before, page]
        return ancestors_of(self._transaction, one.record)

    # -- victims ------------------------------------------------------------------------------------------------------

    def _victims_of(self, quota: _Quota | None) -> Victims:
        name = b"" if quota is None else quota.name
        if name not in self._victims:
            group = quota.group() if quota is not None else None
            self._victims[name] = self._evictor.catalog.victims(self._transaction, group)
        return self._victims[name]

    def _next(self, quota: _Quota | None) -> Victim | None:
        """The next leaf to be evicted, of a tenant or of all, that is not in use."""
        victims = self._victims_of(quota)
        while (victim := victims.next()) is not None and not self._evictor.catalog.may_evict(victim):
            victims.spare(victim)
        return victim

    def _take(self, victim: Victim, quota: _Quota | None) -> bool:
        """Delete a victim; whether it was an eviction: its page may have gone before."""
        transaction = self._transaction
        is_stored = transaction.delete(victim.key)
        if not is_stored:
            transaction.drop_leaf(victim.namespace, victim.key)
        for victims in self._victims.values():
            victims.taken(victim)
        if is_stored:
            cause = self._evictor.cause if quota is None else Cause.QUOTA
            cause = Cause.EXPIRED if victim.is_expired else cause
            transaction.after_commit.append(partial(self._evictor.deleted, victim, time.time_ns(), cause))
        return is_stored


class _Quota(NamedTuple):
    """What a namespace may hold, or all namespaces of a salt together, in bytes."""

    transaction: Transaction
    namespace: bytes
    salt: str | None
    limit: int

    def held(self) -> Count:
        """What they hold now."""
        return self.transaction.count(self.namespace) if self.salt is None else self.transaction.count_of(self.salt)

    def exceeds(self, size: int, evictable: _Evictable) -> bool:
        """Whether so many more bytes are too much, even if all this is evicted."""
        return self.held().quota_bytes - evictable.bytes > self.limit - size

    @property
    def name(self) -> bytes:
        """Of their group."""
        return self.namespace if self.salt is None else OF_SALT + self.salt.encode("utf-8", "surrogatepass")

    def group(self) -> Group:
        """Their leaves."""
        if self.salt is None:
            return Group(self.name, {self.namespace: self.held().leaves})
        spaces = self.transaction.namespaces_of(self.salt)
        return Group(self.name, {space: count.leaves for space, count in spaces.items()})


class _Evictable(NamedTuple):
    """How many pages, and how many bytes as a quota counts them, eviction could delete."""

    pages: int = 0
    bytes: int = 0


NOTHING = _Evictable()


def _evictable(total: Count, kept: Iterable[Page] = ()) -> _Evictable:
    """What eviction could delete of these pages: not what is pinned, and not those that are kept."""
    free = [page for page in kept if not page.pinned]
    n_bytes = sum(page.stored_bytes + len(page.tokens) for page in free)
    return _Evictable(
        max(total.pages - total.pinned - len(free), 0),
        max(total.quota_bytes - total.pinned_bytes - n_bytes, 0),
    )


@dataclass(frozen=True)
class _Limit:
    """What a page may not exceed.

    Attributes
    ----------
    reason
        Why it is refused if it does.
    groups
        Whose leaves are evicted for it, one after the other; None for all.
    held
        What counts for the limit.
    exceeds
        Whether the page is too much if so much is evicted.
    """

    reason: DropReason
    groups: Sequence[_Quota | None]
    held: Callable[[], Count]
    exceeds: Callable[[_Evictable], bool]

    def exceeded(self, evictable: _Evictable = NOTHING) -> bool:
        """Whether the page is too much, by default as it is now."""
        return self.exceeds(evictable)


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
