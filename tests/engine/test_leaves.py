"""The rows of leaves and of counts: after any changes they are what the pages themselves say; damage is mended."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine import keyspace
from prefixstore.engine.invariants import flaws
from prefixstore.engine.keyspace import Count, Leaf, leaf_row
from prefixstore.engine.pages import Pages
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, Usage, head_of
from tests.support.engines import MIB, MemoryPages
from tests.support.newer import make_corrupt, make_newer
from tests.support.pages import make_page
from tests.support.places import write_rows

SPACES = [Namespace({"salt": salt, "model": model}) for salt, model in (("a", "x"), ("a", "y"), ("b", "x"))]
NOW = 1_700_000_000_000_000_000
CANONICAL = {one.key: one.canonical for one in SPACES}


@pytest.fixture(params=["memory", "lmdb"])
def backend(request, tmp_path):
    with closing(
        MemoryPages() if request.param == "memory" else Pages(LMDBBackend(tmp_path / "kv", 64 * MIB))
    ) as found:
        yield found


@dataclass
class Known:
    """A page of the model."""

    record: Record
    usage: Usage

    @property
    def size(self):
        return self.record.stored_bytes + len(self.record.tokens)


class Model:
    """Pages in a dict, and the same in a backend; what the rows should be is worked out when it is asked for."""

    def __init__(self, backend):
        self.backend = backend
        self.pages: dict[bytes, Known] = {}

    def leaves(self):
        """The rows of leaves, and their values."""
        parents = {page.record.parent for page in self.pages.values()}
        return {
            leaf_row(page.record.namespace, key): Leaf.of(head_of(page.record.pack()), page.usage)
            for key, page in self.pages.items()
            if key not in parents and not page.usage.pinned
        }

    def count(self, namespaces):
        leaves, total = self.leaves(), Count()
        for key, page in self.pages.items():
            record, space = page.record, page.record.namespace
            if space in namespaces:
                pinned, has_leaf = page.usage.pinned, leaf_row(space, key) in leaves
                sizes = (record.stored_bytes, record.raw_bytes, page.size)
                total = total.plus(Count(1, *sizes, int(pinned), page.size * pinned, int(has_leaf)))
        return total

    def assert_equal(self):
        with self.backend.view() as view:
            assert stored_leaves(view) == self.leaves()
            counts = view.counts()
            assert counts.pop(keyspace.COUNT, Count()) == view.count() == self.count([one.key for one in SPACES])
            for space in SPACES:
                assert view.count(space.key) == self.count([space.key])
            # a namespace without pages has no row
            assert len(counts) == len({page.record.namespace for page in self.pages.values()})
            assert {row: one for row, one in view.recount().items() if row != keyspace.COUNT} == counts
            assert list(flaws(view)) == []
            for salt in "ab":
                spaces = {page.record.namespace for page in self.pages.values()}
                assert view.namespaces_of(salt).keys() == spaces & {s.key for s in SPACES if s.settings["salt"] == salt}

    def put(self, transaction, number, parent, space, usage):
        """Put a page after a page of the model, or the first one of a sequence; its key."""
        above = self.pages[parent].record if parent is not None else None
        start = above.start + len(above.tokens) // 4 if above is not None else 0
        payload = bytes(number % 50)
        key, record = make_page(payload, [number] * 4, parent=parent or space, start=start, namespace=space)
        if space in CANONICAL:
            transaction.put_namespace(space, CANONICAL[space])
        transaction.put(key, record, usage, payload)
        self.pages[key] = Known(record, usage)
        return key

    def delete(self, transaction, key):
        """Delete a page with what follows it, the last ones first."""
        for child in [each for each, page in self.pages.items() if page.record.parent == key]:
            self.delete(transaction, child)
        assert transaction.delete(key)
        del self.pages[key]


def stored_leaves(view):
    return {row.key: Leaf.unpack(row.value) for rows in keyspace.walk(view.rows, keyspace.LEAF) for row in rows}


def some_usage(chance):
    priority, expires = chance.randint(-9, 9), chance.choice([0, NOW + chance.randrange(10**9)])
    uses, pinned = chance.randint(1, 9), chance.random() < 0.2
    return Usage(
        NOW + chance.randrange(10**12), chance.randrange(9), pinned, priority, expires, uses, chance.randrange(9)
    )


def tree(backend, n=40):
    """Pages of all kinds."""
    chance, model = random.Random(7), Model(backend)
    with backend.update() as transaction:
        for space in SPACES:
            transaction.put_namespace(space.key, space.canonical)
        for number in range(1, n):
            parent = chance.choice([None, *model.pages])
            space = model.pages[parent].record.namespace if parent is not None else chance.choice(SPACES).key
            model.put(transaction, number, parent, space, some_usage(chance))
    model.assert_equal()
    return model


def flaws_of(backend):
    with backend.view() as view:
        return list(flaws(view))


def first_leaf(model):
    return next(iter(model.leaves().items()))


def inner_page(model):
    return next(page.record.parent for page in model.pages.values() if page.record.parent in model.pages)


def pinned_page(model):
    with model.backend.update() as transaction:
        return model.put(transaction, 900, None, SPACES[1].key, Usage(NOW, pinned=True))


def leaf_row_of(model, key):
    return leaf_row(model.pages[key].record.namespace, key)


def count_rows(model):
    """The rows of counts, that of all pages first."""
    with model.backend.view() as view:
        return sorted(view.counts().items())


ABSENT = b"x" * KEY_BYTES
STRANGE = keyspace.count_row(b"t" * keyspace.TENANT_BYTES, b"n" * KEY_BYTES)
# what is written past the pages: of a model and its first leaf row, the rows, and the key that is named
HARMS = {
    "a missing leaf": lambda model, row, leaf: (row[-KEY_BYTES:], (row, None)),
    "a leaf that cannot be read": lambda model, row, leaf: (row[-KEY_BYTES:], (row, leaf.pack()[:-1])),
    "a leaf of a page that another follows": lambda model, row, leaf: (
        key := inner_page(model),
        (leaf_row_of(model, key), leaf.pack()),
    ),
    "a leaf of a pinned page": lambda model, row, leaf: (
        key := pinned_page(model),
        (leaf_row_of(model, key), leaf.pack()),
    ),
    "a leaf of no page": lambda model, row, leaf: (ABSENT, (leaf_row(SPACES[0].key, ABSENT), leaf.pack())),
    "a leaf in another namespace": lambda model, row, leaf: (
        row[-KEY_BYTES:],
        *((leaf_row(one.key, row[-KEY_BYTES:]), leaf.pack()) for one in SPACES if one.key != row[1 : 1 + KEY_BYTES]),
    ),
    "a wrong count of all": lambda model, *_: (
        b"",
        *((row, count.plus(Count(leaves=1)).pack()) for row, count in count_rows(model)[:1]),
    ),
    "a wrong count of a namespace": lambda model, *_: (
        b"",
        *((row, count.plus(Count(quota_bytes=-1)).pack()) for row, count in count_rows(model)[1:2]),
    ),
    "a missing count of a namespace": lambda model, *_: (b"", (count_rows(model)[1][0], None)),
    "a count of a namespace that has none": lambda *_: (b"", (STRANGE, Count(3, leaves=3).pack())),
    "damaged counts": lambda model, *_: (b"", *((row, b"garbage") for row, _ in count_rows(model))),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_wrong_row_is_found_and_mended(backend, harm):
    model = tree(backend)
    key, *rows = HARMS[harm](model, *first_leaf(model))
    write_rows(backend, *rows)
    found = flaws_of(backend)
    assert {rule for rule, *_ in found} == {"index"}
    assert key in {each for _, each, _ in found}
    backend.reindex()
    model.assert_equal()


def test_a_page_that_is_deleted_leaves_no_row_whatever_its_record_says(backend):
    for spoil in (make_corrupt, make_newer):
        model = tree(backend)
        key = next(iter(model.leaves()))[-KEY_BYTES:]
        spoil(backend, key)
        with backend.update() as transaction:
            assert transaction.delete(key)
            # as eviction does that comes upon the row
            transaction.drop_leaf(model.pages[key].record.namespace, key)
        backend.mend()
        del model.pages[key]
        model.assert_equal()
        with backend.update() as transaction:
            for root in [key for key, page in model.pages.items() if page.record.start == 0]:
                model.delete(transaction, root)
        model.assert_equal()


def test_pages_that_cannot_be_read_are_counted_with_all_pages_and_the_others_exactly(backend):
    model = tree(backend)
    keys = list(model.pages)
    for spoil, key in ((make_corrupt, keys[3]), (make_newer, keys[5])):
        spoil(backend, key)
    backend.reindex()
    spaces = [one.key for one in SPACES]
    spoiled = {key: model.pages.pop(key) for key in (keys[3], keys[5])}
    assert [rule for rule, *_ in flaws_of(backend) if rule == "index"] == []
    with backend.view() as view:
        assert view.count().pages == len(model.pages) + 2
        assert view.count()[1:3] == model.count(spaces)[1:3]
        for space in spaces:
            assert view.count(space)[:6] == model.count([space])[:6]
    # put again, they are counted as before
    with backend.update() as transaction:
        for key, page in spoiled.items():
            transaction.put(key, page.record, page.usage, bytes(page.record.stored_bytes))
    model.pages |= spoiled
    backend.reindex()
    model.assert_equal()
