"""Block hit rates of all policies on a trace in the mooncake format; of ours, ``prefixstore trace simulate`` has them.

The policies run in the real engine and index: one block is one page of one token and one byte, and the budget counts
entries. The others, and Belady, which knows the future, are simulated (`benchmarks.rivals` has those that evict leaves
only). A block is a hit only if all blocks before it are hits.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from benchmarks.rivals import RIVALS
from prefixstore.traces.read import read_trace
from prefixstore.traces.replay import InEngine

Prompts: TypeAlias = "list[list[int]]"

CAPACITIES = ["0.01", "0.03", "0.1", "0.3"]
# entries of a heap that may be out of date, beyond as many as are true
SLACK = 1024
# the engine's policies except `priority`: a trace has no priorities
OURS = ["lru", "lfu", "longest_first", "adaptive"]


def read(path: Path, limit: int | None = None) -> Prompts:
    """The blocks of each request, numbered from 0 in the order of their first use."""
    return [list(event.blocks) for event in read_trace(path, limit).requests]


class Cache(Protocol):
    """A cache that a trace is replayed through. `written` counts the blocks stored, each time they were missing."""

    written: int

    def request(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are in the cache; then all of them are added."""


class Blockwise:
    """A cache of blocks that knows nothing of prompts: each block is looked up by itself."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = 0

    def request(self, blocks: Collection[int]) -> int:
        """How many of the first blocks are in the cache; then all of them are added."""
        found = [self.access(block) for block in blocks]
        self.written += found.count(False)
        return found.index(False) if False in found else len(found)

    def access(self, block: int) -> bool:
        """Whether a block is in the cache; from now on it is."""
        raise NotImplementedError


class Belady(Blockwise):
    """Evicts the block that is needed last, even the requested one; of two, the deeper one. The upper bound.

    `prompts` are all that will be requested, in order.
    """

    def __init__(self, capacity: int, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(capacity)
        at = never = sum(map(len, prompts))
        after: dict[int, int] = {}
        self._next = array("q", [never]) * never
        for prompt in reversed(prompts):
            for block in reversed(prompt):
                at -= 1
                self._next[at] = after.get(block, never)
                after[block] = at
        # by block; as in the heap, which also has entries that are no longer true
        self._here: dict[int, tuple[int, int]] = {}
        self._order: list[tuple[int, int, int]] = []
        self._now = -1

    def access(self, block: int) -> bool:
        """Whether a block is in the cache."""
        self._now += 1
        hit = block in self._here
        rank = self._here[block] = -self._next[self._now], -self._now
        heappush(self._order, (*rank, block))
        while len(self._here) > self.capacity:
            *popped, last = heappop(self._order)
            if self._here.get(last) == tuple(popped):
                del self._here[last]
        if len(self._order) > 2 * len(self._here) + SLACK:
            self._order = [(*each, one) for one, each in self._here.items()]
            heapify(self._order)
        return hit


class S3Fifo(Blockwise):
    """Three FIFO queues (Yang et al., SOSP '23): small is a tenth; as many ghosts as the main queue holds."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._small_size = max(1, capacity // 10)

    def access(self, block: int) -> bool:
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(queue[block] + 1, 3)
                return True
        while len(self._small) + len(self._main) >= self.capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = 0
        else:
            self._small[block] = 0
        return False

    def _evict(self) -> None:
        if len(self._small) >= self._small_size or not self._main:
            while self._small:
                block, uses = self._small.popitem(last=False)
                if uses <= 1:
                    self._ghosts[block] = None
                    if len(self._ghosts) > self.capacity - self._small_size:
                        self._ghosts.popitem(last=False)
                    return
                self._main[block] = 0
            return
        while True:
            block, uses = self._main.popitem(last=False)
            if not uses:
                return
            self._main[block] = uses - 1


class TwoQ(Blockwise):
    """2Q, the full version (Johnson and Shasha, VLDB '94): Kin a quarter, Kout twice the capacity."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._in: OrderedDict[int, None] = OrderedDict()
        self._out: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()

    def access(self, block: int) -> bool:
        if block in self._main:
            self._main.move_to_end(block)
            return True
        if block in self._in:
            return True
        if len(self._in) + len(self._main) >= self.capacity:
            if len(self._in) > self.capacity // 4 or not self._main:
                old, _ = self._in.popitem(last=False)
                self._out[old] = None
                if len(self._out) > max(1, self.capacity * 2):
                    self._out.popitem(last=False)
            else:
                self._main.popitem(last=False)
        if block in self._out:
            del self._out[block]
            self._main[block] = None
        else:
            self._in[block] = None
        return False


PEERS: dict[str, Callable[[int, Prompts], Cache]] = {
    "s3fifo": lambda capacity, _: S3Fifo(capacity),
    "2q": lambda capacity, _: TwoQ(capacity),
    **RIVALS,
    "belady": Belady,
}


def hit_rate(cache: Cache, prompts: Prompts) -> float:
    """Hits as a fraction of all blocks of a trace."""
    blocks = sum(map(len, prompts))
    return sum(cache.request(prompt) for prompt in prompts) / max(1, blocks)


def share_written(cache: Cache, prompts: Prompts) -> float:
    """Blocks that were stored, each time they were missing, as a fraction of all blocks of a replayed trace."""
    return cache.written / max(1, sum(map(len, prompts)))


def cache_of(policy: str, capacity: int, prompts: Prompts) -> Cache:
    return PEERS[policy](capacity, prompts) if policy in PEERS else InEngine(policy, capacity)


class Figures(NamedTuple):
    """Hit rates, and shares of blocks that are written, by policy and by capacity, as given."""

    hits: dict[str, dict[str, float]]
    written: dict[str, dict[str, float]]


def figures(prompts: Prompts, capacities: Sequence[str], policies: Sequence[str]) -> Figures:
    """What each policy does with a trace."""
    unique = len({block for prompt in prompts for block in prompt})
    found = Figures({policy: {} for policy in policies}, {policy: {} for policy in policies})
    for policy in policies:
        for given in capacities:
            print(f"{policy} {given} ...", file=sys.stderr, flush=True)
            cache = cache_of(policy, max(1, round(float(given) * unique)), prompts)
            found.hits[policy][given] = round(hit_rate(cache, prompts), 4)
            found.written[policy][given] = round(share_written(cache, prompts), 4)
    return found
