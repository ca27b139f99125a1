"""An LMDB file within its limit: while the budget has space, pages can be written and deleted."""

import itertools
import random
from contextlib import suppress

import numpy as np
import pytest

from prefixstore.backends.lmdb.environment import FILE_EXTRA
from prefixstore.backends.lmdb.lmdb_backend import FILE_FACTOR, LMDBBackend
from prefixstore.engine.pages import Pages
from prefixstore.errors import FullError
from tests.support.engines import MIB, P, store_of
from tests.support.rows import EVERYTHING, delete, write


def tokens_of(seed, n_pages):
    return np.random.default_rng(seed).integers(0, 1 << 30, P * n_pages).tolist()


def size_of_file(path):
    return (path / "data.mdb").stat().st_size


@pytest.mark.attack
def test_under_churn_the_file_stays_within_its_limit_and_the_budget_is_used(tmp_path):
    max_bytes, chance, fills = 8 * MIB, random.Random(1), []
    with store_of(Pages(LMDBBackend(tmp_path, max_bytes)), max_bytes=max_bytes) as store:
        for seed in range(450):
            n_pages = chance.randint(1, 7)
            assert store.put(tokens_of(seed, n_pages), chance.randint(1000, 300_000)) == n_pages
            fills.append(store.engine.upkeep.used()[0].bytes / max_bytes)
        assert store.engine.upkeep.check() == []
        assert store.counters.group("dropped") == {}
    assert size_of_file(tmp_path) <= FILE_FACTOR * max_bytes + FILE_EXTRA
    assert max(fills) <= 1
    assert fills[-1] > 0.7


def until_full(step):
    """Repeat something until the map is full; how often it succeeded."""
    n_done = 0
    with suppress(FullError):
        for n_done in itertools.count():
            step(n_done)
    return n_done


def test_a_file_that_a_reader_keeps_full_has_space_to_delete_and_recovers(tmp_path):
    backend = LMDBBackend(tmp_path, MIB)
    keys = [write(backend, number) for number in range(50)]

    with backend.view() as reader:
        assert len(reader.ranges([EVERYTHING])[0]) == 50
        # nothing that is freed from here on can be reused
        assert until_full(lambda number: keys.append(write(backend, 50 + number))) > 20
        # what updates with payloads leave is enough to delete
        n_deleted = until_full(lambda number: delete(backend, keys[number]))
        assert n_deleted > 2
        assert until_full(lambda _: backend.reclaim()) < 100
    # no update has taken the last free pages
    backend.reclaim()
    for key in keys[-5:]:
        delete(backend, key)
    write(backend, 200_000)
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "budget"), [("put", MIB), ("evict", 5 * MIB), ("clear", MIB), ("compact", MIB)])
def test_a_full_file_has_space_to_delete_under_a_smaller_budget(tmp_path, first, budget):
    with store_of(Pages(LMDBBackend(tmp_path, 6 * MIB)), max_bytes=6 * MIB) as store:
        for seed in range(55):
            assert store.put(tokens_of(seed, 1), 100_000) == 1
    before = size_of_file(tmp_path)
    assert before > 5 * MIB
    for opening in range(4):
        with store_of(Pages(LMDBBackend(tmp_path, budget)), max_bytes=budget) as store:
            if first == "evict":
                store.engine.evictor.evict(0)
            elif first == "clear":
                store.engine.upkeep.clear(None)
            elif first == "compact":
                store.engine.upkeep.compact()
            for seed in range(30):
                assert store.put(tokens_of(1000 * opening + seed + 1000, 1), 50_000) == 1
            assert store.counters.group("dropped") == {}
            assert store.engine.upkeep.used()[0].bytes <= budget
            assert store.engine.upkeep.check() == []
    assert size_of_file(tmp_path) <= FILE_FACTOR * 6 * MIB + FILE_EXTRA
