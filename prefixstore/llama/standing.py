"""A memory that can be gone on from only where it stands: recurrent, or attention beside a recurrent part.

Its state is valid behind one position. Tags do not work on it: with ``n_seq_max == 1`` the recurrent half knows no
sequence 1. But the recurrent part can be copied alone (``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``), and rows of attention
can be cut out of a whole state, where its layout is understood.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import llama_cpp
import numpy as np

from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.errors import ContextError
from prefixstore.llama.memory import SEQUENCE, Memory

__all__ = ["PARTIAL", "WHOLE", "Standing"]

WHOLE = 0
UNBOUNDED = 2**62
PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

_u8_p = ctypes.POINTER(ctypes.c_uint8)


class Standing(Memory):
    """Sequence 0 of a context whose memory cannot step back.

    Attributes
    ----------
    scratch
        Memory for states that are cut or joined. Not the writer's: who holds some may wait for room in the queue.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        super().__init__(llm)
        self.scratch = BufferPool(UNBOUNDED)

    def holds(self, n: int) -> bool:
        """Whether the context can go on from position `n`: it has to stand exactly there."""
        _, mem = self._pointers()
        return n == 0 or llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE) == n - 1

    def copy(self, flags: int, acquire: Callable[[int], PooledBuffer | None]) -> PooledBuffer | None:
        """Copy the state, `WHOLE` or `PARTIAL`, into a buffer from `acquire`; None if there is none."""
        ctx, _ = self._pointers()
        size = llama_cpp.llama_state_seq_get_size_ext(ctx, SEQUENCE, flags)
        buffer = acquire(size)
        if buffer is None:
            return None
        target = ctypes.cast(buffer.address, _u8_p)
        if llama_cpp.llama_state_seq_get_data_ext(ctx, target, size, SEQUENCE, flags) != size:
            buffer.release()
            raise ContextError("llama.cpp did not write the state of the context")
        return buffer

    def put(self, state: memoryview, n: int) -> bool:
        """Replace what the context holds by a whole state of `n` tokens; whether it stands there now.

        If not, it is empty.
        """
        ctx, mem = self._pointers()
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, _u8_p)
        llama_cpp.llama_memory_clear(mem, False)
        taken = llama_cpp.llama_state_seq_set_data(ctx, source, len(state), SEQUENCE)
        if taken == len(state) and self.holds(n):
            return True
        llama_cpp.llama_memory_clear(mem, True)
        return False
