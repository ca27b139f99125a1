"""Ctrl-C at every step of a view and of a transaction: other threads and processes go on, and the backend closes."""

from __future__ import annotations

import contextlib
import gc
import queue
import sys
from contextlib import closing

import pytest

from prefixstore.engine.pages import open_pages
from tests.support import PATIENCE, in_thread, keys_of, python
from tests.support.interrupts import interrupted_at, moments_of
from tests.support.models import TORTURE_OF_LONG
from tests.support.places import MIB, fill, place, space
from tests.support.valkey import forget_lock

pytestmark = pytest.mark.attack
SAMPLES = 150 * TORTURE_OF_LONG

OTHER_PROCESS = """
import sys
from contextlib import closing
from prefixstore.engine.pages import open_pages
with closing(open_pages(sys.argv[1], max_bytes=64 << 20)) as backend:
    for line in sys.stdin:
        with backend.update() as transaction:
            transaction.put_note(b"other", line.encode())
        print("written", flush=True)
"""


class Worker:
    """A thread that does what it is told, for as long as it takes."""

    def __init__(self):
        self.jobs, self.done = queue.SimpleQueue(), queue.SimpleQueue()
        in_thread(self._run)

    def _run(self):
        while (job := self.jobs.get()) is not None:
            try:
                self.done.put(job())
            except Exception as error:  # noqa: BLE001 - reported to the test
                self.done.put(error)

    def can(self, job):
        self.jobs.put(lambda: job() or "done")
        assert self.done.get(timeout=PATIENCE) == "done"


@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
@pytest.mark.parametrize("kind", ["view", "update"])
@pytest.mark.parametrize("scheme", ["memory", "lmdb", "sqlite", "postgresql", "valkey"])
def test_after_ctrl_c_at_any_step_others_read_and_write_and_the_backend_closes(  # noqa: C901
    scheme, kind, tmp_path, request, monkeypatch
):
    # an interrupt in a weak reference's callback is only reported
    monkeypatch.setattr(sys, "unraisablehook", lambda report: None)
    location = "memory:" if scheme == "memory" else place(scheme, tmp_path, request)
    worker = Worker()
    backend = open_pages(location, max_bytes=64 * MIB)
    other = python(OTHER_PROCESS, location) if scheme != "memory" else None
    (path,) = fill(backend, space(), [[1, 2, 3, 4]])
    number = 0

    def view():
        with backend.view() as opened:
            assert opened.record(path[0]) is not None

    def update():
        nonlocal number
        number += 1
        with backend.update() as opened:
            opened.put_note(b"one", str(number).encode())
            opened.put_note(b"two", str(number).encode())

    def others():
        with backend.view() as opened:
            assert opened.note(b"one") == opened.note(b"two")
        with backend.update() as opened:
            opened.put_note(b"thread", b"x")

    work = view if kind == "view" else update
    try:
        moments = moments_of(work)
        for step in range(1, moments + 1, max(1, moments // SAMPLES)):
            try:
                interrupted_at(work, step)
            except BaseException:  # noqa: BLE001
                # the way out of SQLAlchemy may make another exception of it
                if step % 7 == 0:
                    # as `with store:` does: it closes the store while the exception is handled
                    backend.close()
            if step % 7 == 0:
                backend = open_pages(location, max_bytes=64 * MIB)
                if scheme == "memory":
                    (path,) = fill(backend, space(), [[1, 2, 3, 4]])
            if scheme == "valkey":
                # an interrupt may keep a transaction from giving its lock back
                forget_lock(location)
            worker.can(others)
            if other is not None and step % 3 == 0:
                other.stdin.write(f"{step}\n")
                other.stdin.flush()
                assert other.stdout.readline() == "written\n", step
        worker.can(backend.close)
    finally:
        # a connection that SQLAlchemy has lost to an interrupt is closed when it is collected, with a warning
        gc.collect()
        worker.jobs.put(None)
        if other is not None:
            other.stdin.close()
            other.wait(PATIENCE)
            other.stdout.close()


def test_a_transaction_in_memory_is_committed_as_a_whole_or_not_at_all():
    backend = open_pages("memory:", max_bytes=MIB)
    sequences = [[n, 2, 3, 4] for n in range(3)]
    with closing(backend):
        number = 0

        def write():
            nonlocal number
            number += 1
            fill(backend, space(), [[number, *tokens] for tokens in sequences])

        moments = moments_of(write)
        known = keys_of(backend)
        with backend.view() as view:
            generation = view.generation
        for step in range(1, moments + 1):
            with contextlib.suppress(KeyboardInterrupt):
                interrupted_at(write, step)
            with backend.view() as view:
                now = keys_of(backend)
                assert view.used.entries == len(now)
                assert len(now - known) in (0, 6), step
                assert view.generation == generation + bool(now - known)
                known, generation = now, view.generation
