"""Pooled memory for pages on their way from llama.cpp to the store.

Fresh memory costs more than the copy into it (page faults: 0.2-0.3 s against 0.04 s for 134 MB), so buffers are reused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool", "PooledBuffer", "released_on_error"]

IDLE_BYTES = 64 << 20
NO_MEMORY: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


class PooledBuffer:
    """A buffer in use. It starts with one holder, and returns to the pool when the last holder releases it.

    One that is lost no longer counts as in use when it is collected.
    """

    # set by the pool
    _holders = 0

    def __init__(self, pool: BufferPool, size: int) -> None:
        self._pool = pool
        self._memory = NO_MEMORY
        self._size = size

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

    def __del__(self) -> None:
        if self._holders > 0:
            self.abandon()

    def abandon(self) -> None:
        """Stop counting it as in use. Its memory does not return to the pool, since a view may still show it."""
        pool = self._pool
        with pool.lock:
            if self._holders > 0:
                self._holders = 0
                pool.in_use -= self._size
                pool.released()

    def release(self) -> None:
        """Remove a holder."""
        pool = self._pool
        with pool.lock:
            self._holders -= 1
            if self._holders == 0:
                pool.in_use -= self._size
                pool.released(self._memory)


class BufferPool:
    """A supply of buffers, bounded or not.

    Parameters
    ----------
    limit
        Bytes that may be in use at a time; None for no limit. While none is in use, one buffer of any size is given
        out.

    Attributes
    ----------
    in_use
        Bytes that are in use now.
    """

    def __init__(self, limit: int | None) -> None:
        # entered by itself, and not through the condition: this takes a single step
        self.lock = threading.RLock()
        self._released = threading.Condition(self.lock)
        self._limit = limit
        self.in_use = 0
        self._idle: list[npt.NDArray[np.uint8]] = []

    def acquire(self, size: int, *, wait: bool = False, timeout: float | None = None) -> PooledBuffer | None:
        """A buffer of `size` bytes. At the limit: None, or with `wait` a wait until enough are released.

        The wait ends with None if nothing is released for `timeout` seconds; None waits forever.
        """
        with self.lock:
            while self._limit is not None and self.in_use and self.in_use + size > self._limit:
                if not wait:
                    return None
                if not self._released.wait(timeout):
                    return None
            buffer = PooledBuffer(self, size)
            buffer._holders = 1  # noqa: SLF001 - of this module
            self.in_use += size
            fitting = [memory for memory in self._idle if memory.nbytes >= size]
            if fitting:
                memory = min(fitting, key=lambda array: array.nbytes)
                self._idle = [kept for kept in self._idle if kept is not memory]
                buffer._memory = memory  # noqa: SLF001 - as above
                return buffer
        try:
            buffer._memory = np.empty(size, np.uint8)  # noqa: SLF001 - as above
        except Exception:
            buffer.abandon()
            raise
        return buffer

    def released(self, memory: npt.NDArray[np.uint8] | None = None) -> None:
        """Called by a buffer, under the lock, when it has no holder any longer; its memory may be used again."""
        if memory is not None:
            self._keep(memory)
        self._released.notify_all()

    def _keep(self, memory: npt.NDArray[np.uint8]) -> None:
        self._idle.append(memory)
        while len(self._idle) > 1 and sum(kept.nbytes for kept in self._idle) > IDLE_BYTES:
            # the smallest fits the fewest requests
            smallest = min(self._idle, key=lambda array: array.nbytes)
            self._idle = [kept for kept in self._idle if kept is not smallest]


@contextmanager
def released_on_error(buffer: PooledBuffer | None) -> Iterator[None]:
    """Release a buffer if the block ends with an exception; nothing happens without one."""
    try:
        yield
    except BaseException:
        if buffer is not None:
            buffer.release()
        raise
