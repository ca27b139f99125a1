"""The write queue: what is submitted is written in the background, in order, and within its memory."""

import threading
from contextlib import contextmanager

import pytest

from prefixstore.errors import UnavailableError
from tests.support import PATIENCE, in_thread
from tests.support.engines import A, B, MemoryPages, Store, store_of
from tests.support.faults import FlakyBackend

# -- what is written, and when -----------------------------------------------------------------------------------------


def test_a_close_in_the_write_thread_waits_for_nothing_and_the_thread_writes_what_is_queued(monkeypatch):
    # longer than a test may take: the thread would wait for itself
    monkeypatch.setattr("prefixstore.engine.write_queue.NO_PROGRESS_SECONDS", 1000.0)
    gate, closed = threading.Event(), threading.Event()

    class ClosedInside(FlakyBackend):
        @contextmanager
        def update(self):
            gate.wait(PATIENCE)
            # as a finalizer may, which the garbage collector calls in any thread
            store.engine.close()
            with super().update() as transaction:
                yield transaction

        def close(self):
            closed.set()

    store = Store(ClosedInside(MemoryPages()))
    assert store.submit(A) + store.submit(B) == 6
    gate.set()
    assert closed.wait(PATIENCE)
    assert len(store.stored_keys()) == 6
    assert store.counters.group("dropped") == {}
    assert store.engine.queued_bytes == 0
    store.engine.close()


def test_the_queue_is_bounded_and_has_space_again_when_its_pages_are_written():
    with store_of(backend := FlakyBackend(MemoryPages(), "update"), options={"queue_bytes": 2500}) as store:
        backend.gate.clear()
        captures = store.engine.write_queue
        assert [store.submit([number] * 4) for number in (1, 2)] == [1, 1]
        assert store.engine.queued_bytes == 2000
        assert captures.acquire(1000) is None
        assert captures.acquire(500) is not None
        waiting = []
        thread = in_thread(lambda: waiting.append(captures.acquire(1000, wait=True)))
        backend.gate.set()
        thread.join(PATIENCE)
        assert [buffer.view.nbytes for buffer in waiting] == [1000]
        store.engine.flush()
        assert len(store.stored_keys()) == 2


def test_a_capture_that_waits_for_a_location_that_hangs_gives_up(monkeypatch):
    monkeypatch.setattr("prefixstore.engine.write_queue.NO_PROGRESS_SECONDS", 0.05)
    with store_of(options={"queue_bytes": 1000}) as store:
        held = store.engine.write_queue.acquire(1000)
        assert store.engine.write_queue.acquire(1000, wait=True) is None
        held.release()
        store.engine.write_queue.acquire(1000, wait=True).release()


def test_others_who_wait_or_capture_do_not_make_a_hanging_location_look_alive(monkeypatch):
    monkeypatch.setattr("prefixstore.engine.write_queue.NO_PROGRESS_SECONDS", 0.5)
    ended = threading.Event()
    with store_of(backend := FlakyBackend(MemoryPages(), "update")) as store:
        backend.gate.clear()
        store.submit(A[:4])
        captures = store.engine.write_queue

        def wake():
            while not ended.wait(0.05):
                with captures._lock:
                    captures._wake.notify_all()

        thread = in_thread(wake)
        try:
            with pytest.raises(UnavailableError, match="nothing was written"):
                store.engine.flush()
        finally:
            backend.gate.set()
            ended.set()
            thread.join(PATIENCE)


def test_a_bug_does_not_end_the_thread_of_the_queue():
    backend = FlakyBackend(MemoryPages(), "put", error=ZeroDivisionError(), failing=(2,))
    with store_of(backend) as store:
        store.submit(A[:4])
        store.engine.flush()
        store.submit(B[:4])
        store.engine.drain()
        assert store.counters.group("dropped") == {"error": 1}
        assert store.match(B) == 0
        store.submit(B)
        store.engine.flush()
        assert store.fetch(B) == 3
        assert store.engine.queued_bytes == 0
