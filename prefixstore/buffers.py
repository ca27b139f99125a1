"""Memory for pages on their way from llama.cpp to the store, used again and again.

Fresh memory costs more than the copy into it (page faults: 0.2-0.3 s against 0.04 s for 134 MB), so buffers are kept.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool", "PooledBuffer"]

IDLE_BYTES = 64 << 20


class PooledBuffer:
    """A buffer in use. It starts held once, and goes back when the last holder releases it."""

    def __init__(self, pool: BufferPool, memory: npt.NDArray[np.uint8], size: int) -> None:
        self._pool = pool
        self._memory = memory
        self._size = size
        self._holders = 1

    @property
    def view(self) -> memoryview:
        """The buffer, as large as it was asked for."""
        return self._memory.data[: self._size]

    @property
    def address(self) -> int:
        """Where the buffer is, for C."""
        return int(self._memory.ctypes.data)

    def hold(self) -> bool:
        """Hold the buffer once more; False if it has gone back already."""
        with self._pool.lock:
            if self._holders == 0:
                return False
            self._holders += 1
            return True

    def release(self) -> None:
        """Hold it once less."""
        with self._pool.lock:
            self._holders -= 1
            if self._holders == 0:
                self._pool.take_back(self._memory, self._size)


class BufferPool:
    """A bounded supply of buffers.

    Parameters
    ----------
    limit
        Bytes that may be leased at a time. One buffer of any size is always possible.
    """

    def __init__(self, limit: int) -> None:
        self.lock = threading.Condition()
        self._limit = limit
        self._leased = 0
        self._idle: list[npt.NDArray[np.uint8]] = []

    @property
    def leased(self) -> int:
        """Bytes that are leased now."""
        return self._leased

    def acquire(self, size: int, *, wait: bool = False) -> PooledBuffer | None:
        """A buffer of `size` bytes; None if that is too much at the moment and `wait` is false."""
        with self.lock:
            while self._leased and self._leased + size > self._limit:
                if not wait:
                    return None
                self.lock.wait()
            self._leased += size
            fitting = [memory for memory in self._idle if memory.nbytes >= size]
            if fitting:
                memory = min(fitting, key=lambda array: array.nbytes)
                self._idle = [kept for kept in self._idle if kept is not memory]
                return PooledBuffer(self, memory, size)
        try:
            memory = np.empty(size, np.uint8)
        except BaseException:
            with self.lock:
                self._leased -= size
                self.lock.notify_all()
            raise
        return PooledBuffer(self, memory, size)

    def take_back(self, memory: npt.NDArray[np.uint8], size: int) -> None:
        """Called by a buffer, under the lock, when nobody holds it any more."""
        self._leased -= size
        self._idle.append(memory)
        while len(self._idle) > 1 and sum(kept.nbytes for kept in self._idle) > IDLE_BYTES:
            # the smallest serves fewest
            smallest = min(self._idle, key=lambda array: array.nbytes)
            self._idle = [kept for kept in self._idle if kept is not smallest]
        self.lock.notify_all()
