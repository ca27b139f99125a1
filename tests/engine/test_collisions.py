"""Two pages with one key: hits may be lost, but a page is never taken for the other one.

The keys cannot be made to collide, so these tests weaken the hash, or write records by hand.
"""

import io
from contextlib import closing
from dataclasses import replace

import pytest

from prefixstore.errors import CorruptError
from prefixstore.format import keys
from prefixstore.format.export import ExportReader
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.record import Usage
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import copy_store, export_store, import_store
from tests.support.engines import NS, OTHER, P, store_of, two_stores
from tests.support.places import contents, fill, space

# under the weak hash, the first pages of both have the same key
MINE, THEIRS = [6] * 4, [7] * 4
NEXT = [1] * 4


@pytest.fixture
def weak_hash(monkeypatch):
    """Token 7 is hashed as if it were token 6."""
    strong = keys._digest
    six, seven = (as_tokens([token]).tobytes() for token in (6, 7))
    monkeypatch.setattr(keys, "_digest", lambda content, person: strong(content.replace(seven, six), person))
    assert page_keys(NS, as_tokens(MINE + NEXT), P) == page_keys(NS, as_tokens(THEIRS + NEXT), P)


def missing(store, tokens):
    tokens = as_tokens(tokens)
    return store.engine.lookups.missing(NS, tokens, P)


@pytest.mark.usefixtures("weak_hash")
def test_nothing_is_captured_after_a_page_that_another_one_displaces():
    with store_of() as store:
        store.put(MINE)
        for tokens in (THEIRS, THEIRS + NEXT):
            with pytest.raises(CorruptError, match="tokens that do not match its key"):
                missing(store, tokens)
        assert missing(store, MINE + NEXT) == [(P, 2 * P)]
        store.put(MINE + NEXT)
        with pytest.raises(CorruptError, match="tokens that do not match its key"):
            missing(store, THEIRS + NEXT)


@pytest.mark.parametrize("stored", [THEIRS, THEIRS + NEXT, [*THEIRS, 1, 2]], ids=["one", "two", "tail"])
@pytest.mark.usefixtures("weak_hash")
def test_a_page_that_waits_for_its_commit_replaces_another_one_and_what_is_stored_after_it(tmp_path, stored):
    with two_stores(tmp_path) as (one, two):
        waiting = one.announce(MINE)
        two.put(stored)
        two.put(stored[:4], namespace=OTHER)
        # what was computed after the other page is not found after this one
        assert one.match([*MINE, *stored[4:]]) == 4
        assert one.engine.commit(waiting) == 1
        for store in (one, two):
            assert store.match([*MINE, *stored[4:]]) == 4
            assert store.match(stored) == 0
            assert store.fetch(MINE) == 1
        # and nothing else is gone
        assert one.stored_keys() == {*page_keys(NS, as_tokens(MINE), P), *page_keys(OTHER, as_tokens(THEIRS), P)}


@pytest.mark.usefixtures("weak_hash")
def test_a_page_that_was_replaced_after_it_was_found_is_not_restored(tmp_path):
    with two_stores(tmp_path) as (one, two):
        one.put(MINE)
        two.match(MINE)
        path = one.path(MINE)
        record, payload = record_of(two, MINE)
        with two.backend.update() as transaction:
            theirs = replace(record, tokens=as_tokens(THEIRS).tobytes())
            transaction.put(record.key, theirs, Usage(1), payload)
        with one.engine.fetching(path.pages) as states:
            assert list(states) == []
        assert one.counters.group("unreadable") == {"corrupt": 1}
        assert one.match(MINE) == 0


def record_of(store, tokens):
    with store.backend.view() as view:
        key = page_keys(NS, as_tokens(tokens), P)[-1]
        return view.record(key), bytes(view.payload(key))


@pytest.mark.parametrize("fields", [{"namespace": OTHER}, {"start": 8}], ids=["namespace", "start"])
def test_a_record_that_differs_in_what_its_key_does_not_cover_is_replaced(tmp_path, fields):
    with store_of() as source:
        source.put(MINE + NEXT)
        first, second = record_of(source, MINE), record_of(source, MINE + NEXT)
    with two_stores(tmp_path) as (one, two):
        waiting = one.announce(MINE + NEXT)
        with two.backend.update() as transaction:
            transaction.put_namespace(NS, b'{"n":1}')
            transaction.put_namespace(OTHER, b'{"n":2}')
            transaction.put(first[0].key, first[0], Usage(1), first[1])
            transaction.put(second[0].key, replace(second[0], **fields), Usage(1), second[1])
        assert one.match(MINE + NEXT) == 8
        assert one.engine.commit(waiting) == 2
        assert record_of(two, MINE + NEXT)[0].start == 4
        assert two.fetch(MINE + NEXT) == 2
        assert one.engine.upkeep.check() == []


@pytest.mark.parametrize("through", ["file", "copy"])
@pytest.mark.usefixtures("weak_hash")
def test_an_imported_page_is_refused_where_another_one_has_its_key(through):
    mine = space("a")
    with closing(Archive("memory:", create=True)) as source, closing(Archive("memory:", create=True)) as target:
        fill(source.backend, mine, [THEIRS + NEXT])
        fill(target.backend, mine, [MINE])
        before = contents(target.backend)
        if through == "copy":
            moved = copy_store(source, target)
        else:
            file = io.BytesIO()
            export_store(source, file)
            moved = import_store(ExportReader(io.BytesIO(file.getvalue()), "f"), target)
        assert (moved.pages, moved.present) == (0, 0)
        assert moved.refused == 2
        assert contents(target.backend) == before
