"""A location without a model: inspect it, delete from it, repair it."""

import time
from collections import defaultdict

import numpy as np
import pytest

from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.engine.pages import Pages
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import page_key
from prefixstore.maintenance.archive import Archive
from tests.support.newer import make_corrupt, make_newer
from tests.support.places import contents, fill, place, space

# two that share their first page, one that shares nothing, one shorter than a page
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 10], [20, 21, 22, 23, 24], [30, 31])
MINE, YOURS = space("mine"), space("yours")


@pytest.fixture
def archive(tmp_path):
    """In one location: that each backend keeps pages alike is shown by the contract tests and the model."""
    with Archive(tmp_path / "kv", create=True) as opened:
        yield opened


def keys_of(archive):
    return set(contents(archive.backend))


def test_parents_are_listed_before_their_children_and_pages_are_found_by_their_first_digits(archive):
    paths = fill(archive.backend, MINE, SEQUENCES)
    pages = archive.pages()
    seen = {MINE.key}
    for page in pages:
        assert page.parent in seen
        seen.add(page.key)
    assert len(pages) == 7
    page = archive.find(paths[1][-1].hex()[:10])
    assert [one.key for one in archive.path(page)] == paths[1]
    with pytest.raises(InvalidParameterError, match="begins with"):
        archive.find("x")


def test_pages_that_cannot_be_read_do_not_make_digits_unique(archive):
    by_digit = defaultdict(list)
    for [key] in fill(archive.backend, MINE, [[n] * 4 for n in range(400)]):
        by_digit[key.hex()[0]].append(key)
    digit, keys = max(by_digit.items(), key=lambda one: len(one[1]))
    # all but the last two, in their order
    for key in sorted(keys)[:-2]:
        make_corrupt(archive.backend, key)
    with pytest.raises(InvalidParameterError, match="ambiguous"):
        archive.find(digit)
    make_corrupt(archive.backend, sorted(keys)[-2])
    assert archive.find(digit).key == max(keys)


CHOICES = [
    ({"namespace": MINE.key.hex()[:10]}, {"yours": 2}),
    ({"salt": "yours"}, {"mine": 7}),
    ({"salt": "nobody"}, {"mine": 7, "yours": 2}),
    ({"everything": True}, {}),
    # the sequence, and what led only to it
    ({"tokens": [20, 21]}, {"mine": 5, "yours": 2}),
    ({"tokens": [1, 2, 3, 4, 9]}, {"mine": 5, "yours": 2}),
    ({"tokens": [1, 2, 3, 4]}, {"mine": 3}),
    ({"tokens": [1, 2, 3, 4], "salt": "mine"}, {"mine": 3, "yours": 2}),
    ({"tokens": [7]}, {"mine": 7, "yours": 2}),
    ({"older_than": 3600.0}, {"yours": 2}),
    ({"older_than": 3600.0, "tokens": [30]}, {"mine": 6, "yours": 2}),
]


@pytest.mark.parametrize(("choice", "left"), CHOICES)
def test_exactly_the_chosen_pages_are_purged(archive, choice, left):
    fill(archive.backend, MINE, SEQUENCES)
    fill(archive.backend, YOURS, SEQUENCES[:1], last_used=time.time_ns(), pinned=True)
    before = contents(archive.backend)
    removed = archive.purge(**choice)
    now = {holding.namespace.salt: holding.pages for holding in archive.holdings()}
    assert now == left
    assert removed.pages == 9 - sum(left.values())
    assert removed.bytes == 1000 * removed.pages
    assert contents(archive.backend).items() <= before.items()
    assert archive.check() == []
    with archive.backend.view() as view:
        assert len(view.namespaces()) == len(left)


def test_no_tokens_are_not_all_tokens_and_tokens_may_be_an_array(archive):
    fill(archive.backend, MINE, SEQUENCES)
    for tokens in ([], (), np.array([], np.int32)):
        with pytest.raises(InvalidParameterError, match="tokens is empty"):
            archive.purge(tokens=tokens)
    assert len(archive.pages()) == 7
    assert archive.purge(tokens=np.array([20, 21])).pages == 2
    assert len(archive.pages()) == 5


