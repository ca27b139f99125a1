"""Ctrl-C at every place where a thread is waited for: no view closes while it is read, no lock or thread is left."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from prefixstore.backends.objects.read_ahead import Window, ahead, at_once
from prefixstore.backends.threads import Threads
from tests.support import outcome
from tests.support.ctrl_c import interrupted, places_in, sample
from tests.support.fetching import Watcher, state_of, store_of
from tests.support.models import TORTURE
from tests.support.timeouts import wait_for

SECONDS = 30
NAMES = ("prefixstore-read", "prefixstore-work", "prefixstore-objects")

# what happens when a generator is interrupted that the garbage collector ends
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)


class Slow(Watcher):
    """A backend in memory that takes a moment for each page, and notes if its view was closed meanwhile."""

    def __init__(self):
        super().__init__()
        self.misused = []
        self.before = self._read

    def _read(self, i):
        time.sleep(0.0005)
        if not self.open:
            self.misused.append(i)


def left():
    """Threads that have begun, or that the end of the process waits for."""
    until = time.monotonic() + SECONDS
    while True:
        found = [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith(NAMES) and (thread.is_alive() or not thread.daemon)
        ]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.01)


@pytest.mark.parametrize(("codec", "streamed"), [("raw", True), ("raw", False), ("zstd", True)])
@pytest.mark.parametrize("kept", [True, False], ids=["kept threads", "new threads"])
def test_a_ctrl_c_at_any_place_of_a_restore(codec, streamed, kept):
    faults = []
    with store_of([codec] * 4, Slow()) as store:

        def work():
            n = 0
            with store.fetcher.fetching(store.pages, streamed=streamed) as states:
                for n, state in enumerate(states, 1):
                    assert bytes(state) == state_of(n - 1)
            return n

        for at in sample(places_in(work), 50 * TORTURE):
            if not kept:
                store.fetcher.threads.close()
                store.fetcher.threads = Threads("prefixstore-read")
            where = interrupted(work, at)
            gc.collect()
            found = outcome(work, where)
            if found != 4 or store.backend.misused:
                faults.append((where, found, list(store.backend.misused)))
                store.backend.misused.clear()
        # those that were not waited for end when they are told
        wait_for(lambda: store.backend.open == 0 and store.bytes_in_use == 0, "all views are closed")
        store.fetcher.threads.close()
    assert faults == []
    assert left() == []


def read_ahead():
    def read(number, arrived):
        time.sleep(0.0005)
        arrived(1)
        return number

    return [found for _, found in ahead(range(4), lambda _: 1, read, Window())]


def upload():
    made = []

    def create(number):
        time.sleep(0.0005)
        made.append(number)

    at_once(range(4), create, lambda _: 1)
    return sorted(made)


@pytest.mark.parametrize("work", [read_ahead, upload])
def test_a_ctrl_c_at_any_place_where_objects_are_read_or_written(work):
    for at in sample(places_in(work), 300 * TORTURE):
        where = interrupted(work, at)
        assert outcome(work, where) == list(range(4)), where
    gc.collect()
    assert left() == []
