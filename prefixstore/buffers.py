"""Pooled memory for pages on their way from llama.cpp to the store.

Fresh memory costs more than the copy into it (page faults: 0.2-0.3 s against 0.04 s for 134 MB), so buffers are reused.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool", "PooledBuffer"]

IDLE_BYTES = 64 << 20


class PooledBuffer:
    """A buffer in use. It starts with one holder, and returns to the pool when the last holder releases it."""

    def __init__(self, pool: BufferPool, memory: npt.NDArray[np.uint8], size: int) -> None:
        self._pool = pool
        self._memory = memory
        self._size = size
        self._holders = 1

    def __del__(self) -> None:
        # Ctrl-C can come between two holders: what nobody holds is no longer in use. Its memory is not reused, since a
        # view of it may live on.
        if self._holders > 0:
            self._pool.write_off(self._size)

    @property
    def view(self) -> memoryview:
        """The buffer, of the requested size."""
        return self._memory.data[: self._size]

    @property
    def address(self) -> int:
        """The address of the buffer, for C."""
        return int(self._memory.ctypes.data)

    def hold(self) -> bool:
        """Add a holder; False if the buffer has returned to the pool already."""
        with self._pool.lock:
            if self._holders == 0:
                return False
            self._holders += 1
            return True

    def release(self) -> None:
        """Remove a holder."""
        with self._pool.lock:
            self._holders -= 1
            if self._holders == 0:
                self._pool.take_back(self._memory, self._size)


class BufferPool:
    """A supply of buffers, bounded or not.

    Parameters
    ----------
    limit
        Bytes that may be in use at a time; None for no limit. While none is in use, one buffer of any size is given
        out.
    """

    def __init__(self, limit: int | None) -> None:
        self.lock = threading.Condition()
        self._limit = limit
        self._in_use = 0
        self._idle: list[npt.NDArray[np.uint8]] = []

    @property
    def in_use(self) -> int:
        """Bytes that are in use now."""
        return self._in_use

    def acquire(self, size: int, *, wait: bool = False, timeout: float | None = None) -> PooledBuffer | None:
        """A buffer of `size` bytes. At the limit: None, or with `wait` a wait until enough are released.

        The wait ends with None if nothing is released for `timeout` seconds; None waits forever.
        """
        with self.lock:
            while self._limit is not None and self._in_use and self._in_use + size > self._limit:
                if not wait:
                    return None
                if not self.lock.wait(timeout):
                    return None
            self._in_use += size
            fitting = [memory for memory in self._idle if memory.nbytes >= size]
            if fitting:
                memory = min(fitting, key=lambda array: array.nbytes)
                self._idle = [kept for kept in self._idle if kept is not memory]
                return PooledBuffer(self, memory, size)
        try:
            memory = np.empty(size, np.uint8)
        except BaseException:
            with self.lock:
                self._in_use -= size
                self.lock.notify_all()
            raise
        return PooledBuffer(self, memory, size)

    def write_off(self, size: int) -> None:
        """Called for a buffer that was lost: its memory is freed, and does not return to the pool."""
        with self.lock:
            self._in_use -= size
            self.lock.notify_all()

    def take_back(self, memory: npt.NDArray[np.uint8], size: int) -> None:
        """Called by a buffer, under the lock, when it has no holder any longer."""
        self._in_use -= size
        self._idle.append(memory)
        while len(self._idle) > 1 and sum(kept.nbytes for kept in self._idle) > IDLE_BYTES:
            # the smallest fits the fewest requests
            smallest = min(self._idle, key=lambda array: array.nbytes)
            self._idle = [kept for kept in self._idle if kept is not smallest]
        self.lock.notify_all()
