"""Rows with values and payloads that follow from a number."""

from __future__ import annotations

import numpy as np

from prefixstore.backends.contract import Backend, Draft, Range, View

__all__ = ["EVERYTHING", "contents", "delete", "key_of", "payload_of", "put", "rows_of", "value_of", "write"]

EVERYTHING = Range(b"", b"\xff" * 512)


def key_of(number: int) -> bytes:
    """In the order of the numbers."""
    return b"k%010d" % number


def value_of(number: int) -> bytes:
    """Some 300 bytes that occur nowhere else."""
    return np.random.default_rng(1 << 40 | number).bytes(300)


def payload_of(number: int, size: int) -> bytes:
    """Bytes that occur nowhere else."""
    return np.random.default_rng(number).bytes(size)


def put(draft: Draft, number: int, size: int = 1000) -> bytes:
    """Write one row with a payload of this size; its key."""
    draft.put(key_of(number), value_of(number), payload_of(number, size))
    return key_of(number)


def write(backend: Backend, number: int, size: int = 1000) -> bytes:
    """Write one row in an update of its own; its key."""
    with backend.update() as draft:
        return put(draft, number, size)


def delete(backend: Backend, *keys: bytes) -> None:
    """Delete these rows in one update."""
    with backend.update() as draft:
        for key in keys:
            draft.delete(key)


def contents(view: View) -> dict[bytes, tuple[bytes, bytes | None]]:
    """All rows: value and payload by key."""
    keys = [row.key for row in view.ranges([EVERYTHING])[0]]
    found = zip(keys, view.payloads(keys), strict=True)
    return {key: (one[0], None if one[1] is None else bytes(one[1])) for key, one in found if one is not None}


def rows_of(backend: Backend) -> dict[bytes, tuple[bytes, bytes | None]]:
    """All rows that are committed."""
    with backend.view() as view:
        return contents(view)
