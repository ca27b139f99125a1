"""Block hit rates of all policies on a trace in the mooncake format; of ours, ``prefixstore trace simulate`` has them.

The policies run in the real engine and index: one block is one page of one token and one byte, and the budget counts
entries. The others, and Belady, which knows the future, are simulated (`benchmarks.rivals` has those that evict leaves
only). A block is a hit only if all blocks before it are hits.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from benchmarks.rivals import RIVALS
from prefixstore.traces.read import read_trace
from prefixstore.traces.replay import Belady, Blockwise, InEngine

Prompts: TypeAlias = "list[list[int]]"

CAPACITIES = ["0.01", "0.03", "0.1", "0.3"]
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
