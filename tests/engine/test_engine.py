"""The engine: what is stored, what is evicted, and what happens when the backend fails."""

from __future__ import annotations

import itertools
import os
import random
import struct
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import lmdb
import numpy as np
import pytest
import xxhash

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.memory import ENTRY_BYTES, MemoryBackend
from prefixstore.buffers import BufferPool
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import FullError, UnavailableError
from prefixstore.format.autocodec import pick
from prefixstore.format.keys import as_tokens, page_key, page_keys
from prefixstore.format.record import RECORD, SNAPSHOT
from prefixstore.stats import Counters
from prefixstore.testing import FaultyBackend, SlowBackend
from tests.support.engines import Writer

KIB, MIB = 1 << 10, 1 << 20
P = 4  # tokens in a page
NS, OTHER = b"n" * 16, b"o" * 16


def state_of(key: bytes, size: int = 1000) -> bytes:
    """The state of a page, which nothing compresses."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(size)


@dataclass
class Store:
    """An engine, and what a test wants to do with it."""

    backend: object
    max_bytes: int = 64 * MIB
    max_entries: int | None = None
    codec: str = "raw"
    leases: list = field(default_factory=list)

    def __post_init__(self):
        self.open()
        self.buffers = BufferPool(1 << 30)

    def open(self, **options):
        """A new engine on the backend."""
        self.counters = Counters()
        budget = Budget(self.max_bytes, self.max_entries)
        self.engine = Engine(self.backend, budget, POLICIES["lru"](), pick(self.codec), self.counters, **options)

    def pages(self, tokens, size=1000, *, namespace=NS) -> list[PendingPage]:
        """The pages of a sequence that are worth taking, the tail included, as captured now."""
        raw = as_tokens(tokens).tobytes()
        parent, news = namespace, []
        for start in range(0, len(raw), 4 * P):
            piece = raw[start : start + 4 * P]
            key = page_key(parent, piece)
            if self.engine.wants(namespace, parent, piece) or news:
                buffer = self.buffers.acquire(size)
                buffer.view[:] = state_of(key, size)
                news.append(PendingPage.of(namespace, b'{"n":1}', parent, start // 4, piece, buffer))
            parent = key
        return news

    def announce(self, tokens, size=1000, **options) -> list[PendingPage]:
        return [new for new in self.pages(tokens, size, **options) if self.engine.announce(new)]

    def put(self, tokens, size=1000, **options) -> int:
        """Store what is missing of a sequence; how many pages of it were written."""
        self.engine.match(NS, as_tokens(tokens), P)
        batch = self.announce(tokens, size, **options)
        stored = self.engine.commit(batch)
        for new in batch:
            new.buffer.release()
        return stored

    def match(self, tokens, *, namespace=NS) -> int:
        return self.engine.match(namespace, as_tokens(tokens), P).n_tokens

    def fetch(self, tokens) -> int:
        """Restore a prompt, verify the bytes, note the use; how many pages came."""
        path = self.engine.match(NS, as_tokens(tokens), P)
        loaded = []
        with self.engine.fetching(path.pages) as states:
            for page, state in zip(path.pages, states, strict=False):
                assert bytes(state) == state_of(page.key, len(state))
                loaded.append(page)
        self.engine.touch(NS, loaded)
        return len(loaded)

    def stored_keys(self) -> set[bytes]:
        with self.backend.view() as view:
            return {key for key, _, _ in view.scan()}

    def close(self):
        assert self.engine.check() == []
        self.engine.close()


@contextmanager
def store_of(backend=None, **options):
    """A store that is checked at the end."""
    store = Store(MemoryBackend() if backend is None else backend, **options)
    with closing(store):
        yield store


def entry(n_tokens=P, size=1000):
    """What a page costs in memory."""
    return ENTRY_BYTES + 4 * n_tokens + size


def wait_for(condition, what="it"):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, f"{what} does not come"
        time.sleep(0.002)


A, B, C = [1] * 12, [2] * 12, [3] * 12


# -- match and fetch ---------------------------------------------------------------------------------------------------


def test_the_longest_stored_prefix_is_found_to_the_token():
    with store_of() as store:
        assert store.put([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 3
        for prompt, expected in [
            ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 10),
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], 9),
            ([1, 2, 3, 4, 5, 6, 9, 9], 6),
            ([1, 9], 1),
            ([9, 1], 0),
            ([], 0),
        ]:
            assert store.match(prompt) == expected
            assert store.match(prompt, namespace=OTHER) == 0
        assert store.fetch([1, 2, 3, 4, 5, 6, 9, 9]) == 2


def test_a_page_is_found_and_restored_before_it_is_written():
    with store_of() as store:
        batch = store.announce(A)
        assert store.stored_keys() == set()
        assert store.match(A) == 12
        assert store.fetch(A) == 3
        assert store.engine.commit(batch) == 3
        for new in batch:
            new.buffer.release()
        assert len(store.stored_keys()) == 3
        assert store.fetch(A) == 3


def test_a_restore_that_began_before_the_commit_keeps_its_buffers():
    with store_of() as store:
        batch = store.announce(A)
        path = store.engine.match(NS, as_tokens(A), P)
        with store.engine.fetching(path.pages) as states:
            first = next(states)
            assert store.engine.commit(batch) == 3
            for new in batch:
                new.buffer.release()
            assert store.buffers.in_use == 3000
            # nobody gets these buffers yet
            other = store.buffers.acquire(1000)
            other.view[:] = bytes(1000)
            assert bytes(first) == state_of(path.pages[0].key)
            assert [bytes(state) for state in states] == [state_of(page.key) for page in path.pages[1:]]
            other.release()
        assert store.buffers.in_use == 0


def test_the_codec_that_packs_gives_back_the_same_bytes():
    with store_of(codec="zstd") as store:
        tokens = as_tokens(A[:4]).tobytes()
        buffer = store.buffers.acquire(100_000)
        buffer.view[:] = bytes(100_000)
        new = PendingPage.of(NS, b"{}", NS, 0, tokens, buffer)
        assert store.engine.announce(new)
        assert store.engine.commit([new]) == 1
        buffer.release()
        path = store.engine.match(NS, as_tokens(A), P)
        with store.engine.fetching(path.pages) as states:
            assert [bytes(state) for state in states] == [bytes(100_000)]
        used, stored, raw = store.engine.used()
        assert (used.entries, raw) == (1, 100_000)
        assert stored < 1000


# -- what is worth taking ----------------------------------------------------------------------------------------------


def test_wanted_is_what_is_not_here_and_has_its_parent_here():
    with store_of() as store:
        full, tail = as_tokens([1, 1, 1, 1]).tobytes(), as_tokens([1, 1]).tobytes()
        parent = page_key(NS, full)
        engine = store.engine
        assert engine.wants(NS, NS, full)
        assert not engine.wants(NS, parent, full)
        store.put([1, 1, 1, 1])
        assert not engine.wants(NS, NS, full)
        assert not engine.wants(NS, NS, tail)  # covered by the full page
        assert engine.wants(NS, parent, tail)
        assert engine.wants(OTHER, OTHER, full)


def test_missing_are_the_pages_of_a_sequence_that_are_not_here():
    with store_of() as store:
        store.put(A[:8])
        keys = page_keys(NS, as_tokens([1] * 20), P)
        assert store.engine.missing(keys) == [2, 3, 4]
        store.put([1] * 20)
        assert store.engine.missing(keys) == []


def test_a_page_that_was_refused_is_not_taken_again_until_something_changes():
    with store_of(max_bytes=3 * entry()) as store:
        assert store.put([1] * 4, 10_000) == 0
        keys = page_keys(NS, as_tokens([1] * 8), P)
        assert store.engine.missing(keys) == []
        assert not store.engine.wants(NS, NS, as_tokens([1] * 4).tobytes())
        store.put(B[:4])
        store.match(B)
        assert store.engine.missing(keys) == [0, 1]


def test_a_tail_gives_way_to_the_page_that_continues_it():
    with store_of() as store:
        for n in (1, 2, 3, 4):
            assert store.put([1, 2, 3, 4][:n]) == 1
            assert len(store.stored_keys()) == 1
        assert store.put([1, 2, 9]) == 1
        assert len(store.stored_keys()) == 2
        assert store.match([1, 2, 3, 4]) == 4
        assert store.counters.group("dropped") == {}


def test_a_tail_that_waits_to_be_written_gives_way_unwritten():
    with store_of() as store:
        batch = store.announce([1, 2]) + store.announce([1, 2, 3]) + store.announce([1, 2, 3, 4, 5])
        assert len(batch) == 4
        assert store.engine.commit(batch) == 2
        assert store.match([1, 2, 3, 4, 5]) == 5
        assert len(store.stored_keys()) == 2


def test_the_page_that_continues_a_pinned_tail_is_pinned():
    with store_of(max_entries=2) as store:
        store.put([1, 2])
        assert store.engine.pin(NS, as_tokens([1, 2]), P, pinned=True) == 2
        store.put([1, 2, 3])
        store.put(B[:4])
        store.put(C[:4])
        assert [store.match(tokens) for tokens in ([1, 2, 3], B, C)] == [3, 0, 4]


# -- eviction ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first():
    with store_of(max_bytes=6 * entry()) as store:
        store.put(A)
        store.put(B)
        store.fetch(A)
        store.put(C[:4])
        assert [store.match(tokens) for tokens in (A, B, C)] == [12, 8, 4]
        store.put(C)
        assert [store.match(tokens) for tokens in (A, B, C)] == [12, 0, 12]
        assert store.counters["evictions"] == 3


def test_a_parent_outlives_its_children_however_old_it_is():
    with store_of(max_bytes=6 * entry()) as store:
        store.put(A[:4])
        for number in range(10, 40):
            store.put([1, 1, 1, 1, number])
            assert store.match(A) == 4
            assert store.engine.check() == []


def test_pinned_pages_stay_and_are_evicted_again_when_they_are_unpinned():
    with store_of(max_bytes=3 * entry()) as store:
        store.put(A)
        assert store.engine.pin(NS, as_tokens(A), P, pinned=True) == 12
        assert store.put(B) == 0
        assert store.counters.group("dropped") == {"budget": 3}
        assert store.match(A) == 12
        assert store.engine.pin(NS, as_tokens([*A, 1]), P, pinned=False) == 12
        assert store.put(B) == 3
        assert [store.match(A), store.match(B)] == [0, 12]


def test_no_more_entries_than_allowed():
    with store_of(max_entries=3) as store:
        for number in range(20):
            assert store.put([number] * 4) == 1
            assert len(store.stored_keys()) == min(number + 1, 3)
        assert [store.match([number]) for number in range(16, 20)] == [0, 1, 1, 1]


def test_a_page_larger_than_the_budget_is_dropped_and_evicts_nothing():
    with store_of(max_bytes=4 * entry()) as store:
        store.put(A)
        assert store.put(B[:4], 4 * entry()) == 0
        assert store.counters.group("dropped") == {"budget": 1}
        assert store.counters["evictions"] == 0
        assert store.match(A) == 12


def test_pages_of_one_batch_do_not_evict_each_other():
    with store_of(max_bytes=4 * entry()) as store:
        assert store.put(list(range(40))) == 4
        assert store.match(list(range(40))) == 16
        assert store.counters.group("dropped") == {"budget": 6}


def test_the_budget_holds_whatever_comes(tmp_path):
    chance = random.Random(3)
    for backend, size in ((MemoryBackend(), 20_000), (LMDBBackend(tmp_path, MIB), MIB)):
        with store_of(backend, max_bytes=size, max_entries=30) as store:
            for _ in range(150):
                tokens = [chance.randrange(3) for _ in range(chance.randrange(1, 20))]
                store.put(tokens, chance.choice([10, 500, 3000, 9000]))
                used = store.engine.used()[0]
                assert used.bytes <= size
                assert used.entries <= 30
                assert used.entries == len(store.stored_keys())
            assert store.engine.check() == []


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path, database, key, at):
    """Flip a bit of a stored value, past the store."""
    with lmdb.open(str(path), max_dbs=8, map_size=64 * MIB) as env:
        handle = env.open_db(database)
        with env.begin(write=True) as txn:
            value = bytearray(txn.get(key, db=handle))
            value[at] ^= 16
            txn.put(key, bytes(value), db=handle)


def raw_keys(path, database):
    with lmdb.open(str(path), max_dbs=8, readonly=True) as env, env.begin(db=env.open_db(database)) as txn:
        return {bytes(key) for key, _ in txn.cursor()}


@pytest.mark.parametrize("damage", ["payload", "no payload", "record", "other tokens"])
def test_a_damaged_page_ends_a_restore_and_goes_with_all_behind_it(tmp_path, damage):
    tokens = list(range(16))
    keys = page_keys(NS, as_tokens(tokens), P)
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        store.put(tokens)
        store.put([7] * 8)
    if damage == "payload":
        flip(tmp_path, b"payloads", keys[1], 500)
    elif damage == "record":
        flip(tmp_path, b"records", keys[1], RECORD.size + 1)
    else:
        with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
            if damage == "no payload":
                assert txn.delete(keys[1], db=env.open_db(b"payloads", txn))
            else:
                records = env.open_db(b"records", txn)
                txn.put(keys[1], txn.get(keys[2], db=records), db=records)
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        assert {violation.key for violation in store.engine.check()} >= {keys[1].hex()}
        # a record is read when the store is opened, a payload when it is wanted
        assert store.match(tokens) == (4 if damage in ("record", "other tokens") else 16)
        assert store.fetch(tokens) == 1
        assert store.match(tokens) == 4
        assert store.engine.has_deferred
        assert store.engine.commit([]) == 0
        assert store.counters["corrupt"] == 3
        assert not store.engine.has_deferred
        assert store.engine.check() == []
        assert store.match([7] * 8) == 8
        assert store.put(tokens) == 3
        assert store.fetch(tokens) == 4
    assert raw_keys(tmp_path, b"payloads") == raw_keys(tmp_path, b"records") == raw_keys(tmp_path, b"usage")
    assert len(raw_keys(tmp_path, b"records")) == 6


def test_a_record_that_is_damaged_meanwhile_is_replaced_and_spoils_no_batch(tmp_path):
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        store.put(A[:4])
    key = page_keys(NS, as_tokens(A), P)[0]
    flip(tmp_path, b"records", key, 20)
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        # no match before: the index is empty, the page is captured once more
        batch = store.announce(A) + store.announce(B)
        assert store.engine.commit(batch) == 6
        assert store.match(A) == 12
        assert store.counters.group("dropped") == {}


def test_a_page_without_the_page_before_it_is_removed(tmp_path):
    tokens = list(range(12))
    keys = page_keys(NS, as_tokens(tokens), P)
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        store.put(tokens)
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        for name in (b"records", b"usage", b"payloads"):
            txn.delete(keys[0], db=env.open_db(name, txn))
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        assert [violation.rule for violation in store.engine.check()] == ["parent"]
        assert store.match(tokens) == 0
        store.engine.commit([])
        assert store.stored_keys() == set()


def test_the_page_of_a_newer_version_is_left_alone(tmp_path):
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        store.put(A)
        store.put(B)
    keys = page_keys(NS, as_tokens(A), P)
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        records = env.open_db(b"records", txn)
        future = b"\xff" + txn.get(keys[1], db=records)[1:-8]
        txn.put(keys[1], future + struct.pack("<Q", xxhash.xxh3_64_intdigest(future)), db=records)
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        assert store.match(A) == 4
        batch = store.pages(A)
        announced = [new for new in [*batch, *store.pages(C)] if store.engine.announce(new)]
        # A's second page is not ours to replace, and what is behind it cannot be stored; C can
        assert store.engine.commit(announced) == 3
        assert store.counters.group("dropped") == {"unavailable": 2}
        assert keys[1] in store.stored_keys()
        assert store.match(C) == 12


def test_what_another_engine_stored_behind_a_damaged_page_goes_with_it(tmp_path):
    tokens = list(range(12))
    with store_of(LMDBBackend(tmp_path, MIB)) as one:
        one.put(tokens[:4])
        key = page_keys(NS, as_tokens(tokens), P)[0]
    flip(tmp_path, b"payloads", key, 3)
    with store_of(LMDBBackend(tmp_path, MIB)) as one, store_of(LMDBBackend(tmp_path, MIB)) as two:
        assert one.match(tokens) == two.match(tokens) == 4
        assert one.fetch(tokens) == 0
        assert two.put(tokens) == 2  # it has not looked at the first page
        assert one.engine.commit([]) == 0
        assert one.stored_keys() == set()
        assert one.engine.check() == []
        assert two.match(tokens) == 0


def test_a_page_that_another_engine_has_mended_is_not_removed(tmp_path):
    tokens = list(range(12))
    with store_of(LMDBBackend(tmp_path, MIB)) as one:
        one.put(tokens)
        key = page_keys(NS, as_tokens(tokens), P)[0]
    flip(tmp_path, b"payloads", key, 3)
    with store_of(LMDBBackend(tmp_path, MIB)) as one, store_of(LMDBBackend(tmp_path, MIB)) as two:
        assert one.fetch(tokens) == two.fetch(tokens) == 0
        two.engine.commit([])
        assert two.put(tokens) == 3
        one.engine.commit([])
        assert len(one.stored_keys()) == 3
        assert one.fetch(tokens) == two.fetch(tokens) == 3


# -- a backend that fails ----------------------------------------------------------------------------------------------


def test_a_full_backend_is_tried_again_after_room_was_made():
    backend = FaultyBackend(MemoryBackend(), "put", FullError("full"), at=4, times=2)
    with store_of(backend) as store:
        store.put(A)
        assert store.put(B) == 3
        assert store.counters.group("dropped") == {}
        assert backend.failures == 2
        assert store.match(B) == 12


def test_what_finds_no_room_at_last_is_dropped_and_counted_and_no_exception():
    backend = FaultyBackend(MemoryBackend(), "commit", FullError("full"), at=2, times=None)
    with store_of(backend) as store:
        store.put(A)
        assert store.put(B) == 0
        assert store.counters.group("dropped") == {"full": 3}
        # nothing of the failed attempts shows
        assert [store.match(A), store.match(B)] == [12, 0]
        assert store.fetch(A) == 3
        assert store.engine.wants(NS, NS, as_tokens(B[:4]).tobytes())


@pytest.mark.parametrize("operation", ["update", "record", "put", "delete", "commit"])
def test_a_backend_that_fails_once_costs_a_batch_and_no_more(operation):
    backend = FaultyBackend(MemoryBackend(), operation, at=10**9)
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


def test_a_clear_that_fails_forgets_nothing():
    backend = FaultyBackend(MemoryBackend(), "commit", at=2)
    with store_of(backend) as store:
        store.put(A)
        with pytest.raises(UnavailableError):
            store.engine.clear(NS)
        assert store.match(A) == 12
        assert store.engine.clear(NS) == 3
        assert store.match(A) == 0
        assert store.stored_keys() == set()


def test_a_pin_that_fails_pins_nothing():
    backend = FaultyBackend(MemoryBackend(), "commit", at=2)
    with store_of(backend, max_entries=3) as store:
        store.put(A)
        with pytest.raises(UnavailableError):
            store.engine.pin(NS, as_tokens(A), P, pinned=True)
        assert store.put(B) == 3


def test_a_backend_that_cannot_be_read_is_an_error_for_the_caller_and_no_harm():
    backend = FaultyBackend(MemoryBackend(), "view", at=3)
    with store_of(backend) as store:
        store.put(A)
        store.match(A)
        with pytest.raises(UnavailableError):
            store.match(A)
        assert store.match(A) == 12


@pytest.mark.parametrize("operation", ["record", "payload"])
def test_a_page_that_cannot_be_read_now_ends_a_restore_and_stays(operation):
    backend = FaultyBackend(MemoryBackend(), operation, at=10**9)
    with store_of(backend) as store:
        store.put(A)
        store.match(A)
        calls = backend.calls.get(operation, 0)
        backend._failing = range(calls + 2, calls + 3)
        assert store.fetch(A) == 1
        assert store.counters.group("unreadable") == {"unavailable": 1}
        assert store.fetch(A) == 3


def test_a_page_that_cannot_be_read_while_the_index_is_refreshed_is_not_forgotten():
    backend = FaultyBackend(MemoryBackend(), "record", at=10**9)
    with store_of(backend) as store:
        store.match(A)
        store.put(A)
        calls = backend.calls["record"]
        backend._failing = range(calls + 2, calls + 3)
        with pytest.raises(UnavailableError):
            store.match(A)
        assert backend.failures == 1
        assert store.match(A) == 12


def test_a_fault_in_the_store_itself_leaves_no_page_that_cannot_be_read():
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


# -- two engines on one location ---------------------------------------------------------------------------------------


@contextmanager
def two_stores(path, **options):
    with store_of(LMDBBackend(path, MIB), **options) as one, store_of(LMDBBackend(path, MIB), **options) as two:
        yield one, two


def test_two_engines_see_what_the_other_has_committed_at_their_next_match(tmp_path):
    with two_stores(tmp_path) as (one, two):
        one.put(A)
        assert two.match(A) == 12
        assert two.fetch(A) == 3
        two.put(B)
        assert one.match(B) == 12
        assert two.engine.clear(NS) == 6
        assert [one.match(A), one.match(B)] == [0, 0]


def test_two_engines_keep_the_budget_together(tmp_path):
    with two_stores(tmp_path, max_bytes=MIB, max_entries=40) as (one, two):
        for number in range(60):
            assert one.put([1, number, 3, 4, 5], 10_000) == 2
            assert two.put([2, number, 3, 4, 5], 20_000) == 2
            used = one.engine.used()[0]
            assert used.bytes <= MIB
            assert used.entries <= 40
        assert used == two.engine.used()[0]
        assert used.bytes > 0.5 * MIB
        assert {*one.engine._catalog._index.pages} == {*two.engine._catalog._index.pages} == one.stored_keys()


def test_a_use_is_written_with_the_next_batch_and_heeded_by_the_other_engine(tmp_path):
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
        assert one.engine.has_deferred
        one.engine.commit([])
        assert not one.engine.has_deferred
        with one.backend.view() as view:
            assert view.usage(key).hits == 1
            assert view.usage(key).last_used > before.last_used
        two.put(C)
        assert [one.match(A), one.match(B), one.match(C)] == [12, 0, 12]


def test_uses_of_a_page_before_it_is_written_are_counted_once():
    with store_of() as store:
        batch = store.announce(A[:4])
        assert store.fetch(A) == store.fetch(A) == 1
        store.engine.commit(batch)
        store.fetch(A)
        store.engine.commit([])
        with store.backend.view() as view:
            assert view.usage(batch[0].page.key).hits == 3


def test_a_pin_of_one_engine_is_heeded_by_the_other(tmp_path):
    with two_stores(tmp_path, max_entries=3) as (one, two):
        one.put(A)
        assert two.match(A) == 12
        assert one.engine.pin(NS, as_tokens(A), P, pinned=True) == 12
        assert two.put(B) == 0
        assert two.match(A) == 12


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
        # neither has looked into the location before
        ours, theirs = one.announce(A), two.announce([*A, 5, 6])
        assert one.engine.commit(ours) == 3
        assert two.engine.commit(theirs) == 4
        assert two.match([*A, 5, 6]) == one.match([*A, 5, 6]) == 14
        assert two.counters.group("dropped") == one.counters.group("dropped") == {}
        assert one.engine.used()[1] == two.engine.used()[1] == 4000
        assert two.fetch([*A, 5, 6]) == 4


def test_an_older_snapshot_does_not_take_the_index_back(tmp_path):
    with two_stores(tmp_path) as (one, two):
        assert one.match(A) == 0
        with one.backend.view() as old:
            threads = [threading.Thread(target=two.put, args=(A,))]
            threads[0].start()
            threads[0].join()
            assert one.match(A) == 12
            behind = one.announce([*A, 5])
            assert len(behind) == 1
            # another thread opened its snapshot before, and gets its turn only now
            one.engine._catalog.refresh(old)
            assert one.match([*A, 5]) == 13
        assert one.engine.commit(behind) == 1
        assert one.counters.group("dropped") == {}


def test_a_tail_that_another_process_has_stored_meanwhile_is_not_forgotten_with_the_one_that_waits(tmp_path):
    """Forgotten, it would be left behind when what it follows is evicted for want of dependents."""
    with two_stores(tmp_path, max_entries=3) as (one, two):
        one.put(A[:4])
        tail = one.announce(A[:6])
        two.put(A[:6])
        assert one.match(A[:6]) == 6  # one knows that it is stored as well
        longer = one.announce(A[:8])
        one.engine.commit([*tail, *longer])
        assert one.engine.check() == []
        assert one.match(A[:8]) == 8
        for number in range(10, 20):
            one.put([number] * 4)
            assert one.engine.check() == []
        assert {*one.engine._catalog._index.pages} == one.stored_keys()


def test_an_index_that_missed_too_many_changes_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setattr("prefixstore.backends.lmdb.backend.CHANGES_KEPT", 2)
    with two_stores(tmp_path, max_entries=20) as (one, two):
        one.put(A)
        pending = one.announce([*A, 5])
        two.match(A)
        for number in range(10, 40):
            two.put([number] * 4)
            two.fetch(A)
        assert one.match([*A, 5]) == 13
        assert {*one.engine._catalog._index.pages} == one.stored_keys() | {pending[0].page.key}
        assert one.engine.commit(pending) == 1
        assert two.match([*A, 5]) == 13


# -- the writer --------------------------------------------------------------------------------------------------------


@contextmanager
def writer_of(store, queue_bytes=MIB, *, behind=True, read_only=False):
    store.open(queue_bytes=queue_bytes, write_behind=behind, read_only=read_only)
    writer = Writer(store.engine)
    store.buffers = store.engine._queue._buffers
    try:
        yield writer
    finally:
        writer.close()


@pytest.mark.parametrize("behind", [True, False])
def test_what_was_submitted_is_durable_after_a_flush(tmp_path, behind):
    with store_of(LMDBBackend(tmp_path, MIB)) as store, writer_of(store, behind=behind) as writer:
        assert [writer.submit(new) for new in store.pages(A)] == [True] * 3
        writer.flush()
        assert len(store.stored_keys()) == 3
        assert writer.queued_bytes == 0
        # known by now: the buffer goes back at once
        again = Store(MemoryBackend()).pages(A)
        assert [writer.submit(new) for new in again] == [False] * 3
        assert not any(new.buffer.hold() for new in again)


def test_close_writes_what_is_queued_and_noted():
    backend = SlowBackend(MemoryBackend(), 0.05, ("commit",))
    with store_of(backend) as store:
        with writer_of(store) as writer:
            for number in range(5):
                for new in store.pages([number] * 4):
                    writer.submit(new)
            store.fetch([4] * 4)
            assert writer.queued_bytes > 0
        assert writer.queued_bytes == 0
        assert len(store.stored_keys()) == 5
        assert not store.engine.has_deferred
        writer.close()
        writer.flush()


def test_a_page_that_is_submitted_after_the_close_is_written_and_nobody_hangs():
    with store_of() as store:
        with writer_of(store) as writer:
            for new in store.pages(A):
                writer.submit(new)
        for new in store.pages(B):
            assert writer.submit(new)
        closing_thread = threading.Thread(target=writer.close, daemon=True)
        closing_thread.start()
        closing_thread.join(20)
        assert not closing_thread.is_alive()
        assert store.match(B) == 12
        assert len(store.stored_keys()) == 6


def test_the_queue_is_bounded_and_has_room_again_when_its_pages_are_written():
    gate = threading.Event()

    class Gated(MemoryBackend):
        @contextmanager
        def update(self):
            gate.wait(20)
            with super().update() as transaction:
                yield transaction

    with store_of(Gated()) as store, writer_of(store, queue_bytes=2500) as writer:
        for number in (1, 2):
            (new,) = store.pages([number] * 4)
            assert writer.submit(new)
        assert writer.queued_bytes == 2000
        assert writer.acquire(1000) is None
        assert writer.acquire(500) is not None
        waiting = []
        thread = threading.Thread(target=lambda: waiting.append(writer.acquire(1000, wait=True)), daemon=True)
        thread.start()
        gate.set()
        thread.join(20)
        assert [buffer.view.nbytes for buffer in waiting] == [1000]
        writer.flush()
        assert len(store.stored_keys()) == 2


def test_uses_are_written_behind_without_a_batch(monkeypatch):
    monkeypatch.setattr("prefixstore.engine.queue.DEFERRED_SECONDS", 0.02)
    with store_of() as store:
        store.put(A)
        with writer_of(store) as writer:
            store.fetch(A)
            writer.nudge()
            wait_for(lambda: not store.engine.has_deferred, "the note")
        with store.backend.view() as view:
            assert {usage.hits for _, _, usage in view.scan()} == {1}


def test_a_reader_notes_nothing_and_flushes_nothing(tmp_path):
    LMDBBackend(tmp_path, MIB).close()
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        store.put(A)
    with store_of(LMDBBackend(tmp_path, MIB, read_only=True)) as store:
        with writer_of(store, read_only=True) as writer:
            assert store.fetch(A) == 3
            writer.nudge()
            writer.flush()
        assert store.engine.has_deferred
        assert store.counters.group("dropped") == {}


def test_a_flush_says_when_the_location_cannot_make_it_durable():
    with store_of(FaultyBackend(MemoryBackend(), "sync")) as store, writer_of(store) as writer:
        for new in store.pages(A):
            writer.submit(new)
        with pytest.raises(UnavailableError, match="sync"):
            writer.flush()
        writer.flush()
        assert store.match(A) == 12


def test_a_fault_does_not_end_the_thread_that_writes():
    backend = FaultyBackend(MemoryBackend(), "put", ZeroDivisionError(), at=2)
    with store_of(backend) as store, writer_of(store) as writer:
        for new in store.pages(A[:4]):
            writer.submit(new)
        writer.flush()
        for new in store.pages(B[:4]):
            writer.submit(new)
        writer.drain()
        assert store.counters.group("dropped") == {"error": 1}
        assert store.match(B) == 0
        for new in store.pages(B):
            writer.submit(new)
        writer.flush()
        assert store.fetch(B) == 3
        assert writer.queued_bytes == 0


def test_a_forked_child_writes_its_own_and_the_parent_its_own(tmp_path):
    with store_of(LMDBBackend(tmp_path, MIB)) as store:
        with writer_of(store) as writer:
            store.put(C)
            for new in store.pages(A):
                writer.submit(new)
            pid = os.fork()
            if pid == 0:
                done = 1
                try:
                    store.buffers = store.engine._queue._buffers
                    assert store.fetch(C) == 3
                    for new in store.pages(B):
                        writer.submit(new)
                    writer.close()
                    assert store.fetch(B) == 3
                    store.engine.close()
                    done = 0
                finally:
                    os._exit(done)
            assert os.waitpid(pid, 0)[1] == 0
            writer.flush()
        assert [store.fetch(tokens) for tokens in (A, B, C)] == [3, 3, 3]


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_many_threads_capture_restore_pin_and_clear_at_once(tmp_path, kind):
    backend = MemoryBackend() if kind == "memory" else LMDBBackend(tmp_path, MIB)
    failures, restored = [], itertools.count()
    with store_of(backend, max_bytes=MIB, max_entries=60) as store, writer_of(store, 100_000) as writer:

        def work(seed):
            chance = random.Random(seed)
            try:
                for _ in range(60):
                    tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 30))]
                    for _ in range(store.fetch(tokens)):
                        next(restored)
                    for new in captured(store, writer, tokens, chance.choice([100, 3000])):
                        writer.submit(new)
                    if chance.random() < 0.05:
                        store.engine.pin(NS, as_tokens(tokens), P, pinned=chance.random() < 0.3)
                    if chance.random() < 0.02:
                        store.engine.clear(NS)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        writer.flush()
        assert writer.queued_bytes == 0
        assert store.engine.check() == []
        store.match([0])
        assert {*store.engine._catalog._index.pages} == store.stored_keys()
        assert store.engine._catalog._pending == {}
        assert next(restored) > 0
        assert "error" not in store.counters.group("dropped")
        assert "corrupt" not in store.counters.group("unreadable")


def captured(store, writer, tokens, size):
    """As a capture does it: leases that do not wait."""
    raw = as_tokens(tokens).tobytes()
    parent = NS
    for start in range(0, len(raw), 4 * P):
        piece = raw[start : start + 4 * P]
        key = page_key(parent, piece)
        if store.engine.wants(NS, parent, piece):
            buffer = writer.acquire(size)
            if buffer is None:
                return
            buffer.view[:] = state_of(key, size)
            yield PendingPage.of(NS, b'{"n":1}', parent, start // 4, piece, buffer)
        parent = key


# -- snapshots --------------------------------------------------------------------------------------------------------


def snapshot_of(store, tokens, size=100) -> PendingPage:
    """A snapshot behind these tokens, as captured now."""
    keys = [NS, *page_keys(NS, as_tokens(tokens), P)]
    start = (len(keys) - 1) * P
    buffer = store.buffers.acquire(size)
    raw = as_tokens(tokens[start:]).tobytes()
    new = PendingPage.of(NS, b'{"n":1}', keys[-1], start, raw, buffer, 0, 1)
    buffer.view[:] = state_of(new.page.key, size)
    return new


def put_snapshots(store, tokens, positions) -> int:
    """Store the pages of a sequence, which hold tokens only, and snapshots at these positions."""
    store.put(tokens[: len(tokens) - len(tokens) % P], 0)
    return store.engine.commit([new for n in positions if store.engine.announce(new := snapshot_of(store, tokens[:n]))])


def standing(store, tokens, limit=None, multiple_of=1) -> int:
    limit = len(tokens) if limit is None else limit
    return store.engine.match_snapshot(NS, as_tokens(tokens), P, limit, multiple_of).n_tokens


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_snapshots_are_stored_found_and_fetched(tmp_path, kind):
    location = tmp_path if kind == "lmdb" else None
    backend = LMDBBackend(tmp_path, max_bytes=64 * MIB) if location else MemoryBackend()
    tokens = list(range(30))
    with store_of(backend) as store:
        assert put_snapshots(store, tokens, [3, 8, 17, 29]) == 4
        for n, limit, multiple, found in [
            (30, 30, 1, 29),
            (30, 28, 1, 17),
            (30, 28, 8, 8),
            (17, 16, 1, 8),
            (2, 2, 1, 0),
        ]:
            assert standing(store, tokens[:n], limit, multiple) == found
        assert standing(store, [*tokens[:20], 99], 21) == 17
        path = store.engine.match_snapshot(NS, as_tokens(tokens), P, 30)
        with store.engine.fetching(path.pages) as states:
            got = [bytes(state) for state in states]
        assert got == [b""] * 7 + [state_of(path.pages[-1].key, 100)]
        if location:
            with store_of(LMDBBackend(tmp_path, max_bytes=64 * MIB)) as other:
                assert standing(other, tokens) == 29


def test_snapshots_go_before_the_pages_that_they_need():
    tokens = list(range(30))
    with store_of(max_entries=10) as store:
        put_snapshots(store, tokens, [8, 17, 29])
        assert put_snapshots(store, tokens, [28, 27]) == 2
        assert store.counters["evictions"] == 2
        assert standing(store, tokens) == 29
        assert standing(store, tokens[:20]) == 0
        assert store.match(tokens) == 28


def test_snapshots_are_thinned_with_the_next_batch_but_for_those_that_are_pinned():
    tokens = list(range(60))
    with store_of() as store:
        put_snapshots(store, tokens, [8, 17, 29, 40, 50, 58])
        assert store.engine.pin(NS, as_tokens(tokens[:17]), P, pinned=True) == 17
        assert store.engine.thin(NS, as_tokens(tokens), P, 2, 8) == 4
        assert store.engine.has_deferred
        store.engine.commit([])
        assert not store.engine.has_deferred
        with store.backend.view() as view:
            left = [record.start + len(record.tokens) // 4 for _, record, _ in view.scan() if record.form == 1]
        assert 17 in left
        assert 58 in left
        assert len(left) <= 3
        # what was given up can be taken anew, before and after it was deleted
        assert put_snapshots(store, tokens, [8]) == 1
        store.engine.thin(NS, as_tokens(tokens), P, 1, 8)
        assert put_snapshots(store, tokens, [8]) == 1
        assert standing(store, tokens[:9]) == 8
        store.engine.commit([])
        assert standing(store, tokens[:9]) == 8


def test_snapshots_that_wait_are_thinned_unwritten():
    tokens = list(range(60))
    with store_of() as store:
        store.put(tokens, 0)
        news = [snapshot_of(store, tokens[:n]) for n in (8, 17, 29)]
        for new in news:
            assert store.engine.announce(new)
        store.engine.thin(NS, as_tokens(tokens), P, 1, 8)
        assert store.engine.commit(news) == 1
        assert standing(store, tokens) == 29


def test_the_snapshot_before_a_fork_is_thinned_last():
    tokens = list(range(60))
    with store_of() as store:
        put_snapshots(store, tokens, [8, 17, 29, 40, 50, 58])
        store.put([*tokens[:19], *range(100, 130)], 0)
        store.engine.thin(NS, as_tokens(tokens), P, 2, 8)
        store.engine.commit([])
        assert standing(store, tokens[:40]) == 17


def test_expired_snapshots_are_not_found():
    tokens = list(range(30))
    with store_of() as store:
        put_snapshots(store, tokens, [8, 17])
        path = store.engine.match_snapshot(NS, as_tokens(tokens), P, 30)
        path.pages[-1].expires = 1
        assert standing(store, tokens) == 8


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
        assert {*store.engine._catalog._index.pages} == store.stored_keys()
        assert store.engine._catalog._writing == set()


@pytest.mark.parametrize("meddle", ["thin", "damage"])
def test_a_snapshot_that_is_given_up_while_it_is_written_leaves_no_page_without_the_one_before(meddle):
    class Meddler(MemoryBackend):
        """Somebody thins the snapshots, or finds damage, at the moment when room is made for one."""

        meddle = None

        @contextmanager
        def update(self):
            with super().update() as transaction:
                cost = transaction.cost

                def asked(record, n_bytes):
                    if record.form == SNAPSHOT:
                        self.meddle()
                    return cost(record, n_bytes)

                transaction.cost = asked
                yield transaction

    backend = Meddler()
    with store_of(backend, max_entries=1) as store:
        store.put(A[:4])
        parent = page_keys(NS, as_tokens(A), P)[0]
        buffer = store.buffers.acquire(1000)
        new = PendingPage.of(NS, b"{}", parent, 4, as_tokens(A[4:6]).tobytes(), buffer, form=SNAPSHOT)
        assert store.engine.announce(new)
        catalog = store.engine._catalog
        backend.meddle = (
            (lambda: catalog.discard_snapshot(new.page)) if meddle == "thin" else (lambda: catalog.damage(new.page.key))
        )
        assert store.engine.commit([new]) == 0
        buffer.release()
        assert store.engine.check() == []
        assert new.page.key not in store.stored_keys()


def test_what_a_thinned_snapshot_depends_on_stays_until_it_is_deleted():
    with store_of(max_entries=2) as store:
        store.put(A[:4])
        parent = page_keys(NS, as_tokens(A), P)[0]
        buffer = store.buffers.acquire(1000)
        new = PendingPage.of(NS, b"{}", parent, 4, as_tokens(A[4:6]).tobytes(), buffer, form=SNAPSHOT)
        assert store.engine.announce(new)
        assert store.engine.commit([new]) == 1
        buffer.release()
        # in the middle of a transaction, which deletes what was thinned before it began
        with store.engine._catalog.update(store.backend) as transaction:
            store.engine._catalog.discard_snapshot(new.page)
            evictor = store.engine._committer._evictor
            assert evictor._evict(transaction, lambda: transaction.used.entries > 1)
        assert store.engine.check() == []
        assert store.stored_keys() == {parent}
