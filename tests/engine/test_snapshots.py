"""Where snapshots are taken, and which are given up: functions of positions."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from prefixstore.engine.snapshots import positions, thin


def test_a_prompt_stops_one_token_before_its_end():
    assert positions(0, 500, [], 1024) == [499]
    assert positions(499, 500, [], 1024) == []
    assert positions(0, 1, [], 1024) == []


def test_a_long_prompt_stops_at_every_interval():
    assert positions(0, 4000, [], 1024) == [1024, 2048, 3072, 3999]
    assert positions(1500, 4000, [], 1024) == [2048, 3072, 3999]


def test_generation_stops_at_every_interval():
    stops = [n for n in range(4000) if positions(n, n + 1, [], 1024)]
    assert [positions(n, n + 1, [], 1024) for n in stops] == [[1024], [2048], [3072]]


def test_the_end_of_the_system_prompt_and_the_last_two_borders_are_stops():
    assert positions(0, 1000, [300, 400, 500, 600, 990], 1024) == [300, 600, 990, 999]
    assert positions(450, 1000, [300, 400, 500, 600, 990], 1024) == [600, 990, 999]
    assert positions(998, 1000, [300, 400, 500, 600, 990], 1024) == [999]


def test_no_batch_is_spent_on_a_bare_header_or_on_the_end_of_the_turn_before():
    assert positions(0, 1000, [300, 600, 997], 1024) == [300, 600, 999]
    assert positions(0, 1000, [300, 600, 996], 1024) == [300, 600, 999]
    assert positions(0, 1000, [300, 600, 995], 1024) == [300, 600, 995, 999]
    assert positions(598, 1000, [300, 600, 997], 1024) == [999]
    assert positions(592, 1000, [300, 600, 997], 1024) == [600, 999]


def test_a_border_takes_the_place_of_an_interval():
    assert positions(0, 5000, [700, 1900, 4400, 4900], 1024) == [700, 1900, 3072, 4400, 4900, 4999]


def test_no_interval_is_taken_close_to_another_stop():
    assert positions(0, 1030, [], 1024) == [1029]
    assert positions(0, 2048, [1020, 1024, 2040], 1024) == [1020, 1024, 2040, 2047]


ranges = st.tuples(st.integers(0, 9000), st.integers(1, 9000)).map(lambda pair: (pair[0], sum(pair)))
some_borders = st.lists(st.integers(1, 12000), unique=True).map(sorted)


@given(ranges, some_borders, st.integers(1, 3000))
def test_positions_are_ascending_inside_and_few(place, borders, interval):
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
def test_no_stretch_is_long_without_a_snapshot(place, borders, interval):
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
    # those from which others go on are given up only if there is nothing else
    if keep > len(shared | {taken[-1]}):
        assert not gone & shared


def test_thinning_one_by_one_leaves_positions_that_lie_ever_wider_apart():
    left: list[int] = []
    for newest in range(512, 512 * 2000, 512):
        left.append(newest)
        left = sorted(set(left) - thin(left, 16, 512))
        # whoever goes back by a distance finds a snapshot not much further back than that
        for before, after in itertools.pairwise([0, *left]):
            assert after - before <= 512 + 2 * (newest - after)
    gaps = [after - before for before, after in itertools.pairwise(left)]
    assert len(left) == 16
    assert gaps[-1] == 512
    assert left[0] < newest / 2
