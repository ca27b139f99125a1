"""``python -m benchmarks.replay TRACE``: block hit rates of all policies on a trace in the mooncake format.

Our policies run in the real engine and index: one block is one page of one token and one byte, and the budget counts
entries. The others, and Belady, which knows the future, are simulated (`benchmarks.rivals` has those that evict leaves
only). A block is a hit only if all blocks before it are hits.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

if __package__ in (None, ""):
    # run as a file: the directory above is the one to import from
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rivals import RIVALS
from prefixstore.backends.memory import MemoryBackend
from prefixstore.buffers import BufferPool
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pending import PendingPage
from prefixstore.format.autocodec import FixedCodec
from prefixstore.format.keys import TOKEN_BYTES
from prefixstore.stats import Counters

Prompts: TypeAlias = "list[list[int]]"

CAPACITIES = ["0.01", "0.03", "0.1", "0.3"]
# the engine's policies except `priority`: a trace has no priorities
OURS = ["lru", "lfu", "longest_first", "adaptive"]
NAMESPACE = b"a trace replayed"


def read(path: Path, limit: int | None = None) -> Prompts:
    """The blocks of each request, numbered from 0 in the order of their first use."""
    raw = path.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        raw = gzip.decompress(raw)
    numbers: dict[object, int] = {}
    return [
        [numbers.setdefault(block, len(numbers)) for block in json.loads(line)["hash_ids"]]
        for line in raw.splitlines()[:limit]
        if line.strip()
    ]


class Cache(Protocol):
    """What a trace is replayed through. `written` is how many blocks it has stored, each time anew."""

    written: int

    def request(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are in the cache; then all of them are added."""


class InEngine:
    """The real engine with one of its policies."""

    def __init__(self, policy: str, capacity: int) -> None:
        budget = Budget(1 << 60, max_entries=capacity)
        self._counters = Counters()
        self._engine = Engine(
            MemoryBackend(), budget, POLICIES[policy](), FixedCodec("raw"), self._counters, write_behind=False
        )
        self._lease = BufferPool(1 << 20).acquire(1)
        self.written = 0

    def request(self, blocks: Sequence[int]) -> int:
        tokens = np.array(blocks, "<i4")
        path = self._engine.match(NAMESPACE, tokens, 1)
        self._engine.touch(NAMESPACE, path.pages, len(blocks))
        raw, batch = tokens.tobytes(), []
        parent = path.pages[-1].key if path.pages else NAMESPACE
        for start in range(path.n_tokens, len(blocks)):
            at = start * TOKEN_BYTES
            new = PendingPage.of(NAMESPACE, b"{}", parent, start, raw[at : at + TOKEN_BYTES], self._lease)
            if not self._engine.announce(new):
                break
            batch.append(new)
            parent = new.page.key
        self.written += self._engine.commit(batch)
        return path.n_tokens


class _Blockwise:
    """A cache of blocks that knows nothing of prompts: each block is looked up by itself."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = 0

    def request(self, blocks: Sequence[int]) -> int:
        found = [self.access(block) for block in blocks]
        self.written += found.count(False)
        return found.index(False) if False in found else len(found)

    def access(self, block: int) -> bool:
        """Whether a block is in the cache; from now on it is."""
        raise NotImplementedError


class S3Fifo(_Blockwise):
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


class TwoQ(_Blockwise):
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


class Belady(_Blockwise):
    """Evicts the block that is needed last, even the requested one; of two, the deeper one. The upper bound."""

    def __init__(self, capacity: int, prompts: Prompts) -> None:
        super().__init__(capacity)
        flat = [block for blocks in prompts for block in blocks]
        never = len(flat)
        after = dict.fromkeys(flat, never)
        self._next = [never] * never
        for at in range(never - 1, -1, -1):
            self._next[at] = after[flat[at]]
            after[flat[at]] = at
        self._here: dict[int, int] = {}
        self._order: list[tuple[int, int, int]] = []
        self._now = -1

    def access(self, block: int) -> bool:
        self._now += 1
        hit = block in self._here
        wanted = self._here[block] = self._next[self._now]
        heappush(self._order, (-wanted, -self._now, block))
        while len(self._here) > self.capacity:
            wanted, _, last = heappop(self._order)
            if self._here.get(last) == -wanted:
                del self._here[last]
        return hit


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
    """Blocks that were stored, each time anew, as a fraction of all blocks of a trace that was replayed."""
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


def rates(
    prompts: Prompts, capacities: Sequence[str], policies: Sequence[str], *, written: bool = False
) -> dict[str, dict[str, float]]:
    """Hit rates, or shares of blocks that are written, by policy and by capacity, as given."""
    found = figures(prompts, capacities, policies)
    return found.written if written else found.hits


def table(found: dict[str, dict[str, float]]) -> str:
    capacities = list(next(iter(found.values())))
    lines = ["policy         " + "".join(f"{float(given):>9.3g}" for given in capacities)]
    for policy, row in found.items():
        lines.append(f"{policy:<15}" + "".join(f"{row[given]:>9.3f}" for given in capacities))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="replay", description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids, plain or compressed by gzip")
    parser.add_argument("--capacity", nargs="+", default=CAPACITIES, metavar="C", help="fractions of all unique blocks")
    parser.add_argument("--policy", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument("--requests", type=int, help="replay only this many, from the start of the trace")
    parser.add_argument("--written", action="store_true", help="print the share of blocks that are written instead")
    parser.add_argument("--json", action="store_true", help="print {policy: {capacity: hit rate}}")
    options = parser.parse_args(arguments)
    prompts = read(options.trace, options.requests)
    found = rates(prompts, options.capacity, options.policy, written=options.written)
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
