"""Payloads of object storage on their way: more and more at a time."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest

from prefixstore.backends.objects.read_ahead import AT_ONCE, HELD_BYTES, ahead
from prefixstore.errors import CorruptError, UnavailableError
from tests.support import PATIENCE, in_thread
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
        found.extend(ahead(iter(range(50)), lambda _: HELD_BYTES // 4, read, lambda _: None))
    assert found == [-n for n in range(30)]
    assert max(most) <= 4
    assert list(ahead([], lambda _: 1, read, lambda _: None)) == []
    assert list(ahead([7], lambda _: 10**12, read, lambda _: None)) == [-7]


def test_the_first_is_asked_for_alone_and_it_is_told_how_much_of_it_is_there():
    begun, told = [], []
    going = [threading.Event() for _ in range(20)]

    def read(number, arrived):
        begun.append(number)
        assert going[number].wait(PATIENCE)
        arrived(number + 1)
        return number

    found = ahead(range(20), lambda _: MIB, read, told.append)
    results = SimpleQueue()
    reader = in_thread(lambda: [results.put(one) for one in found])
    for n_done, n_begun in enumerate((1, 3, 6, 3 + AT_ONCE, 4 + AT_ONCE)):
        wait_for(lambda n=n_begun: len(begun) == n, "they have begun")
        going[n_done].set()
        assert results.get(timeout=PATIENCE) == n_done
        assert n_done + 1 in told
    for event in going:
        event.set()
    reader.join(PATIENCE)
    assert results.qsize() == 15


def test_whoever_ends_early_has_the_others_end_with_their_next_bytes():
    ended, going, begun = [], threading.Event(), []

    def read(number, arrived):
        if number > 2:
            begun.append(number)
            assert going.wait(PATIENCE)
            try:
                arrived(1)
            except UnavailableError:
                ended.append(number)
                raise
        return number

    found = ahead(range(6), lambda _: MIB, read, lambda _: None)
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    wait_for(lambda: len(begun) == 3, "the others have begun")
    found.close()
    going.set()
    wait_for(lambda: sorted(ended) == [3, 4, 5], "they end")
