"""Memory for payloads that are received."""

from prefixstore.backends import received
from prefixstore.backends.received import ReceivedMemory


def test_memory_that_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(received, "KEPT_BYTES", 250_000)
    memory = ReceivedMemory()
    views = [memory.take(100_000) for _ in range(20)]
    for n, view in enumerate(views):
        view[:] = bytes([n]) * 100_000
    assert [view[99_999] for view in views] == list(range(20))
    assert len(memory._kept) == 2
    assert memory.take(1_000_000).nbytes == 1_000_000
    assert len(memory._kept) == 0
