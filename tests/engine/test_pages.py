"""Pages in rows: what every location promises of them, what is counted, and what damaged rows lead to."""

import itertools
from contextlib import closing

import numpy as np
import pytest

from prefixstore.backends.memory import MemoryBackend
from prefixstore.engine import keyspace, pages
from prefixstore.engine.budget import Budget
from prefixstore.engine.child_rows import ChildRow
from prefixstore.engine.invariants import flaws, violations
from prefixstore.engine.keyspace import CHILD, RECORD, Count
from prefixstore.engine.keyspace import everything as everything_of
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.format.keys import KEY_BYTES, PAGE
from prefixstore.format.record import Usage
from tests.support.pages import NAMESPACE, make_page
from tests.support.places import KEY, MIB, fill, space, write_rows

MISSING = bytes(KEY_BYTES)


@pytest.fixture(params=["memory", "lmdb", "encrypted"])
def backend(request, tmp_path):
    location = "memory:" if request.param == "memory" else f"lmdb://{tmp_path}/kv"
    key = KEY if request.param == "encrypted" else None
    with closing(open_pages(location, max_bytes=64 * MIB, key=key)) as found:
        yield found


# -- reading and writing -----------------------------------------------------------------------------------------------


def test_an_empty_location_has_no_pages(backend):
    for opened_as in (backend.view, backend.update):
        with opened_as() as view:
            assert list(view.scan()) == list(flaws(view)) == []
            assert (dict(view.namespaces()), view.used.entries, view.count()) == ({}, 0, Count())
            assert (view.record(MISSING), view.usage(MISSING), view.payload(MISSING)) == (None, None, None)
            assert view.neighbors(NAMESPACE, b"") == view.children([NAMESPACE], PAGE) == []
            assert view.children([], PAGE) == view.leading([MISSING]) == view.leading([]) == []
            assert view.followed([]) == view.followed([NAMESPACE, MISSING]) == set()
            assert len(view.facts(b"", 10)) == 0


def test_a_page_that_was_put_is_read_back_unchanged(backend):
    payload = np.random.default_rng(0).bytes(5000)
    key, record = make_page(payload, [7, 8, 2**31 - 1, -(2**31)])
    usage = Usage(2**63 - 1, 2**32 - 1, pinned=True, priority=-(2**15), expires=2**63 - 1)
    with backend.update() as transaction:
        transaction.put(key, record, usage, payload)
    with backend.view() as view:
        assert (view.record(key), view.usage(key), bytes(view.payload(key))) == (record, usage, payload)
        assert list(view.scan()) == [(key, record, usage)]
        (facts,) = view.facts(b"", 9)
        expected = {"raw_bytes": 5000, "n_tokens": 4, "hits": 2**32 - 1, "pinned": True, "priority": -(2**15)}
        assert {name: facts[name] for name in expected} == expected


# -- damage -----------------------------------------------------------------------------------------------------------

SEQUENCES = [[number, 1, 2, 3, 4, 5, 6, 7] for number in range(10)]


def test_a_repair_leaves_a_page_in_its_place_where_a_damaged_record_says_that_it_belongs():
    with closing(Pages(MemoryBackend())) as backend:
        (good, *_), (damaged, *_) = fill(backend, space(), SEQUENCES[:2])
        with backend.rows.view() as view:
            write_rows(backend, (keyspace.RECORD + damaged, view.get([keyspace.RECORD + good])[0]))
        backend.reindex()
        with backend.update() as transaction:
            assert transaction.delete(damaged)
        with backend.view() as view:
            assert [one.key for one in view.children([space().key], PAGE)] == [good]
            assert view.followed([space().key]) == {space().key}


LONG = [[0] * 400, [0] * 300 + [1] * 100, [0] * 300 + [2] * 50, [0] * 300]


def long_pages(backend):
    """Siblings that share 300 tokens."""
    with backend.update() as transaction:
        transaction.put_namespace(space().key, space().canonical)
        for tokens in LONG:
            key, record = make_page(b"x", tokens, parent=space().key, namespace=space().key)
            transaction.put(key, record, Usage(1), b"x")


def test_rows_that_lead_to_pages_which_are_not_there_are_found_and_mended_at_all_depths():
    with closing(Pages(MemoryBackend())) as backend:
        long_pages(backend)
        with backend.rows.view() as view:
            (child_rows,) = view.ranges([everything_of(CHILD)])
            (records,) = view.ranges([everything_of(RECORD)])
        for row in records:
            write_rows(backend, (row.key, None))
            write_rows(backend, (keyspace.USAGE + row.key[1:], None))
        for row in child_rows:
            if ChildRow.unpack(row.value).page is not None:
                write_rows(backend, (row.key, None))
        with backend.view() as view:
            assert view.followed([space().key])
            assert {rule for rule, _, _ in flaws(view)} == {"index"}
        backend.reindex()
        with backend.view() as view:
            assert not view.followed([space().key])
            assert list(flaws(view)) == []


def test_in_a_large_location_the_index_is_left_to_a_repair(monkeypatch, caplog):
    monkeypatch.setattr(pages, "MENDED_AT_ONCE", 1)
    with closing(Pages(MemoryBackend())) as backend:
        fill(backend, space(), SEQUENCES[:2])
        with backend.view() as view:
            key = next(key for key, record, _ in view.scan() if not view.followed([key]))
        write_rows(backend, (keyspace.RECORD + key, b"x"))
        with backend.update() as transaction:
            assert transaction.delete(key)
        backend.mend()
        assert "prefixstore check --repair" in caplog.text
        with backend.view() as view:
            assert list(flaws(view))
        backend.reindex()
        with backend.view() as view:
            assert list(flaws(view)) == []


def test_what_a_check_finds_while_others_write_is_no_fault(monkeypatch):
    """Every row that is read has been replaced since the one before was."""
    with closing(Pages(MemoryBackend())) as backend:
        there = fill(backend, space(), SEQUENCES)
        real, n_turns = keyspace.walk, itertools.count()

        def walk(view, *arguments):
            for rows in real(view, *arguments):
                # what was read is no longer true
                with backend.update() as transaction:
                    for key in [key for path in there for key in path]:
                        transaction.delete(key)
                there[:] = fill(backend, space(), [SEQUENCES[next(n_turns) % 10]])
                yield rows

        with backend.view() as view:
            monkeypatch.setattr(keyspace, "walk", walk)
            assert violations(view, Budget(64 * MIB)) == []
