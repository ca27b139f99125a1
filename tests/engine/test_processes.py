"""Two engines on one location, as two processes have them."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.pages import Pages
from prefixstore.engine.waiting import DropReason
from prefixstore.format.keys import as_tokens, page_keys
from tests.support.engines import MIB, NS, A, B, C, P, Store, snapshot_of, store_of, two_stores
from tests.support.fragile import known_keys


def test_a_use_is_written_with_the_next_batch_and_respected_by_the_other_engine(tmp_path):
    with two_stores(tmp_path, max_entries=6) as (one, two):
        one.put(A)
        one.put(B)
        assert two.match(A) == 12
        key = page_keys(NS, as_tokens(A), P)[0]
        with one.backend.view() as view:
            before = view.usage(key)
        assert one.fetch(A) == 3
        with one.backend.view() as view:
            assert view.usage(key) == before
        assert one.engine.captures.has_deferred
        one.engine.commit([])
        assert not one.engine.captures.has_deferred
        with one.backend.view() as view:
            assert view.usage(key).hits == 1
            assert view.usage(key).last_used > before.last_used
        two.put(C)
        assert [one.match(A), one.match(B), one.match(C)] == [12, 0, 12]


def test_a_page_whose_parent_was_evicted_meanwhile_is_an_orphan(tmp_path):
    with two_stores(tmp_path, max_entries=3) as (one, two):
        one.put(A[:4])
        assert one.match(A) == 4
        batch = one.announce(A)
        assert len(batch) == 2
        two.put(B)
        assert one.engine.commit(batch) == 0
        assert one.counters.group("dropped") == {"orphan": 2}
        assert one.match(A) == 0


def test_a_page_that_both_engines_have_captured_is_stored_once(tmp_path):
    with two_stores(tmp_path) as (one, two):
        # neither has read the location before
        ours, theirs = one.announce(A), two.announce([*A, 5, 6])
        assert one.engine.commit(ours) == 3
        assert two.engine.commit(theirs) == 4
        assert two.match([*A, 5, 6]) == one.match([*A, 5, 6]) == 14
        assert two.counters.group("dropped") == one.counters.group("dropped") == {}
        assert one.engine.upkeep.used()[1] == two.engine.upkeep.used()[1] == 4000
        assert two.fetch([*A, 5, 6]) == 4


def test_a_tail_that_another_process_has_stored_is_not_forgotten_with_the_pending_one(tmp_path):
    """If it were forgotten, its parent would seem to be a leaf, and would be evicted before it."""
    with two_stores(tmp_path, max_entries=3) as (one, two):
        one.put(A[:4])
        tail = one.announce(A[:6])
        two.put(A[:6])
        assert one.match(A[:6]) == 6  # from here on, one knows that it is stored as well
        longer = one.announce(A[:8])
        one.engine.commit([*tail, *longer])
        assert one.engine.upkeep.check() == []
        assert one.match(A[:8]) == 8
        for number in range(10, 20):
            one.put([number] * 4)
            assert one.engine.upkeep.check() == []
        assert known_keys(one.engine) == one.stored_keys()


def test_an_unpin_of_one_engine_is_seen_by_the_other(tmp_path):
    with two_stores(tmp_path, max_entries=3) as (one, two):
        one.put(A)
        one.engine.upkeep.pin(NS, as_tokens(A), P, pinned=True)
        assert two.put(B) == 0
        assert two.counters.group("dropped") == {"budget": 3}
        one.engine.upkeep.pin(NS, as_tokens(A), P, pinned=False)
        assert two.put(B) == 3
        assert one.match(B) == 12


@pytest.fixture
def clock(monkeypatch):
    now = [time.time_ns()]
    monkeypatch.setattr("time.time_ns", lambda: now[0])
    return now


@pytest.mark.parametrize("reader", [{"read_only": True}, {}])
def test_a_reader_sees_that_another_engine_keeps_a_page_alive(tmp_path, clock, reader):
    with store_of(Pages(LMDBBackend(tmp_path, MIB)), options={"ttl": 60.0}) as one:
        one.put(A)
        two = Store(Pages(LMDBBackend(tmp_path, MIB)), options=reader)
        assert two.match(A) == 12
        for _ in range(10):
            clock[0] += 40 * 10**9
            assert one.fetch(A) == 3
            one.engine.commit([])
            assert two.match(A) == 12
        clock[0] += 61 * 10**9
        assert two.match(A) == one.match(A) == 0
        two.engine.close()


@pytest.mark.parametrize("is_late", [True, False])
def test_a_page_captured_here_outlasts_one_that_expires_and_that_another_engine_has_stored(tmp_path, clock, is_late):
    with (
        store_of(Pages(LMDBBackend(tmp_path, MIB)), options={"ttl": 60.0}) as one,
        store_of(Pages(LMDBBackend(tmp_path, MIB))) as two,
    ):
        waiting = two.announce(A)
        one.put(A)
        clock[0] += (61 if is_late else 30) * 10**9
        assert two.match(A) == 12
        assert two.engine.commit(waiting) == 3
        clock[0] += 61 * 10**9
        assert two.match(A) == one.match(A) == 12


# -- other threads, while a transaction is open ------------------------------------------------------------------------


def while_space_is_made(store, work):
    """Run `work` in the next transaction of the store, just before it makes space for a page."""
    update = store.backend.update

    @contextmanager
    def updating():
        with update() as transaction:
            cost = transaction.cost

            def asked(*arguments):
                transaction.cost, store.backend.update = cost, update
                work()
                return cost(*arguments)

            transaction.cost = asked
            yield transaction

    store.backend.update = updating


def pending_here_and_stored_there(one, two):
    """A snapshot that waits in one engine, and that the other one has stored."""
    one.put(A[:4])
    two.match(A)
    ours, theirs = snapshot_of(one, A[:6]), snapshot_of(two, A[:6])
    assert one.engine.captures.announce(ours)
    assert two.engine.captures.announce(theirs)
    assert two.engine.commit([theirs]) == 1
    return ours


def test_a_page_that_is_given_up_in_a_transaction_and_that_another_process_has_stored_keeps_its_parent(tmp_path):
    with two_stores(tmp_path, max_entries=2) as (one, two):
        ours = pending_here_and_stored_there(one, two)
        batch = one.announce(B[:4])
        while_space_is_made(one, lambda: one.engine._catalog.drop([ours], DropReason.UNAVAILABLE))
        one.engine.commit(batch)
        assert one.engine.upkeep.check() == []
        assert one.match_snapshot(A[:6]) in (0, 6)


def test_a_snapshot_that_is_pending_here_and_stored_by_another_process_can_be_thinned(tmp_path):
    with two_stores(tmp_path) as (one, two):
        ours = pending_here_and_stored_there(one, two)
        one.match(A)
        one.engine._catalog.discard_snapshot(ours.page)
        one.engine.commit([ours])
        assert one.stored_keys() == {ours.page.parent}


def test_a_page_that_is_taken_for_damaged_in_a_transaction_keeps_its_parent(tmp_path):
    with two_stores(tmp_path, max_entries=2) as (one, _):
        one.put(A[:8])
        batch = one.announce(B[:4])
        page = one.engine.match(NS, as_tokens(A[:8]), P).pages[1]
        while_space_is_made(one, lambda: one.engine._catalog.mark_damaged(page))
        one.engine.commit(batch)
        assert one.engine.upkeep.check() == []


def test_a_page_that_is_deleted_before_its_engine_knows_that_it_is_stored_leaves_the_index(tmp_path):
    with two_stores(tmp_path, max_entries=3) as (one, two):
        batch = one.announce(A)
        keep = one.engine._ram.keep

        def evicted(*_):
            # the transaction has ended, and the catalog does not know it yet
            one.engine._ram.keep = keep
            two.put(B)
            one.match(A)

        one.engine._ram.keep = evicted
        assert one.engine.commit(batch) == 3
        assert one.match(A) == 0
        assert known_keys(one.engine) == one.stored_keys()
