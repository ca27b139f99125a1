"""Memory for payloads that are received: it is used again once nothing refers to it. Fresh memory is slower by half."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt

from prefixstore.buffers import BufferPool
from prefixstore.errors import UnavailableError

__all__ = ["ReceivedMemory"]

# below that fresh memory is as good
SMALL = 64 << 10


class ReceivedMemory:
    """A supply of memory.

    Attributes
    ----------
    pool
        What is used again.
    """

    def __init__(self) -> None:
        self.pool = BufferPool(limit=None)

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory of this size; it returns to the pool when nothing refers to it any more.

        Raises
        ------
        UnavailableError
            If there is none.
        """
        try:
            if size < SMALL:
                return np.empty(size, np.uint8)
            buffer = self.pool.acquire(size, wait=True)
        except (MemoryError, ValueError) as error:
            raise UnavailableError(f"there is no memory for a payload of {size:,} bytes") from error
        assert buffer is not None, "it waits until there is one"
        array = np.asarray(buffer.view)
        weakref.finalize(array, buffer.release).atexit = False
        return array
