"""Buffers for pages on their way into the store and out of it."""

from __future__ import annotations

import random
import threading

from prefixstore.buffers import BufferPool


def test_no_more_is_handed_out_than_allowed_except_one_of_any_size():
    pool = BufferPool(100)
    large = pool.acquire(1000)
    assert large is not None
    assert pool.acquire(1) is None
    large.release()
    held = [pool.acquire(60), pool.acquire(40), pool.acquire(1)]
    assert [buffer is not None for buffer in held] == [True, True, False]
    assert pool.in_use == 100


def test_a_buffer_that_is_lost_no_longer_counts_and_its_memory_is_not_used_again():
    pool = BufferPool(100)
    lost = pool.acquire(60)
    view = lost.view
    view[:] = bytes(60)
    assert pool.acquire(60) is None
    del lost
    assert pool.in_use == 0
    other = pool.acquire(60)
    other.view[:] = b"x" * 60
    assert bytes(view) == bytes(60)


def test_a_held_buffer_is_released_with_its_last_holder():
    pool = BufferPool(100)
    buffer = pool.acquire(60)
    assert buffer.hold()
    buffer.release()
    assert pool.acquire(60) is None
    buffer.release()
    assert pool.in_use == 0
    assert not buffer.hold()
    buffer.release()
    assert pool.in_use == 0
    assert pool.acquire(60) is not None


def test_many_threads_never_share_a_buffer():
    pool = BufferPool(4000)
    failures = []

    def work(mark):
        chance = random.Random(mark)
        for _ in range(300):
            buffer = pool.acquire(chance.choice([10, 500, 1000]), wait=True)
            buffer.view[:] = bytes([mark]) * len(buffer.view)
            held = buffer.hold()
            if not held or bytes(buffer.view) != bytes([mark]) * len(buffer.view):
                failures.append(mark)
            buffer.release()
            buffer.release()

    threads = [threading.Thread(target=work, args=(mark,), daemon=True) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert pool.in_use == 0
