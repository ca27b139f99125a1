"""What an engine tells of itself: what was given up, what was written and deleted, what found no space."""

import numpy as np

from prefixstore import FullError, PrefixStore
from tests.support.engines import A, B, MemoryPages, entry, store_of
from tests.support.faults import FlakyBackend

# -- the pool ----------------------------------------------------------------------------------------------------------


def test_pages_that_are_written_and_deleted_add_up_to_those_that_are_there():
    with store_of(max_bytes=5 * entry()) as store:
        rng = np.random.default_rng(0)
        for _ in range(40):
            store.put(rng.integers(0, 3, rng.integers(1, 13)).tolist())
            count = store.counters
            assert count["allocations"] - count["frees"] == store.engine.upkeep.used()[0].entries
        assert count["evictions"] > 10
        # tails that were replaced are neither evicted nor expired, and are gone all the same
        assert count["frees"] > count["evictions"] + count["expired"]
        store.engine.upkeep.clear(None)
        assert count["allocations"] == count["frees"]


def test_what_a_failed_transaction_has_written_and_deleted_is_not_counted():
    backend = FlakyBackend(MemoryPages(), "commit", error=FullError("full"))
    with store_of(backend, max_bytes=3 * entry()) as store:
        store.put(A)
        backend.fails = True
        store.put(B)
        backend.fails = False
        assert (store.counters["allocations"], store.counters["frees"]) == (3, 0)


def test_stats_have_the_pool():
    with PrefixStore("memory:", namespace="n", max_bytes=10_000, max_entries=4) as store:
        empty = store.stats()
        assert (empty.capacity_bytes, empty.capacity_entries) == (10_000, 4)
        assert (empty.free_bytes, empty.utilization, empty.peak_bytes) == (10_000, 0.0, 0)
        assert (empty.pending_pages, empty.pending_snapshots, empty.outdated) == (0, 0, {})
        assert "9.8 KiB of 9.8 KiB free, 0% in use" in str(empty)
