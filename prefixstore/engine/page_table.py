"""The page table: what eviction needs to know of each page, in arrays, under 100 bytes a page; no step takes long.

A page has a slot. It is a leaf if no other page names it as its parent. It is fixed if eviction cannot reach it: it is
pinned, or not stored yet, or has such a descendant. A page whose parent is not in the table is a stray.

Used under the lock of the catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from prefixstore.engine.key_table import Keys, KeyTable, Slots
from prefixstore.engine.page_columns import (
    BLOCK,
    PINNED,
    ROW_BYTES,
    SHIFT,
    SNAPSHOT_FORM,
    STORED,
    STRAY,
    VICTIM,
    Block,
    Column,
)
from prefixstore.engine.totals import Totals
from prefixstore.format.keys import KEY_BYTES, SNAPSHOT

__all__ = ["MASK", "MAX_U16", "MAX_U32", "PageTable", "TableEntry"]

MASK = BLOCK - 1
MAX_U16 = (1 << 16) - 1
MAX_U32 = (1 << 32) - 1


class TableEntry(NamedTuple):
    """What the table knows of one page."""

    key: bytes
    namespace: bytes
    end: int
    last_used: int
    expires: int
    n_bytes: int
    priority: int
    uses: int
    form: int
    pinned: bool
    is_stored: bool
    may_be_victim: bool


class _Keys(KeyTable):
    """The key table of a page table: the keys are in its blocks."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self._blocks = blocks

    def key_of(self, slot: int) -> bytes:
        at = (slot & MASK) * KEY_BYTES
        return self._blocks[slot >> SHIFT].key[at : at + KEY_BYTES].tobytes()

    def keys_of(self, slots: Slots) -> Keys:
        return gather(self._blocks, "key", slots)


