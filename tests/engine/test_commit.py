"""Commits: one transaction for pages, uses and deletions, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from prefixstore.errors import FullError
from prefixstore.format.keys import as_tokens
from tests.support.engines import NS, A, B, MemoryPages, store_of
from tests.support.faults import FaultyBackend

# -- tails -------------------------------------------------------------------------------------------------------------


def test_a_tail_is_replaced_by_the_page_that_continues_it():
    with store_of() as store:
        for n in (1, 2, 3, 4):
            assert store.put([1, 2, 3, 4][:n]) == 1
            assert len(store.stored_keys()) == 1
        assert store.put([1, 2, 9]) == 1
        assert len(store.stored_keys()) == 2
        assert store.match([1, 2, 3, 4]) == 4
        assert store.counters.group("dropped") == {}


def test_a_pending_tail_that_is_continued_is_never_written():
    with store_of() as store:
        batch = store.announce([1, 2]) + store.announce([1, 2, 3]) + store.announce([1, 2, 3, 4, 5])
        assert len(batch) == 4
        assert store.engine.commit(batch) == 2
        assert store.match([1, 2, 3, 4, 5]) == 5
        assert len(store.stored_keys()) == 2


# -- uses --------------------------------------------------------------------------------------------------------------


# -- a backend that fails ----------------------------------------------------------------------------------------------


def test_a_full_backend_is_tried_again_after_space_was_made():
    backend = FaultyBackend(MemoryPages(), "put", FullError("full"), at=4, times=2)
    with store_of(backend) as store:
        store.put(A)
        assert store.put(B) == 3
        assert store.counters.group("dropped") == {}
        assert backend.failures == 2
        assert store.match(B) == 12


@pytest.mark.slow
def test_pages_that_find_no_space_are_dropped_and_counted_without_an_exception():
    backend = FaultyBackend(MemoryPages(), "commit", FullError("full"), at=2, times=None)
    with store_of(backend) as store:
        store.put(A)
        assert store.put(B) == 0
        assert store.counters.group("dropped") == {"full": 3}
        # the failed attempts have left no trace
        assert [store.match(A), store.match(B)] == [12, 0]
        assert store.fetch(A) == 3
        assert store.engine.wants(NS, NS, as_tokens(B[:4]).tobytes())


@pytest.mark.parametrize("operation", ["update", "put", "delete", "commit"])
def test_a_backend_that_fails_once_costs_one_batch(operation):
    backend = FaultyBackend(MemoryPages(), operation, at=10**9)
    with store_of(backend, max_entries=5) as store:
        store.put(A)
        store.match(A)
        calls = backend.calls.get(operation, 0)
        backend._failing = range(calls + 1, calls + 2)
        assert store.put(B) == 0
        assert backend.failures == 1
        assert store.counters.group("dropped") == {"unavailable": 3}
        assert [store.match(A), store.match(B)] == [12, 0]
        assert store.put(B) == 3
        assert store.match(B) == 12


def test_a_bug_in_the_codec_leaves_no_unreadable_page():
    with store_of() as store:

        def broken(namespace, raw):
            raise ZeroDivisionError

        encode, store.engine._committer._encode = store.engine._committer._encode, broken
        batch = store.announce(A)
        with pytest.raises(ZeroDivisionError):
            store.engine.commit(batch)
        assert store.match(A) == 0
        store.engine._committer._encode = encode
        assert store.put(A) == 3


# -- snapshots that are deleted at the same time -----------------------------------------------------------------------
