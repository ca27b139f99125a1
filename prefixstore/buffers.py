"""Pooled memory for pages on their way from llama.cpp to the store.

Fresh memory costs more than the copy into it (page faults: 0.2-0.3 s against 0.04 s for 134 MB), so buffers are reused.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

IDLE_BYTES = 64 << 20

_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()


class _Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory of a pool, to which it returns when neither a buffer nor a view of one refers to it any more."""

    pool: BufferPool | None = None

    def __del__(self) -> None:
        if self.pool is not None and isinstance(self.base, np.ndarray):
            self.pool.keep(self.base)


class PooledBuffer:
    """A buffer in use, until it is released or collected. Views of it stay valid as long as they are referenced.

    `view` is its memory, of the requested size; empty after it was released.
    """

    # set by the pool while it counts as in use
    _size = 0

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self.view = memoryview(b"")

    @property
    def address(self) -> int:
        """The address of its memory."""
        return int(np.frombuffer(self.view, np.uint8).ctypes.data)

    def release(self) -> None:
        """Stop counting it as in use. A second call does nothing."""
        pool = self._pool
        # no call between these two steps: an interrupt cannot separate them
        with pool.lock:
            pool.in_use -= self._size
            self._size = 0
        self.view = memoryview(b"")
        with pool.lock:
            pool.freed.notify_all()

    def __del__(self) -> None:
        if self._size:
            self.release()


class BufferPool:
    """A supply of buffers, bounded or not.

    Parameters
    ----------
    limit
        Bytes that may be in use at a time; None for no limit. While none is in use, one buffer may have any size.

    Attributes
    ----------
    in_use
        Bytes that are in use now.
    """

    def __init__(self, limit: int | None) -> None:
        self.renew()
        self._limit = limit
        self.in_use = 0
        self._idle: list[npt.NDArray[np.uint8]] = []
        _pools.add(self)

    def renew(self) -> None:
        """Make a new lock, as in a forked child, where the thread that held the old one does not exist."""
        # memory may come back at any moment, also to the thread that has the lock
        self.lock = threading.RLock()
        self.freed = threading.Condition(self.lock)

    def acquire(self, size: int, *, wait: bool = False, timeout: float | None = None) -> PooledBuffer | None:
        """A buffer of `size` bytes. At the limit: None, or with `wait` a wait until enough are released.

        The wait ends with None if nothing is released for `timeout` seconds; None waits forever.
        """
        buffer = PooledBuffer(self)
        with self.lock:
            while not self._fits(size):
                if not wait or not self.freed.wait(timeout):
                    return None
            buffer._size = size  # noqa: SLF001 - of this module
            self.in_use += size
            # not much larger than requested: only the requested size is counted
            fitting = [memory for memory in self._idle if size <= memory.nbytes <= 2 * size]
            idle = min(fitting, key=lambda array: array.nbytes, default=None)
            self._idle = [kept for kept in self._idle if kept is not idle]
        try:
            memory = (np.empty(size, np.uint8) if idle is None else idle).view(_Memory)
        except Exception:
            buffer.release()
            raise
        memory.pool = self
        buffer.view = memory.data[:size]
        return buffer

    def adopt(self, view: memoryview) -> PooledBuffer | None:
        """A buffer with the memory of another pool, which counts here as well; None at the limit."""
        buffer = PooledBuffer(self)
        with self.lock:
            if not self._fits(len(view)):
                return None
            buffer._size = len(view)  # noqa: SLF001 - of this module
            self.in_use += len(view)
        buffer.view = view
        return buffer

    def _fits(self, size: int) -> bool:
        return self._limit is None or not self.in_use or self.in_use + size <= self._limit

    def keep(self, memory: npt.NDArray[np.uint8]) -> None:
        """Take back memory to which nothing refers any more."""
        with self.lock:
            self._idle.append(memory)
            while len(self._idle) > 1 and sum(kept.nbytes for kept in self._idle) > IDLE_BYTES:
                # the smallest fits the fewest requests
                smallest = min(self._idle, key=lambda array: array.nbytes)
                self._idle = [kept for kept in self._idle if kept is not smallest]


def _after_fork() -> None:
    for pool in list(_pools):
        pool.renew()


if hasattr(os, "register_at_fork"):
    # registered before those of engines, which drop buffers in the child
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def released_on_error(buffer: PooledBuffer | None) -> Iterator[None]:
    """Release a buffer if the block ends with an exception; nothing happens without one."""
    try:
        yield
    except BaseException:
        if buffer is not None:
            buffer.release()
        raise
