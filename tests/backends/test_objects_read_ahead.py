"""Payloads of object storage on their way: as many at a time as the link takes."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from prefixstore.backends.objects import read_ahead
from prefixstore.backends.objects.read_ahead import AT_ONCE, HELD_BYTES, SMALL_AT_ONCE, SOON, Requests
from prefixstore.errors import CorruptError, UnavailableError
from tests.support import PATIENCE
from tests.support.places import MIB
from tests.support.timeouts import wait_for


@pytest.fixture
def requests():
    with closing(Requests()) as found:
        yield found


class Counting:
    """How many are at work at a time."""

    def __init__(self):
        self.running, self.most, self.lock = 0, 0, threading.Lock()

    def __enter__(self):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)

    def __exit__(self, *_):
        with self.lock:
            self.running -= 1


def test_payloads_are_read_ahead_in_order_with_a_bound_on_what_is_held(requests):
    counting = Counting()

    def read(number, arrived):
        with counting:
            time.sleep(0.001 * (number % 3))
        if number == 30:
            raise CorruptError("in its turn")
        return -number

    found = []
    requests.n_ahead = AT_ONCE
    with pytest.raises(CorruptError):
        found.extend(requests.ahead(range(50), lambda _: HELD_BYTES // 4, read))
    assert found == [-n for n in range(30)]
    assert 1 < counting.most <= 4
    assert list(requests.ahead([], lambda _: 1, read)) == []
    assert list(requests.ahead([7], lambda _: 10**12, read)) == [-7]


def test_small_requests_and_uploads_are_many_at_a_time_with_a_bound_on_what_is_held(requests):
    def most_of(size):
        counting = Counting()

        def work(number):
            with counting:
                time.sleep(0.002)
            return -number

        assert requests.at_once(range(100), work, lambda _: size) == [-n for n in range(100)]
        return counting.most

    assert 4 < most_of(0) <= SMALL_AT_ONCE
    assert 1 < most_of(HELD_BYTES // 4) <= 4
    assert most_of(2 * HELD_BYTES) == 1


def test_when_one_fails_none_is_at_work_and_the_rest_is_left(requests):
    done, is_ready = [], threading.Event()

    def work(number):
        if number == 0:
            is_ready.wait(PATIENCE)
            raise CorruptError("the first")
        is_ready.set()
        time.sleep(0.02)
        done.append(number)

    with pytest.raises(CorruptError):
        requests.at_once(range(100), work, lambda _: 0)
    n_done = len(done)
    assert n_done < 99
    time.sleep(0.05)
    assert len(done) == n_done


def test_the_progress_of_the_one_that_is_waited_for_is_noted(requests):
    notes = []

    def read(number, arrived):
        arrived(1)
        arrived(2)
        return number

    assert list(requests.ahead(range(2), lambda _: 3, read, notes.append)) == [0, 1]
    assert notes[:3] == [0, 1, 3]
    assert notes[-1] == 0


def test_whoever_ends_early_has_the_others_end_with_their_next_bytes(requests):
    ended, going, begun = [], threading.Event(), []

    def read(number, arrived):
        if number:
            begun.append(number)
            assert going.wait(PATIENCE)
            try:
                arrived(1)
            except UnavailableError:
                ended.append(number)
                raise
        return number

    requests.n_ahead = AT_ONCE
    found = requests.ahead(range(6), lambda _: MIB, read)
    assert next(found) == 0
    wait_for(lambda: len(begun) == 5, "the others have begun")
    found.close()
    going.set()
    wait_for(lambda: sorted(ended) == [1, 2, 3, 4, 5], "they end")


@pytest.mark.parametrize(
    ("rate", "each", "n_ahead"),
    [
        (12.5e6, float("inf"), (1, 2)),  # 100 Mbit/s
        (125e6, float("inf"), (1, 2)),  # 1 Gbit/s
        (10e9, 90e6, (AT_ONCE,)),  # a large object store: so much for each connection
        (10e9, float("inf"), (AT_ONCE,)),
    ],
)
def test_as_many_are_asked_for_as_the_link_takes(requests, rate, each, n_ahead):
    seen = set()
    for _ in range(40):
        requests._received(8 * MIB, 8 * MIB / min(each, rate / requests.n_ahead))
        seen.add(requests.n_ahead)
    assert requests.n_ahead in n_ahead
    assert max(seen) <= max(n_ahead)


def test_a_link_that_became_slower_is_found_out(requests):
    for _ in range(10):
        requests._received(8 * MIB, 0.2)
    assert requests.n_ahead == AT_ONCE
    requests._received(8 * MIB, 20 * SOON)
    assert requests.n_ahead == AT_ONCE // 2
    # what was the fastest is forgotten after a while
    for _ in range(200):
        requests._received(8 * MIB, 20 * SOON)
    assert requests.n_ahead == AT_ONCE
    assert read_ahead.KEPT < 1
