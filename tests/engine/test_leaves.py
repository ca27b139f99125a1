"""The rows of leaves and of counts: after any changes they are what the pages themselves say; damage is mended."""

from __future__ import annotations

import random

import pytest

from prefixstore.engine import keyspace
from prefixstore.engine.invariants import flaws
from prefixstore.engine.keyspace import Count, Leaf, leaf_row
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Usage
from tests.support.engines import MemoryPages
from tests.support.newer import make_corrupt, make_newer
from tests.support.pages import make_page
from tests.support.places import write_rows

SPACES = [Namespace({"salt": salt, "model": model}) for salt, model in (("a", "x"), ("a", "y"), ("b", "x"))]
NOW = 1_700_000_000_000_000_000


def some_usage(chance):
    priority, expires = chance.randint(-9, 9), chance.choice([0, NOW + chance.randrange(10**9)])
    uses, pinned = chance.randint(1, 9), chance.random() < 0.2
    return Usage(
        NOW + chance.randrange(10**12), chance.randrange(9), pinned, priority, expires, uses, chance.randrange(9)
    )


def pages_of_all_kinds():
    """Records and usages by their keys, parents first."""
    chance, pages = random.Random(1), {}
    for number in range(1, 40):
        parent = chance.choice([None, *pages])
        above = pages[parent][0] if parent is not None else None
        space = above.namespace if above is not None else chance.choice(SPACES).key
        start = above.start + 4 if above is not None else 0
        key, record = make_page(bytes(number), [number] * 4, parent=parent or space, start=start, namespace=space)
        pages[key] = record, some_usage(chance)
    return pages


PAGES = pages_of_all_kinds()
PARENTS = {record.parent for record, _ in PAGES.values()}
LEAVES = [key for key, (_, usage) in PAGES.items() if key not in PARENTS and not usage.pinned]


def put(backend, pages):
    with backend.update() as transaction:
        for space in SPACES:
            transaction.put_namespace(space.key, space.canonical)
        for key, (record, usage) in pages.items():
            transaction.put(key, record, usage, bytes(record.stored_bytes))
    return backend


def delete(backend, key):
    """Delete a page with what follows it, the last ones first."""
    with backend.view() as view:
        family, below = [key], {one: record.parent for one, record, _ in view.scan()}
    for one in family:
        family += [child for child, parent in below.items() if parent == one]
    with backend.update() as transaction:
        for one in reversed(family):
            assert transaction.delete(one)
    return set(family)


def rows_of(backend):
    """The rows of leaves and of counts, with which nothing is wrong."""
    with backend.view() as view:
        assert list(flaws(view)) == []
        rows = [
            row for kind in (keyspace.LEAF, keyspace.COUNT) for rows in keyspace.walk(view.rows, kind) for row in rows
        ]
    return {row.key: row.value for row in rows}


@pytest.fixture
def backend():
    return put(MemoryPages(), PAGES)


def test_pages_that_none_follows_and_that_are_not_pinned_have_leaves_and_all_are_counted(backend):
    assert {row[-KEY_BYTES:] for row in rows_of(backend) if row.startswith(keyspace.LEAF)} == set(LEAVES)
    with backend.view() as view:
        for space in (None, *(one.key for one in SPACES)):
            found = [key for key, (record, _) in PAGES.items() if space in (None, record.namespace)]
            sizes = {key: PAGES[key][0].stored_bytes for key in found}
            pinned = [sizes[key] + 16 for key in found if PAGES[key][1].pinned]
            n, size, n_leaves = len(found), sum(sizes.values()), len(set(LEAVES) & set(found))
            assert view.count(space) == Count(n, size, size, size + 16 * n, len(pinned), sum(pinned), n_leaves)
        for salt in "ab":
            assert view.namespaces_of(salt).keys() == {one.key for one in SPACES if one.settings["salt"] == salt}


@pytest.mark.parametrize("seed", range(3))
def test_after_any_changes_they_are_those_of_the_pages_that_are_left(backend, seed):
    chance, left = random.Random(seed), dict(PAGES)
    for step in range(40):
        key, (record, _) = chance.choice(list(PAGES.items()))
        usage = some_usage(chance)
        if key not in left:
            if record.parent in left or record.parent == record.namespace:
                put(backend, {key: (record, usage)})
                left[key] = record, usage
        elif chance.random() < 0.3:
            gone = delete(backend, key)
            left = {one: page for one, page in left.items() if one not in gone}
        else:
            # written again, or used
            left[key] = record, usage
            with backend.update() as transaction:
                if chance.random() < 0.5:
                    transaction.touch(key, usage)
                else:
                    transaction.put(key, record, usage, bytes(record.stored_bytes))
        if step % 10 == 9:
            assert rows_of(backend) == rows_of(put(MemoryPages(), left))


