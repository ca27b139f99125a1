"""Lookups, compared with brute force: over what is stored, what waits, and both; and with what others have done."""

import random

import pytest

from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.engine.pages import Pages
from prefixstore.format.record import Usage
from tests.support.engines import MIB, A, MemoryPages, P, Store, put_snapshots, snapshot_of, store_of, two_stores


@pytest.fixture(params=["memory", "lmdb"])
def store(request, tmp_path):
    backend = MemoryPages() if request.param == "memory" else Pages(LMDBBackend(tmp_path / "kv", 64 * MIB))
    opened = Store(backend)
    yield opened
    opened.engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_deepest_snapshot_is_found_within_a_limit_and_at_a_multiple(store, seed):
    chance = random.Random(seed)
    known, waiting = [], []
    for step in range(40):
        # many begin like earlier ones
        before = chance.choice([[], *known])
        tokens = before[: chance.randrange(len(before) + 1)] + chance.choices([0, 1], k=chance.randint(1, 9))
        waiting += store.announce(tokens[: len(tokens) // 4 * 4], 0)
        new = snapshot_of(store, tokens)
        if store.engine.write_queue.announce(new):
            waiting.append(new)
        known.append(tokens)
        if step % 3 == 2:
            store.engine.commit(waiting)
            waiting = []
        for multiple_of in (1, 2, 3):
            wanted = chance.choice(known) + chance.choices([0, 1], k=2)
            limit = chance.randrange(len(wanted) + 1)
            here = [len(one) for one in known if wanted[: len(one)] == one and len(one) <= limit]
            expected = max((n for n in here if n % multiple_of == 0), default=0)
            assert store.match_snapshot(wanted, limit, multiple_of) == expected
    store.engine.commit(waiting)


def test_a_page_that_is_damaged_after_it_was_read_is_a_miss_until_it_is_stored_again(tmp_path):
    tokens = list(range(12))
    with two_stores(tmp_path / "kv") as (mine, other):
        mine.put(tokens)
        key = mine.path(tokens).pages[1].key
        other.engine.upkeep.clear(None)
        other.put(tokens)
        with other.backend.update() as transaction:
            record, payload = transaction.record(key), bytearray(transaction.payload(key))
            payload[-1] ^= 1
            transaction.put(key, record, Usage(record.created), bytes(payload))
        assert mine.fetch(tokens) == 1
        # it is this one that is damaged, not the one that was read first
        assert mine.match(tokens) == P
        other.engine.upkeep.clear(None)
        other.put(tokens)
        assert (mine.match(tokens), mine.fetch(tokens)) == (12, 3)


def test_what_has_expired_is_captured_again_at_once(clock):
    with store_of(options={"ttl": 60.0}) as store:
        store.put(A)
        put_snapshots(store, A, [len(A) - 1])
        snapshot = snapshot_of(store, A[:-1])
        assert store.engine.lookups.has(snapshot.page.key)
        clock[0] += 61 * 10**9
        assert not store.engine.lookups.has(snapshot.page.key)
        assert store.put(A) == 3
        assert store.match(A) == len(A)
