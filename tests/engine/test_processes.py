"""Two engines on one location, as two processes have them."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from tests.support.engines import A, B, snapshot_of, two_stores


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


@pytest.fixture
def clock(monkeypatch):
    now = [time.time_ns()]
    monkeypatch.setattr("time.time_ns", lambda: now[0])
    return now


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
