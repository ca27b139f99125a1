"""What `check` verifies: every invariant of a location; and what finds the rows that are wrong, for what mends them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from prefixstore.backends.contract import Row
from prefixstore.engine import keyspace, siblings
from prefixstore.engine.budget import Budget
from prefixstore.engine.keyspace import Count, Leaf
from prefixstore.engine.page_view import View, leaf_of, path_in
from prefixstore.engine.trie import Entry
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.codec import decode
from prefixstore.format.keys import KEY_BYTES, SNAPSHOT
from prefixstore.format.record import Record, head_of

__all__ = [
    "CHECKS",
    "HOLLOW",
    "LOST",
    "MISPLACED",
    "STRAY_LEAVES",
    "WRONG_LEAVES",
    "Check",
    "Violation",
    "astray",
    "flaws",
    "strays",
    "violations",
]

# how often all pages are counted while others write
SUMS = 5
# how often what seems to be wrong is looked at again
TIMES = 2


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold.

    Attributes
    ----------
    rule
        ``"record"`` (it cannot be read), ``"parent"`` (the parent is missing, or cannot have children), ``"position"``
        (the page does not start where its parent ends), ``"payload"`` (missing, damaged, or of the wrong length),
        ``"orphan"`` (a usage without a record), ``"index"`` (the backend does not find a page among the children of
        its parent, or finds another there), ``"file"`` (the file is damaged elsewhere),
        ``"namespace"`` (unknown, or not that of the parent), ``"budget"``
        (exceeded), ``"undecryptable"`` (rows that were changed, or whose key is missing).
    key
        The page, as hexadecimal digits; empty for the location as a whole.
    message
        What was found.
    """

    rule: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.key} {self.message}" if self.key else f"{self.rule}: {self.message}"


class Check(NamedTuple):
    """Finds rows of one kind that are wrong.

    Attributes
    ----------
    kind
        The letter of the rows.
    wrong
        Those of some rows of this kind that are wrong.
    message
        What is wrong with them.
    rule
        Of `Violation`: ``"index"`` if `Pages.reindex` mends it, or ``"orphan"`` if `Transaction.delete` does.
    """

    kind: bytes
    wrong: Callable[[View, Sequence[Row]], list[Row]]
    message: str
    rule: str = "index"

    def page_of(self, row: Row) -> bytes:
        """The key of the page of which the row is, or ``b""``."""
        if self.kind == keyspace.CHILD:
            child = siblings.Child.unpack(row.value)
            return (child.page if child is not None else None) or b""
        return row.key[-KEY_BYTES:] if self.kind == keyspace.LEAF else row.key[1:]


def flaws(view: View) -> Iterator[tuple[str, bytes, str]]:
    """Faults of the places of pages, and of what is kept beside them, such as the index of children.

    Each is a rule of `Violation`, the key of the page or ``b""``, and a message. Raises `CorruptError` if the location
    cannot be used at all.
    """
    view.check()
    for rows in keyspace.walk(view.rows, keyspace.RECORD):
        yield from astray(view, [row.key[1:] for row in rows])
    for check in CHECKS:
        for rows in keyspace.walk(view.rows, check.kind):
            wrong = check.wrong(view, rows)
            for _ in range(TIMES if wrong else 0):
                # this view may see later commits: as they are now
                wrong = check.wrong(view, stored(view, [row.key for row in wrong]))
            yield from ((check.rule, check.page_of(row), check.message) for row in wrong)
    yield from _miscounted(view)


def stored(view: View, keys: Sequence[bytes]) -> list[Row]:
    """Those of these rows that there are."""
    return [Row(key, value) for key, value in zip(keys, view.rows.get(keys), strict=True) if value is not None]


def astray(view: View, keys: Sequence[bytes]) -> Iterator[tuple[str, bytes, str]]:
    """What is wrong with the places of those of these pages that can be read, in their sequences: as `flaws`."""
    for key, record, above in _with_parents(view, keys):
        if any(_out_of_place(record, above)):
            # this view may see later commits: both as they are now
            for _, page, parent in _with_parents(view, [key]):
                yield from ((rule, key, what) for rule, what in _out_of_place(page, parent))


