"""Memory that cannot step back: recurrent, alone or beside attention. Take its state out of a context, put it back.

Tags (see `paged_memory`) do not work on it: with ``n_seq_max == 1`` its recurrent half knows no sequence 1. But the
recurrent part can be copied alone (``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``), and rows of attention can be cut out of a
whole state if its layout is understood.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np

from prefixstore.buffers import BufferPool, PooledBuffer, released_on_error
from prefixstore.errors import ContextError
from prefixstore.llama.kv_memory import Acquire, ContextMemory, u8_p
from prefixstore.llama.residents import SEQUENCE

__all__ = ["PARTIAL", "WHOLE", "SnapshotMemory"]

WHOLE = 0
PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class SnapshotMemory(ContextMemory):
    """Memory that cannot step back: recurrent, alone or beside attention. Its state is valid at one position.

    Attributes
    ----------
    scratch
        Buffers for states that are cut or joined. Not those of the write queue: the holder may wait for space in it.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        super().__init__(llm)
        self.scratch = BufferPool(limit=None)

    def is_shared(self) -> bool:
        """False: nothing is copied through another sequence."""
        return False

    def holds(self, n: int) -> bool:
        """Whether the context can continue from position `n`: it must be exactly there."""
        _, mem = self._pointers()
        return n == 0 or llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE) == n - 1

    def copy(self, flags: int, acquire: Acquire) -> PooledBuffer | None:
        """Copy the state, `WHOLE` or `PARTIAL`, into a buffer from `acquire`; None if there is no buffer."""
        ctx, _ = self._pointers()
        size = llama_cpp.llama_state_seq_get_size_ext(ctx, SEQUENCE, flags)
        buffer = acquire(size)
        if buffer is None:
            return None
        with released_on_error(buffer):
            target = ctypes.cast(buffer.address, u8_p)
            if llama_cpp.llama_state_seq_get_data_ext(ctx, target, size, SEQUENCE, flags) != size:
                raise ContextError("llama.cpp did not write the state of the context")
        return buffer

    def put(self, state: memoryview, n: int) -> bool:
        """Replace what the context holds by a whole state of `n` tokens, for the caller to tell the Llama which.

        `unverified` is true until then. False if it did not work, and the context is empty.
        """
        ctx, mem = self._pointers()
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, u8_p)
        self.unverified = True
        llama_cpp.llama_memory_clear(mem, False)
        taken = llama_cpp.llama_state_seq_set_data(ctx, source, len(state), SEQUENCE)
        if taken == len(state) and self.holds(n):
            return True
        self.discard()
        return False
