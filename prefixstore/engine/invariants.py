"""The invariants of a location, which `check` verifies and a repair restores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from prefixstore.backends.contract import Row
from prefixstore.engine import child_rows, keyspace
from prefixstore.engine.budget import Budget
from prefixstore.engine.keyspace import Count, Leaf
from prefixstore.engine.page_view import PageView, leaf_of, path_in
from prefixstore.engine.trie import Entry
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.codec import decode
from prefixstore.format.keys import KEY_BYTES, SNAPSHOT
from prefixstore.format.record import Record, head_of

# how often all pages are counted again while others write
SUMS = 5
# how often something that looks wrong is looked at again
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


class Fault(NamedTuple):
    """What is wrong with a row: a rule of `Violation`, and a message."""

    row: Row
    rule: str
    message: str


class Check(NamedTuple):
    """Finds rows of one kind that are wrong.

    Attributes
    ----------
    kind
        The kind of the rows.
    find
        Finds what is wrong with some of them. `Pages.reindex` mends faults of the rule ``index``; for the other rules
        the page is deleted.
    """

    kind: bytes
    find: Callable[[PageView, Sequence[Row]], Iterator[Fault]]

    def walk(self, view: PageView) -> Iterator[Fault]:
        """What is wrong with all rows of this kind; a part of them is in memory at a time."""
        for rows in keyspace.walk(view.rows, self.kind):
            found = list(self.find(view, rows))
            for _ in range(TIMES if found else 0):
                # a view may see later commits: look at these rows as they are now
                found = list(self.find(view, stored(view, list(dict.fromkeys(one.row.key for one in found)))))
            yield from found


def page_of(row: Row) -> bytes:
    """The key of the page to which a row belongs, or ``b""``."""
    if row.key.startswith(keyspace.CHILD):
        child = child_rows.ChildRow.unpack(row.value)
        return (child.page if child is not None else None) or b""
    return row.key[-KEY_BYTES:] if row.key.startswith(keyspace.LEAF) else row.key[1:]


def flaws(view: PageView) -> Iterator[tuple[str, bytes, str]]:
    """Faults of the sequence of pages, and of the rows beside them, such as the index of children.

    Each is a rule of `Violation`, the key of the page or ``b""``, and a message. Raises `CorruptError` if the location
    cannot be used at all.
    """
    view.check()
    for check in CHECKS:
        yield from ((one.rule, page_of(one.row), one.message) for one in check.walk(view))
    yield from _miscounted(view)


def stored(view: PageView, keys: Sequence[bytes]) -> list[Row]:
    """Those of these rows that exist."""
    return [Row(key, value) for key, value in zip(keys, view.rows.get(keys), strict=True) if value is not None]


def strays(view: PageView) -> tuple[set[bytes], set[bytes]]:
    """Pages that can never be found, and pages that a newer version wrote; both without their descendants."""
    lost: set[bytes] = set()
    newer: set[bytes] = set()
    for rows in keyspace.walk(view.rows, keyspace.RECORD):
        for key, (record, _) in view.records([row.key[1:] for row in rows]).items():
            if not isinstance(record, Record):
                (newer if isinstance(record, IncompatibleError) else lost).add(key)
    return lost | {one.row.key[1:] for one in PLACES.walk(view)}, newer


def is_stray(view: PageView, key: bytes) -> bool:
    """Whether a page can never be found: it cannot be read, or does not follow its parent."""
    record, _ = view.records([key]).get(key, (None, None))
    if not isinstance(record, Record):
        return True
    parent, _ = view.records([record.parent]).get(record.parent, (None, None))
    return any(_out_of_place(record, parent))


def _misplaced_pages(view: PageView, rows: Sequence[Row]) -> Iterator[Fault]:
    """Pages, among those that can be read, that do not follow their parents."""
    records = {key: one for key, (one, _) in view.records([row.key[1:] for row in rows]).items()}
    pages = [(row, one) for row in rows if isinstance(one := records.get(row.key[1:]), Record)]
    above = view.records([page.parent for _, page in pages])
    for row, page in pages:
        for rule, message in _out_of_place(page, above.get(page.parent, (None,))[0]):
            yield Fault(row, rule, message)


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


def _lost(view: PageView, rows: Sequence[Row]) -> Iterator[Fault]:
    paths = [path_in(row.key[1:], row.value) or [] for row in rows]
    found = iter(view.rows.get([key for path in paths for key in path]))
    for row, path in zip(rows, paths, strict=True):
        if not child_rows.leads_to(row.key[1:], list(islice(found, len(path)))) and path:
            yield Fault(row, "index", "it is not found among the children of its parent")


def _misplaced(view: PageView, rows: Sequence[Row]) -> Iterator[Fault]:
    children = [child_rows.ChildRow.unpack(row.value) for row in rows]
    records = view.rows.get([keyspace.RECORD + page_of(row) for row in rows])
    for row, child, record in zip(rows, children, records, strict=True):
        # a page whose record is damaged may belong below any row
        if child is None or (
            child.page is not None and (record is None or row.key not in (path_in(child.page, record) or [row.key]))
        ):
            what = "it is among the children of a page that it does not follow, or is not stored"
            yield Fault(row, "index", what)


def _hollow(view: PageView, rows: Sequence[Row]) -> Iterator[Fault]:
    for row in child_rows.hollow(view.rows, rows):
        yield Fault(row, "index", "a page is said to have children that it does not have")


def _orphans(view: PageView, rows: Sequence[Row]) -> Iterator[Fault]:
    records = view.rows.get([keyspace.RECORD + row.key[1:] for row in rows])
    for row, record in zip(rows, records, strict=True):
        if record is None:
            yield Fault(row, "orphan", "a usage without a record")


def _wrong_leaves(view: PageView, rows: Sequence[Row]) -> Iterator[Fault]:
    keys = [row.key[1:] for row in rows]
    followed, usages = view.followed(keys), view.rows.get([keyspace.USAGE + key for key in keys])
    pages = [leaf_of(key, row.value, usage) for key, row, usage in zip(keys, rows, usages, strict=True)]
    there = {row.key: row.value for row in stored(view, [row for row, _ in pages if row is not None])}
    for row, (leaf_row, leaf) in zip(rows, pages, strict=True):
        if leaf_row is not None:
            value, is_leaf = there.get(leaf_row), leaf is not None and row.key[1:] not in followed
            if (value is not None) != is_leaf or (is_leaf and Leaf.unpack(value) is None):
                what = "eviction takes it for a page that others follow, or for one that none does"
                yield Fault(row, "index", what)


def _stray_leaves(view: PageView, rows: Sequence[Row]) -> Iterator[Fault]:
    records = view.rows.get([keyspace.RECORD + page_of(row) for row in rows])
    for row, record in zip(rows, records, strict=True):
        head = head_of(record)
        if record is None or (head is not None and head.namespace != row.key[1 : 1 + KEY_BYTES]):
            yield Fault(row, "index", "eviction may choose it, but it is not there")


PLACES = Check(keyspace.RECORD, _misplaced_pages)
LOST = Check(keyspace.RECORD, _lost)
MISPLACED = Check(keyspace.CHILD, _misplaced)
HOLLOW = Check(keyspace.CHILD, _hollow)
ORPHANS = Check(keyspace.USAGE, _orphans)
WRONG_LEAVES = Check(keyspace.RECORD, _wrong_leaves)
STRAY_LEAVES = Check(keyspace.LEAF, _stray_leaves)
CHECKS = (PLACES, LOST, MISPLACED, HOLLOW, ORPHANS, WRONG_LEAVES, STRAY_LEAVES)


def _miscounted(view: PageView) -> Iterator[tuple[str, bytes, str]]:
    n_wrong = 0
    for _ in range(SUMS):
        counted, right = view.counts(), view.recount()
        all_counted, every = counted.get(keyspace.COUNT, Count()), right[keyspace.COUNT]
        if every.pages > sum(count.pages for row, count in right.items() if row != keyspace.COUNT):
            # pages that cannot be read now were counted with their sizes when they were written
            is_right = all_counted.pages == every.pages
        else:
            is_right = {keyspace.COUNT: all_counted} | counted == right
        if is_right:
            return
        # the first time, others may have written in between
        n_wrong += view.counts() == counted
        if n_wrong == TIMES:
            what = f"there are {every.pages} pages of {every.stored_bytes} bytes, counted as {all_counted.pages} of"
            yield "index", b"", f"{what} {all_counted.stored_bytes}, or not all by namespace"
            return


# -- all of it --------------------------------------------------------------------------------------------------------


def violations(view: PageView, budget: Budget) -> list[Violation]:
    """Read the whole location and verify every checksum. An empty list means that no problems were found."""
    found = [Violation(rule, key.hex(), message) for rule, key, message in flaws(view)]
    contents = Check(keyspace.RECORD, _spoiled)
    found += [Violation(one.rule, one.row.key[1:].hex(), one.message) for one in contents.walk(view)]
    size = view.used
    if budget.exceeded(size):
        found.append(Violation("budget", "", f"{size.bytes:,} bytes in {size.entries:,} pages exceed {budget}"))
    return found


def _spoiled(view: PageView, rows: Sequence[Row]) -> Iterator[Fault]:
    """What is wrong with the contents of pages."""
    usages, namespaces = view.rows.get([keyspace.USAGE + row.key[1:] for row in rows]), set(view.namespaces())
    for row, usage in zip(rows, usages, strict=True):
        for rule, message in _faults(view, row, usage, namespaces):
            yield Fault(row, rule, message)


def _faults(view: PageView, row: Row, usage: bytes | None, namespaces: Collection[bytes]) -> Iterator[tuple[str, str]]:
    """What is wrong with the contents of a page: rules and messages. One page at a time is in memory."""
    key = row.key[1:]
    record = Entry.of(key, row.value, usage).record
    try:
        if isinstance(record, Record):
            stored, payload = next(iter(view.rows.payloads([row.key]))) or (row.value, None)
            # a backend may keep the value twice, and the one beside the payload may be damaged
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
