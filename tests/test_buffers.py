"""Buffers for pages on their way into the store and out of it."""

import random
import threading
from functools import partial

import numpy as np
import pytest

from prefixstore import buffers
from prefixstore.buffers import BufferPool
from prefixstore.testing.together import together
from tests.support import PATIENCE, allocated, in_fork


def test_no_more_is_handed_out_than_allowed_except_one_of_any_size():
    pool = BufferPool(100)
    large = pool.acquire(1000)
    assert large is not None
    assert pool.acquire(1) is None
    large.release()
    held = [pool.acquire(60), pool.acquire(40), pool.acquire(1)]
    assert [buffer is not None for buffer in held] == [True, True, False]
    assert pool.in_use == 100


@pytest.mark.parametrize("how", ["lost", "released"])
def test_a_buffer_that_is_in_use_no_longer_does_not_count_and_its_memory_is_used_again_after_its_views(how):
    pool = BufferPool(100)
    one = pool.acquire(60)
    view = one.view
    view[:] = bytes(60)
    assert pool.acquire(60) is None
    if how == "released":
        one.release()
        one.release()
    del one
    assert pool.in_use == 0
    other = pool.acquire(60)
    other.view[:] = b"x" * 60
    assert bytes(view) == bytes(60)
    other.release()
    address = np.frombuffer(view, np.uint8).ctypes.data
    del view
    assert address in (buffer.address for buffer in (pool.acquire(50), pool.acquire(50)))


def test_a_buffer_in_the_memory_of_another_pool_counts_in_both():
    near, far = BufferPool(1000), BufferPool(100)
    first, second = near.acquire(60), near.acquire(60)
    first.view[:] = b"1" * 60
    copy = far.adopt(first.view)
    assert far.adopt(second.view) is None
    first.release()
    assert (near.in_use, far.in_use) == (60, 60)
    assert bytes(copy.view) == b"1" * 60
    copy.release()
    assert far.in_use == 0


def test_idle_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(buffers, "IDLE_BYTES", 2_500_000)
    pool = BufferPool(None)
    with allocated() as megabytes:
        held = [pool.acquire(size) for size in (1_000_000, 500_000, 1_000_000, 1_000_000, 300_000)]
        while held:
            held.pop().release()
        assert 1 < megabytes() <= 2.6
        pool.acquire(50_000_000).release()
        assert round(megabytes()) == 50
        # a small one takes no large memory
        small = pool.acquire(1_000_000)
        assert round(megabytes()) == 51
        small.release()


def test_the_child_of_a_fork_waits_for_no_thread_of_the_parent():
    pool = BufferPool(None)
    held = [pool.acquire(100)]
    locked, ended = threading.Event(), threading.Event()

    def lock():
        with pool.lock:
            locked.set()
            ended.wait(PATIENCE)

    thread = threading.Thread(target=lock)
    thread.start()
    locked.wait(PATIENCE)
    try:
        in_fork(held.clear)
    finally:
        ended.set()
        thread.join(PATIENCE)


def test_many_threads_never_share_a_buffer():
    pool = BufferPool(4000)

    def work(mark):
        chance = random.Random(mark)
        for _ in range(300):
            buffer = pool.acquire(chance.choice([10, 500, 1000]), wait=True)
            buffer.view[:] = bytes([mark]) * len(buffer.view)
            view = buffer.view
            buffer.release()
            assert bytes(view) == bytes([mark]) * len(view)

    together(*(partial(work, mark) for mark in range(1, 9)))
    assert pool.in_use == 0
