"""Reads all of an LMDB file by LMDB's own means: a child process runs this module as a script.

LMDB trusts what it reads: a changed byte can end the process. So a file that may have been changed is read by a child
process first; if that ends the child, the file is damaged. The pages of the tree are looked at one by one: LMDB moves
what is in them by the sizes that they say it has, and writes none that have another flag. Then LMDB copies the file to
nowhere, and compares how many pages the tree, its large values and the list of free pages have with those of the file.
Contents of keys and values are not looked at: they have their own checksums.

This module imports nothing of prefixstore.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path

if __name__ == "__main__":
    # where LMDB is: the start-up files of the packages, which usually say that, are not read
    sys.path.append(sys.argv[2])

import lmdb

# what the script prints; why it is damaged follows
SOUND = "sound"
DAMAGED = "damaged: "
MAX_READERS = 512
# key and value of the row by which a store is known
MAGIC = b"mmagic", b"prefixstore"
# the header of a page: number, flags, where its free space begins and ends; of a node: size or page, flags, size of key
PAGE, NODE = struct.Struct("=Q2xHHH"), struct.Struct("=HHHH")
BRANCH, LEAF, LARGE = 1, 2, 4
# in the first two pages: the root of the tree, and the number of the transaction
META = struct.Struct("=128xQ8xQ")


class DamageError(Exception):
    """The file is not as LMDB writes it."""


def _read(env: lmdb.Environment, txn: lmdb.Transaction, data: mmap) -> bool:
    """Follow the tree, and compare it with what LMDB has counted; False if others have written too much meanwhile."""
    stat = txn.stat(env.open_db(None, txn))
    size = stat["psize"]
    roots = {number: root for root, number in (META.unpack_from(data, size * n) for n in range(2))}
    if txn.id() not in roots:
        return False
    before, n_rows, n_pages = b"", 0, 0
    for key, n_large in _rows(data, size, roots[txn.id()], stat["depth"]) if stat["depth"] else ():
        if key <= before:
            raise DamageError("keys are out of order")
        before, n_rows, n_pages = key, n_rows + 1, n_pages + n_large
    if (n_rows, n_pages) != (stat["entries"], stat["overflow_pages"]):
        raise DamageError("the tree has not as many rows, or pages for large values, as are counted")
    return True


def _rows(data: mmap, size: int, number: int, depth: int) -> Iterator[tuple[bytes, int]]:
    """The keys in a page of the tree and below it, in order, each with the number of pages that have its value."""
    at = number * size
    kind, nodes = LEAF if depth == 1 else BRANCH, []
    found, flags, begin, end = PAGE.unpack_from(data, at)
    for start in struct.unpack_from(f"={(begin - PAGE.size) // 2}H", data, at + PAGE.size):
        low, high, more, n_key = NODE.unpack_from(data, at + start)
        key = data[at + start + NODE.size : at + start + NODE.size + n_key]
        n_value = 0 if kind == BRANCH else 8 if more else low | high << 16
        nodes.append((start, start + NODE.size + n_key + n_value, key, low | high << 16, more))
    for start, stop, *_ in sorted(nodes):
        if start != end:
            break
        end = stop + stop % 2
    if (found, flags, end) != (number, kind, size):
        raise DamageError(f"page {number} is not as LMDB fills it")
    for _, stop, key, value, more in nodes:
        if kind == BRANCH:
            yield from _rows(data, size, value | more << 32, depth - 1)
        elif more:
            yield key, _large(data, size, int.from_bytes(data[at + stop - 8 : at + stop], sys.byteorder), value)
        else:
            yield key, 0


def _large(data: mmap, size: int, number: int, n_bytes: int) -> int:
    """How many pages a large value has, which begins in this one."""
    found, flags, low, high = PAGE.unpack_from(data, number * size)
    n_pages: int = low | high << 16
    if (found, flags) != (number, LARGE) or n_pages * size < PAGE.size + n_bytes:
        raise DamageError(f"page {number} has not the value that it should have")
    return n_pages


def _main(directory: str) -> str | None:
    """Read a store; says what is wrong."""
    if not (Path(directory) / "data.mdb").stat().st_size:
        # LMDB initializes an empty file
        return None
    try:
        env = lmdb.open(directory, readonly=True, create=False, map_size=0, max_readers=MAX_READERS, mode=0o600)
    except (lmdb.InvalidError, lmdb.InvalidParameterError, lmdb.VersionMismatchError, lmdb.ReadonlyError):
        # not an LMDB file, of another version, or without the right to register a reader: opening it raises the error
        return None
    try:
        is_read = False
        while not is_read:
            with env.begin(buffers=True) as txn:
                # that of another application is refused when the store is opened
                if bytes(txn.get(MAGIC[0], b"")) != MAGIC[1]:
                    return None
                with (Path(directory) / "data.mdb").open("rb") as file:
                    is_read = _read(env, txn, mmap(file.fileno(), 0, access=ACCESS_READ))
        with Path(os.devnull).open("wb") as nowhere:
            env.copyfd(nowhere.fileno(), compact=True)
    except DamageError as error:
        return str(error)
    except (lmdb.Error, struct.error, OverflowError) as error:
        return f"it cannot be read: {error}"
    return None


if __name__ == "__main__":
    why = _main(sys.argv[1])
    sys.stdout.write(f"{DAMAGED}{why}" if why else SOUND)
    sys.stdout.flush()
    # what LMDB has read of a damaged file is not released
    os._exit(0)
