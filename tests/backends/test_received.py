"""Memory for payloads that are received."""

from __future__ import annotations

import threading

import pytest

from prefixstore.backends import received
from prefixstore.backends.received import ReceivedMemory
from prefixstore.errors import UnavailableError
from tests.support import PATIENCE

SIZE = 100_000


def test_memory_is_used_again_only_when_nobody_refers_to_it():
    memory = ReceivedMemory()
    one = memory.take(SIZE)
    one[:3] = list(b"one")
    part = one.data[1:3]
    del one
    two = memory.take(SIZE)
    two[:3] = list(b"two")
    assert bytes(part) == b"ne"
    assert memory.pool.in_use == 2 * SIZE
    del part, two
    assert memory.pool.in_use == 0


@pytest.mark.parametrize("size", [1 << 62, -1])
def test_memory_that_there_is_not_is_an_error_of_ours(size):
    with pytest.raises(UnavailableError, match="no memory"):
        ReceivedMemory().take(size)


def test_threads_never_share_memory(monkeypatch):
    monkeypatch.setattr(received, "SMALL", 1)
    memory, failed = ReceivedMemory(), []

    def work(number):
        for _ in range(1000):
            taken = memory.take(1000).data
            taken[:] = bytes([number]) * 1000
            if taken.tobytes() != bytes([number]) * 1000:
                failed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert failed == []
    assert memory.pool.in_use == 0
