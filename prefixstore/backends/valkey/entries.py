"""Parses replies with many entries: each has its key and its length before it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from prefixstore.backends.packed_facts import facts_of
from prefixstore.backends.valkey.layout import LENGTH, RECORD_AT, USAGE_AT
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import RECORD

__all__ = ["FACT_BYTES", "entries_in", "facts_in", "members_in"]

# so much of an entry holds its facts
FACT_BYTES = RECORD_AT + RECORD.size
_FACT = np.dtype([("key", f"V{KEY_BYTES}"), ("length", "<u4"), ("head", f"V{FACT_BYTES}")])


def entries_in(answer: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and entries."""
    at = 0
    while at < len(answer):
        begin = at + KEY_BYTES + LENGTH.size
        end = begin + LENGTH.unpack_from(answer, at + KEY_BYTES)[0]
        yield answer[at : at + KEY_BYTES], answer[begin:end]
        at = end


def members_in(answer: bytes, n_ranges: int) -> list[list[tuple[bytes, bytes]]]:
    """Keys and entries of the members of each range."""
    found: list[list[tuple[bytes, bytes]]] = [[] for _ in range(n_ranges)]
    at = 0
    while at < len(answer):
        number = LENGTH.unpack_from(answer, at)[0]
        at += LENGTH.size
        begin = at + KEY_BYTES + LENGTH.size
        end = begin + LENGTH.unpack_from(answer, at + KEY_BYTES)[0]
        found[number].append((answer[at : at + KEY_BYTES], answer[begin:end]))
        at = end
    return found


def facts_in(answer: bytes) -> npt.NDArray[np.void]:
    """The facts of pages, from the beginnings of their entries."""
    rows = np.frombuffer(answer, _FACT)
    keys = [bytes(key) for key in rows["key"]]
    heads = [bytes(head) for head in rows["head"]]
    # one that is too short to have a usage has no record either
    sizes = np.maximum(rows["length"].astype(np.int64) - RECORD_AT, 0)
    return facts_of(keys, [head[RECORD_AT:] for head in heads], [head[USAGE_AT:RECORD_AT] for head in heads], sizes)
