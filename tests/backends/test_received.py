"""Memory for payloads that are received."""

from __future__ import annotations

import pytest

from prefixstore.backends import received
from prefixstore.backends.received import ReceivedMemory
from prefixstore.errors import UnavailableError


def test_memory_is_used_again_only_when_nobody_refers_to_it():
    memory = ReceivedMemory()
    one = memory.take(100_000)
    one[:3] = b"one"
    part = one[1:3]
    del one
    two = memory.take(100_000)
    two[:3] = b"two"
    assert bytes(part) == b"ne"
    del part
    three = memory.take(90_000)
    three[:3] = b"333"
    assert bytes(two[:3]) == b"two"
    assert len(memory._kept) == 2


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


@pytest.mark.parametrize("size", [1 << 50, 1 << 62, 1 << 70, -1])
def test_memory_that_there_is_not_is_an_error_of_ours(size):
    with pytest.raises(UnavailableError, match="no memory"):
        ReceivedMemory().take(size)
