"""Pages in a backend that keeps rows: what is stored of each, and the indexes that lead to them.

Everything that is true of pages in every location is here: a page is put, deleted and used as a whole, is found among
its siblings, and is counted. `engine.keyspace` says in which rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixstore.backends import contract, open_backend
from prefixstore.backends.base import (
    CHANGES_KEPT,
    FACTS,
    Backend,
    Entry,
    Transaction,
    Used,
    View,
    retried,
    tokens_of,
)
from prefixstore.backends.contract import Draft, Range
from prefixstore.backends.packed_facts import facts_of
from prefixstore.engine import keyspace, siblings
from prefixstore.engine.budget import fewer
from prefixstore.engine.keyspace import (
    UNKNOWN,
    Count,
    Leaf,
    change_row,
    generation_of,
    leaf_row,
    namespace_row,
    note_row,
    record_row,
    usage_row,
)
from prefixstore.errors import CorruptError, FullError, StorageError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import USAGE, Buffer, Head, Record, Usage, head_of, namespace_in, place_of, record_bytes

__all__ = ["Pages", "open_pages"]

# of the generation before the first one of a location
FIRST = b"first"
# Keys in one row of changes; of more, an update writes several. The last one is read with each lookup.
KEYS_OF_CHANGE = 64
# rows that a rebuild of the index changes in one update, if there is space for it
REINDEXED_AT_ONCE = 512
# Of so many pages an update adds up the sizes, if they are not known: it takes a fraction of a second. Of more they are
# unknown until the index is rebuilt, which does not keep other writers waiting.
SUMMED_AT_ONCE = 100_000
# Each takes off the last rows of chains of child rows that lead to nothing. A longer chain was forged, and takes more
# than one repair.
PASSES = 256
# how often it adds up the sizes while others write, before it keeps them waiting
SUMS = 5


class Recounted(NamedTuple):
    """What the rows of counts should be, and how many pages cannot be read: these count with all pages only."""

    rows: dict[bytes, Count]
    unreadable: int


class _PageView(View):
    """Reads pages.

    Parameters
    ----------
    rows
        The rows of the location.
    is_local
        Whether reading a row is cheap: then fewer are read, one after the other.
    check
        Checks what the rows are in.
    """

    def __init__(self, rows: contract.View, *, is_local: bool, check: Callable[[], None]) -> None:
        self._rows = rows
        self._is_local = is_local
        self._check = check
        # what is read later is at least as new: it is read once
        self._generation: int | None = None
        # of namespaces whose settings were read
        self._tenants: dict[bytes, bytes] = {}

    # -- pages --------------------------------------------------------------------------------------------------------

    def record(self, key: bytes) -> Record | None:
        stored = self._rows.get([record_row(key)])[0]
        return Record.unpack(key, stored) if stored is not None else None

    def usage(self, key: bytes) -> Usage | None:
        stored = self._rows.get([usage_row(key)])[0]
        return Usage.unpack(stored) if stored is not None else None

    def records(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Record | StorageError, Usage]]:
        return {key: (record, usage) for key, record, usage in self._entries(list(dict.fromkeys(keys)))}

    def _entries(self, keys: Sequence[bytes]) -> list[Entry]:
        """Those of these pages that are stored."""
        stored = self._rows.get([row for key in keys for row in (record_row(key), usage_row(key))])
        return [
            _entry(key, record, usage)
            for key, record, usage in zip(keys, stored[::2], stored[1::2], strict=True)
            if record is not None
        ]

    def leading(self, keys: Sequence[bytes]) -> list[Entry]:
        low, high = 0, len(keys)
        while self._is_local and low < high:
            middle = (low + high) // 2
            if self._rows.get([record_row(keys[middle])])[0] is not None:
                low = middle + 1
            else:
                high = middle
        found = self.records(keys[:high])
        return [Entry(key, *found[key]) for key in takewhile(found.__contains__, keys)]

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        for rows in keyspace.walk(self._rows, keyspace.RECORD):
            usages = self._rows.get([usage_row(row.key[1:]) for row in rows])
            yield from (_entry(row.key[1:], row.value, usage) for row, usage in zip(rows, usages, strict=True))

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        found: list[contract.Row] = []
        for rows in keyspace.walk(self._rows, keyspace.RECORD, after):
            found += (row for row in rows if len(row.key) == 1 + KEY_BYTES)
            if len(found) >= at_most:
                break
        if not found:
            return np.empty(0, FACTS)
        keys = [row.key[1:] for row in found[:at_most]]
        return facts_of(keys, [row.value for row in found[:at_most]], self._rows.get([usage_row(key) for key in keys]))

    # -- payloads -----------------------------------------------------------------------------------------------------

    def payload(self, key: bytes) -> Buffer | None:
        found = next(iter(self._rows.payloads([record_row(key)])))
        return found[1] if found is not None else None

    def fetch(self, keys: Sequence[bytes]) -> Iterator[tuple[Record, Buffer]]:
        for key, found in zip(keys, self._rows.payloads([record_row(key) for key in keys]), strict=True):
            if found is None:
                return
            record = Record.unpack(key, found[0])
            if found[1] is None:
                raise CorruptError(f"page {key.hex()} has no payload")
            yield record, found[1]

    @property
    def arrived(self) -> int:  # type: ignore[override]
        return self._rows.arrived

    def stored(self) -> Iterator[tuple[bytes, Record | StorageError, Buffer | StorageError | None]]:
        for rows in keyspace.walk(self._rows, keyspace.RECORD):
            usages = self._rows.get([usage_row(row.key[1:]) for row in rows])
            for row, usage in zip(rows, usages, strict=True):
                # one at a time: what a server sends is in memory
                try:
                    found = next(iter(self._rows.payloads([row.key])))
                except CorruptError as error:
                    yield row.key[1:], _entry(row.key[1:], row.value, usage).record, error
                    continue
                if found is not None:
                    record = _entry(row.key[1:], found[0], usage).record
                    # the row itself may be damaged where its value is kept twice
                    seen = _entry(row.key[1:], row.value, usage).record
                    record = record if isinstance(seen, Record) else seen
                    yield row.key[1:], record, found[1] if isinstance(record, Record) else None

    # -- children -----------------------------------------------------------------------------------------------------

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        return self.beside(parent, tokens, ())[0]

    def beside(self, parent: bytes, tokens: bytes, parents: Sequence[bytes]) -> tuple[list[Entry], list[Entry]]:
        path = siblings.child_path(parent, PAGE, tokens)
        sides = siblings.around(path)
        nodes = [keyspace.under(siblings.first_node(each, SNAPSHOT)) for each in dict.fromkeys(parents)]
        beside: Iterable[Sequence[contract.Row]]
        if self._is_local:
            # mostly the first step is enough
            beside, snapshots = (self._rows.ranges([side])[0] for side in sides), self._rows.ranges(nodes)
        else:
            found = self._rows.ranges(sides + nodes)
            beside, snapshots = found[: len(sides)], found[len(sides) :]
        near = siblings.nearest(self._rows, path, beside)
        children = siblings.pages_below(self._rows, snapshots)
        keys = [key for key in (near.before, near.beside, near.after) if key is not None]
        entries = self._readable([*keys, *(key for some in children for key in some)])
        if all(key in entries for key in keys):
            ordered = [entries[key] for key in keys]
            n_below = sum(tokens_of(each) <= tokens for each in ordered)
            neighbors = ordered[max(n_below - 1, 0) : n_below + 1]
        else:
            # then there may be another one beyond
            neighbors = super().neighbors(parent, tokens)
        return neighbors, [entries[key] for some in children for key in some if key in entries]

    def _readable(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        return {one.key: one for one in self._entries(keys) if isinstance(one.record, Record)}

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        nodes = [siblings.first_node(parent, form) for parent in dict.fromkeys(parents)]
        keys = [key for some in siblings.children_of(self._rows, nodes, at_most) for key in some]
        entries = self._readable(keys)
        return [entries[key] for key in keys if key in entries]

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        found = self._rows.ranges([keyspace.under(siblings.all_children(key), 1) for key in keys])
        return {key for key, rows in zip(keys, found, strict=True) if rows}

    # -- the location -------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        if self._generation is None:
            self._generation = self._last_generation()
        return self._generation

    def _last_generation(self) -> int:
        """The generation now: a view may see later ones than the one that it has begun with."""
        wanted = keyspace.everything(keyspace.CHANGE)._replace(limit=1, reverse=True)
        while last := self._rows.ranges([wanted])[0]:
            if generation := generation_of(last[0].key):
                return generation
            # nobody wrote this one
            wanted = wanted._replace(stop=last[0].key)
        return 0

    def changes(self, since: int) -> list[bytes] | None:
        now = self.generation
        rows = self._rows.ranges([keyspace.changes_between(since, now)])[0] if since < now else []
        # who has seen an empty location has missed nothing if its first generation is there
        first = since + 1 if since or not rows or rows[0].value != FIRST else generation_of(rows[0].key)
        if (rows and rows[0].value == FIRST and since) or len(rows) != now - first + 1:
            return None
        return [
            row.value[i : i + KEY_BYTES]
            for row in rows
            if row.value != FIRST
            for i in range(0, len(row.value), KEY_BYTES)
        ]

    def namespaces(self) -> Mapping[bytes, bytes]:
        rows = self._rows.ranges([keyspace.everything(keyspace.NAMESPACE)])[0]
        return {row.key[1:]: row.value for row in rows}

    def namespace(self, key: bytes) -> bytes | None:
        return self._rows.get([namespace_row(key)])[0]

    def note(self, name: bytes) -> bytes | None:
        return self._rows.get([note_row(name)])[0]

    @property
    def rows(self) -> contract.View:
        """The rows, for what eviction samples."""
        return self._rows

    def _all(self) -> Count | None:
        """What all pages hold, as it was counted; None if that is missing or damaged."""
        return Count.unpack(self._rows.get([keyspace.COUNT])[0])

    def count(self, namespace: bytes | None = None) -> Count:
        if namespace is None:
            counted = self._all()
            return self.recount().rows[keyspace.COUNT] if counted is None else counted
        return Count.unpack(self._rows.get([self._count_row(namespace)])[0]) or Count()

    def namespaces_of(self, salt: str) -> set[bytes]:
        rows = self._rows.ranges([keyspace.counts_of(keyspace.tenant_of(salt, b""))])[0]
        return {row.key[-KEY_BYTES:] for row in rows}

    def _tenant(self, namespace: bytes) -> bytes:
        """Whose pages those of a namespace are: settings that are missing, or damaged, name no salt."""
        if namespace not in self._tenants:
            settings = self._rows.get([namespace_row(namespace)])[0]
            salt = None
            if settings is not None:
                with suppress(CorruptError):
                    salt = Namespace.parse(settings).salt
            self._tenants[namespace] = keyspace.tenant_of(salt, namespace)
        return self._tenants[namespace]

    def _count_row(self, namespace: bytes) -> bytes:
        return keyspace.count_row(self._tenant(namespace), namespace)

    def recount(self) -> Recounted:
        """All rows of counts as they should be."""
        found: dict[bytes, Count] = {}
        every = damaged = Count()
        for rows in keyspace.walk(self._rows, keyspace.RECORD):
            usages = self._rows.get([usage_row(row.key[1:]) for row in rows])
            for row, usage in zip(rows, usages, strict=True):
                head = head_of(row.value)
                if head is None:
                    damaged = damaged.plus(Count(1))
                else:
                    found[head.namespace] = found.get(head.namespace, Count()).plus(_counted_as(head, usage))
        for rows in keyspace.walk(self._rows, keyspace.LEAF):
            for row in rows:
                namespace = row.key[1 : 1 + KEY_BYTES]
                found[namespace] = found.get(namespace, Count()).plus(Count(leaves=1))
        for one in found.values():
            every = every.plus(one)
        counts = {self._count_row(key): one for key, one in found.items()} | {keyspace.COUNT: every.plus(damaged)}
        return Recounted(counts, damaged.pages)

    @property
    def sizes(self) -> tuple[int, int]:
        counted = self.count()
        if not counted.has_sizes:
            counted = self.recount().rows[keyspace.COUNT]
        return counted.stored_bytes, counted.raw_bytes

    @property
    def used(self) -> Used:
        return Used(self._rows.used, self.count().pages)

    def flaws(self) -> Iterator[tuple[str, bytes, str]]:
        self._check()
        for rows in keyspace.walk(self._rows, keyspace.RECORD):
            for key in self._lost(rows):
                yield "index", key, "it is not found among the children of its parent"
        yield from self._wrong_children()
        yield from self._orphans()
        yield from self._flaws_of_leaves()
        for rows in keyspace.walk(self._rows, keyspace.CHANGE):
            if not all(generation_of(row.key) and _is_whole(row.value) for row in rows):
                yield "index", b"", "the changes of a generation cannot be read"
        yield from self._miscounted()

    def _lost(self, rows: Sequence[contract.Row]) -> Iterator[bytes]:
        """Those pages with these records that are not found among their siblings."""
        paths = {row.key: path for row in rows if (path := _path_in(row.key[1:], row.value)) is not None}
        found = iter(self._rows.get([key for record, path in paths.items() for key in (record, *path)]))
        for record, path in paths.items():
            now, *children = islice(found, 1 + len(path))
            # this view may see later commits: where the page is then, is another question
            if _path_in(record[1:], now) == path and not siblings.leads_to(record[1:], children):
                yield record[1:]

    def _wrong_children(self) -> Iterator[tuple[str, bytes, str]]:
        """What is wrong with child rows."""
        for rows in keyspace.walk(self._rows, keyspace.CHILD):
            for key in self._misplaced(rows):
                if key is not None:
                    yield "index", key, "it is among the children of a page that it does not follow, or is not stored"
            for row in siblings.hollow(self._rows, rows):
                # also now: this view may see later commits
                if self._rows.get([row.key])[0] == row.value and siblings.hollow(self._rows, [row]):
                    yield "index", b"", "a page is said to have children that it does not have"

    def _misplaced(self, rows: Sequence[contract.Row]) -> list[bytes | None]:
        """The page that each of these child rows names wrongly; `b""` if it cannot be read, None if it is right."""
        children = [siblings.Child.unpack(row.value) for row in rows]
        pages = [child.page if child is not None else None for child in children]
        # this view may see later commits: rows and records as they are now
        records = [record_row(page or b"") for page in pages]
        now = self._rows.get([*(row.key for row in rows), *records])
        found: list[bytes | None] = []
        for row, child, page, value, record in zip(rows, children, pages, now, now[len(rows) :], strict=False):
            is_wrong = page is not None and value == row.value and not _may_be_below(row.key, page, record)
            found.append(b"" if child is None else page if is_wrong else None)
        return found

    def _orphans(self) -> Iterator[tuple[str, bytes, str]]:
        for rows in keyspace.walk(self._rows, keyspace.USAGE):
            keys = [row.key[1:] for row in rows]
            for key, seen in zip(keys, self._rows.get([record_row(key) for key in keys]), strict=True):
                if seen is not None:
                    continue
                # this view may see later commits: both as they are now
                usage, record = self._rows.get([usage_row(key), record_row(key)])
                if usage is not None and record is None:
                    yield "orphan", key, "a usage without a record"

    def _wrong_leaves(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these pages that have a leaf row and should have none, or should have one that can be read."""
        followed = self.followed(keys)
        wrong: list[bytes] = []
        stored = self._rows.get([row for key in keys for row in (record_row(key), usage_row(key))])
        pages = [_leaf_of(key, *some) for key, *some in zip(keys, stored[::2], stored[1::2], strict=True)]
        here = [row for row, _ in pages if row is not None]
        values = dict(zip(here, self._rows.get(here), strict=True))
        for key, (row, leaf) in zip(keys, pages, strict=True):
            if row is None:
                continue
            value, is_leaf = values[row], leaf is not None and key not in followed
            if (value is not None) != is_leaf or (is_leaf and Leaf.unpack(value) is None):
                wrong.append(key)
        return wrong

    def _stray_leaves(self, rows: Sequence[contract.Row]) -> list[bytes]:
        """Those of these leaf rows whose pages are not there, or in another namespace."""
        stored = self._rows.get([record_row(row.key[1 + KEY_BYTES :]) for row in rows])
        heads = [head_of(record) if record is not None else None for record in stored]
        return [
            row.key
            for row, record, head in zip(rows, stored, heads, strict=True)
            if record is None or (head is not None and head.namespace != row.key[1 : 1 + KEY_BYTES])
        ]

    def _flaws_of_leaves(self) -> Iterator[tuple[str, bytes, str]]:
        for rows in keyspace.walk(self._rows, keyspace.RECORD):
            # again, since this view may see later commits
            for key in self._wrong_leaves(self._wrong_leaves([row.key[1:] for row in rows])):
                yield "index", key, "eviction takes it for a page that others follow, or for one that none does"
        for rows in keyspace.walk(self._rows, keyspace.LEAF):
            wrong = self._stray_leaves(rows)
            now = self._rows.get(wrong)
            again = [contract.Row(key, value) for key, value in zip(wrong, now, strict=True) if value is not None]
            for row in self._stray_leaves(again):
                yield "index", row[-KEY_BYTES:], "eviction may choose it, but it is not there"

    def _miscounted(self) -> Iterator[tuple[str, bytes, str]]:
        for _ in range(SUMS):
            generation = self._last_generation()
            counted, right = self._counts(), self.recount()
            all_counted, every = counted.get(keyspace.COUNT, Count()), right.rows[keyspace.COUNT]
            if right.unreadable or not all_counted.has_sizes:
                # what those hold was counted when they were written
                is_right = all_counted.pages == every.pages
            else:
                is_right = {keyspace.COUNT: all_counted} | counted == right.rows
            if is_right:
                return
            if self._last_generation() == generation:
                what = f"there are {tuple(every)} pages and bytes"
                yield "index", b"", f"{what}, and they were counted as {tuple(all_counted)}, or not all by namespace"
                return

    def _counts(self) -> dict[bytes, Count]:
        """All rows of counts that can be read."""
        rows = (row for some in keyspace.walk(self._rows, keyspace.COUNT) for row in some)
        return {row.key: count for row in rows if (count := Count.unpack(row.value)) is not None}


