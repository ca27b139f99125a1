"""Memory for pages that are on their way."""

from __future__ import annotations

import random
import threading

from prefixstore import buffers as module
from prefixstore.buffers import Buffers


def test_a_lease_is_as_large_as_it_was_asked_for_and_can_be_written():
    pool = Buffers(100)
    lease = pool.lease(10)
    lease.view[:] = b"0123456789"
    assert bytes(lease.view) == b"0123456789"
    assert lease.address == lease._memory.ctypes.data
    assert pool.leased == 10


def test_no_more_is_leased_than_allowed_but_one_of_any_size():
    pool = Buffers(100)
    large = pool.lease(1000)
    assert large is not None
    assert pool.lease(1) is None
    large.release()
    assert [pool.lease(60) is not None, pool.lease(40) is not None, pool.lease(1) is not None] == [True, True, False]
    assert pool.leased == 100


def test_memory_is_used_again_and_the_smallest_that_fits():
    pool = Buffers(1000)
    leases = [pool.lease(size) for size in (50, 200, 100)]
    addresses = [lease.address for lease in leases]
    for lease in leases:
        lease.release()
    assert pool.lease(80).address == addresses[2]
    assert pool.lease(20).address == addresses[0]
    assert pool.lease(80).address == addresses[1]


def test_what_is_held_goes_back_with_its_last_holder():
    pool = Buffers(100)
    lease = pool.lease(60)
    assert lease.hold()
    lease.release()
    assert pool.lease(60) is None
    lease.release()
    assert pool.leased == 0
    assert not lease.hold()
    lease.release()
    assert pool.leased == 0
    assert pool.lease(60) is not None


def test_idle_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "IDLE_BYTES", 250)
    pool = Buffers(10_000)
    leases = [pool.lease(size) for size in (100, 50, 100, 100, 30)]
    for lease in leases:
        lease.release()
    assert sum(memory.nbytes for memory in pool._idle) <= 250
    big = pool.lease(5000)
    big.release()
    assert [memory.nbytes for memory in pool._idle] == [5000]


def test_who_waits_gets_what_becomes_free():
    pool = Buffers(100)
    held = pool.lease(100)
    got = []
    threads = [threading.Thread(target=lambda: got.append(pool.lease(40, wait=True)), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(0.05)
    assert got == []
    held.release()
    for thread in threads:
        thread.join(20)
    assert [len(lease.view) for lease in got] == [40, 40]
    assert pool.leased == 80


def test_many_threads_never_share_a_buffer():
    pool = Buffers(4000)
    failures = []

    def work(mark):
        chance = random.Random(mark)
        for _ in range(300):
            lease = pool.lease(chance.choice([10, 500, 1000]), wait=True)
            lease.view[:] = bytes([mark]) * len(lease.view)
            held = lease.hold()
            if not held or bytes(lease.view) != bytes([mark]) * len(lease.view):
                failures.append(mark)
            lease.release()
            lease.release()

    threads = [threading.Thread(target=work, args=(mark,), daemon=True) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert pool.leased == 0
