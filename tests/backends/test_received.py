"""Memory for payloads that are received."""

from prefixstore.backends import received
from prefixstore.backends.received import ReceivedMemory
from tests.support import allocated


def test_memory_that_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(received, "KEPT_BYTES", 2_500_000)
    memory = ReceivedMemory()
    with allocated() as megabytes:
        views = [memory.take(1_000_000) for _ in range(20)]
        for n, view in enumerate(views):
            view[:] = bytes([n]) * 1_000_000
        assert [view[999_999] for view in views] == list(range(20))
        del views, view
        assert round(megabytes()) == 2
        assert memory.take(10_000_000).nbytes == 10_000_000
        assert round(megabytes()) == 0
