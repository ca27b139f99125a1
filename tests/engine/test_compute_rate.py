"""When a restore is worth it."""

from __future__ import annotations

from prefixstore.engine.compute_rate import MAX_SLOWDOWN, RETRY_EVERY, SMALLEST_BATCH, ComputeRate


def test_a_restore_is_done_until_both_rates_are_known():
    rate = ComputeRate()
    assert rate.is_worth(1, 1000)
    rate.restored(1, 100.0)
    assert rate.is_worth(1, 1000)
    other = ComputeRate()
    other.computed(SMALLEST_BATCH, 1e-9)
    assert other.is_worth(1, 1000)


def test_a_restore_that_is_slower_is_skipped_and_now_and_then_tried():
    rate = ComputeRate()
    rate.computed(100, 1.0)  # 10 ms a token
    rate.restored(2, 2.0)  # 1 s a page
    assert rate.is_worth(100, 1)
    assert rate.is_worth(85, 1)  # a little slower is not worth a change
    assert MAX_SLOWDOWN * 0.85 > 1 > MAX_SLOWDOWN * 0.8
    answers = [rate.is_worth(80, 1) for _ in range(2 * RETRY_EVERY)]
    assert answers == 2 * [*[False] * (RETRY_EVERY - 1), True]