def _usage_in(stored: bytes | None) -> Usage:
    """The stored usage of a page, as far as it can be read."""
    with suppress(CorruptError):
        return Usage.unpack(stored) if stored is not None else Usage(0)
    return Usage(0)


def _counted_as(head: Head, usage: bytes | None) -> Count:
    """What a page counts as."""
    size, is_pinned = head.quota_bytes, _usage_in(usage).pinned
    return Count(1, head.stored_bytes, head.raw_bytes, size, int(is_pinned), size * is_pinned)


def _leaf_of(key: bytes, record: bytes | None, usage: bytes | None) -> tuple[bytes | None, Leaf | None]:
    """The leaf row that a stored page may have, and its value, None if it is pinned; no row if it cannot be read."""
    head = head_of(record) if record is not None else None
    if head is None:
        return None, None
    found = _usage_in(usage)
    return leaf_row(head.namespace, key), None if found.pinned else Leaf.of(head, found)


def _entry(key: bytes, record: bytes, usage: bytes | None) -> Entry:
    """A page, or why it cannot be read."""
    try:
        read = Record.unpack(key, record)
        return Entry(key, read, Usage.unpack(usage) if usage is not None else Usage(read.created))
    except StorageError as error:
        return Entry(key, error, Usage(0))


def _is_whole(changed: bytes) -> bool:
    """Whether the value of a row of changes is a list of keys, or stands before the first one."""
    return changed == FIRST or len(changed) % KEY_BYTES == 0


