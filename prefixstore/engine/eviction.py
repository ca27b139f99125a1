"""The order of eviction: queues that give out the lowest-ranked leaves of the page table, ranked in steps."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Generator, Iterator
from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np

from prefixstore.engine.adaptive_policy import Adaptive
from prefixstore.engine.key_table import Slots
from prefixstore.engine.page_columns import PINNED, SHIFT, VICTIM
from prefixstore.engine.page_table import MASK, PageTable
from prefixstore.engine.policy import Policy, Ranks, by_expiry, lfu, longest_first, lru, priority
from prefixstore.engine.totals import Group

__all__ = ["BUSY", "POLICIES", "Busy", "Candidates", "VictimQueue"]

POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "lru": lru,
    "lfu": lfu,
    "longest_first": longest_first,
    "priority": priority,
}

# a rank, the time of the last use, and the end as a negative number: the deepest first
Order: TypeAlias = "tuple[float, int, int]"
LAST: Order = (float("inf"), 0, 0)
# of pages that are evicted after all others, in the order of their last use
KEPT = sys.float_info.max

# one in so many leaves is ranked at a time, and so many at least, or at most
SHARE, FEWEST, MOST = 16, 1024, 32768
# a policy that drifts ranks again after one in so many was taken or spared, and not before so many
TAKEN, FEWEST_TAKEN = 16, 16
# leaves of a block whose ranks are looked at to find out which ranks are low
SAMPLED = 512


class Busy(Enum):
    """The leaves are being ranked: ask again."""

    BUSY = "busy"


BUSY = Busy.BUSY


class _Ranked(NamedTuple):
    """Leaves in the order of their ranks."""

    slots: list[int]
    order: list[Order]


class VictimQueue:
    """The leaves of a table in the order of a policy.

    Only the lowest leaves are ranked and sorted; when they are used up, the next ones are. Pages that change meanwhile
    join them if they are low enough, which is why a table has to tell its queues (`offer`). A rank is looked at again
    when the turn of its page comes. Ranking is done in steps of one block, so that a lock can be released in between.

    Parameters
    ----------
    table
        Has the pages.
    policy
        The order.
    namespaces
        Whose pages: their numbers in the table, called at each ranking; None for all.
    expiring
        Whether only leaves that expire are wanted.
    """

    def __init__(
        self,
        table: PageTable,
        policy: Policy,
        namespaces: Callable[[], list[int]] | None = None,
        *,
        expiring: bool = False,
    ) -> None:
        self._table = table
        self._policy = policy
        self._namespaces = namespaces
        self._expiring = expiring
        self._ranked = _Ranked([], [])
        self._at = 0
        self._heap: list[tuple[Order, int]] = []
        # every leaf that is in neither has at least this rank
        self._limit: Order = (float("-inf"), 0, 0)
        # asked for since the leaves were ranked, and after how many they are ranked again
        self._taken, self._enough = 0, 0
        # given out, and not offered since: a page that could not be deleted is not given out for ever
        self._given: set[int] = set()
        self._ranking: Iterator[None] | None = None
        self._numbers: set[int] = set()

    # -- giving out ---------------------------------------------------------------------------------------------------

    def offer(self, slot: int) -> None:
        """A page has become a leaf, or may be a victim again."""
        self._given.discard(slot)
        if not self._is_mine(slot):
            return
        order = self._order_of(slot)
        if order <= self._limit:
            heapq.heappush(self._heap, (order, slot))
            if len(self._heap) > 64 + 2 * len(self._ranked.slots) and len(self._heap) > 2 * self._n_leaves():
                self._clear_heap()

    def next(self) -> int | Busy | None:
        """The slot of the next victim; `BUSY` if there is more to rank, None if there are no more.

        The caller removes it from the table, or offers it again.
        """
        if self._ranking is not None:
            if next(self._ranking, self) is not self:
                return BUSY
            self._ranking = None
        while True:
            if self._policy.drifts and self._taken >= self._enough and (self._at or self._heap or self._ranked.slots):
                return self._start()
            slot = self._pop()
            if slot is None:
                return None if self._limit == LAST else self._start()
            self._taken += 1
            self._given.add(slot)
            return slot

    def victims(self) -> Generator[int, None, None]:
        """The slots of all victims, in order, as `next` gives them out."""
        while (slot := self.next()) is not None:
            if isinstance(slot, int):
                yield slot

    def spared(self) -> None:
        """Note that the next victim was compared with a new page, and kept."""
        self._taken += 1

    def _start(self) -> Busy:
        self._ranking = self._rank()
        return BUSY

    def _pop(self) -> int | None:
        """The lowest of the ranked leaves that is still one, and still ranks so low."""
        while True:
            ranked = self._ranked.order[self._at] if self._at < len(self._ranked.slots) else None
            if ranked is not None and (not self._heap or ranked <= self._heap[0][0]):
                order, slot = ranked, self._ranked.slots[self._at]
                self._at += 1
            elif self._heap:
                order, slot = heapq.heappop(self._heap)
            else:
                return None
            # one that was offered while the leaves were ranked may be here twice
            if slot in self._given or not self._is_mine(slot):
                continue
            # without a use since, it ranks as low, or lower, unless it is kept from now on
            is_used = self._table.blocks[slot >> SHIFT].last_used[slot & MASK] != order[1]
            if is_used or self._is_kept(slot) != (order[0] == KEPT):
                now = self._order_of(slot)
                if now > order:
                    if now <= self._limit:
                        heapq.heappush(self._heap, (now, slot))
                    continue
            return slot

    # -- ranking ------------------------------------------------------------------------------------------------------

    def _rank(self) -> Generator[None, None, None]:
        """Rank the lowest leaves, a block at each step."""
        table = self._table
        self._given = {slot for slot in self._given if table.is_victim(slot)}
        self._numbers = set(self._namespaces()) if self._namespaces is not None else set()
        self._ranked, self._at, self._heap, self._taken = _Ranked([], []), 0, [], 0
        self._limit = LAST
        n_leaves = 0
        if len(table.blocks) > 1:
            samples: list[tuple[float, int, int]] = []
            for block in range(len(table.blocks)):
                at = self._leaves_of(block)
                n_leaves += len(at)
                some = at[:: max(len(at) // SAMPLED, 1)]
                if len(some):
                    columns = table.blocks[block].columns
                    ranks = self._ranks(block, some).tolist()
                    weight = len(at) // len(some) + 1
                    samples += zip(ranks, columns["last_used"][some].tolist(), [weight] * len(some), strict=True)
                yield
            self._limit = self._lowest(samples, min(max(n_leaves // SHARE, FEWEST), MOST))
        found: list[Slots] = []
        ranks_of: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
        n_leaves = 0
        for block in range(len(table.blocks)):
            at = self._leaves_of(block)
            n_leaves += len(at)
            columns = table.blocks[block].columns
            ranks = self._ranks(block, at)
            if self._limit != LAST:
                limit, last_used, _ = self._limit
                low = (ranks < limit) | ((ranks == limit) & (columns["last_used"][at] <= last_used))
                at, ranks = at[low], ranks[low]
            found.append(at + (block << SHIFT))
            ranks_of.append(ranks)
            yield
        self._sort(np.concatenate(found or [np.empty(0, np.int64)]), np.concatenate(ranks_of or [np.empty(0)]))
        self._enough = max(FEWEST_TAKEN, min(n_leaves // TAKEN, len(self._ranked.slots)))

    def _sort(self, slots: Slots, ranks: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        if self._given:
            here = ~np.isin(slots, list(self._given))
            slots, ranks = slots[here], ranks[here]
        if not len(slots):
            return
        last_used, ends = self._table.gather("last_used", slots), -self._table.gather("end", slots).astype(np.int64)
        by_rank = np.lexsort((ends, last_used, ranks))
        if len(slots) > MOST:
            # few blocks with many leaves: the rest waits for the next ranking
            by_rank = by_rank[:MOST]
            last = by_rank[-1]
            self._limit = float(ranks[last]), int(last_used[last]), int(ends[last])
        order = list(zip(ranks[by_rank].tolist(), last_used[by_rank].tolist(), ends[by_rank].tolist(), strict=True))
        self._ranked = _Ranked(slots[by_rank].tolist(), order)

    @staticmethod
    def _lowest(samples: list[tuple[float, int, int]], wanted: int) -> Order:
        """Below which rank there are about so many leaves."""
        n = 0
        for rank, last_used, weight in sorted(samples):
            n += weight
            if n >= wanted:
                # all of those that were last used then, whatever their depth
                return rank, last_used, 1
        return LAST

    def _ranks(self, block: int, at: Slots) -> Ranks:
        """The ranks of pages of a block: of those that are kept, the highest."""
        ranks = self._policy.ranks(self._table.blocks[block].columns, at)
        kept = [slot & MASK for slot in self._table.kept if slot >> SHIFT == block] if not self._expiring else []
        if kept:
            ranks = np.where(np.isin(at, kept), KEPT, ranks)
        return ranks

    def _is_kept(self, slot: int) -> bool:
        return slot in self._table.kept and not self._expiring

    def _leaves_of(self, block: int) -> Slots:
        at = self._table.victims_of(block)
        columns = self._table.blocks[block].columns
        if self._namespaces is not None:
            at = at[np.isin(columns["namespace"][at], list(self._numbers))]
        return at[columns["expires"][at] > 0] if self._expiring else at

    def _is_mine(self, slot: int) -> bool:
        block, at = self._table.blocks[slot >> SHIFT], slot & MASK
        if block.n_children[at] or block.flags[at] & (VICTIM | PINNED) != VICTIM:
            return False
        if self._expiring and not block.expires[at]:
            return False
        return self._namespaces is None or block.namespace[at] in self._numbers

    def _order_of(self, slot: int) -> Order:
        block, at = self._table.blocks[slot >> SHIFT], slot & MASK
        rank = KEPT if self._is_kept(slot) else self._policy.rank(block, at)
        return rank, block.last_used[at], -block.end[at]

    def _n_leaves(self) -> int:
        return len({slot for _, slot in self._heap})

    def _clear_heap(self) -> None:
        """Remove what pages have left behind that were offered again."""
        slots = {slot for _, slot in self._heap if self._is_mine(slot)}
        self._heap = [(self._order_of(slot), slot) for slot in slots]
        heapq.heapify(self._heap)


class Candidates:
    """The pages of a table that may be deleted, in several orders. Used under the lock of the catalog.

    Parameters
    ----------
    table
        Has the pages.
    policy
        The order in which they are evicted.
    """

    def __init__(self, table: PageTable, policy: Policy) -> None:
        self._table = table
        self._policy = policy
        self._victims = VictimQueue(table, policy)
        self._expiring = VictimQueue(table, by_expiry(), expiring=True)
        # for namespaces, and for salts, with a quota: made when they first need space
        self._victims_of: dict[bytes | str, VictimQueue] = {}
        table.on_candidate.append(self.offer)

    def offer(self, slot: int) -> None:
        """A page has become a leaf, or may be a victim again."""
        self._victims.offer(slot)
        if self._table.blocks[slot >> SHIFT].expires[slot & MASK]:
            self._expiring.offer(slot)
        if self._victims_of:
            namespace = self._table.entry(slot).namespace
            for group in (namespace, self._table.totals.salt_of(namespace)):
                if group is not None and group in self._victims_of:
                    self._victims_of[group].offer(slot)

    def add(self, key: bytes) -> None:
        """A page may be a victim again."""
        slot = self._table.find(key)
        if slot >= 0:
            self.offer(slot)

    def victims(self, group: Group = None) -> VictimQueue:
        """Pages to evict, of a group or of all."""
        self._policy.prepare(self._table)
        if group is None:
            return self._victims
        if group not in self._victims_of:
            self._victims_of[group] = VictimQueue(self._table, self._policy, lambda: self._numbers_of(group))
        return self._victims_of[group]

    def _numbers_of(self, group: bytes | str) -> list[int]:
        return [self._table.number(namespace) for namespace in self._table.totals.namespaces(group)]

    def joined(self, namespace: bytes) -> None:
        """Note that the salt of a namespace is known now: the pages of that salt are ranked again."""
        salt = self._table.totals.salt_of(namespace)
        if salt is not None:
            self._victims_of.pop(salt, None)

    def forget(self, group: bytes | str) -> None:
        """Forget a group that has no pages any more."""
        self._victims_of.pop(group, None)

    def expiring(self) -> VictimQueue:
        """Pages that expire, the first one first."""
        return self._expiring
