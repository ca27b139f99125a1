"""Rows with values and payloads that follow from a number."""

from __future__ import annotations

import numpy as np

from prefixstore.backends.contract import Backend, Draft, Range
from prefixstore.testing.backend_contract import read_rows as rows_of  # noqa: F401 - for the tests

EVERYTHING = Range(b"", b"\xff" * 512)


def key_of(number: int) -> bytes:
    """In the order of the numbers."""
    return b"k%010d" % number


def payload_of(number: int, size: int) -> bytes:
    """Bytes that occur nowhere else."""
    return np.random.default_rng(number).bytes(size)


def put(draft: Draft, number: int, size: int = 1000) -> bytes:
    """Write one row with a payload of this size; its key."""
    draft.put(key_of(number), payload_of(1 << 40 | number, 300), payload_of(number, size))
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
