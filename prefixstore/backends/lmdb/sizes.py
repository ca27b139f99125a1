"""The total size of all payloads, as stored and as states: updated with each change, so it need not be summed.

It is a row of the database ``meta``, with the number of pages that it covers, and a checksum. A row that is damaged, or
has another number of pages, is ignored: then the sizes are summed from the records.
"""

from __future__ import annotations

import struct
from typing import Any

import lmdb
import xxhash

from prefixstore.format.record import LARGEST

__all__ = ["counted", "put_counted"]

ROW = b"sizes"
# number of pages, bytes as stored, bytes of the states; and an xxh3-64 of these
SIZES = struct.Struct("<QQQ")
SEAL = struct.Struct("<Q")


def counted(txn: lmdb.Transaction, meta: Any, entries: int) -> tuple[int, int] | None:
    """The sizes recorded for this number of pages; None if they are not known."""
    if not entries:
        return 0, 0
    stored = txn.get(ROW, default=b"", db=meta)
    if len(stored) != SIZES.size + SEAL.size or SEAL.pack(_digest(stored[: SIZES.size])) != stored[SIZES.size :]:
        return None
    n_counted, stored_bytes, raw_bytes = SIZES.unpack_from(stored)
    return (stored_bytes, raw_bytes) if n_counted == entries else None


def put_counted(txn: lmdb.Transaction, meta: Any, entries: int, sizes: tuple[int, int] | None) -> None:
    """Record the sizes for this number of pages; None if they are not known."""
    if sizes is None or not 0 <= min(sizes) <= max(sizes) <= LARGEST:
        txn.delete(ROW, db=meta)
        return
    row = SIZES.pack(entries, *sizes)
    txn.put(ROW, row + SEAL.pack(_digest(row)), db=meta)


def _digest(row: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(row)