def _path_in(key: bytes, stored: bytes | None) -> list[bytes] | None:
    """The child rows that a stored page can have; None if it is not there, or cannot be read."""
    record = _entry(key, stored, None).record if stored is not None else None
    return _path_of(record) if isinstance(record, Record) else None


def _may_be_below(row: bytes, key: bytes, stored: bytes | None) -> bool:
    """Whether a page may be below a child row; where one belongs whose record is damaged, nobody can say."""
    return stored is not None and ((path := _path_in(key, stored)) is None or row in path)


def _path_of(record: Record) -> list[bytes]:
    """The child rows that a page can have."""
    return siblings.child_path(record.parent, record.form, record.tokens)


class _PageTransaction(_PageView, Transaction):
    """Changes pages."""

    _rows: Draft

    def __init__(self, rows: Draft, *, is_local: bool, check: Callable[[], None]) -> None:
        super().__init__(rows, is_local=is_local, check=check)
        self._changed: list[bytes] = []
        # rows of counts that were changed
        self._counted: dict[bytes, Count] = {}
        # whether a page was deleted whose namespace nobody knows
        self._has_lost_count = False

    # -- counting -----------------------------------------------------------------------------------------------------

    def _all(self) -> Count | None:
        return self._counted.get(keyspace.COUNT) or super()._all()

    def count(self, namespace: bytes | None = None) -> Count:
        row = keyspace.COUNT if namespace is None else self._count_row(namespace)
        return self._counted[row] if row in self._counted else super().count(namespace)

    def namespaces_of(self, salt: str) -> set[bytes]:
        start = keyspace.counts_of(keyspace.tenant_of(salt, b"")).start
        return super().namespaces_of(salt) | {row[-KEY_BYTES:] for row in self._counted if row.startswith(start)}

    def _add(self, namespace: bytes, change: Count) -> None:
        """Count a change of a namespace."""
        for group in (None, namespace):
            row = keyspace.COUNT if group is None else self._count_row(namespace)
            self._counted[row] = self.count(group).plus(change)

    def _counts(self) -> dict[bytes, Count]:
        both = super()._counts() | self._counted
        return {row: count for row, count in both.items() if count.pages or row == keyspace.COUNT}

    def _replace_counts(self, counts: dict[bytes, Count]) -> None:
        # also the rows of namespaces that this update has emptied
        self._counted = dict.fromkeys([*super()._counts(), *self._counted], Count()) | counts
        self._has_lost_count = False

    def _write_counts(self) -> None:
        for row, count in self._counted.items():
            if count.pages or row == keyspace.COUNT:
                self._rows.put(row, count.pack())
            else:
                self._rows.delete(row)

    @property
    def used(self) -> Used:
        used = super().used
        if self._is_local or not self._changed:
            return used
        # where the size is estimated, with what the end of the transaction writes
        costs = self._rows.costs
        n_full, n_left = divmod(len(self._changed), KEYS_OF_CHANGE)
        last = costs.of(change_row(0), bytes(KEY_BYTES * n_left))
        last += n_full * costs.of(change_row(0), bytes(KEY_BYTES * KEYS_OF_CHANGE))
        last += len(self._counted) * costs.of(keyspace.count_row(b"", bytes(KEY_BYTES)), Count().pack())
        return Used(used.bytes + last, used.entries)

    def cost(self, record: Record, n_bytes: int) -> int:
        costs, n_token_bytes = self._rows.costs, len(record.tokens)
        key = bytes(1 + KEY_BYTES)
        child = costs.of(bytes(siblings.child_bytes(n_token_bytes)), key)
        leaf = costs.of(leaf_row(key, key), bytes(keyspace.LEAVES.itemsize))
        usage = costs.of(key, bytes(USAGE.size))
        # a page may be entered twice: for itself, and for a sibling with the same first tokens
        return costs.of(key, bytes(record_bytes(n_token_bytes)), n_bytes) + usage + leaf + 2 * child

    # -- pages --------------------------------------------------------------------------------------------------------

    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        path, space = _path_of(record), record.namespace
        mine, above = leaf_row(space, key), leaf_row(space, record.parent)
        wanted = [record_row(key), usage_row(key), record_row(record.parent), mine, above, *path]
        old, old_usage, parent, *_ = self._rows.get(wanted)
        replaced = self._uncount(old, old_usage)
        packed = record.pack()
        head = head_of(packed)
        assert head is not None
        self._add(space, _counted_as(head, usage.pack()))
        self._rows.put(record_row(key), packed, payload, replaced=replaced)
        self._rows.put(usage_row(key), usage.pack())
        place = place_of(old) if old is not None else None
        if place is not None and (before := siblings.child_path(*place)) != path:
            # another page has had this key, or its record is damaged
            siblings.remove_child(self._rows, key, before)
        siblings.add_child(self._rows, key, path)
        # also a page that was not here may be followed: by one that has lost it
        is_leaf = not usage.pinned and not self.followed([key])
        self._set_leaf(space, mine, Leaf.of(head, usage) if is_leaf else None)
        if parent is not None and (found := head_of(parent)) is not None:
            self._set_leaf(found.namespace, leaf_row(found.namespace, record.parent), None)
        self._changed.append(key)

    def delete(self, key: bytes) -> bool:
        record, usage = self._rows.get([record_row(key), usage_row(key)])
        replaced = self._uncount(record, usage)
        place = place_of(record) if record is not None else None
        if record is not None and (
            place is None or not siblings.remove_child(self._rows, key, siblings.child_path(*place))
        ):
            self._remove_everywhere(key)
        if record is None and usage is None:
            return False
        self._rows.delete(record_row(key), replaced=replaced)
        self._rows.delete(usage_row(key))
        if record is not None and place is not None:
            space = namespace_in(record)
            self._set_leaf(space, leaf_row(space, key), None)
            self._mend_leaf(place[0])
        self._changed.append(key)
        return True

    def _uncount(self, record: bytes | None, usage: bytes | None) -> int | None:
        """No longer count a page as it is stored; the size of the payload that it has, if known."""
        if record is None:
            return None
        head = head_of(record)
        if head is None:
            self._has_lost_count = True
            self._counted[keyspace.COUNT] = self.count().plus(Count(-1, UNKNOWN, UNKNOWN))
            return None
        self._add(head.namespace, Count(*(-n for n in _counted_as(head, usage))))
        return head.stored_bytes

    def _set_leaf(self, namespace: bytes, row: bytes, leaf: Leaf | None) -> None:
        """Write a leaf row, or delete it."""
        is_there = self._rows.get([row])[0] is not None
        if is_there != (leaf is not None):
            self._add(namespace, Count(leaves=-1 if leaf is None else 1))
        if leaf is not None:
            self._rows.put(row, leaf.pack())
        elif is_there:
            self._rows.delete(row)

    def drop_leaf(self, namespace: bytes, key: bytes) -> None:
        self._set_leaf(namespace, leaf_row(namespace, key), None)

    def _mend_leaf(self, key: bytes) -> None:
        """Have a page that is stored, and can be read, have a leaf row if none follows it and it is not pinned."""
        record, usage = self._rows.get([record_row(key), usage_row(key)])
        row, leaf = _leaf_of(key, record, usage)
        if row is not None:
            self._set_leaf(row[1 : 1 + KEY_BYTES], row, None if leaf is None or self.followed([key]) else leaf)

    def _remove_everywhere(self, key: bytes) -> None:
        """Take a page out of the index whose record does not say where it is there."""
        for rows in keyspace.walk(self._rows, keyspace.CHILD):
            for row in rows:
                child = siblings.Child.unpack(row.value)
                if child is not None and child.page == key:
                    siblings.take_out(self._rows, row.key, child)
        for _ in range(PASSES):
            # each time the rows above those that are gone
            if not sum(self._mend_hollow(rows) for rows in keyspace.walk(self._rows, keyspace.CHILD)):
                break
        if self.count().pages <= SUMMED_AT_ONCE:
            # which page it followed is not known; of very many, the next repair finds it
            for rows in keyspace.walk(self._rows, keyspace.RECORD):
                self.mend_leaves([row.key for row in rows])

    def _mend_hollow(self, rows: Sequence[contract.Row]) -> int:
        """Mend those of these child rows that say that there are more pages, and have none below; how many."""
        found = siblings.hollow(self._rows, rows)
        for row in found:
            siblings.mend_child(self._rows, row.key)
        return len(found)

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        entries = self._entries(keys)
        spaces = {one.key: one.record.namespace for one in entries if isinstance(one.record, Record)}
        self._rows.get([leaf_row(space, key) for key, space in spaces.items()])

    def touch(self, key: bytes, usage: Usage, *, announce: bool = False) -> None:
        record, old = self._rows.get([record_row(key), usage_row(key)])
        if record is None:
            return
        self._rows.put(usage_row(key), usage.pack())
        self._changed += [key] * announce
        head, was_pinned = head_of(record), _usage_in(old).pinned
        if head is None:
            return
        if usage.pinned != was_pinned:
            sign = 1 if usage.pinned else -1
            self._add(head.namespace, Count(pinned=sign, pinned_bytes=sign * head.quota_bytes))
            self._mend_leaf(key)
        elif self._rows.get([row := leaf_row(head.namespace, key)])[0] is not None:
            self._rows.put(row, Leaf.of(head, usage).pack())

    def put_namespace(self, key: bytes, settings: bytes) -> None:
        if self.namespace(key) == settings:
            return
        row, count = self._count_row(key), self.count(key)
        self._rows.put(namespace_row(key), settings)
        del self._tenants[key]
        if any(count) and row != self._count_row(key):
            # pages were put, or deleted, while it was not known whose they are
            self._counted |= {row: Count(), self._count_row(key): count.plus(self.count(key))}

    def drop_namespace(self, key: bytes) -> None:
        self._rows.delete(namespace_row(key))

    def put_note(self, name: bytes, value: bytes | None) -> None:
        if value is None:
            self._rows.delete(note_row(name))
        else:
            self._rows.put(note_row(name), value)

    # -- the index ----------------------------------------------------------------------------------------------------

    def enter(self, rows: Sequence[bytes]) -> bool:
        """Enter the pages of these records among their siblings, where they are not; once is enough.

        Not those that cannot be read: where a damaged one says that it belongs, another page may be.
        """
        for row, stored in zip(rows, self._rows.get(rows), strict=True):
            path = _path_in(row[1:], stored)
            if path is not None:
                siblings.add_child(self._rows, row[1:], path)
        return False

    def correct(self, rows: Sequence[bytes]) -> bool:
        """Take out of some child rows what they name wrongly; whether the rows above may be wrong since."""
        is_changed = False
        there = self._stored(rows)
        for row, wrong in zip(there, self._misplaced(there), strict=True):
            child = siblings.Child.unpack(row.value)
            if child is None:
                self._rows.delete(row.key)
            elif wrong is not None:
                siblings.take_out(self._rows, row.key, child)
            is_changed = is_changed or wrong is not None
        return bool(self._mend_hollow(self._stored(rows))) or is_changed

    def _stored(self, rows: Sequence[bytes]) -> list[contract.Row]:
        found = zip(rows, self._rows.get(rows), strict=True)
        return [contract.Row(row, value) for row, value in found if value is not None]

    def rows_from(self, kind: bytes, start: bytes, at_most: int) -> list[bytes]:
        """The keys of the next rows of a kind."""
        wanted = Range(start, keyspace.everything(kind).stop, at_most)
        return [row.key for row in self._rows.ranges([wanted])[0]]

    def mend_leaves(self, rows: Sequence[bytes]) -> bool:
        """Write or delete the leaf rows of the pages of these records; once is enough."""
        for key in self._wrong_leaves([row[1:] for row in rows]):
            self._mend_leaf(key)
        return False

    def drop_leaves(self, rows: Sequence[bytes]) -> bool:
        """Delete those of these leaf rows whose pages are not there; once is enough."""
        for row in self._stray_leaves(self._stored(rows)):
            self._rows.delete(row)
        return False

    def start_over(self, counts: dict[bytes, Count]) -> int:
        """Replace the counts, and have every process read again what it knows: the index may have been wrong.

        Returns the generation that begins with this.
        """
        self._replace_counts(counts)
        now = self.generation
        # what the generation in between has changed, nobody can say; without any, as for an empty location
        generation = now + 2 if now else time.time_ns() // 1000
        self._rows.put(change_row(generation), b"")
        return generation

    def forget(self, rows: Sequence[bytes], before: int) -> bool:
        """Delete some rows of changes: those of generations before this one, or of none; once is enough."""
        for row in rows:
            if generation_of(row) < before:
                self._rows.delete(row)
        return False

    def finish(self) -> None:
        """Record what changed, and forget changes that are too old."""
        if self._has_lost_count and self.count().pages <= SUMMED_AT_ONCE:
            self._replace_counts(self.recount().rows)
        self._write_counts()
        if self._changed:
            last = self.generation
            if last == 0:
                # an empty location begins with the time: one before it, which has been lost, had no later ones
                self.began = last = time.time_ns() // 1000
                self._rows.put(change_row(last), FIRST)
            # a row that no page can have may have been deleted
            keys = [key for key in dict.fromkeys(self._changed) if len(key) == KEY_BYTES]
            for generation, at in enumerate(range(0, max(len(keys), 1), KEYS_OF_CHANGE), last + 1):
                self._rows.put(change_row(generation), b"".join(keys[at : at + KEYS_OF_CHANGE]))
                if generation > CHANGES_KEPT:
                    self._rows.delete(change_row(generation - CHANGES_KEPT))


