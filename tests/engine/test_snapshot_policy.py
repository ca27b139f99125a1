"""Where snapshots are taken and which are thinned, as functions of positions; then the same in an engine."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.memory import MemoryBackend
from prefixstore.engine.snapshot_policy import positions, thin
from prefixstore.format.keys import SNAPSHOT, as_tokens
from tests.support.engines import MIB, NS, P, put_snapshots, snapshot_of, state_of, store_of


def test_a_prompt_has_a_snapshot_one_token_before_its_end():
    assert positions(0, 500, [], 1024) == [499]
    assert positions(499, 500, [], 1024) == []
    assert positions(0, 1, [], 1024) == []


def test_a_long_prompt_has_a_snapshot_at_every_interval():
    assert positions(0, 4000, [], 1024) == [1024, 2048, 3072, 3999]
    assert positions(1500, 4000, [], 1024) == [2048, 3072, 3999]


def test_generation_has_a_snapshot_at_every_interval():
    stops = [n for n in range(4000) if positions(n, n + 1, [], 1024)]
    assert [positions(n, n + 1, [], 1024) for n in stops] == [[1024], [2048], [3072]]


def test_there_are_snapshots_after_the_system_prompt_and_at_the_last_two_borders():
    assert positions(0, 1000, [300, 400, 500, 600, 990], 1024) == [300, 600, 990, 999]
    assert positions(450, 1000, [300, 400, 500, 600, 990], 1024) == [600, 990, 999]
    assert positions(998, 1000, [300, 400, 500, 600, 990], 1024) == [999]


def test_there_is_no_snapshot_at_a_bare_header_or_just_after_the_previous_turn():
    assert positions(0, 1000, [300, 600, 997], 1024) == [300, 600, 999]
    assert positions(0, 1000, [300, 600, 996], 1024) == [300, 600, 999]
    assert positions(0, 1000, [300, 600, 995], 1024) == [300, 600, 995, 999]
    assert positions(598, 1000, [300, 600, 997], 1024) == [999]
    assert positions(592, 1000, [300, 600, 997], 1024) == [600, 999]


def test_a_border_replaces_the_position_of_an_interval():
    assert positions(0, 5000, [700, 1900, 4400, 4900], 1024) == [700, 1900, 3072, 4400, 4900, 4999]


def test_an_interval_close_to_another_position_is_skipped():
    assert positions(0, 1030, [], 1024) == [1029]
    assert positions(0, 2048, [1020, 1024, 2040], 1024) == [1020, 1024, 2040, 2047]


ranges = st.tuples(st.integers(0, 9000), st.integers(1, 9000)).map(lambda pair: (pair[0], sum(pair)))
some_borders = st.lists(st.integers(1, 12000), unique=True).map(sorted)


@given(ranges, some_borders, st.integers(1, 3000))
def test_positions_are_ascending_in_range_and_few(place, borders, interval):
    start, end = place
    found = positions(start, end, borders, interval)
    assert found == sorted(set(found))
    assert all(start < position <= end for position in found)
    if end in found:
        assert end % interval == 0
    assert len(found) <= 4 + (end - start) // interval + 1
    if end - start > 1:
        assert end - 1 in found
    assert {border for border in borders if start < border < end} >= set(found) - {end - 1} - {
        position for position in found if position % interval == 0
    }
    assert {border for border in borders[-2:] if start + 8 <= border < end - 4} <= set(found)


@given(ranges, some_borders, st.integers(8, 3000))
def test_no_long_stretch_is_without_a_snapshot(place, borders, interval):
    start, end = place
    found = positions(start, end, borders, interval)
    assert all(b - a <= 2.5 * interval for a, b in itertools.pairwise([start, *found, end]))


@given(
    st.lists(st.integers(1, 100_000), unique=True, min_size=1).map(sorted),
    st.integers(1, 20),
    st.integers(1, 2000),
    st.data(),
)
def test_thinning_keeps_the_newest_and_as_many_as_allowed(taken, keep, interval, data):
    shared = data.draw(st.sets(st.sampled_from(taken)))
    gone = thin(taken, keep, interval, shared)
    assert gone <= set(taken)
    assert len(taken) - len(gone) == min(keep, len(taken))
    assert taken[-1] not in gone
    # those from which others branch off are deleted only if there are no others
    if keep > len(shared | {taken[-1]}):
        assert not gone & shared


def test_thinning_one_by_one_spaces_older_positions_further_apart():
    left: list[int] = []
    for newest in range(512, 512 * 2000, 512):
        left.append(newest)
        left = sorted(set(left) - thin(left, 16, 512))
        # going back by any distance, there is a snapshot not much further back
        for before, after in itertools.pairwise([0, *left]):
            assert after - before <= 512 + 2 * (newest - after)
    gaps = [after - before for before, after in itertools.pairwise(left)]
    assert len(left) == 16
    assert gaps[-1] == 512
    assert left[0] < newest / 2


# -- in an engine ------------------------------------------------------------------------------------------------------


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
            assert store.match_snapshot(tokens[:n], limit, multiple) == found
        assert store.match_snapshot([*tokens[:20], 99], 21) == 17
        path = store.engine.match_snapshot(NS, as_tokens(tokens), P, 30)
        with store.engine.fetching(path.pages) as states:
            got = [bytes(state) for state in states]
        assert got == [b""] * 7 + [state_of(path.pages[-1].key, 100)]
        if location:
            with store_of(LMDBBackend(tmp_path, max_bytes=64 * MIB)) as other:
                assert other.match_snapshot(tokens) == 29


def test_snapshots_are_evicted_before_the_pages_that_they_need():
    tokens = list(range(30))
    with store_of(max_entries=10) as store:
        put_snapshots(store, tokens, [8, 17, 29])
        assert put_snapshots(store, tokens, [28, 27]) == 2
        assert store.counters["evictions"] == 2
        assert store.match_snapshot(tokens) == 29
        assert store.match_snapshot(tokens[:20]) == 0
        assert store.match(tokens) == 28


def test_snapshots_are_thinned_with_the_next_batch_except_pinned_ones():
    tokens = list(range(60))
    with store_of() as store:
        put_snapshots(store, tokens, [8, 17, 29, 40, 50, 58])
        assert store.engine.pin(NS, as_tokens(tokens[:17]), P, pinned=True) == 17
        assert store.engine.thin(NS, as_tokens(tokens), P, 2, 8) == 3
        assert store.engine.has_deferred
        store.engine.commit([])
        assert not store.engine.has_deferred
        with store.backend.view() as view:
            left = [record.start + len(record.tokens) // 4 for _, record, _ in view.scan() if record.form == SNAPSHOT]
        assert 17 in left
        assert 58 in left
        assert len(left) <= 3
        # a thinned snapshot can be captured again, before and after it was deleted
        assert put_snapshots(store, tokens, [8]) == 1
        store.engine.thin(NS, as_tokens(tokens), P, 1, 8)
        assert put_snapshots(store, tokens, [8]) == 1
        assert store.match_snapshot(tokens[:9]) == 8
        store.engine.commit([])
        assert store.match_snapshot(tokens[:9]) == 8


def test_pending_snapshots_that_are_thinned_are_never_written():
    tokens = list(range(60))
    with store_of() as store:
        store.put(tokens, 0)
        news = [snapshot_of(store, tokens[:n]) for n in (8, 17, 29)]
        for new in news:
            assert store.engine.announce(new)
        store.engine.thin(NS, as_tokens(tokens), P, 1, 8)
        assert store.engine.commit(news) == 1
        assert store.match_snapshot(tokens) == 29


def test_the_snapshot_before_a_branch_is_thinned_last():
    tokens = list(range(60))
    with store_of() as store:
        put_snapshots(store, tokens, [8, 17, 29, 40, 50, 58])
        store.put([*tokens[:19], *range(100, 130)], 0)
        store.engine.thin(NS, as_tokens(tokens), P, 2, 8)
        store.engine.commit([])
        assert store.match_snapshot(tokens[:40]) == 17


def test_expired_snapshots_are_not_found():
    tokens = list(range(30))
    with store_of() as store:
        put_snapshots(store, tokens, [8, 17])
        path = store.engine.match_snapshot(NS, as_tokens(tokens), P, 30)
        path.pages[-1].expires = 1
        assert store.match_snapshot(tokens) == 8
