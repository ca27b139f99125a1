"""A process that is stopped, or hangs, while it holds the write lock of a location: others go on, and do not wait."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from prefixstore.backends.objects import store_state as objects
from prefixstore.backends.sql import postgresql, sqlite
from prefixstore.engine import write_queue
from prefixstore.engine.pages import open_pages
from prefixstore.errors import UnavailableError
from tests.support import PATIENCE, ROOT, outcome
from tests.support.engines import MIB, A, B, C, Store, note_of
from tests.support.places import SCHEMES, place
from tests.support.signals import suspend
from tests.support.timeouts import wait_for


@contextmanager
def holder(location):
    """Another process, stopped inside a transaction."""
    script = [sys.executable, "-m", "tests.attacks.holder", location]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout.readline() == "held\n"
            suspend(process)
            yield process
        finally:
            process.kill()


def ends(work):
    """Something is done, or given up."""
    found = outcome(work)
    assert not isinstance(found, Exception) or isinstance(found, UnavailableError), found


@pytest.fixture
def impatient(monkeypatch):
    """Waits for locks, and for the turn of another, are short."""
    monkeypatch.setattr(write_queue, "NO_PROGRESS_SECONDS", 2.0)
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.5)
    monkeypatch.setattr(postgresql, "LOCK_SECONDS", 0.5)
    monkeypatch.setattr(objects, "TURN_SECONDS", 2.0)


@pytest.fixture
def store(request, tmp_path, impatient):
    """A store that has a sequence, in a location of each kind."""
    location = place(request.param, tmp_path, request)
    made = Store(open_pages(location, max_bytes=64 * MIB), options={"queue_bytes": MIB})
    made.put(A)
    made.location = location
    return made


@pytest.mark.parametrize("store", SCHEMES, indirect=True)
@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_others_go_on_while_a_process_is_stopped_in_a_transaction(store, end):
    with holder(store.location) as process:
        assert store.fetch(A) == 3
        store.submit(B)
        # what waits to be written is found
        assert store.match(B) == 12 or store.counters.group("dropped")
        ends(store.engine.drain)
        if store.location.startswith(("sqlite", "postgresql")):
            # LMDB waits for its lock without an end: there, only what the write thread does is bounded. Valkey takes
            # the lock from a process that is silent, and object storage has none.
            changed = outcome(lambda: store.engine.upkeep.change_note(b"mine", lambda _: b"1"), "a change")
            assert isinstance(changed, UnavailableError)
        assert store.fetch(A) == 3
        if end == "goes on":
            process.send_signal(signal.SIGCONT)
            assert process.communicate("\n", timeout=PATIENCE)[0] == "done\n"
        else:
            process.kill()
            process.wait(PATIENCE)
        wait_for(lambda: drained(store), "the queue")
        assert store.put(C) == 3
        assert store.fetch(C) == 3
        assert store.fetch(A) == 3
        # committed as a whole, or not at all
        assert note_of(store, b"holder") == (b"was here" if end == "goes on" else None)
        if end == "goes on":
            # the holder stored the pages of a tenant of its own
            assert store.engine.upkeep.used()[0].entries >= 8
    assert store.engine.upkeep.check() == []
    store.engine.close()


def drained(store):
    try:
        store.engine.drain()
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize("store", SCHEMES, indirect=True)
def test_a_store_closes_in_time_while_a_process_is_stopped_in_a_transaction(store):
    with holder(store.location) as process:
        store.submit(B)
        writer = store.engine.write_queue._thread
        ends(store.engine.close)
        process.kill()
        process.wait(PATIENCE)
    wait_for(lambda: not writer.is_alive(), "the end of the write thread")
    again = Store(open_pages(store.location, max_bytes=64 * MIB))
    assert again.fetch(A) == 3
    assert again.put(C) == 3
    again.close()