class Pages(Backend):
    """A location that keeps pages, in the rows of a backend.

    Parameters
    ----------
    rows
        The backend, which is closed with this.
    """

    def __init__(self, rows: contract.Backend) -> None:
        self._backend = rows

    @property
    def rows(self) -> contract.Backend:
        """The backend."""
        return self._backend

    @property
    def location(self) -> str:
        return self._backend.location

    @property
    def is_local(self) -> bool:
        return self._backend.is_local

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._viewing() as view:
            yield view

    @contextmanager
    def _viewing(self) -> Iterator[_PageView]:
        with self._backend.view() as rows:
            yield _PageView(rows, is_local=self._backend.is_local, check=self._backend.check)

    @contextmanager
    def update(self) -> Iterator[Transaction]:
        with self._changing() as transaction:
            yield transaction

    @contextmanager
    def _changing(self) -> Iterator[_PageTransaction]:
        with self._backend.update() as rows:
            transaction = _PageTransaction(rows, is_local=self._backend.is_local, check=self._backend.check)
            yield transaction
            transaction.finish()

    def sync(self) -> None:
        self._backend.sync()

    def reclaim(self) -> None:
        self._backend.reclaim()

    def scrub(self) -> None:
        self._backend.compact(erase=True)

    def compact(self) -> int:
        return self._backend.compact()

    def reindex(self) -> None:
        """Mend the index of children, some pages at a time, and count everything again."""
        self._work_on_all(keyspace.RECORD, _PageTransaction.enter)
        for _ in range(PASSES):
            if not self._work_on_all(keyspace.CHILD, _PageTransaction.correct):
                break
        self._work_on_all(keyspace.RECORD, _PageTransaction.mend_leaves)
        self._work_on_all(keyspace.LEAF, _PageTransaction.drop_leaves)
        for _ in range(SUMS):
            # while others write, if possible
            with self._viewing() as view:
                counted = view.generation, view.recount().rows
            if before := self._start_over(counted):
                break
        else:
            before = self._start_over(None)
        self._work_on_all(keyspace.CHANGE, partial(_PageTransaction.forget, before=before))

    def _work_on_all(self, kind: bytes, work: Callable[[_PageTransaction, Sequence[bytes]], bool]) -> bool:
        """Do some work on all rows of a kind, some at a time; whether it says that there is more."""
        has_more, start, at_once = False, kind, REINDEXED_AT_ONCE
        while True:
            try:
                done = self._work_on(kind, start, at_once, work)
            except FullError as error:
                at_once = fewer(self, at_once, error)
                continue
            if done is None:
                return has_more
            start, again = done
            has_more = has_more or again

    @retried
    def _work_on(
        self, kind: bytes, start: bytes, at_once: int, work: Callable[[_PageTransaction, Sequence[bytes]], bool]
    ) -> tuple[bytes, bool] | None:
        """Do some work on the next rows of a kind, in one update; where those after them begin, and what it says."""
        with self._changing() as transaction:
            rows = transaction.rows_from(kind, start, at_once)
            return (rows[-1] + b"\0", work(transaction, rows)) if rows else None

    @retried
    def _start_over(self, counted: tuple[int, dict[bytes, Count]] | None) -> int:
        """Write down what was counted at a generation, or count now; the one that begins, 0 if others have written."""
        with self._changing() as transaction:
            generation, counts = counted or (transaction.generation, transaction.recount().rows)
            return transaction.start_over(counts) if generation == transaction.generation else 0

    def after_fork(self) -> None:
        self._backend.after_fork()

    def close(self) -> None:
        self._backend.close()


def open_pages(location: str | os.PathLike[str] | None, *, max_bytes: int, read_only: bool = False) -> Backend:
    """Open the location that a path or a URL names; see `prefixstore.backends.open_backend`."""
    return Pages(open_backend(location, max_bytes=max_bytes, read_only=read_only))
