"""When a restore is worth it."""

from prefixstore.engine.compute_rate import MAX_CAPTURE_SHARE, MAX_SLOWDOWN, RETRY_EVERY, SMALLEST_BATCH, ComputeRate


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


def test_what_is_tried_again_of_restores_does_not_depend_on_captures():
    rate = ComputeRate()
    rate.computed(100, 1.0)
    rate.restored(1, 100.0)
    rate.captured(1, 100.0)
    rate.captured(1, 100.0)
    tried = [(rate.is_worth(100, 1), rate.is_worth_capturing(100, 1)) for _ in range(RETRY_EVERY)]
    assert tried == [*[(False, False)] * (RETRY_EVERY - 1), (True, True)]


def test_pages_are_captured_along_while_that_takes_a_small_share_of_computing():
    rate = ComputeRate()
    rate.computed(100, 1.0)
    assert rate.captures_along(256)
    rate.captured(4, 4 * 2.56 * 0.9 * MAX_CAPTURE_SHARE)
    assert rate.captures_along(256)
    rate.captured(1, 256.0)
    assert rate.captures_along(256), "it may have been a pause"
    rate.captured(1, 256.0)
    assert not rate.captures_along(256)
    rate.captured(1, 2.56 * 0.9 * MAX_CAPTURE_SHARE)
    assert rate.captures_along(256)


def test_what_is_slower_to_capture_than_to_compute_waits_for_more_tokens_and_is_tried_now_and_then():
    rate = ComputeRate()
    rate.computed(100, 1.0)
    rate.captured(1, 2.0)
    assert rate.is_worth_capturing(100, 1), "it may have been a pause"
    rate.captured(1, 2.0)
    answers = [rate.is_worth_capturing(100, 1) for _ in range(RETRY_EVERY)]
    assert answers == [*[False] * (RETRY_EVERY - 1), True]
    assert rate.is_worth_capturing(200, 1)
    assert not rate.is_worth_capturing(200, 2)