ABSENT, LEAF = b"x" * KEY_BYTES, Leaf(bytes(KEY_BYTES), NOW, 0, 1, 4, 4, 1, 0, 0).pack()
FOLLOWED = next(key for key in PAGES if key in PARENTS)
PINNED = next(key for key, (_, usage) in PAGES.items() if usage.pinned and key not in PARENTS)
STRANGE = keyspace.count_row(b"t" * keyspace.TENANT_BYTES, b"n" * KEY_BYTES)


def row_of(key):
    return leaf_row(PAGES[key][0].namespace, key)


# the key of the page that is named, and what is written past the pages
HARMS = {
    "a missing leaf": lambda _: (LEAVES[0], (row_of(LEAVES[0]), None)),
    "a leaf that cannot be read": lambda _: (LEAVES[0], (row_of(LEAVES[0]), LEAF[:-1])),
    "a leaf of a page that another follows": lambda _: (FOLLOWED, (row_of(FOLLOWED), LEAF)),
    "a leaf of a pinned page": lambda _: (PINNED, (row_of(PINNED), LEAF)),
    "a leaf of no page": lambda _: (ABSENT, (leaf_row(SPACES[0].key, ABSENT), LEAF)),
    "a leaf in another namespace": lambda _: (
        LEAVES[0],
        *((leaf_row(one.key, LEAVES[0]), LEAF) for one in SPACES if one.key != PAGES[LEAVES[0]][0].namespace),
    ),
    "a wrong count of all": lambda found: (b"", (found[0][0], found[0][1].plus(Count(leaves=1)).pack())),
    "a wrong count of a namespace": lambda found: (b"", (found[1][0], found[1][1].plus(Count(quota_bytes=-1)).pack())),
    "a missing count of a namespace": lambda found: (b"", (found[1][0], None)),
    "a count of a namespace that has none": lambda _: (b"", (STRANGE, Count(3, leaves=3).pack())),
    "damaged counts": lambda found: (b"", *((row, b"garbage") for row, _ in found)),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_wrong_row_is_found_and_mended(backend, harm):
    before = rows_of(backend)
    with backend.view() as view:
        key, *rows = HARMS[harm](sorted(view.counts().items()))
    write_rows(backend, *rows)
    with backend.view() as view:
        found = list(flaws(view))
    assert {rule for rule, *_ in found} == {"index"}
    assert key in {each for _, each, _ in found}
    backend.reindex()
    assert rows_of(backend) == before


@pytest.mark.parametrize("spoil", [make_corrupt, make_newer])
def test_a_page_that_is_deleted_leaves_no_row_whatever_its_record_says(backend, spoil):
    spoil(backend, LEAVES[0])
    with backend.update() as transaction:
        assert transaction.delete(LEAVES[0])
        # as eviction does that comes upon the row
        transaction.drop_leaf(PAGES[LEAVES[0]][0].namespace, LEAVES[0])
        assert transaction.count().pages == len(PAGES) - 1
    backend.mend()
    assert rows_of(backend) == rows_of(put(MemoryPages(), {key: PAGES[key] for key in PAGES if key != LEAVES[0]}))
    for key in [key for key, (record, _) in PAGES.items() if record.start == 0 and key != LEAVES[0]]:
        delete(backend, key)
    assert rows_of(backend) == {keyspace.COUNT: Count().pack()}


def test_pages_that_cannot_be_read_are_counted_with_all_pages_and_the_others_exactly(backend):
    before, keys = rows_of(backend), list(PAGES)
    spoiled = {key: PAGES[key] for key in (keys[3], keys[5])}
    for spoil, key in zip((make_corrupt, make_newer), spoiled, strict=True):
        spoil(backend, key)
    backend.reindex()
    with backend.view() as view:
        assert [rule for rule, *_ in flaws(view) if rule == "index"] == []
        assert view.count().pages == len(PAGES)
        for space in (None, *(one.key for one in SPACES)):
            pages = [(key, record) for key, (record, _) in PAGES.items() if space in (None, record.namespace)]
            sizes = [record.stored_bytes for key, record in pages if key not in spoiled]
            assert view.count(space)[1:3] == (sum(sizes), sum(sizes))
            assert space is None or view.count(space).pages == len(sizes)
    # put again, they are counted as before
    put(backend, spoiled)
    backend.reindex()
    assert rows_of(backend) == before
