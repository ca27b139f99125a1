"""Which leaves are evicted: those that a policy ranks lowest, found by sampling leaf rows.

Page keys are hashes, so the rows after a random key are an unbiased sample of the leaves of a namespace. The namespace
is drawn in proportion to its leaves. 64 leaves are read for each one that is evicted; up to 256 in all, every leaf is
read, and the order is exact. No memory grows with the number of pages.
"""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import numpy as np

from prefixstore.backends.contract import Range, Row
from prefixstore.engine import keyspace
from prefixstore.engine.adaptive_policy import Adaptive
from prefixstore.engine.keyspace import LEAVES, Count, Leaf, leaf_row, leaves_of
from prefixstore.engine.page_view import PageView
from prefixstore.engine.policy import Counting, Leaves, Ordering, Policy, Ranks
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.units import shown

POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    # least recently used first; among pages used together, the deepest first
    "lru": lambda: Ordering("lru", lambda leaves: np.zeros(len(leaves))),
    "lfu": Counting,
    # the end of the longest prompt first, which keeps the beginnings of many prompts
    "longest_first": lambda: Ordering("longest_first", lambda leaves: -leaves["end"].astype(np.float64)),
    # lowest priority first; among those, the least recently used
    "priority": lambda: Ordering("priority", lambda leaves: leaves["priority"]),
}


def policy_named(name: object) -> Policy:
    """A new policy by its name in `POLICIES`. Raises `InvalidParameterError` for another name."""
    if not isinstance(name, str) or name not in POLICIES:
        known = ", ".join(map(repr, POLICIES))
        raise InvalidParameterError(f"policy={shown(name)} is unknown; choose one of {known}")
    return POLICIES[name]()


# Leaves that are read for each eviction, and for how many evictions a round trip reads. In a local file the first one
# reads for a single eviction: most transactions need no more.
SAMPLE, AT_ONCE = 64, 4
# Up to this many leaves, all are read. Of samples, the lowest are kept, up to the same number.
POOL = 256
# From how many namespaces one is drawn. If there are more, they are those after a random one.
SPACES = 1024
# the rank of pages that have expired
EXPIRED = float("-inf")

Rank: TypeAlias = Callable[[Sequence[bytes], Leaves], Ranks]
"""Ranks leaves with these page keys, to which it first adds their deferred uses."""


class Group(NamedTuple):
    """A group of pages of which some are evicted to make space for others.

    Attributes
    ----------
    of
        A namespace (bytes), or all namespaces of a salt (str); None for all pages.
    quota
        How many bytes of payloads and tokens they may take.
    """

    of: bytes | str | None = None
    quota: int = sys.maxsize

    def spaces(self, view: PageView) -> Mapping[bytes, Count] | None:
        """Its namespaces, and what each of them holds; None stands for all namespaces."""
        if isinstance(self.of, bytes):
            return {self.of: view.count(self.of)}
        return view.namespaces_of(self.of) if self.of is not None else None

    def held(self, view: PageView) -> Count:
        """What its pages count now."""
        spaces = self.spaces(view)
        return view.count() if spaces is None else reduce(Count.plus, spaces.values(), Count())


ALL = Group()


class Victim(NamedTuple):
    """A leaf to evict: as it is stored, with the time of its last use (deferred uses included)."""

    key: bytes
    namespace: bytes
    leaf: Leaf
    last_used: int
    is_expired: bool

    @property
    def row(self) -> bytes:
        """Its leaf row."""
        return leaf_row(self.namespace, self.key)


