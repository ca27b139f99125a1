"""The write queue: what is submitted is written in the background, in order, and within its memory."""

import threading
from contextlib import contextmanager

import pytest

from prefixstore.errors import UnavailableError
from tests.support import PATIENCE
from tests.support.engines import A, B, MemoryPages, Store, gated, store_of, writer_of
from tests.support.faults import FaultyBackend, FlakyBackend

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
    for tokens in (A, B):
        for new in store.pages(tokens):
            assert store.engine.write_queue.submit(new)
    gate.set()
    assert closed.wait(PATIENCE)
    assert len(store.stored_keys()) == 6
    assert store.counters.group("dropped") == {}
    assert store.engine.queued_bytes == 0
    store.engine.close()


def test_the_queue_is_bounded_and_has_space_again_when_its_pages_are_written():
    gate = threading.Event()

    with store_of(gated(MemoryPages, gate)()) as store, writer_of(store, queue_bytes=2500) as writer:
        for number in (1, 2):
            (new,) = store.pages([number] * 4)
            assert writer.write_queue.submit(new)
        assert writer.queued_bytes == 2000
        assert writer.write_queue.acquire(1000) is None
        assert writer.write_queue.acquire(500) is not None
        waiting = []
        thread = threading.Thread(
            target=lambda: waiting.append(writer.write_queue.acquire(1000, wait=True)), daemon=True
        )
        thread.start()
        gate.set()
        thread.join(PATIENCE)
        assert [buffer.view.nbytes for buffer in waiting] == [1000]
        writer.flush()
        assert len(store.stored_keys()) == 2


def test_a_capture_that_waits_for_a_location_that_hangs_gives_up(monkeypatch):
    monkeypatch.setattr("prefixstore.engine.write_queue.NO_PROGRESS_SECONDS", 0.05)
    with store_of() as store, writer_of(store, queue_bytes=1000) as writer:
        held = writer.write_queue.acquire(1000)
        assert writer.write_queue.acquire(1000, wait=True) is None
        held.release()
        writer.write_queue.acquire(1000, wait=True).release()


def test_others_who_wait_or_capture_do_not_make_a_hanging_location_look_alive(monkeypatch):
    monkeypatch.setattr("prefixstore.engine.write_queue.NO_PROGRESS_SECONDS", 0.5)
    gate, ended = threading.Event(), threading.Event()
    with store_of(gated(MemoryPages, gate)()) as store, writer_of(store) as writer:
        writer.write_queue.submit(store.pages(A)[0])

        def wake():
            while not ended.wait(0.05):
                with writer.write_queue._lock:
                    writer.write_queue._wake.notify_all()

        thread = threading.Thread(target=wake)
        thread.start()
        try:
            with pytest.raises(UnavailableError, match="nothing was written"):
                writer.flush()
        finally:
            gate.set()
            ended.set()
            thread.join(PATIENCE)


def test_a_bug_does_not_end_the_thread_of_the_queue():
    backend = FaultyBackend(MemoryPages(), "put", ZeroDivisionError(), at=2)
    with store_of(backend) as store, writer_of(store) as writer:
        for new in store.pages(A[:4]):
            writer.write_queue.submit(new)
        writer.flush()
        for new in store.pages(B[:4]):
            writer.write_queue.submit(new)
        writer.drain()
        assert store.counters.group("dropped") == {"error": 1}
        assert store.match(B) == 0
        for new in store.pages(B):
            writer.write_queue.submit(new)
        writer.flush()
        assert store.fetch(B) == 3
        assert writer.queued_bytes == 0
