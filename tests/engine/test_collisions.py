"""Two pages with one key: hits may be lost, but a page is never taken for the other one.

The keys cannot be made to collide, so these tests weaken the hash, or write records by hand.
"""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import replace

import pytest

from prefixstore.format import keys
from prefixstore.format.export import ExportReader
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.record import Usage
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import copy_store, export_store, import_store
from tests.support.engines import NS, P, two_stores
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


@pytest.mark.usefixtures("weak_hash")
def test_a_page_that_was_replaced_after_it_was_found_is_not_restored(tmp_path):
    with two_stores(tmp_path) as (one, two):
        one.put(MINE)
        two.match(MINE)
        path = one.engine.match(NS, as_tokens(MINE), P)
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