class Victims:
    """The leaves of a group in one transaction, the lowest first."""

    def __init__(self, view: PageView, rank: Rank, group: Group = ALL) -> None:
        self._view = view
        self._rows = view.rows
        self._rank = rank
        spaces = group.spaces(view)
        # how many leaves each namespace has; None for all namespaces
        self._spaces = None if spaces is None else {space: count.leaves for space, count in spaces.items()}
        # leaves that were read, in the order of eviction; some may be gone or used by now
        self._heap: list[tuple[float, int, int, bytes, bytes]] = []
        # after how many more leaves to read again; None if all were read
        self._left: int | None = 0
        # for how many evictions to read the next time
        self._at_once = 1 if view.is_local else AT_ONCE
        # leaf rows that this transaction may not evict
        self._spared: set[bytes] = set()

    def lowest(self) -> Victim | None:
        """The lowest leaf as it is stored now, the same one until it is deleted or spared; None if there is none."""
        while True:
            if self._left == 0:
                self._read()
            if not self._heap and self._left is not None:
                # the samples had nothing but spared leaves
                self._read_all()
            if not self._heap:
                return None
            rank, last_used, _, row, value = self._heap[0]
            stored = self._rows.get([row])[0]
            if stored == value:
                leaf = Leaf.unpack(value)
                assert leaf is not None, "none of another length is read"
                return Victim(row[1 + KEY_BYTES :], row[1 : 1 + KEY_BYTES], leaf, last_used, rank == EXPIRED)
            self._pass_over()
            if stored is not None:
                self._push([Row(row, stored)])

    def spare(self, victim: Victim) -> None:
        """Keep the lowest leaf from being evicted in this transaction."""
        self._spared.add(victim.row)
        self._pass_over()

    def added(self, namespace: bytes, key: bytes) -> None:
        """Consider a page that may have become a leaf."""
        if self._spaces is None or namespace in self._spaces:
            row = leaf_row(namespace, key)
            if (value := self._rows.get([row])[0]) is not None:
                self._push([Row(row, value)])

    def _pass_over(self) -> None:
        """Remove the lowest leaf, which is there twice if it was read twice."""
        lowest = self._heap[0]
        while self._heap and self._heap[0] == lowest:
            heapq.heappop(self._heap)
        if self._left is not None:
            self._left -= 1

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read a sample of leaves, or all if there are few."""
        n_leaves = self._view.count().leaves if self._spaces is None else sum(self._spaces.values())
        found = self._sample() if n_leaves > POOL else []
        if not found:
            self._read_all()
            return
        self._left, self._at_once = self._at_once, AT_ONCE
        self._push(found)
        self._heap = heapq.nsmallest(POOL, self._heap)
        # the rows that `lowest` will compare, in one request
        self._rows.get([row for *_, row, _ in self._heap[: 2 * AT_ONCE]])

    def _read_all(self) -> None:
        """Read all leaves, up to a limit that a sampled group reaches only if almost all of it was spared."""
        most = POOL + len(self._spared)
        if self._spaces is None:
            ranges = [keyspace.everything(keyspace.LEAF)._replace(limit=most + 1)]
        else:
            ranges = [leaves_of(space, limit=most + 1) for space in self._spaces]
        rows = [row for some in self._rows.ranges(ranges) for row in some]
        self._left = None if len(rows) <= most else AT_ONCE
        self._heap = []
        self._push(rows)

    def _some_spaces(self) -> Mapping[bytes, int]:
        """The number of leaves of each namespace; of very many, only those after a random one."""
        start = random.randbytes(keyspace.TENANT_BYTES)
        after, first = self._rows.ranges(
            [keyspace.counts_from(start, SPACES), keyspace.counts_from(b"", SPACES)],
        )
        found: dict[bytes, int] = {}
        for row in (*after, *first)[:SPACES] if len(after) < SPACES else after:
            count = Count.unpack(row.value)
            if count is not None and count.leaves > 0:
                found[row.key[-KEY_BYTES:]] = count.leaves
        return found

    def _sample(self) -> list[Row]:
        """Leaves after random keys."""
        spaces = self._some_spaces() if self._spaces is None else self._spaces
        if not spaces:
            return []
        drawn = random.choices(list(spaces), list(spaces.values()), k=self._at_once)
        wanted = [leaves_of(space, random.randbytes(KEY_BYTES), SAMPLE) for space in drawn]
        found = self._rows.ranges(wanted)
        # a range that reached the end of its namespace continues at its beginning
        rest = [
            Range(leaf_row(space, b""), one.start, SAMPLE - len(rows))
            for space, one, rows in zip(drawn, wanted, found, strict=True)
            if len(rows) < SAMPLE
        ]
        return [row for some in (*found, *(self._rows.ranges(rest) if rest else ())) for row in some]

    def _push(self, rows: Sequence[Row]) -> None:
        sizes = 1 + 2 * KEY_BYTES, LEAVES.itemsize
        rows = [row for row in rows if (len(row.key), len(row.value)) == sizes and row.key not in self._spared]
        if not rows:
            return
        leaves = np.frombuffer(bytearray(b"".join(row.value for row in rows)), LEAVES)
        ranks = self._rank([row.key[-KEY_BYTES:] for row in rows], leaves)
        expires = leaves["expires"]
        ranks = np.where((expires > 0) & (expires <= time.time_ns()), EXPIRED, ranks)
        order = zip(
            ranks.tolist(), leaves["last_used"].tolist(), (-leaves["end"].astype(np.int64)).tolist(), rows, strict=True
        )
        for rank, last_used, end, row in order:
            heapq.heappush(self._heap, (rank, last_used, end, row.key, row.value))
