"""The rows of leaves and of counts: after any changes they are what the pages themselves say; damage is mended."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine import keyspace
from prefixstore.engine.keyspace import Count, leaf_row
from prefixstore.engine.page_checks import flaws
from prefixstore.engine.pages import Pages
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Usage
from tests.support.engines import MIB, MemoryPages
from tests.support.newer import make_corrupt, make_newer

SPACES = [Namespace({"salt": salt, "model": model}) for salt, model in (("a", "x"), ("a", "y"), ("b", "x"))]
NOW = 1_700_000_000_000_000_000


@pytest.fixture(params=["memory", "lmdb"])
def backend(request, tmp_path):
    with closing(
        MemoryPages() if request.param == "memory" else Pages(LMDBBackend(tmp_path / "kv", 64 * MIB))
    ) as found:
        yield found


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


def write(backend, *rows):
    """Write rows as no engine would; None deletes one."""
    with backend.rows.update() as draft:
        for row, value in rows:
            if value is None:
                draft.delete(row)
            else:
                draft.put(row, value)


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
    write(backend, *rows)
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
        assert view.sizes == (model.count(spaces).stored_bytes, model.count(spaces).raw_bytes)
        for space in spaces:
            assert view.count(space)[:6] == model.count([space])[:6]
    # put again, they are counted as before
    with backend.update() as transaction:
        for key, page in spoiled.items():
            transaction.put(key, page.record, page.usage, bytes(page.record.stored_bytes))
    model.pages |= spoiled
    backend.reindex()
    model.assert_equal()
