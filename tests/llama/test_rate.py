"""Whether a restore is worth it."""

from __future__ import annotations

import pytest

from prefixstore.llama.rate import LOSES_BY, SMALLEST_BATCH, TRY_AGAIN, Pace


def test_as_long_as_one_of_both_is_not_known_a_restore_is_done():
    pace = Pace()
    assert pace.is_worth(1, 1000)
    pace.restored(1, 100.0)
    assert pace.is_worth(1, 1000)
    other = Pace()
    other.computed(SMALLEST_BATCH, 1e-9)
    assert other.is_worth(1, 1000)


def test_a_restore_that_is_slower_is_left_out_and_tried_now_and_then():
    pace = Pace()
    pace.computed(100, 1.0)  # 10 ms a token
    pace.restored(2, 2.0)  # 1 s a page
    assert pace.is_worth(100, 1)
    assert pace.is_worth(85, 1)  # a little slower is not worth a change
    assert LOSES_BY * 0.85 > 1 > LOSES_BY * 0.8
    answers = [pace.is_worth(80, 1) for _ in range(3 * TRY_AGAIN)]
    # it goes on losing, so it is tried ever more seldom
    assert answers == [*[False] * (TRY_AGAIN - 1), True, *[False] * (2 * TRY_AGAIN - 1), True]


def test_small_batches_say_nothing():
    pace = Pace()
    pace.computed(SMALLEST_BATCH - 1, 5.0)
    assert pace.token_seconds is None
    assert pace.compute_us(10) == 0
    pace.computed(SMALLEST_BATCH, SMALLEST_BATCH * 0.001)
    assert pace.compute_us(10) == 10_000


def test_it_follows_when_the_machine_changes():
    pace = Pace()
    for _ in range(30):
        pace.computed(100, 1.0)
        pace.restored(1, 0.5)
    assert not pace.is_worth(10, 1)
    for _ in range(30):
        pace.restored(4, 0.2)
    assert pace.page_seconds == pytest.approx(0.05, rel=0.01)
    assert pace.is_worth(10, 1)
