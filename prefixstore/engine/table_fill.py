"""Fills the page table with all pages of a location, in slices, while single pages are added and deleted."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.backends.base import Facts
from prefixstore.engine.key_table import SHARDS, Keys, Slots
from prefixstore.engine.page_columns import (
    BLOCK,
    PINNED,
    SHIFT,
    SNAPSHOT_FORM,
    STORED,
    VICTIM,
    Column,
)
from prefixstore.engine.page_table import MAX_U32, PageTable
from prefixstore.format.keys import KEY_BYTES, SNAPSHOT, TOKEN_BYTES

__all__ = ["Describe", "TableFill"]

Describe: TypeAlias = Callable[[Facts, int], Mapping[str, Column]]
"""The columns of the policy for pages, given the time: `Policy.describe`."""


class TableFill:
    """One filling of a table, from slices of `View.facts` in the order of the keys.

    Between the slices the lock may be released: pages that are added or changed meanwhile stay as they are.

    Parameters
    ----------
    table
        The table. It has pending pages at most.
    describe
        Of the policy.
    now
        Nanoseconds since the epoch: uses that claim to be later are not believed.
    """

    def __init__(self, table: PageTable, describe: Describe, now: int) -> None:
        self._table = table
        self._describe = describe
        self._now = now
        # of each slice: slots and the keys of their parents, by the first bytes of these, and where each byte begins
        self._parents: list[tuple[Slots, Keys, list[int]]] = []
        table.filling = {table.key(slot) for slot in table}

    def add(self, facts: Facts) -> None:
        """Add a slice of what is stored now. Those that cannot be read are left out."""
        facts = facts[facts["is_readable"]]
        if self._table.filling:
            known = self._table.filling
            is_known = np.fromiter((key in known for key in facts["key"].tolist()), np.bool_, count=len(facts))
            for i in np.flatnonzero(is_known).tolist():
                self._add_known(facts[i : i + 1])
            facts = facts[~is_known]
        if not len(facts):
            return
        keys, parents = _bytes(facts["key"]), _bytes(facts["parent"])
        first = self._table.reserve(len(facts))
        numbers = self._number(facts)
        self._write(facts, keys, numbers, first)
        self._table.keys.insert_many(keys, first)
        self._table.end += len(facts)
        self._table.adopt_children(facts["key"].tolist(), first)
        is_first = (parents == _bytes(facts["namespace"])).all(axis=1)
        slots = np.flatnonzero(~is_first) + first
        parents = parents[~is_first]
        order = np.argsort(parents[:, 0], kind="stable")
        starts = np.searchsorted(parents[order, 0], np.arange(SHARDS + 1)).tolist()
        self._parents.append((_mapped(slots[order]), _mapped(parents[order]), starts))

    def _add_known(self, fact: Facts) -> None:
        """Add one page that has come, or gone, since the filling began; one that is here as stored is known better."""
        table, row = self._table, fact[0]
        key = bytes(row["key"])
        n_bytes = int(row["stored_bytes"]) + int(row["n_tokens"]) * TOKEN_BYTES
        slot = table.find(key)
        if slot < 0:
            slot = table.add(
                key,
                bytes(row["parent"]),
                bytes(row["namespace"]),
                end=int(row["start"]) + int(row["n_tokens"]),
                n_bytes=n_bytes,
                last_used=min(int(row["last_used"]), self._now),
                expires=int(row["expires"]),
                priority=int(row["priority"]),
                form=int(row["form"]),
                pinned=bool(row["pinned"]),
            )
            block, at = table.blocks[slot >> SHIFT], slot & (BLOCK - 1)
            for name, value in self._describe(fact, self._now).items():
                block.columns[name][at] = value[0]
        elif not table.entry(slot).is_stored:
            # captured here, and stored by another process
            table.change(
                key,
                n_bytes=n_bytes,
                pinned=bool(row["pinned"]),
                expires=int(row["expires"]),
                priority=int(row["priority"]),
                is_stored=True,
            )

    def _write(self, facts: Facts, keys: Keys, numbers: npt.NDArray[np.int64], first: int) -> None:
        n_bytes = facts["stored_bytes"] + facts["n_tokens"].astype(np.uint64) * TOKEN_BYTES
        flags = (
            STORED
            | VICTIM
            | PINNED * facts["pinned"].astype(np.uint8)
            | SNAPSHOT_FORM * (facts["form"] == SNAPSHOT).astype(np.uint8)
        )
        values = {
            "key": keys,
            "namespace": numbers,
            "end": np.minimum(facts["start"].astype(np.int64) + facts["n_tokens"], MAX_U32),
            "last_used": np.where(facts["last_used"] <= self._now, facts["last_used"], self._now),
            "expires": facts["expires"],
            "n_bytes": n_bytes,
            "priority": facts["priority"],
            "flags": flags,
            **self._describe(facts, self._now),
        }
        done = 0
        while done < len(facts):
            block, at = divmod(first + done, BLOCK)
            n = min(len(facts) - done, BLOCK - at)
            for name, value in values.items():
                self._table.blocks[block].columns[name][at : at + n] = value[done : done + n]
            done += n

    def _number(self, facts: Facts) -> npt.NDArray[np.int64]:
        """The numbers of their namespaces, whose totals they are added to."""
        names = facts["namespace"].copy()
        n_bytes = facts["stored_bytes"].astype(np.int64) + facts["n_tokens"].astype(np.int64) * TOKEN_BYTES
        distinct: dict[bytes, int] = {}
        numbers = np.fromiter(
            (distinct.setdefault(name, len(distinct)) for name in names.tolist()), np.int64, count=len(names)
        )
        pages = np.bincount(numbers, minlength=len(distinct))
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, numbers, n_bytes)
        free = ~facts["pinned"]
        free_pages = np.bincount(numbers[free], minlength=len(distinct))
        free_sums = np.zeros(len(distinct), np.int64)
        np.add.at(free_sums, numbers[free], n_bytes[free])
        mine = np.empty(len(distinct), np.int64)
        for namespace, i in distinct.items():
            mine[i] = self._table.take_number(namespace)
            self._table.totals.count_stored(
                namespace, int(pages[i]), int(sums[i]), int(free_pages[i]), int(free_sums[i])
            )
        return mine[numbers]

    def finish(self) -> Iterator[None]:
        """Find the parents of all pages, in steps; after the last one the table is complete."""
        table = self._table
        for shard in range(SHARDS):
            cuts = [(some, keys, slice(*starts[shard : shard + 2])) for some, keys, starts in self._parents]
            slots = np.concatenate([some[cut] for some, _, cut in cuts] or [np.empty(0, np.int64)])
            if not len(slots):
                continue
            parents = np.concatenate([keys[cut] for _, keys, cut in cuts])
            # a page may have left, and another one have its slot
            changed = table.filling or set()
            if changed:
                stays = [table.key(slot) not in changed and table.find(table.key(slot)) == slot for slot in slots]
                slots, parents = slots[stays], parents[stays]
            above = table.keys.find_many(shard, parents)
            for i in np.flatnonzero(above < 0).tolist():
                table.wait(int(slots[i]), parents[i].tobytes())
            has_one = above >= 0
            table.link(slots[has_one], above[has_one])
            yield
        self._parents = []
        table.filling = None
        table.find_kept()


def _mapped(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy in memory that goes back to the system with it: what `malloc` frees between other blocks, it keeps."""
    if not values.size:
        return values
    copy = np.frombuffer(mmap.mmap(-1, values.nbytes), values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


def _bytes(keys: Facts) -> Keys:
    return np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), KEY_BYTES)
