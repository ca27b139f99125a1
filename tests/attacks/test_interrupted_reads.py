"""Ctrl-C at every place where a thread is waited for: no view closes while it is read, no lock or thread is left."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from prefixstore.backends.objects.read_ahead import Window, ahead, at_once
from tests.support import outcome
from tests.support.ctrl_c import interrupted, places_in, sample
from tests.support.models import TORTURE
from tests.support.timeouts import wait_for

# what happens when a generator is interrupted that the garbage collector ends
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)


def is_ours(thread):
    """Whether it has begun, or the end of the process waits for it."""
    return thread.name.startswith("prefixstore-objects") and (thread.is_alive() or not thread.daemon)


def read_ahead():
    def read(number, arrived):
        time.sleep(0.0005)
        arrived(1)
        return number

    return list(ahead([1] * 4, read, Window()))


def upload():
    made = []

    def create(number):
        time.sleep(0.0005)
        made.append(number)

    at_once(range(4), create)
    return sorted(made)


@pytest.mark.parametrize("work", [read_ahead, upload])
def test_a_ctrl_c_at_any_place_where_objects_are_read_or_written(work):
    for at in sample(places_in(work), 300 * TORTURE):
        where = interrupted(work, at)
        assert outcome(work, where) == list(range(4)), where
    gc.collect()
    wait_for(lambda: not any(map(is_ours, threading.enumerate())), "the end of the threads")
