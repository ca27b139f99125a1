"""Reads pages: their records, usage and payloads, and the indexes that lead to them.

A view sees everything that was committed before it opened; later commits may or may not be visible. It never waits for
a writer. A payload that it returned stays readable and unchanged until the view closes, even if the page is deleted
meanwhile, so the caller need not copy it. A missing page is None, never an exception.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from itertools import takewhile

import numpy as np

from prefixstore.backends import contract
from prefixstore.backends.encryption_keys import HEADER, key_of
from prefixstore.engine import child_rows, keyspace
from prefixstore.engine.keyspace import Count, Leaf, leaf_row
from prefixstore.engine.page import shared_tokens
from prefixstore.engine.trie import Entry, Trie
from prefixstore.errors import CorruptError, LocationError, StorageError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT
from prefixstore.format.namespace import salt_in
from prefixstore.format.record import FACTS, Buffer, Facts, Record, Usage, facts_of, head_of


@dataclass(frozen=True)
class Used:
    """What a location holds, index included."""

    bytes: int
    entries: int


class PageView:
    """Reads pages from the `rows` of a view of this backend.

    From a local one, where a read is cheap, it reads fewer rows, one after the other.
    """

    def __init__(self, rows: contract.View, backend: contract.Backend, trie: Trie) -> None:
        self.rows = rows
        self._trie = trie
        self.is_local, self.check = backend.is_local, backend.check
        # by namespace, as its settings say
        self._salts: dict[bytes, str | None] = {}

    # -- pages --------------------------------------------------------------------------------------------------------

    def record(self, key: bytes) -> Record | None:
        """The record of a page. Raises `CorruptError` or `IncompatibleError` if it cannot be read."""
        stored = self.rows.get([keyspace.RECORD + key])[0]
        return Record.unpack(key, stored) if stored is not None else None

    def usage(self, key: bytes) -> Usage | None:
        """The usage of a page."""
        stored = self.rows.get([keyspace.USAGE + key])[0]
        return Usage.unpack(stored) if stored is not None else None

    def records(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Record | StorageError, Usage]]:
        """Record (or why it cannot be read) and usage of each of these pages that is stored."""
        return {key: (record, usage) for key, record, usage in self._entries(list(dict.fromkeys(keys)))}

    def _entries(self, keys: Sequence[bytes]) -> list[Entry]:
        """The entries of those of these pages that are stored."""
        stored = self.rows.get([row for key in keys for row in (keyspace.RECORD + key, keyspace.USAGE + key)])
        return self._trie.entries(keys, stored)

    def leading(self, keys: Sequence[bytes], doubtful: Container[bytes] = ()) -> list[Entry]:
        """The stored pages of a sequence, up to the first that is missing.

        The keys are those of consecutive pages, parents first. No page is stored without its parent, so in a local
        location a bisection finds how many there are, and cached records are not read again, except those of `doubtful`
        keys.
        """
        found = self._leading_local(keys, doubtful) if self.is_local else self._leading_far(keys)
        return [entry for entry, _ in takewhile(lambda one: one[0].key == one[1], zip(found, keys, strict=False))]

    def _leading_local(self, keys: Sequence[bytes], doubtful: Container[bytes]) -> list[Entry]:
        low, high = 0, len(keys)
        # most often all of them are stored
        middle = high - 1
        while low < high:
            if self.rows.get([keyspace.RECORD + keys[middle]])[0] is not None:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        for gone in keys[high:]:
            self._trie.forget(gone)
        keys = keys[:high]
        usages = self.rows.get([keyspace.USAGE + key for key in keys])
        known = self._trie.known
        found = [None if key in doubtful else known(key, usage) for key, usage in zip(keys, usages, strict=True)]
        if None in found:
            unknown = [key for key, one in zip(keys, found, strict=True) if one is None]
            read = {one.key: one for one in self._entries(unknown)}
            found = [read.get(key) if one is None else one for key, one in zip(keys, found, strict=True)]
        return [one for one in found if one is not None]

    def _leading_far(self, keys: Sequence[bytes]) -> list[Entry]:
        # where each row is a request: a few at first, then more and more
        step = len(keys) if self.rows.at_once is None else self.rows.at_once // 4
        found: list[Entry] = []
        n_asked = 0
        while len(found) == n_asked < len(keys):
            found += self._entries(keys[n_asked : n_asked + step])
            n_asked, step = min(n_asked + step, len(keys)), step * 2
        return found

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        """All pages, in no particular order: key, record (or why it cannot be read), and usage."""
        for rows in keyspace.walk(self.rows, keyspace.RECORD):
            usages = self.rows.get([keyspace.USAGE + row.key[1:] for row in rows])
            yield from (Entry.of(row.key[1:], row.value, usage) for row, usage in zip(rows, usages, strict=True))

    def facts(self, after: bytes, at_most: int) -> Facts:
        """Facts of the pages after this key (``b""`` for the first ones), in the order of the location's rows.

        Of type `FACTS`, shape ``(n,)``; n is 0 only after the last page. Checksums of records are not verified. A page
        whose record cannot be read has nothing but a key.
        """
        found: list[contract.Row] = []
        for rows in keyspace.walk(self.rows, keyspace.RECORD, after):
            found += (row for row in rows if len(row.key) == 1 + KEY_BYTES)
            if len(found) >= at_most:
                break
        if not found:
            return np.empty(0, FACTS)
        keys = [row.key[1:] for row in found[:at_most]]
        return facts_of(
            keys, [row.value for row in found[:at_most]], self.rows.get([keyspace.USAGE + key for key in keys])
        )

    # -- payloads -----------------------------------------------------------------------------------------------------

    def payload(self, key: bytes) -> Buffer | None:
        """The stored bytes of a page, not verified, valid until the view closes."""
        found = next(iter(self.rows.payloads([keyspace.RECORD + key])))
        return found[1] if found is not None else None

    def fetch(self, keys: Sequence[bytes]) -> Generator[tuple[Record, Buffer], None, None]:
        """Record and payload, not verified, of these pages in order, up to the first that is missing.

        The two belong together even if the page is put again meanwhile.

        At the page in question, raises what `record` raises, and `CorruptError` for a record without a payload.
        """
        for key, found in zip(keys, self.rows.payloads([keyspace.RECORD + key for key in keys]), strict=True):
            if found is None:
                return
            record = Record.unpack(key, found[0])
            if found[1] is None:
                raise CorruptError(f"page {key.hex()} has no payload")
            yield record, found[1]

    @property
    def arrived(self) -> int:
        """How many bytes have arrived of the payload that `fetch` waits for, if known. Any thread may read it."""
        return self.rows.arrived

    # -- children -----------------------------------------------------------------------------------------------------

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        """At most three children of a page, in the order of the location's rows; snapshots do not count.

        Among them is the child that has the longest prefix in common with `tokens`.
        """
        return self.beside(parent, tokens, ())[0]

    def beside(self, parent: bytes, tokens: bytes, parents: Sequence[bytes]) -> tuple[list[Entry], list[Entry]]:
        """The `neighbors` after `parent`, and the snapshots after `parents`; of a server in one request."""
        path = child_rows.child_path(parent, PAGE, tokens)
        sides = child_rows.around(path)
        nodes = [keyspace.under(child_rows.first_node(each, SNAPSHOT)) for each in dict.fromkeys(parents)]
        beside: Iterable[Sequence[contract.Row]]
        if self.is_local:
            # one step at a time: mostly the first is enough
            beside, snapshots = (self.rows.ranges([side])[0] for side in sides), self.rows.ranges(nodes)
        else:
            found = self.rows.ranges(sides + nodes)
            beside, snapshots = found[: len(sides)], found[len(sides) :]
        keys = child_rows.nearest(self.rows, path, beside)
        children = child_rows.pages_below(self.rows, snapshots)
        entries = self._readable([*keys, *(key for some in children for key in some)])
        neighbors = [entries[key] for key in keys if key in entries]
        if len(neighbors) < len(keys):
            # behind a neighbor that cannot be read there may be another one
            beyond = self.children([parent], PAGE)
            neighbors = nlargest(3, beyond, key=lambda each: shared_tokens(tokens_of(each), tokens))
        return neighbors, [entries[key] for some in children for key in some if key in entries]

    def _readable(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        return {one.key: one for one in self._entries(keys) if isinstance(one.record, Record)}

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        """The children of these pages, or namespaces, that have this form, in the order of the location's rows.

        With `at_most`, only the first `at_most` of each parent.
        """
        nodes = [child_rows.first_node(parent, form) for parent in dict.fromkeys(parents)]
        keys = [key for some in child_rows.children_of(self.rows, nodes, at_most) for key in some]
        entries = self._readable(keys)
        return [entries[key] for key in keys if key in entries]

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        """Which of these pages, or namespaces, have children, unreadable ones included."""
        found = self.rows.ranges([keyspace.under(child_rows.all_children(key), 1) for key in keys])
        return {key for key, rows in zip(keys, found, strict=True) if rows}

    # -- the location -------------------------------------------------------------------------------------------------

    def require_plain(self) -> None:
        """Raise `LocationError` if the location is encrypted, and this view does not decrypt it."""
        if (name := key_of(self.rows.get([HEADER])[0])) is not None:
            raise LocationError(
                f"it is encrypted, under the key {name.hex()}: set PREFIXSTORE_KEY, or key= (copy: "
                "--from-key, --to-key), to where that is: file:/etc/kv.key"
            )

    def require_header(self) -> None:
        """Raise `LocationError` if the rows seem to be encrypted, but the header that would say so is gone."""
        kinds = (keyspace.RECORD, keyspace.NAMESPACE)
        found = self.rows.ranges([keyspace.everything(kind)._replace(limit=1) for kind in kinds])
        records, settings = ([row.value for row in rows] for rows in found)
        if records and not any(map(head_of, records)) and not any(text.startswith(b"{") for text in settings):
            raise LocationError(
                "its pages are encrypted, or all damaged, and the row that says how is gone: restore a backup, or use "
                "a new location"
            )

    def namespaces(self) -> Mapping[bytes, bytes]:
        """Canonical settings of all namespaces that have pages, by key."""
        rows = self.rows.ranges([keyspace.everything(keyspace.NAMESPACE)])[0]
        return {row.key[1:]: row.value for row in rows}

    def namespace(self, key: bytes) -> bytes | None:
        """Canonical settings of one namespace."""
        return self.rows.get([keyspace.NAMESPACE + key])[0]

    def note(self, name: bytes) -> bytes | None:
        """The note that `PageUpdate.put_note` wrote under this name."""
        return self.rows.get([keyspace.NOTE + name])[0]

    def count(self, namespace: bytes | None = None) -> Count:
        """What a namespace holds, or all of them."""
        if namespace is None:
            counted = Count.unpack(self.rows.get([keyspace.COUNT])[0])
            return self.recount()[keyspace.COUNT] if counted is None else counted
        row = self._count_row(namespace)
        return self._counts_in([contract.Row(row, self.rows.get([row])[0] or b"")])[row]

    def namespaces_of(self, salt: str) -> dict[bytes, Count]:
        """The namespaces with this salt that have pages, and what they hold."""
        rows = self.rows.ranges([keyspace.counts_of(keyspace.tenant_of(salt, b""))])[0]
        return {row[-KEY_BYTES:]: count for row, count in self._counts_in(rows).items()}

    def _counts_in(self, rows: Iterable[contract.Row]) -> dict[bytes, Count]:
        """The counts in these rows, zero in empty ones; a damaged count is computed again."""
        found = {row.key: Count.unpack(row.value) if row.value else Count() for row in rows}
        right = self.recount() if None in found.values() else {}
        return {row: right.get(row, Count()) if count is None else count for row, count in found.items()}

    def _salt(self, namespace: bytes) -> str | None:
        """The salt of a namespace; None if its settings name none, or are missing or damaged."""
        if namespace not in self._salts:
            self._salts[namespace] = salt_in(self.rows.get([keyspace.NAMESPACE + namespace])[0])
        return self._salts[namespace]

    def _count_row(self, namespace: bytes) -> bytes:
        return keyspace.count_row(keyspace.tenant_of(self._salt(namespace), namespace), namespace)

    def recount(self) -> dict[bytes, Count]:
        """All count rows, computed from the pages. Pages that cannot be read count in the total only."""
        found: dict[bytes, Count] = {}
        every = damaged = Count()
        for rows in keyspace.walk(self.rows, keyspace.RECORD):
            usages = self.rows.get([keyspace.USAGE + row.key[1:] for row in rows])
            for row, usage in zip(rows, usages, strict=True):
                head = head_of(row.value)
                if head is None:
                    damaged = damaged.plus(Count(1))
                else:
                    found[head.namespace] = found.get(head.namespace, Count()).plus(Count.of(head, usage_in(usage)))
        for rows in keyspace.walk(self.rows, keyspace.LEAF):
            for row in rows:
                namespace = row.key[1 : 1 + KEY_BYTES]
                found[namespace] = found.get(namespace, Count()).plus(Count(leaves=1))
        for one in found.values():
            every = every.plus(one)
        return {self._count_row(key): one for key, one in found.items()} | {keyspace.COUNT: every.plus(damaged)}

    @property
    def used(self) -> Used:
        """What the location holds; in an update, what that has written so far included."""
        return Used(self.rows.used, self.count().pages)

    def counts(self) -> dict[bytes, Count]:
        """All count rows that can be read."""
        rows = (row for some in keyspace.walk(self.rows, keyspace.COUNT) for row in some)
        return {row.key: count for row in rows if (count := Count.unpack(row.value)) is not None}


def tokens_of(entry: Entry) -> bytes:
    """The tokens of a page that can be read."""
    assert isinstance(entry.record, Record)
    return entry.record.tokens


def usage_in(stored: bytes | None) -> Usage:
    """The stored usage of a page; one that is missing or damaged is that of a page never used."""
    with suppress(CorruptError):
        return Usage.unpack(stored) if stored is not None else Usage(0)
    return Usage(0)


def leaf_of(key: bytes, record: bytes | None, usage: bytes | None) -> tuple[bytes | None, Leaf | None]:
    """The key and value of the leaf row of a page that nothing follows.

    A pinned page has no value, and one that cannot be read not even a key.
    """
    head = head_of(record)
    if head is None:
        return None, None
    found = usage_in(usage)
    return leaf_row(head.namespace, key), None if found.pinned else Leaf.of(head, found)


def path_in(key: bytes, stored: bytes | None) -> list[bytes] | None:
    """The path of a stored page (`child_rows.page_path`); None if it is not there, or cannot be read."""
    record = Entry.of(key, stored, None).record if stored is not None else None
    return child_rows.page_path(record) if isinstance(record, Record) else None