def test_pages_whose_tenant_is_not_known_are_reported_when_a_tenant_is_purged(archive, caplog):
    fill(archive.backend, MINE, SEQUENCES)
    fill(archive.backend, YOURS, SEQUENCES)
    with archive.backend.update() as transaction:
        transaction.put_namespace(YOURS.key, b"damaged")
    assert archive.purge(salt="mine").pages == 7
    assert "7 pages may be of this tenant" in caplog.text
    assert YOURS.key.hex() in caplog.text
    assert archive.purge(namespace=YOURS.key.hex()).pages == 7


CHOICES = [
    {"salt": "mine"},
    {"namespace": MINE.key.hex()},
    {"tokens": [1, 2]},
    {"older_than": 60.0},
    {"everything": True},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: next(iter(choice)))
def test_a_purge_deletes_pages_after_a_damaged_record_and_the_record(choice, monkeypatch):
    with Archive("memory:", create=True) as archive:
        paths = fill(archive.backend, MINE, SEQUENCES[:2])
        make_corrupt(archive.backend, paths[0][0])
        assert archive.purge(**choice).pages == 4
        with archive.backend.view() as view:
            assert list(view.scan()) == []
            assert view.namespaces() == {}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: next(iter(choice)))
def test_a_purge_leaves_pages_of_a_newer_version_and_says_so(choice, caplog):
    # it does not find what begins with some tokens after a page that it cannot read
    n = 4 if "everything" in choice else 0 if "tokens" in choice else 3
    with Archive("memory:", create=True) as archive:
        paths = fill(archive.backend, MINE, SEQUENCES[:2])
        make_newer(archive.backend, paths[0][0])
        assert archive.purge(**choice).pages == n
        with archive.backend.view() as view:
            assert view.used.entries == 4 - n
        assert archive.engine.deleter.n_newer() == 4 - n
        assert ("newer prefixstore" in caplog.text) == ("everything" not in choice)


def test_a_purge_leaves_what_a_page_of_a_newer_version_follows():
    with Archive("memory:", create=True) as archive:
        (path,) = fill(archive.backend, MINE, [list(range(16))])
        make_newer(archive.backend, path[2])
        assert archive.purge(namespace=MINE.key.hex()).pages == 1
        with archive.backend.view() as view:
            assert view.used.entries == len(path) - 1
        assert archive.purge(everything=True).pages == len(path) - 1


def test_a_page_is_pinned_with_its_ancestors_and_unpinned_except_those_that_others_need(archive):
    paths = fill(archive.backend, MINE, SEQUENCES)
    one, two = (archive.find(path[-1].hex()) for path in paths[:2])
    assert archive.pin(one) == 2
    assert archive.pin(one) == 0
    assert archive.pin(two) == 2
    assert archive.pin(one, pinned=False) == 1
    pinned = {key for key, (_, usage, _) in contents(archive.backend).items() if usage.pinned}
    assert pinned == set(paths[1])
    assert len(archive.evict(1).pages) == 4
    assert keys_of(archive) == set(paths[1])


def test_repair_deletes_damaged_pages_and_their_descendants_and_reports_them(archive):
    paths = fill(archive.backend, MINE, SEQUENCES)
    key = paths[0][0]
    with archive.backend.update() as transaction:
        transaction.put(key, transaction.record(key), transaction.usage(key), bytes(1000))
    assert [(one.rule, one.key) for one in archive.check()] == [("payload", key.hex())]
    found, removed = archive.repair()
    assert [one.key for one in found] == [key.hex()]
    assert removed.pages == 4
    assert archive.check() == []
    assert keys_of(archive) == {*paths[2], *paths[3]}
    assert archive.repair() == ([], type(removed)())


def test_children_that_are_added_to_a_page_while_it_is_purged_are_purged_too(tmp_path, request, monkeypatch):
    with Archive(place("lmdb", tmp_path, request), create=True) as archive:
        fill(archive.backend, MINE, SEQUENCES)
        other = Pages(LMDBBackend(tmp_path / "kv", 1 << 30))
        update = archive.backend.update
        written = []

        def continued():
            # a server continues a conversation between the choice and the deletion
            if not written:
                written.append(fill(other, MINE, [[*SEQUENCES[0], 50, 51, 52, 53]]))
            return update()

        monkeypatch.setattr(archive.backend, "update", continued)
        archive.purge(tokens=SEQUENCES[0])
        other.close()
        assert (
            page_key(written[0][0][1], b"".join(n.to_bytes(4, "little") for n in (50, 51, 52, 53)))
            == (written[0][0][2])
        )
        assert not {*written[0][0][1:]} & keys_of(archive)
        assert archive.check() == []
