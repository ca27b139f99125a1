"""Commits: one transaction for pages, uses and deletions, whatever happens meanwhile."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest

from prefixstore.engine.budget import Quota
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.waiting import DropReason
from prefixstore.errors import FullError
from prefixstore.format.keys import SNAPSHOT, as_tokens, page_keys
from prefixstore.format.record import Record, StoredPage, Usage, checksum
from tests.support.engines import MIB, NS, A, B, MemoryPages, P, entry, state_of, store_of
from tests.support.faults import FaultyBackend
from tests.support.fragile import known_keys

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


def test_a_tail_that_is_continued_just_after_it_was_written_is_deleted_with_the_next_commit():
    with store_of() as store:
        longer = []
        tail = store.announce([1, 2])
        # between the end of the transaction and the moment when the catalog learns of it
        store.engine._ram.keep = lambda *_: longer.extend(store.announce([1, 2, 3]))
        assert store.engine.commit(tail) == 1
        assert store.match([1, 2, 3]) == 3
        assert store.engine.commit(longer) == 1
        assert store.stored_keys() == {longer[0].page.key}
        assert known_keys(store.engine) == store.stored_keys()


def test_the_space_of_a_tail_is_that_of_the_page_that_continues_it():
    with store_of(max_bytes=2 * entry(2) + entry(1), max_entries=3) as store:
        for tokens in ([1, 2], [5, 6], [7]):
            store.put(tokens)
        assert store.put([7, 8], 1000 - 4) == 1
        assert store.counters["evictions"] == 0
        assert len(store.stored_keys()) == 3


def test_the_quota_counts_a_tail_for_the_page_that_continues_it_and_evicts_nothing_for_that():
    """The tail cannot be evicted for it, and is gone when it is written."""
    with store_of(quota=Quota(3 * (1000 + 4 * P))) as store:
        store.put(B[:P], 1000)
        store.put([1, 2, 3], 1500)
        assert store.put([1, 2, 3, 4], 1900) == 1
        assert (store.match([1, 2, 3, 4]), store.match(B[:P])) == (4, P)
        assert store.counters["evictions"] == 0


# -- uses --------------------------------------------------------------------------------------------------------------


def test_uses_of_a_pending_page_are_counted_once():
    with store_of() as store:
        batch = store.announce(A[:4])
        assert store.fetch(A) == store.fetch(A) == 1
        store.engine.commit(batch)
        store.fetch(A)
        store.engine.commit([])
        with store.backend.view() as view:
            assert view.usage(batch[0].page.key).hits == 3


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
        assert store.engine.lookups.missing(NS, as_tokens(B[:4]), P) == [(0, 4)]


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

        encode, store.engine.captures._committer._encode = store.engine.captures._committer._encode, broken
        batch = store.announce(A)
        with pytest.raises(ZeroDivisionError):
            store.engine.commit(batch)
        assert store.match(A) == 0
        store.engine.captures._committer._encode = encode
        assert store.put(A) == 3


# -- snapshots that are deleted at the same time -----------------------------------------------------------------------


def test_a_snapshot_that_is_given_up_while_it_is_written_leaves_no_orphan():
    class InterferingBackend(MemoryPages):
        """Thins a snapshot at the moment when space is made for it."""

        interfere = None

        @contextmanager
        def update(self):
            with super().update() as transaction:
                cost = transaction.cost

                def asked(record, n_bytes):
                    if record.form == SNAPSHOT:
                        self.interfere()
                    return cost(record, n_bytes)

                transaction.cost = asked
                yield transaction

    backend = InterferingBackend()
    with store_of(backend, max_entries=1) as store:
        store.put(A[:4])
        parent = page_keys(NS, as_tokens(A), P)[0]
        buffer = store.buffers.acquire(1000)
        new = PendingPage.of(NS, b"{}", parent, 4, as_tokens(A[4:6]).tobytes(), buffer, form=SNAPSHOT)
        assert store.engine.captures.announce(new)
        backend.interfere = lambda: store.engine._catalog.discard_snapshot(new.page)
        assert store.engine.commit([new]) == 0
        buffer.release()
        assert store.engine.upkeep.check() == []
        assert new.page.key not in store.stored_keys()


def test_nothing_is_evicted_for_a_page_that_cannot_be_written():
    with store_of(max_entries=2) as store:
        store.put(A[:8])
        before = store.stored_keys()
        buffer = store.buffers.acquire(1000)
        new = PendingPage.of(NS, b"{}", page_keys(NS, as_tokens(B), P)[0], 4, as_tokens(B[4:8]).tobytes(), buffer)
        assert store.engine.captures.announce(new)
        assert store.engine.commit([new]) == 0
        buffer.release()
        assert store.stored_keys() == before
        assert store.counters.group("dropped") == {"orphan": 1}


def test_a_use_during_a_commit_is_neither_lost_nor_counted_twice():
    with store_of() as store:
        store.put(A)
        store.fetch(A)
        # another prompt uses the pages between the transaction and the moment when the catalog learns of it
        keep = store.engine._ram.keep
        store.engine._ram.keep = lambda *arguments: (store.fetch(A), keep(*arguments))
        store.put(B)
        store.engine._ram.keep = keep
        store.engine.commit([])
        with store.backend.view() as view:
            hits = {view.usage(page.key).hits for page in store.engine.match(NS, as_tokens(A), P).pages}
        # one by the first fetch, and one for each of the three pages of B
        assert hits == {4}


def test_a_state_that_finds_no_memory_in_ram_does_not_undo_the_commit(monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError

    with store_of() as store:
        store.open(ram_bytes=MIB)
        monkeypatch.setattr("prefixstore.engine.ram.np.frombuffer", no_memory)
        assert store.put(A) == 3
        monkeypatch.undo()
        assert store.counters.group("dropped") == {}
        assert store.engine.ram_bytes == 0
        assert store.fetch(A) == 3


def test_a_page_that_was_cleared_and_captured_again_is_not_refused_with_its_predecessor():
    with store_of() as store:
        (first,) = store.announce(A[:4])
        store.engine._catalog.drop([first], DropReason.ERROR)
        (second,) = store.announce(A[:4])
        store.engine._catalog.refuse(first, DropReason.BUDGET)
        assert store.engine.commit([second]) == 1
        assert store.match(A[:4]) == 4


def test_what_is_captured_while_a_namespace_is_cleared_goes_with_what_it_continues_or_stays(monkeypatch):
    with store_of() as store:
        store.put(A)
        delete = store.engine.deleter._delete_next

        def meanwhile(*arguments, **options):
            # another prompt continues the last page before it is deleted, and the first one is captured again after
            store.put([*A, 5])
            deleted = delete(*arguments, **options)
            store.put(A)
            return deleted

        monkeypatch.setattr(store.engine.deleter, "_delete_next", meanwhile)
        assert store.engine.upkeep.clear(NS) == 4
        assert store.match([*A, 5]) == 12


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


def test_an_engine_without_housekeeping_deletes_nothing_by_itself():
    with store_of() as store:
        store.put(A)
        pages = store.engine.match(NS, as_tokens(A), P).pages
        store.open(housekeeping=False, write_behind=False)
        store.engine.match(NS, as_tokens(A), P)
        store.engine._catalog.mark_damaged(pages[1])
        assert not store.engine.captures.has_deferred
        store.put(B)
        assert len(store.stored_keys()) == 6
