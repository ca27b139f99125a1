"""Rows with values and payloads that follow from a number."""

from __future__ import annotations

import numpy as np

from prefixstore.backends.contract import Backend, Draft, Range
from prefixstore.testing.backend_contract import read_rows as rows_of  # noqa: F401 - for the tests
from tests.support import python

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


WRITER = """
import sys
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from tests.support.rows import write
backend = LMDBBackend(sys.argv[1], int(sys.argv[2]))
print("open", flush=True)
for line in sys.stdin:
    number, size = map(int, line.split())
    print(write(backend, number, size).hex(), flush=True)
backend.close()
"""


class Writer:
    """Another process that has an LMDB location open, and writes rows when it is told to."""

    def __init__(self, path: object, max_bytes: int) -> None:
        self.process = python(WRITER, path, max_bytes)
        assert self._said() == "open\n"

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def write(self, number: int, size: int = 1000) -> bytes:
        """Write one row; its key."""
        print(number, size, file=self.process.stdin, flush=True)
        return bytes.fromhex(self._said())

    def close(self) -> None:
        """Have it close the location, and end."""
        self.process.communicate()
        assert self.process.returncode == 0