class PageTable:
    """Facts of pages by slot.

    Attributes
    ----------
    blocks
        The columns. Only the table and the policy change them.
    keys
        Slots by key.
    totals
        What all pages, namespaces and salts hold.
    on_candidate
        Called with the slot of each page that has become a leaf, or may be evicted from now on.
    filling
        While the table is filled (see `TableFill`): the keys of pages added or removed since that began.
    kept
        Slots of the pages that are evicted after all others, those here of `keep`.
    """

    def __init__(self) -> None:
        self.kept: set[int] = set()
        # how often each page is to be kept, here or not
        self._kept_keys: Counter[bytes] = Counter()
        self.blocks: list[Block] = []
        self.keys = _Keys(self.blocks)
        self.totals = Totals()
        self.on_candidate: list[Callable[[int], None]] = []
        self.filling: set[bytes] | None = None
        # slots from here on were never used; those before it that are free
        self.end = 0
        self._free: list[int] = []
        self._namespaces: list[bytes] = []
        self._number_of: dict[bytes, int] = {}
        self._free_numbers: list[int] = []
        # children of pages that are not here, by the key of the parent
        self._waiting: dict[bytes, set[int]] = {}
        self._waits_for: dict[int, bytes] = {}

    def __len__(self) -> int:
        return self.end - len(self._free)

    def __contains__(self, key: bytes) -> bool:
        return self.keys.find(key) >= 0

    def __iter__(self) -> Iterator[int]:
        """The slots of all pages."""
        return iter(self.keys)

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays, as far as they are in use: the end of the last block takes no memory yet."""
        return self.end * ROW_BYTES + self.keys.n_bytes

    # -- single pages -------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """The slot of a page; -1 if it is not here."""
        return self.keys.find(key)

    def add(
        self,
        key: bytes,
        parent: bytes,
        namespace: bytes,
        *,
        end: int,
        n_bytes: int,
        last_used: int,
        uses: int = 1,
        expires: int = 0,
        priority: int = 0,
        form: int = 0,
        pinned: bool = False,
        is_stored: bool = True,
        may_be_victim: bool = True,
        gain: float = 1.0,
    ) -> int:
        """Add a page that is not here; its slot.

        Parameters
        ----------
        key, parent, namespace
            Its key, that of its parent (of the namespace for a first page), and that of the namespace.
        end
            Position after its last token.
        n_bytes
            What it counts against a quota: its stored bytes and tokens.
        last_used, expires
            Nanoseconds since the epoch; no expiry is 0.
        uses
            How often it was used, being captured included.
        priority, form, pinned
            Of its record and usage.
        is_stored, may_be_victim
            Whether the location has it, and whether eviction may delete it.
        gain
            What a hit saves for each byte; only ratios matter.
        """
        slot = self._take_slot()
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        block.key[at * KEY_BYTES : (at + 1) * KEY_BYTES] = key
        block.namespace[at] = self.take_number(namespace)
        block.end[at] = min(end, MAX_U32)
        block.last_used[at] = last_used
        block.expires[at] = expires
        block.n_bytes[at] = n_bytes
        block.priority[at] = priority
        block.uses[at] = min(uses, MAX_U16)
        block.gain[at] = gain
        block.page_class[at] = block.clock[at] = block.n_children[at] = block.n_fixed[at] = block.parent[at] = 0
        flags = PINNED * pinned | STORED * is_stored | VICTIM * may_be_victim | SNAPSHOT_FORM * (form == SNAPSHOT)
        block.flags[at] = flags
        self.keys.insert(key, slot)
        if key in self._kept_keys:
            self.kept.add(slot)
        if parent != namespace:
            self._attach(slot, parent)
        self._count(slot, 1)
        if self.is_fixed(slot):
            self._change_fixed(block.parent[at] - 1, 1)
        for child in self._waiting.pop(key, ()):
            self._adopt(slot, child)
        if self.filling is not None:
            self.filling.add(key)
        self._offer(slot)
        return slot

    def remove(self, key: bytes) -> bool:
        """Remove a page; whether it was here. Pages that depend on it are strays from then on."""
        if self.filling is not None:
            self.filling.add(key)
        slot = self.keys.find(key)
        if slot < 0:
            return False
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        if block.n_children[at]:
            self._disown(slot, key)
        namespace = self._namespaces[block.namespace[at]]
        was_fixed, parent = self.is_fixed(slot), block.parent[at] - 1
        self._count(slot, -1)
        self.keys.delete(key, slot)
        self.kept.discard(slot)
        if block.flags[at] & STRAY:
            self._stop_waiting(slot)
        block.flags[at] = block.parent[at] = 0
        self._free.append(slot)
        if parent >= 0:
            self.blocks[parent >> SHIFT].n_children[parent & MASK] -= 1
            if was_fixed:
                self._change_fixed(parent, -1)
            self._offer(parent)
        self._forget_if_empty(namespace)
        return True

    def change(
        self,
        key: bytes,
        *,
        n_bytes: int | None = None,
        pinned: bool | None = None,
        expires: int | None = None,
        priority: int | None = None,
        is_stored: bool | None = None,
        may_be_victim: bool | None = None,
    ) -> None:
        """Change facts of a page; nothing happens if it is not here."""
        slot = self.keys.find(key)
        if slot < 0:
            return
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        was_fixed = self.is_fixed(slot)
        self._count(slot, -1)
        flags = block.flags[at]
        was_stored = flags & STORED
        for bit, value in ((PINNED, pinned), (STORED, is_stored), (VICTIM, may_be_victim)):
            if value is not None:
                flags = flags | bit if value else flags & ~bit
        block.flags[at] = flags
        if n_bytes is not None:
            if was_stored and block.n_bytes[at] and n_bytes:
                # packed differently: the same time is saved for other bytes
                block.gain[at] *= block.n_bytes[at] / n_bytes
            block.n_bytes[at] = n_bytes
        if expires is not None:
            block.expires[at] = expires
        if priority is not None:
            block.priority[at] = priority
        self._count(slot, 1)
        if (is_fixed := self.is_fixed(slot)) != was_fixed:
            self._change_fixed(block.parent[at] - 1, 1 if is_fixed else -1)
        self._offer(slot)

    def use(self, key: bytes, last_used: int) -> int:
        """Note the time of a use; the slot of the page, -1 if it is not here."""
        slot = self.keys.find(key)
        if slot >= 0:
            block, at = self.blocks[slot >> SHIFT], slot & MASK
            block.last_used[at] = max(block.last_used[at], last_used)
        return slot

    def keep(self, keys: Iterable[bytes]) -> None:
        """Have these pages evicted after all others, once they are here; as often as this is called for one."""
        for key in keys:
            self._kept_keys[key] += 1
            if (slot := self.keys.find(key)) >= 0:
                self.kept.add(slot)

    def stop_keeping(self, keys: Iterable[bytes]) -> None:
        """Undo one `keep` of each of these pages."""
        for key in keys:
            self._kept_keys[key] -= 1
            if self._kept_keys[key] > 0:
                continue
            del self._kept_keys[key]
            if (slot := self.keys.find(key)) >= 0:
                self.kept.discard(slot)
                self._offer(slot)

    def find_kept(self) -> None:
        """Find the pages to keep, after the table was filled."""
        self.kept = {slot for key in self._kept_keys if (slot := self.keys.find(key)) >= 0}

    def entry(self, slot: int) -> TableEntry:
        """What the table knows of the page in a slot."""
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        flags = block.flags[at]
        return TableEntry(
            self.keys.key_of(slot),
            self._namespaces[block.namespace[at]],
            block.end[at],
            block.last_used[at],
            block.expires[at],
            block.n_bytes[at],
            block.priority[at],
            block.uses[at],
            1 if flags & SNAPSHOT_FORM else 0,
            bool(flags & PINNED),
            bool(flags & STORED),
            bool(flags & VICTIM),
        )

    def key(self, slot: int) -> bytes:
        """The key of the page in a slot."""
        return self.keys.key_of(slot)

    def parent(self, slot: int) -> bytes:
        """The key of the parent of the page in a slot; of the namespace for a first page."""
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        if block.parent[at]:
            return self.keys.key_of(block.parent[at] - 1)
        namespace: bytes = self._namespaces[block.namespace[at]]
        return self._waits_for.get(slot, namespace)

    def noted(self, slot: int) -> tuple[int, int]:
        """What the policy has recorded of a page: its uses, and the clock at the last one."""
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        return block.uses[at], block.clock[at]

    def is_leaf(self, key: bytes) -> bool:
        """Whether a page is here, and no other page here depends on it."""
        slot = self.keys.find(key)
        return slot >= 0 and not self.blocks[slot >> SHIFT].n_children[slot & MASK]

    def is_victim(self, slot: int) -> bool:
        """Whether a slot has a leaf that eviction may delete now."""
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        return block.flags[at] & (VICTIM | PINNED) == VICTIM and not block.n_children[at]

    def is_fixed(self, slot: int) -> bool:
        """Whether eviction cannot reach a page."""
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        return bool(block.flags[at] & (VICTIM | PINNED) != VICTIM or block.n_fixed[at])

    def strays(self) -> list[int]:
        """The slots of pages whose parents are not here."""
        return list(self._waits_for)

    # -- many pages ---------------------------------------------------------------------------------------------------

    def number(self, namespace: bytes) -> int:
        """The number of a namespace in the columns; -1 if it has no pages."""
        return self._number_of.get(namespace, -1)

    def take_number(self, namespace: bytes) -> int:
        """The number of a namespace, a new one if it has none."""
        number = self._number_of.get(namespace)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._namespaces[number] = namespace
            else:
                number = len(self._namespaces)
                self._namespaces.append(namespace)
            self._number_of[namespace] = number
        return number

    def link(self, slots: Slots, parents: Slots) -> None:
        """Link pages in these slots, which have no parents yet, to their parents."""
        of_block = slots >> SHIFT
        for number in np.unique(of_block).tolist():
            here = of_block == number
            self.blocks[number].columns["parent"][slots[here] & MASK] = parents[here] + 1
        of_block = parents >> SHIFT
        for number in np.unique(of_block).tolist():
            np.add.at(self.blocks[number].columns["n_children"], parents[of_block == number] & MASK, 1)
        flags, n_fixed = self.gather("flags", slots), self.gather("n_fixed", slots)
        is_fixed = (flags & (VICTIM | PINNED) != VICTIM) | (n_fixed > 0)
        for parent in parents[is_fixed].tolist():
            self._change_fixed(parent, 1)

    def adopt_children(self, keys: Sequence[bytes], first: int) -> None:
        """Link the strays whose parents, with these keys, were added in consecutive slots."""
        if not self._waiting:
            return
        for slot, key in enumerate(keys, first):
            for child in self._waiting.pop(key, ()):
                self._adopt(slot, child)

    def victims_of(self, block: int) -> Slots:
        """Where in this block there are leaves that eviction may delete."""
        columns = self.blocks[block].columns
        is_victim = (columns["flags"] & (VICTIM | PINNED) == VICTIM) & (columns["n_children"] == 0)
        return np.flatnonzero(is_victim)

    def gather(self, column: str, slots: Slots) -> Column:
        """Values of a column."""
        return gather(self.blocks, column, slots)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        slot = self.reserve(1)
        self.end += 1
        return slot

    def reserve(self, n: int) -> int:
        """Make sure that there are blocks for `n` more pages; the first slot that was never used."""
        while self.end + n > len(self.blocks) << SHIFT:
            self.blocks.append(Block())
        return self.end

    def _forget_if_empty(self, namespace: bytes) -> None:
        if not self.totals.of(namespace).pages:
            self._free_numbers.append(self._number_of.pop(namespace))

    def _attach(self, slot: int, parent: bytes) -> None:
        above = self.keys.find(parent)
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        if above < 0:
            self.wait(slot, parent)
            return
        block.parent[at] = above + 1
        self.blocks[above >> SHIFT].n_children[above & MASK] += 1

    def wait(self, slot: int, parent: bytes) -> None:
        """Note that a page is a stray until its parent is added."""
        self.blocks[slot >> SHIFT].flags[slot & MASK] |= STRAY
        self._waiting.setdefault(parent, set()).add(slot)
        self._waits_for[slot] = parent

    def _adopt(self, slot: int, child: int) -> None:
        """A stray has its parent now."""
        block, at = self.blocks[child >> SHIFT], child & MASK
        del self._waits_for[child]
        block.flags[at] &= ~STRAY
        block.parent[at] = slot + 1
        self.blocks[slot >> SHIFT].n_children[slot & MASK] += 1
        if self.is_fixed(child):
            self._change_fixed(slot, 1)

    def _disown(self, slot: int, key: bytes) -> None:
        """The parent of some pages is removed before them, which is rare: they are looked for."""
        for number, block in enumerate(self.blocks):
            children = np.flatnonzero(block.columns["parent"] == slot + 1)
            block.columns["parent"][children] = 0
            for child in children.tolist():
                self.wait(child + (number << SHIFT), key)
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        was_fixed = self.is_fixed(slot)
        self._count(slot, -1)
        block.n_children[at] = block.n_fixed[at] = 0
        self._count(slot, 1)
        if was_fixed and not self.is_fixed(slot):
            self._change_fixed(block.parent[at] - 1, -1)

    def _stop_waiting(self, slot: int) -> None:
        parent = self._waits_for.pop(slot)
        self._waiting[parent].discard(slot)
        if not self._waiting[parent]:
            del self._waiting[parent]

    def _count(self, slot: int, sign: int) -> None:
        block, at = self.blocks[slot >> SHIFT], slot & MASK
        self.totals.count(
            self._namespaces[block.namespace[at]],
            sign,
            block.n_bytes[at],
            is_stored=bool(block.flags[at] & STORED),
            is_fixed=self.is_fixed(slot),
        )

    def _change_fixed(self, slot: int, sign: int) -> None:
        """A child of this page cannot be evicted any more (1), or can again (-1)."""
        while slot >= 0:
            block, at = self.blocks[slot >> SHIFT], slot & MASK
            was_fixed = self.is_fixed(slot)
            self._count(slot, -1)
            block.n_fixed[at] += sign
            self._count(slot, 1)
            if self.is_fixed(slot) == was_fixed:
                return
            slot = block.parent[at] - 1

    def _offer(self, slot: int) -> None:
        if self.is_victim(slot):
            for tell in self.on_candidate:
                tell(slot)


def gather(blocks: list[Block], name: str, slots: Slots) -> Column:
    """Values of a column in slots of several blocks."""
    if len(blocks) == 1:
        return blocks[0].columns[name][slots]
    column = blocks[0].columns[name]
    found = np.empty((len(slots), *column.shape[1:]), column.dtype)
    of_block = slots >> SHIFT
    for number in np.unique(of_block).tolist():
        here = of_block == number
        found[here] = blocks[number].columns[name][slots[here] & MASK]
    return found
