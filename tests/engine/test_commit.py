"""Commits: one transaction for pages, uses and deletions, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from prefixstore.engine.pending import PendingPage
from prefixstore.errors import FullError
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.record import Record, StoredPage, Usage, checksum
from tests.support.engines import NS, A, B, MemoryPages, P, state_of, store_of
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


def test_nothing_is_evicted_for_a_page_that_cannot_be_written():
    with store_of(max_entries=2) as store:
        store.put(A[:8])
        before = store.stored_keys()
        buffer = store.buffers.acquire(1000)
        new = PendingPage.of(NS, b"{}", page_keys(NS, as_tokens(B), P)[0], 4, as_tokens(B[4:8]).tobytes(), buffer)
        assert store.engine.announce(new)
        assert store.engine.commit([new]) == 0
        buffer.release()
        assert store.stored_keys() == before
        assert store.counters.group("dropped") == {"orphan": 1}


def stored_pages(n, *, namespace=NS, **usage):
    """Pages of a file, as many as wanted, each the first of a sequence."""
    for number in range(n):
        tokens = as_tokens([number] * P).tobytes()
        state = state_of(tokens)
        record = Record(namespace, namespace, 0, tokens, 0, len(state), len(state), checksum(state), 0, 1 + number)
        yield StoredPage(record.key, record, Usage(1 + number, **usage), state)


def test_imported_pages_compete_for_the_space_with_each_other_and_with_others():
    with store_of(max_entries=10) as store:
        for number in range(100, 106):
            store.put([number] * P)
        # older than what is there, and one of them pinned
        batch = [*list(stored_pages(8)), *list(stored_pages(9, pinned=True))[8:]]
        done = store.engine.importer.import_pages(batch, {NS: b'{"n":1}'})
        assert done.pages == 4
        assert done.refused == 5
        keys = store.stored_keys()
        assert batch[-1].key in keys, "a pinned page is kept"
        # of the others the newest
        assert {page.key for page in batch[5:8]} <= keys
        assert all(store.match([number] * P) == P for number in range(100, 106))


def test_an_engine_without_housekeeping_deletes_nothing_by_itself():
    with store_of() as store:
        store.put(A)
        pages = store.engine.match(NS, as_tokens(A), P).pages
        store.open(housekeeping=False, write_behind=False)
        store.engine.match(NS, as_tokens(A), P)
        store.engine._catalog.mark_damaged(pages[1])
        assert not store.engine.has_deferred
        store.put(B)
        assert len(store.stored_keys()) == 6
