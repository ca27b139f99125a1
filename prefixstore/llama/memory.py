"""The memory of a llama.cpp context: take pages out, put pages back.

A page leaves by tagging: its cells are given to sequence 1 as well, and ``llama_state_seq_get_data`` writes sequence 1.
With ``n_seq_max == 1`` cells come out without a sequence id then, 4 bytes shorter than the loader wants them; they are
written so far behind the start of the buffer that whole cells fit in before the rows. Where there are several sections,
or longer cells, sequence 1 is made to hold all cells, and sequence 0 those of the page while it is written: retagging
visits every live cell. A page comes back in the same way: it is loaded as sequence 1, whose cells are then given to
sequence 0. Tags change, tensors do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np

from prefixstore.buffers import PooledBuffer
from prefixstore.errors import ContextError, CorruptError
from prefixstore.llama.parse import U32
from prefixstore.llama.shape import Shape, complete_cells, shape_of, shape_of_sequence
from prefixstore.llama.state import Blob, Buffer

__all__ = ["KINDS", "Memory", "kind_of", "page_tokens_for"]

KINDS = ("pages", "snapshots", "pages and snapshots")
SHORT_PAGE = 64

SEQUENCE = 0  # what Llama computes in
SCRATCH = 1
END = -1

_u8_p = ctypes.POINTER(ctypes.c_uint8)


def kind_of(llm: llama_cpp.Llama) -> str:
    """What is stored of a context: ``"pages"``, ``"snapshots"`` (recurrent) or ``"pages and snapshots"`` (hybrid).

    Or why nothing is: ``"encoder"`` or ``"no_memory"``.
    """
    model = llm._model.model
    if llama_cpp.llama_model_has_encoder(model):
        return "encoder"
    if not llama_cpp.llama_get_memory(llm._ctx.ctx):
        return "no_memory"
    if llama_cpp.llama_model_is_recurrent(model):
        return "snapshots"
    if llama_cpp.llama_model_is_hybrid(model):
        return "pages and snapshots"
    return "pages"


def page_tokens_for(llm: llama_cpp.Llama, wanted: int) -> int:
    """The length of a page: as wanted, but no longer than the model's sliding window, whose rows it would lack.

    Nor longer than `SHORT_PAGE` where snapshots hold the rows since the last boundary.
    """
    if kind_of(llm) == "pages and snapshots":
        return min(wanted, SHORT_PAGE)
    window = int(llama_cpp.llama_model_n_swa(llm._model.model))
    return min(wanted, window) if window else wanted


class Memory:
    """Sequence 0 of a context whose memory can be cut into pages.

    Attributes
    ----------
    window
        Length of the model's sliding window in tokens; 0 if it has none.
    forgets
        Whether rows that have left the window are overwritten (``swa_full=False``).
    shape
        Of its pages; None before llama.cpp has written one, or taken an example of it.
    is_own
        Whether it is that of a page that llama.cpp has written here.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = weakref.ref(llm)
        self.window = int(llama_cpp.llama_model_n_swa(llm._model.model))
        self.forgets = bool(self.window) and not llm.context_params.swa_full
        self.shape: Shape | None = None
        self.is_own = False

    def _pointers(self) -> tuple[Any, Any]:
        llm = self._llm()
        ctx = llm._ctx.ctx if llm is not None else None
        if ctx is None:
            raise ContextError("the Llama is closed; detach() the store before llm.close()")
        return ctx, llama_cpp.llama_get_memory(ctx)

    def holds(self, n: int) -> bool:
        """Whether the first `n` tokens are all there, as far as the next token needs them: it can go on from `n`."""
        _, mem = self._pointers()
        first = llama_cpp.llama_memory_seq_pos_min(mem, SEQUENCE)
        last = llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE)
        needed_from = max(0, n - self.window) if self.forgets else 0
        return n == 0 or (0 <= first <= needed_from and last >= n - 1)

    def cut(self, n: int) -> None:
        """Keep the first `n` tokens only, tagged as sequence 0 only."""
        _, mem = self._pointers()
        llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        if not llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, n, END):
            raise ContextError(f"llama.cpp does not cut this context at {n}")

    def fits(self, state: Buffer, start: int, n_tokens: int) -> bool:
        """Whether a page has the shape that this context gives its pages, and the positions from `start` on."""
        if self.shape is None:
            try:
                shape = shape_of_sequence(state)
            except CorruptError:
                return False
            if not shape.fits(state, start, n_tokens) or not self._takes(shape.example(start)):
                return False
            self.shape = shape
        return self.shape.fits(state, start, n_tokens)

    def fits_whole(self, state: Buffer, blob: Blob, n: int) -> bool:
        """Whether a state of `n` tokens, as ``llama_state_get_data`` wrote it, has the shape of this context's."""
        found = shape_of(blob)
        if self.shape is None and (
            self._takes(found.example(0)) if found.recurrent is None else self.takes_whole(state, n)
        ):
            self.shape = found
        return found == self.shape

    def takes_whole(self, state: Buffer, n: int) -> bool:
        """Whether llama.cpp takes the state of `n` tokens of a context, which is not kept; false if it is in use."""
        ctx, mem = self._pointers()
        if llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE) != -1:
            return False
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, _u8_p)
        taken = llama_cpp.llama_state_set_data(ctx, source, len(state))
        stands = llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE) == n - 1
        llama_cpp.llama_memory_clear(mem, True)
        return bool(taken == len(state) and stands)

    def _takes(self, state: bytes) -> bool:
        """Whether llama.cpp takes a page, which is not kept."""
        ctx, mem = self._pointers()
        if llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH) != -1:
            return False
        source = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        taken = llama_cpp.llama_state_seq_set_data(ctx, source, len(state), SCRATCH)
        llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        return bool(taken == len(state))

    def load(self, state: memoryview) -> bool:
        """Append a page that `fits`, straight from where it lies; whether llama.cpp took it.

        The page keeps its second tag until the next one is loaded, or until `cut`.
        """
        ctx, mem = self._pointers()
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, _u8_p)
        if llama_cpp.llama_state_seq_set_data(ctx, source, len(state), SCRATCH) != len(state):
            return False
        llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, END, END)
        return True

    def take(
        self,
        ranges: Sequence[tuple[int, int]],
        acquire: Callable[[int], PooledBuffer | None],
        accept: Callable[[int, int, PooledBuffer | str], object],
    ) -> None:
        """Copy pages out, up to the first that cannot be had.

        Parameters
        ----------
        ranges
            First position and boundary of each page.
        acquire
            Supplies a buffer of so many bytes, or None.
        accept
            Is given each page, ``accept(start, end, buffer)``, and releases its buffer when it is done with it; for a
            page that cannot be had, the reason: ``"incomplete"`` (the context does not hold all rows of it any more)
            or ``"queue_full"``.
        """
        ctx, mem = self._pointers()
        if llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH) != -1:
            raise ContextError("sequence 1 of the context is in use")
        if self.shape is not None and self.shape.is_plain and llama_cpp.llama_n_seq_max(ctx) == 1:
            for start, end in ranges:
                got = self._copy_beside(ctx, mem, start, end, self.shape, acquire)
                if not self.is_own and not isinstance(got, str):
                    self.is_own = self.shape.fits(got.view, start, end - start)
                accept(start, end, got)
                if isinstance(got, str):
                    break
            return
        llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, SCRATCH, END, END)
        llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
        try:
            for start, end in ranges:
                llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, start, end)
                got = self._copy(ctx, mem, start, end, acquire)
                if self.shape is None and not isinstance(got, str):
                    with contextlib.suppress(CorruptError):
                        self.shape, self.is_own = shape_of_sequence(got.view), True
                accept(start, end, got)
                if isinstance(got, str):
                    break
                llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
        finally:
            llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
            llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, END, END)
            llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)

    @staticmethod
    def _copy(
        ctx: Any, mem: Any, start: int, end: int, acquire: Callable[[int], PooledBuffer | None]
    ) -> PooledBuffer | str:
        first = llama_cpp.llama_memory_seq_pos_min(mem, SEQUENCE)
        last = llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE)
        if (first, last) != (start, end - 1):
            return "incomplete"
        size = llama_cpp.llama_state_seq_get_size(ctx, SEQUENCE)
        buffer = acquire(size)
        if buffer is None:
            return "queue_full"
        target = ctypes.cast(buffer.address, _u8_p)
        if llama_cpp.llama_state_seq_get_data(ctx, target, size, SEQUENCE) != size:
            buffer.release()
            raise ContextError(f"llama.cpp did not write the state of tokens {start} to {end}")
        return buffer

    @staticmethod
    def _copy_beside(
        ctx: Any, mem: Any, start: int, end: int, shape: Shape, acquire: Callable[[int], PooledBuffer | None]
    ) -> PooledBuffer | str:
        """The page written as sequence 1, which needs no other cell to change."""
        n = end - start
        size, missing = shape.size(n), n * U32.size
        llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, SCRATCH, start, end)
        try:
            first = llama_cpp.llama_memory_seq_pos_min(mem, SCRATCH)
            last = llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH)
            if (first, last) != (start, end - 1):
                return "incomplete"
            buffer = acquire(size)
            if buffer is None:
                return "queue_full"
            target = ctypes.cast(buffer.address + missing, _u8_p)
            written = llama_cpp.llama_state_seq_get_data(ctx, target, size - missing, SCRATCH)
        finally:
            llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        if written != size - missing:
            buffer.release()
            raise ContextError(f"llama.cpp did not write the state of tokens {start} to {end}")
        complete_cells(buffer.view, n)
        return buffer
