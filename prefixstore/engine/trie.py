"""A trie, in memory, of the pages that were read lately, so that they are not hashed, read and verified again.

Its nodes are keys of pages, and what leads from one to the next are the tokens of a page: that never changes. Whether a
page is stored only the location knows, and its record may have changed since: whoever reads the page compares the two,
and has a stale entry dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefixstore.errors import StorageError
from prefixstore.format.keys import page_key
from prefixstore.format.record import Record, Usage

# pages that are kept at most: 4 KB each of 256 tokens
MOST_KEPT = 4096


class Entry(NamedTuple):
    """A stored page without its payload: its key, its record (or why that cannot be read), and its usage."""

    key: bytes
    record: Record | StorageError
    usage: Usage

    @classmethod
    def of(cls, key: bytes, record: bytes | Record, usage: bytes | None) -> Entry:
        """The page in these rows; its record may have been unpacked before."""
        try:
            read = record if isinstance(record, Record) else Record.unpack(key, record)
            return cls(key, read, Usage.unpack(usage) if usage is not None else Usage(read.created))
        except StorageError as error:
            return cls(key, error, Usage(0))


class Trie:
    """Pages that were read lately, by their tokens and by their keys. Any thread may use it."""

    def __init__(self) -> None:
        # by key: the rows, and the entry that was made of them
        self._read: dict[bytes, tuple[bytes, bytes | None, Entry]] = {}
        # by key of a page or a namespace: the tokens and the key of the child that was looked up last
        self._after: dict[bytes, tuple[bytes, bytes]] = {}

    def keys(self, namespace: bytes, pieces: Sequence[bytes]) -> list[bytes]:
        """The keys of consecutive pages with these tokens. Those that were looked up before are not hashed again."""
        keys: list[bytes] = []
        after, parent = self._after, namespace
        for piece in pieces:
            known = after.get(parent)
            if known is None or known[0] != piece:
                if len(after) >= MOST_KEPT:
                    after.clear()
                known = after[parent] = piece, page_key(parent, piece)
            parent = known[1]
            keys.append(parent)
        return keys

    def known(self, key: bytes, usage: bytes | None) -> Entry | None:
        """A page with this stored usage, and the cached record; None if its record is not cached."""
        known = self._read.get(key)
        if known is None:
            return None
        record, before, entry = known
        if usage != before:
            # it was used or pinned since, or its usage is damaged
            assert isinstance(entry.record, Record), "no others are kept"
            entry = Entry.of(key, entry.record, usage)
            # unless another thread has dropped it meanwhile
            if self._read.get(key) is known:
                self._keep(record, usage, entry)
        return entry

    def forget(self, key: bytes) -> None:
        """Drop a page that is gone, or differs from what was read last."""
        self._read.pop(key, None)

    def entries(self, keys: Sequence[bytes], rows: Sequence[bytes | None]) -> list[Entry]:
        """The stored pages among `keys`; `rows` has the record and the usage of each."""
        found: list[Entry] = []
        read = self._read
        for key, record, usage in zip(keys, rows[::2], rows[1::2], strict=True):
            if record is None:
                continue
            known = read.get(key)
            if known is not None and known[0] == record and known[1] == usage:
                found.append(known[2])
                continue
            entry = Entry.of(key, record, usage)
            found.append(entry)
            self._keep(record, usage, entry)
        return found

    def _keep(self, record: bytes, usage: bytes | None, entry: Entry) -> None:
        if isinstance(entry.record, Record):
            if len(self._read) >= MOST_KEPT:
                self._read.clear()
            self._read[entry.key] = record, usage, entry
