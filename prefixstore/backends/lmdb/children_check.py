"""Checks that the index of children matches the pages: one row for every page, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lmdb

from prefixstore.backends.base import Entry
from prefixstore.backends.lmdb.children import Siblings, Target, target_of
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import Record

__all__ = ["ChildrenCheck"]


class ChildrenCheck:
    """The check, in one transaction.

    Parameters
    ----------
    txn, database, entry_of
        As `Siblings` takes them.
    """

    def __init__(self, txn: lmdb.Transaction, database: Any, entry_of: Callable[[bytes], Entry | None]) -> None:
        self._txn = txn
        self._db = database
        self._entry_of = entry_of
        # pages that cannot be read: whether their rows are right is not known
        self._damaged: set[bytes] = set()

    def flaws(self, pages: Iterable[Entry]) -> Iterator[tuple[bytes, str]]:
        """What is wrong, given all pages: the key of the page or ``b""``, and a message."""
        for entry in pages:
            if not isinstance(entry.record, Record):
                self._damaged.add(entry.key)
            elif self._row_of(entry) is None:
                yield entry.key, "it is missing from the index of its parent's children"
        for row, value in self._txn.cursor(self._db):
            target = target_of(value, Target(0, b""))
            if target is None or len(row) <= KEY_BYTES:
                yield b"", f"the index of children has an invalid row: {bytes(row).hex()}"
            elif target.depth:
                if self._is_empty(target.key + bytes(row[KEY_BYTES : KEY_BYTES + 1])):
                    yield b"", f"the index of children leads nowhere after {bytes(row).hex()}"
            elif problem := self._named_wrongly(target.key, bytes(row)):
                yield target.key, problem

    def _named_wrongly(self, key: bytes, row: bytes) -> str | None:
        """What is wrong with a row that names a page."""
        if key in self._damaged:
            return None
        named = self._entry_of(key)
        if named is None:
            # left by a page whose record was damaged: readers ignore it, and a writer in whose way it is replaces it
            return None
        return "it is in the index of children twice" if self._row_of(named) not in (None, row) else None

    def _row_of(self, entry: Entry) -> bytes | None:
        """The row that names a page, if it is where it has to be."""
        record = entry.record
        assert isinstance(record, Record)
        siblings = Siblings(self._txn, self._db, record.parent, record.form, self._entry_of)
        return siblings.row_of(entry.key, record.tokens)

    def _is_empty(self, head: bytes) -> bool:
        """Whether a node has no row."""
        cursor = self._txn.cursor(self._db)
        return not cursor.set_range(head) or cursor.key()[: len(head)] != head