def strays(view: View) -> tuple[set[bytes], set[bytes]]:
    """Pages that can never be found, and those that a newer version wrote; without what follows them."""
    lost: set[bytes] = set()
    newer: set[bytes] = set()
    for rows in keyspace.walk(view.rows, keyspace.RECORD):
        keys = [row.key[1:] for row in rows]
        for key, (record, _) in view.records(keys).items():
            if not isinstance(record, Record):
                (newer if isinstance(record, IncompatibleError) else lost).add(key)
        lost |= {key for _, key, _ in astray(view, keys)}
    return lost, newer


def _with_parents(view: View, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Record, Record | StorageError | None]]:
    """Those of these pages that can be read, and what is stored of their parents."""
    records = {key: one for key, (one, _) in view.records(keys).items() if isinstance(one, Record)}
    above = view.records([one.parent for one in records.values()])
    for key, record in records.items():
        yield key, record, above[record.parent][0] if record.parent in above else None


def _out_of_place(page: Record, parent: Record | StorageError | None) -> Iterator[tuple[str, str]]:
    if page.parent == page.namespace:
        if page.start:
            yield "position", f"a first page starts at {page.start}, not at 0"
    elif isinstance(parent, Record):
        if parent.end != page.start:
            yield "position", f"starts at {page.start}, but its parent ends at {parent.end}"
        if parent.form == SNAPSHOT:
            yield "parent", "its parent is a snapshot, which cannot have children"
        if parent.namespace != page.namespace:
            yield "namespace", "its parent is in another namespace"
    elif not isinstance(parent, IncompatibleError):
        yield "parent", f"its parent {page.parent.hex()} is missing"


def _lost(view: View, rows: Sequence[Row]) -> list[Row]:
    paths = [path_in(row.key[1:], row.value) or [] for row in rows]
    found = iter(view.rows.get([key for path in paths for key in path]))
    children = [list(islice(found, len(path))) for path in paths]
    return [
        row
        for row, path, some in zip(rows, paths, children, strict=True)
        if path and not siblings.leads_to(row.key[1:], some)
    ]


def _misplaced(view: View, rows: Sequence[Row]) -> list[Row]:
    children = [siblings.Child.unpack(row.value) for row in rows]
    pages = [child.page if child is not None else None for child in children]
    records = view.rows.get([keyspace.RECORD + (page or b"") for page in pages])
    return [
        row
        for row, child, page, record in zip(rows, children, pages, records, strict=True)
        if child is None or (page is not None and not _may_be_below(row.key, page, record))
    ]


def _may_be_below(row: bytes, key: bytes, record: bytes | None) -> bool:
    """Whether a page may be below a child row. If its record is damaged, it may be below any."""
    return record is not None and ((path := path_in(key, record)) is None or row in path)


def _orphans(view: View, rows: Sequence[Row]) -> list[Row]:
    records = view.rows.get([keyspace.RECORD + row.key[1:] for row in rows])
    return [row for row, record in zip(rows, records, strict=True) if record is None]


def _wrong_leaves(view: View, rows: Sequence[Row]) -> list[Row]:
    keys = [row.key[1:] for row in rows]
    followed, usages = view.followed(keys), view.rows.get([keyspace.USAGE + key for key in keys])
    pages = [leaf_of(key, row.value, usage) for key, row, usage in zip(keys, rows, usages, strict=True)]
    there = {row.key: row.value for row in stored(view, [row for row, _ in pages if row is not None])}
    wrong: list[Row] = []
    for row, (leaf_row, leaf) in zip(rows, pages, strict=True):
        if leaf_row is not None:
            value, is_leaf = there.get(leaf_row), leaf is not None and row.key[1:] not in followed
            if (value is not None) != is_leaf or (is_leaf and Leaf.unpack(value) is None):
                wrong.append(row)
    return wrong


def _stray_leaves(view: View, rows: Sequence[Row]) -> list[Row]:
    records = view.rows.get([keyspace.RECORD + row.key[1 + KEY_BYTES :] for row in rows])
    heads = [head_of(record) if record is not None else None for record in records]
    return [
        row
        for row, record, head in zip(rows, records, heads, strict=True)
        if record is None or (head is not None and head.namespace != row.key[1 : 1 + KEY_BYTES])
    ]


