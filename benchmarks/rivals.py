"""Eviction policies of the literature that evict leaves only, as a store of prefixes has to, for `benchmarks.replay`.

The cache objects of libcachesim decide for themselves which object goes, and cannot be told that a block with children
in the cache has to stay. So these are small simulations: ARC (Megiddo and Modha, FAST '03), SIEVE (Zhang et al., NSDI
'24), W-TinyLFU (Einziger, Friedman and Manes, TOS '17), GDSF (Cherkasova, HPL-98-69) and LeCaR (Vietri et al.,
HotStorage '18). Where one would evict a block with children, it takes the next one in its order.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

__all__ = ["RIVALS"]

Prompts: TypeAlias = "Sequence[Sequence[int]]"


class Leafwise:
    """A cache of blocks in which a block stays as long as one that follows it does.

    A block is only looked for if all blocks before it are there. Those of the prompt that is being added stay.
    """

    def __init__(self, capacity: int, prompts: Prompts) -> None:
        self.capacity = capacity
        self.written = 0
        self.here: set[int] = set()
        self._parent: dict[int, int] = {}
        self._n_children: Counter[int] = Counter()
        self._busy: set[int] = set()

    def request(self, blocks: Sequence[int]) -> int:
        n = next((i for i, block in enumerate(blocks) if block not in self.here), len(blocks))
        self._busy = set(blocks[:n])
        for block in reversed(blocks[:n]):
            self.hit(block)
        for i in range(n, len(blocks)):
            self.before(blocks[i])
            while len(self.here) >= self.capacity:
                victim = self.victim()
                if victim is None or victim == blocks[i]:
                    return n
                self._remove(victim)
            self.here.add(blocks[i])
            self._busy.add(blocks[i])
            self.written += 1
            if i:
                self._parent[blocks[i]] = blocks[i - 1]
                self._n_children[blocks[i - 1]] += 1
            self.add(blocks[i])
        return n

    def _remove(self, block: int) -> None:
        self.here.discard(block)
        self.evict(block)
        parent = self._parent.pop(block, None)
        if parent is not None:
            self._n_children[parent] -= 1

    def may_go(self, block: int) -> bool:
        """Whether a block may be evicted now."""
        return block in self.here and not self._n_children[block] and block not in self._busy

    def first(self, blocks: Iterable[int]) -> int | None:
        """The first of these that may be evicted."""
        return next((block for block in blocks if self.may_go(block)), None)

    def before(self, block: int) -> None:
        """A block is missing, and space is about to be made for it."""

    def hit(self, block: int) -> None:
        """A block is used."""

    def victim(self) -> int | None:
        """The block to evict next, or the new one itself; None if there is none."""
        raise NotImplementedError

    def add(self, block: int) -> None:
        """A block has come."""

    def evict(self, block: int) -> None:
        """A block has gone."""


class Arc(Leafwise):
    """Two lists by last use, of blocks used once and more often; their ghosts say how long each should be."""

    def __init__(self, capacity: int, prompts: Prompts) -> None:
        super().__init__(capacity, prompts)
        self._once, self._often = OrderedDict[int, None](), OrderedDict[int, None]()
        self._gone_once, self._gone_often = OrderedDict[int, None](), OrderedDict[int, None]()
        self._target = 0.0
        self._returns = False

    def before(self, block: int) -> None:
        self._returns = block in self._gone_once or block in self._gone_often
        if block in self._gone_once:
            self._target += max(len(self._gone_often) / len(self._gone_once), 1)
            del self._gone_once[block]
        elif block in self._gone_often:
            self._target -= max(len(self._gone_once) / len(self._gone_often), 1)
            del self._gone_often[block]
        self._target = min(max(self._target, 0), self.capacity)

    def hit(self, block: int) -> None:
        self._once.pop(block, None)
        self._often.pop(block, None)
        self._often[block] = None

    def victim(self) -> int | None:
        lists = [self._once, self._often] if len(self._once) > self._target else [self._often, self._once]
        found = self.first(lists[0])
        return found if found is not None else self.first(lists[1])

    def add(self, block: int) -> None:
        (self._often if self._returns else self._once)[block] = None

    def evict(self, block: int) -> None:
        ghosts = self._gone_once if block in self._once else self._gone_often
        self._once.pop(block, None)
        self._often.pop(block, None)
        ghosts[block] = None
        while len(ghosts) > self.capacity:
            ghosts.popitem(last=False)


class Sieve(Leafwise):
    """One queue; a hand goes from the oldest to the newest, spares what was used since, and takes the next."""

    def __init__(self, capacity: int, prompts: Prompts) -> None:
        super().__init__(capacity, prompts)
        self._queue: OrderedDict[int, bool] = OrderedDict()
        self._sweep: Iterator[int] = iter(())

    def hit(self, block: int) -> None:
        self._queue[block] = True

    def victim(self) -> int | None:
        for _ in range(3):
            for block in self._sweep:
                if block in self._queue and self.may_go(block):
                    if not self._queue[block]:
                        return block
                    self._queue[block] = False
            # blocks that came since are newer than where the hand begins again
            self._sweep = iter(list(self._queue))
        return None

    def add(self, block: int) -> None:
        self._queue[block] = False

    def evict(self, block: int) -> None:
        del self._queue[block]


class WTinyLfu(Leafwise):
    """A window of 1 % by last use; what leaves it must be used more often than the oldest of the main part."""

    def __init__(self, capacity: int, prompts: Prompts) -> None:
        super().__init__(capacity, prompts)
        self._window_size = max(1, capacity // 100)
        self._window, self._main = OrderedDict[int, None](), OrderedDict[int, None]()
        self._counts: Counter[int] = Counter()
        self._n = 0

    def _count(self, block: int) -> None:
        self._counts[block] += 1
        self._n += 1
        if self._n >= 10 * self.capacity:
            # counts are halved after ten accesses for each block
            self._n //= 2
            self._counts = Counter({block: n // 2 for block, n in self._counts.items() if n > 1})

    def before(self, block: int) -> None:
        self._count(block)

    def hit(self, block: int) -> None:
        self._count(block)
        part = self._window if block in self._window else self._main
        part.move_to_end(block)

    def victim(self) -> int | None:
        old = self.first(self._main)
        if len(self._window) >= self._window_size:
            candidate = self.first(self._window)
            if candidate is not None and (old is None or self._counts[candidate] <= self._counts[old]):
                return candidate
        return old if old is not None else self.first(self._window)

    def add(self, block: int) -> None:
        self._window[block] = None
        while len(self._window) > self._window_size:
            moved, _ = self._window.popitem(last=False)
            self._main[moved] = None

    def evict(self, block: int) -> None:
        self._window.pop(block, None)
        self._main.pop(block, None)


class Gdsf(Leafwise):
    """Uses and the rank of the last victim; all blocks have one size here."""

    def __init__(self, capacity: int, prompts: Prompts) -> None:
        super().__init__(capacity, prompts)
        self._uses: Counter[int] = Counter()
        self._rank: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []
        self._floor = 0.0
        self._now = 0

    def _push(self, block: int) -> None:
        self._now += 1
        self._uses[block] += 1
        self._rank[block] = (self._floor + self._uses[block], self._now)
        heapq.heappush(self._heap, (self._rank[block], block))

    def hit(self, block: int) -> None:
        self._push(block)

    def add(self, block: int) -> None:
        self._push(block)

    def victim(self) -> int | None:
        passed = []
        found = None
        while self._heap and found is None:
            rank, block = heapq.heappop(self._heap)
            if self._rank.get(block) != rank:
                continue
            if self.may_go(block):
                found, self._floor = block, rank[0]
            else:
                passed.append((rank, block))
        for each in passed:
            heapq.heappush(self._heap, each)
        return found

    def evict(self, block: int) -> None:
        del self._rank[block], self._uses[block]


class LeCaR(Leafwise):
    """Chooses between last use and number of uses at random, with weights that regret teaches."""

    def __init__(self, capacity: int, prompts: Prompts) -> None:
        super().__init__(capacity, prompts)
        self._chance = random.Random(1)
        self._weight = 0.5
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self._heap: list[tuple[int, int, int]] = []
        self._ghosts: tuple[OrderedDict[int, int], OrderedDict[int, int]] = (OrderedDict(), OrderedDict())
        self._by_use = False
        self._now = 0

    def before(self, block: int) -> None:
        self._now += 1
        for i, ghosts in enumerate(self._ghosts):
            if block in ghosts:
                age = self._now - ghosts.pop(block)
                regret = 0.005 ** (age / self.capacity)
                recency, use = self._weight, 1 - self._weight
                recency *= math.exp(-0.45 * regret) if i == 0 else 1
                use *= math.exp(-0.45 * regret) if i == 1 else 1
                self._weight = min(max(recency / (recency + use), 0.01), 0.99)

    def hit(self, block: int) -> None:
        self.add(block)

    def add(self, block: int) -> None:
        self._now += 1
        self._recent.pop(block, None)
        self._recent[block] = None
        self._counts[block] += 1
        heapq.heappush(self._heap, (self._counts[block], self._now, block))

    def victim(self) -> int | None:
        self._by_use = self._chance.random() >= self._weight
        return self._least_used() if self._by_use else self.first(self._recent)

    def _least_used(self) -> int | None:
        passed = []
        found = None
        while self._heap and found is None:
            n, at, block = heapq.heappop(self._heap)
            if block not in self.here or self._counts[block] != n:
                continue
            if self.may_go(block):
                found = block
            passed.append((n, at, block))
        for each in passed:
            heapq.heappush(self._heap, each)
        return found

    def evict(self, block: int) -> None:
        del self._recent[block], self._counts[block]
        ghosts = self._ghosts[self._by_use]
        ghosts[block] = self._now
        while len(ghosts) > self.capacity:
            ghosts.popitem(last=False)


RIVALS: dict[str, Callable[[int, Prompts], Leafwise]] = {
    "arc": Arc,
    "sieve": Sieve,
    "w-tinylfu": WTinyLfu,
    "gdsf": Gdsf,
    "lecar": LeCaR,
}
