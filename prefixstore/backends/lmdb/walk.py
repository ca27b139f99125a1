"""Reads all of an LMDB file by LMDB's own means: a child process runs this module as a script.

LMDB trusts what it reads: a changed byte can end the process. So a file that may have been changed is read by a child
process first; if that ends the child, the file is damaged. A cursor follows the tree to its end, which shows its keys
and sizes. Then LMDB copies the file to nowhere, and compares how many pages the tree, its large values and the list of
free pages have with those of the file. Contents of keys and values are not looked at: they have their own checksums.

This module imports nothing of prefixstore.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # where LMDB is: the start-up files of the packages, which usually say that, are not read
    sys.path.append(sys.argv[2])

import lmdb

__all__ = ["DAMAGED", "MAGIC", "MAX_READERS", "SOUND"]

# what the script prints; why it is damaged follows
SOUND = "sound"
DAMAGED = "damaged: "
MAX_READERS = 512
# key and value of the row by which a store is known
MAGIC = b"mmagic", b"prefixstore"
# bytes before a large value in its pages, and before a key in its node
PAGE_HEADER, NODE_HEADER = 16, 8


class DamageError(Exception):
    """The file is not as LMDB writes it."""


def _read(env: lmdb.Environment, txn: lmdb.Transaction) -> None:
    """Have a cursor follow the tree, and compare it with what LMDB has counted."""
    stat = txn.stat(env.open_db(None, txn))
    size = stat["psize"]
    # LMDB keeps no larger node in a page of a tree
    largest = ((size - PAGE_HEADER) // 2 & ~1) - 2 - NODE_HEADER
    before, n_rows, n_pages = b"", 0, 0
    for view, value in txn.cursor():
        key = bytes(view)
        if key <= before:
            raise DamageError("keys are out of order")
        before, n_rows = key, n_rows + 1
        if n_rows > stat["entries"]:
            break
        if len(key) + len(value) > largest:
            n_pages += -(-(PAGE_HEADER + len(value)) // size)
    if n_rows != stat["entries"]:
        raise DamageError("the tree has not as many rows as are counted")
    if n_pages > stat["overflow_pages"]:
        raise DamageError("values are larger than the pages that are counted")


def _main(directory: str) -> str | None:
    """Read a store; says what is wrong."""
    if not (Path(directory) / "data.mdb").stat().st_size:
        # LMDB initializes an empty file
        return None
    try:
        env = lmdb.open(directory, readonly=True, create=False, map_size=0, max_readers=MAX_READERS, mode=0o600)
    except (lmdb.InvalidError, lmdb.InvalidParameterError, lmdb.VersionMismatchError):
        # not an LMDB file, or of another version: opening it raises the error
        return None
    try:
        with env.begin(buffers=True) as txn:
            # that of another application is refused when the store is opened
            if bytes(txn.get(MAGIC[0], b"")) != MAGIC[1]:
                return None
            _read(env, txn)
        with Path(os.devnull).open("wb") as nowhere:
            env.copyfd(nowhere.fileno(), compact=True)
    except DamageError as error:
        return str(error)
    except lmdb.Error as error:
        return f"LMDB says {error}"
    return None


if __name__ == "__main__":
    why = _main(sys.argv[1])
    sys.stdout.write(f"{DAMAGED}{why}" if why else SOUND)
    sys.stdout.flush()
    # what LMDB has read of a damaged file is not released
    os._exit(0)
