"""Eviction on request: in the order of the store's policy, down to a size, or only tried."""

from dataclasses import replace

import numpy as np
import pytest

from prefixstore import InvalidParameterError, MisuseError, PrefixStore
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.miss import miss_reason
from prefixstore.engine.pages import open_pages
from prefixstore.engine.saved_notes import POLICY_NOTE
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.maintenance.archive import Archive
from tests.support.engines import MIB, NS, A, B, C, P, entry, store_of, taken
from tests.support.places import SCHEMES, contents, fill, opened, place, space

PAGES = space()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "policy"), [*(("memory", policy) for policy in POLICIES), *((scheme, "adaptive") for scheme in SCHEMES)]
)
def test_a_dry_run_changes_nothing_and_says_what_an_eviction_then_does(scheme, policy, tmp_path, request):
    url = "memory:" if scheme == "memory" else place(scheme, tmp_path, request)
    rng = np.random.default_rng(1)
    sequences = [[1, 2, 3, 4, *rng.integers(0, 3, 12).tolist()] for _ in range(30)]
    with store_of(open_pages(url, max_bytes=64 * MIB), policy=policy) as store:
        for i, tokens in enumerate(sequences):
            fill(store.backend, PAGES, [tokens], last_used=i + 1, size=20_000)
        engine = store.engine
        before = contents(store.backend)
        used = engine.upkeep.used()[0]
        tried = engine.evictor.evict(used.bytes // 2, dry_run=True)
        assert tried.dry_run
        assert tried.policy == policy
        assert tried.is_enough
        assert tried.pages
        assert contents(store.backend) == before
        assert engine.upkeep.check() == []
        assert store.counters["evictions"] == store.counters["frees"] == 0
        assert engine.upkeep.used()[0] == used
        done = engine.evictor.evict(used.bytes // 2)
        assert done.bytes_left == engine.upkeep.used()[0].bytes <= used.bytes // 2
        # in LMDB it may take a page more until the file is as small as that after its commit
        assert done.pages[: len(tried.pages)] == tried.pages
        assert len(done.pages) <= len(tried.pages) + 1
        # what is deleted in several transactions may leave a file in another shape than what is deleted in one
        assert abs(done.bytes_left - tried.bytes_left) <= used.bytes // 20
        assert set(before) - set(contents(store.backend)) == {bytes.fromhex(key) for key in done.pages}
        assert store.counters["evictions"] == len(done.pages)


def test_what_is_pinned_stays_and_it_is_said_that_this_is_not_enough():
    with store_of() as store:
        for tokens in (A, B, C):
            store.put(tokens)
        store.pin(B)
        for dry_run in (True, False):
            evicted = store.engine.evictor.evict(0, dry_run=dry_run)
            assert len(evicted.pages) == 6
            assert evicted.bytes == 6 * taken()
            assert evicted.bytes_left == 3 * taken()
            assert not evicted.is_enough
        assert [store.match(tokens) for tokens in (A, B, C)] == [0, 12, 0]


def test_a_store_evicts_to_a_share_of_its_budget_or_to_a_size_and_writes_what_waits_before():
    with PrefixStore("memory:", namespace="n", max_bytes=40_000, policy="lfu") as store:
        for n in range(20):
            fill(store.engine._backend, PAGES, [[n] * 4], last_used=n + 1)
        assert store.stats().utilization > 0.8
        tried = store.evict(0.5, dry_run=True)
        assert (tried.target_bytes, tried.policy, tried.is_enough) == (20_000, "lfu", True)
        assert store.evict("50%") == replace(tried, dry_run=False)
        assert store.stats().utilization <= 0.5
        assert store.evict("10KB").bytes_left <= 10_000
        assert store.evict(0).bytes_left == 0


@pytest.mark.parametrize("to", [1.5, -0.1, True, "x", "150%", None, -1, float("nan"), [1]])
def test_what_is_no_target_is_refused(to):
    with PrefixStore("memory:", namespace="n") as store, pytest.raises(InvalidParameterError, match="to="):
        store.evict(to)


def test_a_read_only_store_evicts_nothing(tmp_path):
    with PrefixStore(tmp_path, namespace="n"):
        pass
    with PrefixStore(tmp_path, namespace="n", read_only=True) as store:
        for dry_run in (True, False):
            with pytest.raises(MisuseError, match="read_only=True"):
                store.evict(0, dry_run=dry_run)


def test_an_archive_evicts_in_the_order_of_the_policy(tmp_path):
    url = f"lmdb://{tmp_path / 'kv'}"
    with opened(url) as backend:
        # the one that was used last has the longest prompt
        old = fill(backend, PAGES, [[1] * 4], last_used=10, size=20_000)[0]
        new = fill(backend, PAGES, [[2] * 8], last_used=20, size=20_000)[0]
        with backend.update() as transaction:
            transaction.put_note(POLICY_NOTE, b"longest_first")
    with Archive(url) as archive:
        used = archive.used().bytes
        assert archive.evict(used - 1, dry_run=True).pages == (new[1].hex(),)
    with Archive(url, policy="lru") as archive:
        assert archive.evict(used - 1, dry_run=True).pages == (old[0].hex(),)


# -- what is remembered of it -----------------------------------------------------------------------------------------


def has_evicted(store, tokens):
    (key,) = page_keys(NS, as_tokens(tokens[:P]), P)
    return store.engine.evictor.has_evicted(key)


def test_what_was_evicted_for_space_a_quota_or_a_request_is_remembered():
    with store_of(max_bytes=4 * entry()) as store:
        store.put(A)
        assert not has_evicted(store, A)
        store.put(B)
        store.put(C)
        assert has_evicted(store, A)
        store.engine.evictor.evict(0)
        assert has_evicted(store, C)
    with store_of(quota=4 * 1100) as store:
        for tokens in (A, B, C):
            store.put(tokens)
        assert has_evicted(store, A)


def test_the_reason_of_a_miss_tells_short_prompts_evicted_ones_and_those_that_differ_from_new_ones():
    def reason(store, tokens, n_matched=0):
        return miss_reason(store.engine, NS, as_tokens(tokens), P, n_matched=n_matched, min_tokens=3)

    with store_of() as store:
        store.put(A)
        assert reason(store, A[:2], 2) == reason(store, []) == "short"
        assert reason(store, [1, 9, 9, 9], 1) == "diverged"
        assert reason(store, B) == "not_found"
        store.engine.evictor.evict(0)
        assert reason(store, A) == reason(store, [*A[:P], 7, 7]) == "evicted"
        assert reason(store, [1, 9, 9, 9]) == "not_found"
