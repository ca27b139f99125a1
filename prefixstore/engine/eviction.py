"""The order of eviction: the leaves that a policy ranks lowest, found by samples of leaf rows.

The keys of pages are hashes, so the rows after a random key are an unbiased sample of the leaves of a namespace, and
the namespace is drawn by how many it has. For each leaf that is taken, 64 are read. Of up to 256 leaves all are read,
so that the order is exact. Nothing here grows with the number of pages.
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
from prefixstore.format.keys import KEY_BYTES

__all__ = ["ALL", "POLICIES", "Group", "Rank", "Victim", "Victims"]

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

# Leaves that are read for each one that is taken, and how many are taken of one round trip. In a local file the first
# round trip is for one: most transactions need no more.
SAMPLE, AT_ONCE = 64, 4
# Up to so many leaves, all are read. Of samples of more, so many of the lowest are kept.
POOL = 256
# namespaces from which one is drawn: of more, those after a random one
SPACES = 1024
# the rank of pages that have expired
EXPIRED = float("-inf")

Rank: TypeAlias = Callable[[Sequence[bytes], Leaves], Ranks]
"""Ranks leaves with these page keys, after it has entered into them what is to be written of their uses."""


class Group(NamedTuple):
    """Pages that are evicted for each other.

    Attributes
    ----------
    of
        A namespace (bytes), or all namespaces of a salt (str); None for all pages.
    quota
        How many bytes they may take: stored bytes and tokens.
    """

    of: bytes | str | None = None
    quota: int = sys.maxsize

    def spaces(self, view: PageView) -> Mapping[bytes, Count] | None:
        """Its namespaces, and what each of them holds; None for all that there are."""
        if isinstance(self.of, bytes):
            return {self.of: view.count(self.of)}
        return view.namespaces_of(self.of) if self.of is not None else None

    def held(self, view: PageView) -> Count:
        """What its pages take now."""
        spaces = self.spaces(view)
        return view.count() if spaces is None else reduce(Count.plus, spaces.values(), Count())


ALL = Group()


class Victim(NamedTuple):
    """A leaf to be evicted: as it is stored, when it was used last, and whether it has expired."""

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
        # leaves that were read, in the order in which they are taken: some may be gone, or used since
        self._heap: list[tuple[float, int, int, bytes, bytes]] = []
        # how many may be taken before more are read; None where all were read
        self._left: int | None = 0
        # for how many leaves are read the next time
        self._at_once = 1 if view.is_local else AT_ONCE
        # that are not to be taken in this transaction
        self._spared: set[bytes] = set()

    def lowest(self) -> Victim | None:
        """The lowest leaf as stored now, the same until it is deleted or spared; None if no leaf is left."""
        while True:
            if self._left == 0:
                self._read()
            if not self._heap and self._left is not None:
                # nothing but what was spared was found
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
        """Not have the lowest leaf chosen in this transaction."""
        self._spared.add(victim.row)
        self._pass_over()

    def added(self, namespace: bytes, key: bytes) -> None:
        """A page may be a leaf now."""
        if self._spaces is None or namespace in self._spaces:
            row = leaf_row(namespace, key)
            if (value := self._rows.get([row])[0]) is not None:
                self._push([Row(row, value)])

    def _pass_over(self) -> None:
        """Go on to the next leaf. One that was read twice is there twice."""
        lowest = self._heap[0]
        while self._heap and self._heap[0] == lowest:
            heapq.heappop(self._heap)
        if self._left is not None:
            self._left -= 1

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read some more leaves, or all where there are few."""
        n_leaves = self._view.count().leaves if self._spaces is None else sum(self._spaces.values())
        found = self._sample() if n_leaves > POOL else []
        if not found:
            self._read_all()
            return
        self._left, self._at_once = self._at_once, AT_ONCE
        self._push(found)
        self._heap = heapq.nsmallest(POOL, self._heap)
        # their values now, in one request
        self._rows.get([row for *_, row, _ in self._heap[: 2 * AT_ONCE]])

    def _read_all(self) -> None:
        """Read the first leaves that may be taken: mostly that is all."""
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
        """How many leaves namespaces have: all of them, or of very many those after a random one."""
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
        """Some leaves after random keys."""
        spaces = self._some_spaces() if self._spaces is None else self._spaces
        if not spaces:
            return []
        drawn = random.choices(list(spaces), list(spaces.values()), k=self._at_once)
        wanted = [leaves_of(space, random.randbytes(KEY_BYTES), SAMPLE) for space in drawn]
        found = self._rows.ranges(wanted)
        # those that ended before there were enough go on with the first ones
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