LOST = Check(keyspace.RECORD, _lost, "it is not found among the children of its parent")
MISPLACED = Check(
    keyspace.CHILD, _misplaced, "it is among the children of a page that it does not follow, or is not stored"
)
HOLLOW = Check(
    keyspace.CHILD,
    lambda view, rows: siblings.hollow(view.rows, rows),
    "a page is said to have children that it does not have",
)
ORPHANS = Check(keyspace.USAGE, _orphans, "a usage without a record", "orphan")
WRONG_LEAVES = Check(
    keyspace.RECORD, _wrong_leaves, "eviction takes it for a page that others follow, or for one that none does"
)
STRAY_LEAVES = Check(keyspace.LEAF, _stray_leaves, "eviction may choose it, but it is not there")
CHECKS = (LOST, MISPLACED, HOLLOW, ORPHANS, WRONG_LEAVES, STRAY_LEAVES)


def _miscounted(view: View) -> Iterator[tuple[str, bytes, str]]:
    for _ in range(SUMS):
        generation = view.last_generation()
        counted, right = view.counts(), view.recount()
        all_counted, every = counted.get(keyspace.COUNT, Count()), right[keyspace.COUNT]
        if every.pages > sum(count.pages for row, count in right.items() if row != keyspace.COUNT):
            # what those hold that cannot be read was counted when they were written
            is_right = all_counted.pages == every.pages
        else:
            is_right = {keyspace.COUNT: all_counted} | counted == right
        if is_right:
            return
        if view.last_generation() == generation:
            what = f"there are {every.pages} pages of {every.stored_bytes} bytes, counted as {all_counted.pages} of"
            yield "index", b"", f"{what} {all_counted.stored_bytes}, or not all by namespace"
            return


# -- all of it --------------------------------------------------------------------------------------------------------


def violations(view: View, budget: Budget) -> list[Violation]:
    """Read the whole location and verify every checksum. An empty list means that no problems were found."""
    found = [Violation(rule, key.hex(), message) for rule, key, message in flaws(view)]
    namespaces = set(view.namespaces())
    for rows in keyspace.walk(view.rows, keyspace.RECORD):
        usages = view.rows.get([keyspace.USAGE + row.key[1:] for row in rows])
        for row, usage in zip(rows, usages, strict=True):
            faults = list(_faults(view, row, usage, namespaces))
            if faults:
                # this view may see later commits: as the page is now
                value, used = view.rows.get([row.key, keyspace.USAGE + row.key[1:]])
                now = Row(row.key, value or b"")
                faults = list(_faults(view, now, used, set(view.namespaces()))) if value is not None else []
            found += [Violation(rule, row.key[1:].hex(), message) for rule, message in faults]
    size = view.used
    if budget.exceeded(size):
        found.append(Violation("budget", "", f"{size.bytes:,} bytes in {size.entries:,} pages exceed {budget}"))
    return found


def _faults(view: View, row: Row, usage: bytes | None, namespaces: Collection[bytes]) -> Iterator[tuple[str, str]]:
    """What is wrong with a page itself: rules, and messages. One at a time: what a server sends is in memory."""
    key = row.key[1:]
    record = Entry.of(key, row.value, usage).record
    try:
        if isinstance(record, Record):
            stored, payload = next(iter(view.rows.payloads([row.key]))) or (row.value, None)
            # the row itself may be damaged where its value is kept twice
            record = Entry.of(key, stored, usage).record
        if not isinstance(record, Record):
            raise record
    except IncompatibleError:
        return
    except CorruptError as error:
        yield "payload" if isinstance(record, Record) else "record", str(error)
        return
    if record.namespace not in namespaces:
        yield "namespace", f"namespace {record.namespace.hex()} has no settings"
    try:
        if payload is None:
            yield "payload", "the payload is missing"
        else:
            decode(record, payload)
    except IncompatibleError:
        pass
    except StorageError as error:
        yield "payload", str(error)
