"""Ctrl-C at every place of a restore: no view is closed while a thread reads it, no thread and no lock is left."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from prefixstore.engine.readers import ReaderPool
from tests.support.ctrl_c import interrupted, places_in, sample
from tests.support.fetching import Watcher, store_of
from tests.support.models import TORTURE

SECONDS = 30

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


def in_time(work):
    """What `work` returns in another thread; None if it hangs."""
    results = []

    def run():
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - reported by the test
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return results[0] if results else None


def left():
    """Threads of readers that have begun, or that the end of the process waits for."""
    until = time.monotonic() + SECONDS
    while True:
        found = [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith(("prefixstore-read", "prefixstore-objects"))
            and (thread.ident or not thread.daemon)
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
            return store.fetch(streamed=streamed)

        n = places_in(work)
        for at in sample(n, 50 * TORTURE):
            if not kept:
                store.fetcher._pool.close()
                store.fetcher._pool = ReaderPool()
            where, other = "", None
            try:
                where = interrupted(work, at)
            except Exception as error:  # noqa: BLE001 - reported below
                other = error
            gc.collect()
            found = in_time(work)
            if found != 4 or other is not None or store.backend.misused:
                faults.append((where, found, other, list(store.backend.misused)))
                store.backend.misused.clear()
                store.fetcher._pool = ReaderPool()
        store.fetcher.close()
    assert faults == []
    assert left() == []
