"""Commits: one transaction for pages, uses and deletions, whatever happens meanwhile."""

import itertools

import pytest

from prefixstore.errors import FullError
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import Record, StoredPage, Usage, checksum
from tests.support.engines import NS, A, B, MemoryPages, P, state_of, store_of, two_stores
from tests.support.faults import FlakyBackend

# -- a backend that fails ----------------------------------------------------------------------------------------------


def test_a_full_backend_is_tried_again_after_space_was_made():
    backend = FlakyBackend(MemoryPages(), "put", error=FullError("full"), failing=(4, 5))
    with store_of(backend) as store:
        store.put(A)
        assert store.put(B) == 3
        assert store.counters.group("dropped") == {}
        assert backend.n_failed == 2
        assert store.match(B) == 12


@pytest.mark.slow
def test_pages_that_find_no_space_are_dropped_and_counted_without_an_exception():
    backend = FlakyBackend(MemoryPages(), "commit", error=FullError("full"), failing=range(2, 100))
    with store_of(backend) as store:
        store.put(A)
        assert store.put(B) == 0
        assert store.counters.group("dropped") == {"full": 3}
        # the failed attempts have left no trace
        assert [store.match(A), store.match(B)] == [12, 0]
        assert store.fetch(A) == 3
        assert store.engine.lookups.missing(NS, as_tokens(B[:4]), P) == [(0, 4)]


# -- beside restores and other processes -------------------------------------------------------------------------------


def test_a_restore_that_began_before_the_commit_keeps_its_buffers():
    with store_of() as store:
        batch = store.announce(A)
        path = store.path(A)
        with store.engine.fetching(path.pages) as states:
            first = next(states)
            assert store.engine.commit(batch) == 3
            for new in batch:
                new.buffer.release()
            assert store.engine.queued_bytes == 0
            # no one gets this memory yet
            other = store.engine.write_queue.acquire(1000)
            other.view[:] = bytes(1000)
            assert bytes(first) == state_of(path.pages[0].key)
            assert [bytes(state) for state in states] == [state_of(page.key) for page in path.pages[1:]]


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


# -- imports ----------------------------------------------------------------------------------------------------------


def stored_pages(n, *, namespace=NS, **usage):
    """Pages of a file, as many as wanted, each the first of a sequence."""
    for number in range(n):
        tokens = as_tokens([number] * P).tobytes()
        state = state_of(tokens)
        record = Record(namespace, namespace, 0, tokens, 0, len(state), len(state), checksum(state), 0, 1 + number)
        yield StoredPage(record.key, record, Usage(1 + number, **usage), state)


def test_an_import_that_failed_can_be_repeated(monkeypatch):
    batch, settings = list(stored_pages(6)), {NS: b"{}"}
    with store_of() as store:
        announce, calls = store.engine._catalog.announce, itertools.count()

        def failing(new):
            if next(calls) == 3:
                raise MemoryError
            return announce(new)

        monkeypatch.setattr(store.engine._catalog, "announce", failing)
        with pytest.raises(MemoryError):
            store.engine.importer.import_pages(batch, settings)
        monkeypatch.undo()
        assert store.engine.importer.import_pages(batch, settings).pages == 6
        assert store.stored_keys() == {page.key for page in batch}


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
