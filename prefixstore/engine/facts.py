"""Facts of many pages at once, from the stored bytes of their records and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, TOKEN_BYTES
from prefixstore.format.record import FORMAT_VERSION, LARGEST, RECORD, RECORD_SEAL, RECORDS, USAGE, USAGES, Buffer

__all__ = ["FACTS", "Facts", "facts_of"]

Facts: TypeAlias = npt.NDArray[np.void]
# What `View.facts` returns of a page: all but its tokens, its checksum and its payload.
FACTS = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("parent", f"V{KEY_BYTES}"),
        ("namespace", f"V{KEY_BYTES}"),
        ("raw_bytes", "<u8"),
        ("stored_bytes", "<u8"),
        ("created", "<u8"),
        ("last_used", "<u8"),
        ("expires", "<u8"),
        ("start", "<u4"),
        ("n_tokens", "<u4"),
        ("compute_us", "<u4"),
        ("hits", "<u4"),
        ("priority", "<i2"),
        ("form", "u1"),
        ("pinned", "?"),
        ("is_readable", "?"),
    ]
)

_OF_RECORD = ("parent", "namespace", "raw_bytes", "stored_bytes", "created", "start", "n_tokens", "compute_us")
_OF_USAGE = ("last_used", "expires", "hits", "priority")


def facts_of(
    keys: Sequence[bytes],
    records: Sequence[Buffer],
    usages: Sequence[Buffer | None],
) -> Facts:
    """The facts of pages, as `View.facts` returns them, from their stored bytes; the usage may be missing."""
    facts = np.zeros(len(keys), FACTS)
    facts["key"] = np.frombuffer(b"".join(keys), FACTS["key"])
    record = _fields(records, RECORD.size, RECORDS)
    sizes = np.fromiter(map(len, records), np.int64, len(records))
    is_used = np.fromiter((each is not None for each in usages), bool, len(usages))
    usage = _fields([each or b"" for each in usages], USAGE.size, USAGES)
    usage_sizes = np.fromiter((USAGE.size if each is None else len(each) for each in usages), np.int64, len(usages))
    is_readable = (
        (record["version"] == FORMAT_VERSION)
        & ((record["form"] == PAGE) | (record["form"] == SNAPSHOT))
        & (sizes == RECORD.size + TOKEN_BYTES * record["n_tokens"].astype(np.int64) + RECORD_SEAL.size)
        & (usage_sizes == USAGE.size)
    )
    for name in ("raw_bytes", "stored_bytes", "created"):
        is_readable &= record[name] <= LARGEST
    for name in ("last_used", "expires"):
        is_readable &= usage[name] <= LARGEST
    for name in (*_OF_RECORD, "form"):
        facts[name] = record[name]
    for name in _OF_USAGE:
        facts[name] = usage[name]
    facts["last_used"] = np.where(is_used, usage["last_used"], record["created"])
    facts["pinned"] = usage["pinned"] != 0
    facts["is_readable"] = True
    if not is_readable.all():
        bare = np.zeros(int((~is_readable).sum()), FACTS)
        bare["key"] = facts["key"][~is_readable]
        facts[~is_readable] = bare
    return facts


def _fields(stored: Sequence[Buffer], size: int, layout: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The first `size` bytes of each; zeros for one that is shorter."""
    missing = bytes(size)
    return np.frombuffer(b"".join([each[:size] if len(each) >= size else missing for each in stored]), layout)
