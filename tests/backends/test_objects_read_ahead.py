"""Payloads of object storage on their way: as many at a time as the link takes."""

import threading
import time
from collections import deque

import pytest

from prefixstore.backends.objects.read_ahead import (
    AT_ONCE,
    HELD_BYTES,
    ReadWindow,
    ahead,
)
from prefixstore.errors import CorruptError, UnavailableError
from tests.support import PATIENCE
from tests.support.places import MIB
from tests.support.timeouts import wait_for


def test_payloads_are_read_ahead_in_order_with_a_bound_on_what_is_held():
    running, most, lock = [], [], threading.Lock()

    def read(number, arrived):
        with lock:
            running.append(number)
            most.append(len(running))
        time.sleep(0.001 * (number % 3))
        with lock:
            running.remove(number)
        if number == 30:
            raise CorruptError("in its turn")
        return -number

    found = []
    with pytest.raises(CorruptError):
        found.extend(ahead([HELD_BYTES // 4] * 50, read, wide()))
    assert found == [-n for n in range(30)]
    assert max(most) <= 4
    assert list(ahead([], read, ReadWindow())) == []
    assert list(ahead([10**12], read, ReadWindow())) == [0]


def wide():
    """A window as large as may be held."""
    window = ReadWindow()
    window.received(HELD_BYTES, HELD_BYTES / 1e12)
    assert window.bytes == HELD_BYTES
    return window


def test_whoever_ends_early_has_the_others_end_with_their_next_bytes():
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

    found = ahead([MIB] * 6, read, wide())
    assert next(found) == 0
    wait_for(lambda: len(begun) == 5, "the others have begun")
    found.close()
    going.set()
    wait_for(lambda: sorted(ended) == [1, 2, 3, 4, 5], "they end")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Link:
    """A simulated link that its requests share, and a server that answers late and gives each so much at most."""

    def __init__(self, rate, latency=0.0, each=float("inf")):
        self.rate, self.latency, self.each = rate, latency, each
        self.clock = Clock()
        self.window = ReadWindow(self.clock)

    def restore(self, sizes):
        """When each of these payloads has come, asked for as `ahead` does."""
        began = self.clock.now
        left, running, arrivals, window = deque(enumerate(sizes)), [], {}, self.window
        window.begin()
        while left or running:
            now = self.clock.now
            most = window.bytes if arrivals else window.before_first(sizes[0])
            while left and len(running) < AT_ONCE and (not running or sum(each[1] for each in running) <= most):
                number, size = left.popleft()
                running.append([number, size, size, now])
            flowing = [each for each in running if each[3] + self.latency <= now + 1e-9]
            share = min(self.rate / len(flowing), self.each) if flowing else 0.0
            # requests are looked at once in a millisecond, as pieces arrive
            step = min([0.001, *(each[1] / share for each in flowing)])
            self.clock.now += step
            for each in flowing:
                each[1] = max(each[1] - step * share, 0.0)
                if each[1] < 1e-3:
                    running.remove(each)
                    arrivals[each[0]] = self.clock.now - began
                    window.received(each[2], self.clock.now - each[3], is_full=each[0] > 0 and len(left) > 0)
        return [arrivals[number] for number in range(len(sizes))]


@pytest.mark.parametrize(
    ("rate", "latency", "each"),
    [
        (12.5e6, 0.005, float("inf")),  # 100 Mbit/s
        (12.5e6, 0.05, float("inf")),
        (125e6, 0.005, float("inf")),  # 1 Gbit/s
        (125e6, 0.05, float("inf")),
        (10e9, 0.02, 90e6),  # a large object store: so much for each connection
    ],
)
def test_on_a_slow_link_the_first_page_comes_as_if_alone_and_every_one_is_filled(rate, latency, each):
    link, sizes = Link(rate, latency, each), [8 * MIB] * 32
    alone = latency + sizes[0] / min(rate, each)
    for _ in range(5):
        arrived = link.restore(sizes)
        assert arrived[0] <= 1.05 * alone
        # each page about when it would come if they were asked for one by one
        assert all(came <= (n + 2) * alone for n, came in enumerate(arrived))
    best = max(latency + sum(sizes) / rate, alone * len(sizes) / AT_ONCE)
    assert arrived[-1] <= 1.05 * best
