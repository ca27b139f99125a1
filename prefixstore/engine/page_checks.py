"""What can be wrong with the rows of a location, for `check`, and for what mends them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from prefixstore.backends import contract
from prefixstore.engine import keyspace, siblings
from prefixstore.engine.keyspace import Count, Leaf, record_row, usage_row
from prefixstore.engine.page_view import View, leaf_of, path_in
from prefixstore.errors import IncompatibleError, StorageError
from prefixstore.format.keys import KEY_BYTES, SNAPSHOT
from prefixstore.format.record import Record, head_of

__all__ = ["astray", "flaws", "misplaced", "stray_leaves", "strays", "wrong_leaves"]

# how often all pages are counted while others write
SUMS = 5


def flaws(view: View) -> Iterator[tuple[str, bytes, str]]:
    """Faults of the places of pages, and of what is kept beside them, such as the index of children.

    Each is a rule of `prefixstore.engine.invariants.Violation` (``"index"`` if `Pages.reindex` mends it,
    if not, `Transaction.delete` does), the key of the page or ``b""``, and a message. Raises `CorruptError` if the
    location cannot be used at all.
    """
    view.check()
    for rows in keyspace.walk(view.rows, keyspace.RECORD):
        yield from astray(view, [row.key[1:] for row in rows])
        for key in _lost(view, rows):
            yield "index", key, "it is not found among the children of its parent"
    yield from _wrong_children(view)
    yield from _orphans(view)
    yield from _flaws_of_leaves(view)
    yield from _miscounted(view)


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


def _lost(view: View, rows: Sequence[contract.Row]) -> Iterator[bytes]:
    """Those pages with these records that are not found among their siblings."""
    paths = {row.key: path for row in rows if (path := path_in(row.key[1:], row.value)) is not None}
    found = iter(view.rows.get([key for record, path in paths.items() for key in (record, *path)]))
    for record, path in paths.items():
        now, *children = islice(found, 1 + len(path))
        # this view may see later commits: where the page is then, is another question
        if path_in(record[1:], now) == path and not siblings.leads_to(record[1:], children):
            yield record[1:]


def _wrong_children(view: View) -> Iterator[tuple[str, bytes, str]]:
    """What is wrong with child rows."""
    for rows in keyspace.walk(view.rows, keyspace.CHILD):
        for key in misplaced(view, rows):
            if key is not None:
                yield "index", key, "it is among the children of a page that it does not follow, or is not stored"
        for row in siblings.hollow(view.rows, rows):
            # also now: this view may see later commits
            if view.rows.get([row.key])[0] == row.value and siblings.hollow(view.rows, [row]):
                yield "index", b"", "a page is said to have children that it does not have"


def misplaced(view: View, rows: Sequence[contract.Row]) -> list[bytes | None]:
    """The page that each of these child rows names wrongly; `b""` if it cannot be read, None if it is right."""
    children = [siblings.Child.unpack(row.value) for row in rows]
    pages = [child.page if child is not None else None for child in children]
    # this view may see later commits: rows and records as they are now
    records = [record_row(page or b"") for page in pages]
    now = view.rows.get([*(row.key for row in rows), *records])
    found: list[bytes | None] = []
    for row, child, page, value, record in zip(rows, children, pages, now, now[len(rows) :], strict=False):
        is_wrong = page is not None and value == row.value and not _may_be_below(row.key, page, record)
        found.append(b"" if child is None else page if is_wrong else None)
    return found


def _orphans(view: View) -> Iterator[tuple[str, bytes, str]]:
    for rows in keyspace.walk(view.rows, keyspace.USAGE):
        keys = [row.key[1:] for row in rows]
        for key, seen in zip(keys, view.rows.get([record_row(key) for key in keys]), strict=True):
            if seen is not None:
                continue
            # this view may see later commits: both as they are now
            usage, record = view.rows.get([usage_row(key), record_row(key)])
            if usage is not None and record is None:
                yield "orphan", key, "a usage without a record"


def wrong_leaves(view: View, keys: Sequence[bytes]) -> list[bytes]:
    """Those of these pages that have a leaf row and should have none, or should have one that can be read."""
    followed = view.followed(keys)
    wrong: list[bytes] = []
    stored = view.rows.get([row for key in keys for row in (record_row(key), usage_row(key))])
    pages = [leaf_of(key, *some) for key, *some in zip(keys, stored[::2], stored[1::2], strict=True)]
    here = [row for row, _ in pages if row is not None]
    values = dict(zip(here, view.rows.get(here), strict=True))
    for key, (row, leaf) in zip(keys, pages, strict=True):
        if row is None:
            continue
        value, is_leaf = values[row], leaf is not None and key not in followed
        if (value is not None) != is_leaf or (is_leaf and Leaf.unpack(value) is None):
            wrong.append(key)
    return wrong


def stray_leaves(view: View, rows: Sequence[contract.Row]) -> list[bytes]:
    """Those of these leaf rows whose pages are not there, or in another namespace."""
    stored = view.rows.get([record_row(row.key[1 + KEY_BYTES :]) for row in rows])
    heads = [head_of(record) if record is not None else None for record in stored]
    return [
        row.key
        for row, record, head in zip(rows, stored, heads, strict=True)
        if record is None or (head is not None and head.namespace != row.key[1 : 1 + KEY_BYTES])
    ]


def _flaws_of_leaves(view: View) -> Iterator[tuple[str, bytes, str]]:
    for rows in keyspace.walk(view.rows, keyspace.RECORD):
        # again, since this view may see later commits
        for key in wrong_leaves(view, wrong_leaves(view, [row.key[1:] for row in rows])):
            yield "index", key, "eviction takes it for a page that others follow, or for one that none does"
    for rows in keyspace.walk(view.rows, keyspace.LEAF):
        wrong = stray_leaves(view, rows)
        now = view.rows.get(wrong)
        again = [contract.Row(key, value) for key, value in zip(wrong, now, strict=True) if value is not None]
        for row in stray_leaves(view, again):
            yield "index", row[-KEY_BYTES:], "eviction may choose it, but it is not there"


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
            what = f"there are {tuple(every)} pages and bytes"
            yield "index", b"", f"{what}, and they were counted as {tuple(all_counted)}, or not all by namespace"
            return


def _may_be_below(row: bytes, key: bytes, stored: bytes | None) -> bool:
    """Whether a page may be below a child row; where one belongs whose record is damaged, nobody can say."""
    return stored is not None and ((path := path_in(key, stored)) is None or row in path)
