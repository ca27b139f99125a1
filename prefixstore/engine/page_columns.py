"""The columns of the page table, in blocks: growing adds a block, and copies nothing."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.engine.key_table import cells_of
from prefixstore.format.keys import KEY_BYTES

__all__ = [
    "BLOCK",
    "PINNED",
    "ROW_BYTES",
    "SHIFT",
    "SNAPSHOT_FORM",
    "STORED",
    "STRAY",
    "VICTIM",
    "Block",
    "Column",
]

Column: TypeAlias = npt.NDArray[Any]

SHIFT = 16
# slots of a block: what one step of a ranking looks at
BLOCK = 1 << SHIFT

# Flags. PINNED: exempt from eviction and expiry. STORED: the location has the page, or the open transaction has put it
# there. VICTIM: it is stored, and not in the hands of the transaction that wrote it. STRAY: it is not a first page, and
# its parent is not in the table.
PINNED = 1
STORED = 2
VICTIM = 4
SNAPSHOT_FORM = 8
STRAY = 16

COLUMNS = {
    # slot of the parent and one; 0 for none
    "parent": "u4",
    "n_children": "u4",
    # children that cannot be evicted
    "n_fixed": "u4",
    "namespace": "u4",
    # position after the last token
    "end": "u4",
    # nanoseconds since the epoch; of the expiry: 0 for never
    "last_used": "u8",
    "expires": "u8",
    # what it counts against a quota: stored bytes and tokens
    "n_bytes": "u8",
    "priority": "i2",
    "flags": "u1",
    # The rest belongs to the policy. uses: those before an eviction included; clock: prompts until the last one.
    "uses": "u2",
    "page_class": "u1",
    "clock": "u4",
    "gain": "f4",
}
# of one page in all columns
ROW_BYTES = KEY_BYTES + sum(np.dtype(kind).itemsize for kind in COLUMNS.values())


class Block:
    """Facts of `BLOCK` pages. Each column is an array, and a memoryview of it: single cells are read faster there.

    Attributes
    ----------
    columns
        The arrays, by name.
    key
        The keys, one after the other.
    """

    __slots__ = ("columns", "key", *COLUMNS)

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {"key": np.zeros((BLOCK, KEY_BYTES), np.uint8)}
        self.key = cells_of(self.columns["key"].reshape(-1))
        for name, kind in COLUMNS.items():
            self.columns[name] = np.zeros(BLOCK, kind)
            setattr(self, name, cells_of(self.columns[name]))

    parent: memoryview[Any]
    n_children: memoryview[Any]
    n_fixed: memoryview[Any]
    namespace: memoryview[Any]
    end: memoryview[Any]
    last_used: memoryview[Any]
    expires: memoryview[Any]
    n_bytes: memoryview[Any]
    priority: memoryview[Any]
    flags: memoryview[Any]
    uses: memoryview[Any]
    page_class: memoryview[Any]
    clock: memoryview[Any]
    gain: memoryview[Any]
