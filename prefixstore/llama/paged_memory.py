"""Memory that can be cut into pages: take pages out of a context, put them back.

A page leaves by tagging: its cells are given to sequence 1 as well, and ``llama_state_seq_get_data`` writes sequence 1.
With ``n_seq_max == 1`` the cells are written without a sequence id, 4 bytes shorter than the loader expects. They are
written that far after the start of the buffer, so that whole cells fit in before the rows. Where there are several
sections, or longer cells, sequence 1 is made to hold all cells, and sequence 0 those of the page while it is written;
retagging visits every live cell. A page comes back in the same way: it is loaded as sequence 1, whose cells are then
given to sequence 0. Tags change, tensors do not.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import llama_cpp
import numpy as np

from prefixstore.buffers import PooledBuffer, released_on_error
from prefixstore.errors import ContextError, CorruptError
from prefixstore.llama.kv_memory import Acquire, ContextMemory, u8_p
from prefixstore.llama.residents import END, SCRATCH, SEQUENCE
from prefixstore.llama.state.shape import StateShape, complete_cells, shape_of_sequence
from prefixstore.llama.state.view import U32

__all__ = ["Missing", "MissingPage", "PagedMemory"]


class Missing(Enum):
    """Why a page cannot be taken."""

    INCOMPLETE = "incomplete"
    """The context no longer holds all rows of the page."""
    QUEUE_FULL = "queue_full"
    """There is no buffer for it."""


@dataclass(frozen=True, slots=True)
class MissingPage:
    """A page that could not be taken: its first position, its boundary, and the reason."""

    start: int
    end: int
    reason: Missing


class PagedMemory(ContextMemory):
    """Memory that can be cut into pages."""

    def holds(self, n: int) -> bool:
        """Whether the context can continue from position `n`: all rows that the next token needs are there."""
        _, mem = self._pointers()
        first = llama_cpp.llama_memory_seq_pos_min(mem, SEQUENCE)
        last = llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE)
        needed_from = max(0, n - self.window) if self.overwrites_window else 0
        return n == 0 or (0 <= first <= needed_from and last >= n - 1)

    def cut(self, n: int) -> None:
        """Keep the first `n` tokens only, tagged as sequence 0 only."""
        _, mem = self._pointers()
        llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        if not llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, n, END):
            raise ContextError(f"llama.cpp cannot cut this context at position {n}")

    def shift(self, keep: int, drop: int) -> None:
        """Drop `drop` tokens after the first `keep`, and move the others to the positions after these.

        Only for contexts of which `llama.moving_window` says that they can: others end the process.
        """
        _, mem = self._pointers()
        if not llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, keep, keep + drop):
            raise ContextError(f"llama.cpp cannot drop tokens {keep} to {keep + drop} from this context")
        llama_cpp.llama_memory_seq_add(mem, SEQUENCE, keep + drop, END, -drop)

    def load(self, state: memoryview) -> bool:
        """Append a page that `fits`, without copying it first; whether llama.cpp accepted it.

        The page keeps its second tag until the next one is loaded, or until `cut`. Rows of one that is refused may have
        been copied: `discard` them.
        """
        ctx, mem = self._pointers()
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, u8_p)
        if not self._load_beside(ctx, source, len(state)):
            return False
        llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, END, END)
        return True

    def take(
        self,
        ranges: Sequence[tuple[int, int]],
        acquire: Acquire,
        accept: Callable[[int, int, PooledBuffer], object],
    ) -> MissingPage | None:
        """Copy pages out of the context, up to the first that cannot be taken.

        Parameters
        ----------
        ranges
            First position and boundary of each page.
        acquire
            Supplies a buffer for each page.
        accept
            Called with each page, ``accept(start, end, buffer)``, before the next one is copied; owns the buffer.

        Returns
        -------
        MissingPage or None
            The first page that could not be taken; None if all were.
        """
        ctx, mem = self._pointers()
        self.settle()
        if self.is_shared():
            raise ContextError("sequence 1 of the context is in use; the store needs it")
        if self.shape is not None and self.shape.is_plain and llama_cpp.llama_n_seq_max(ctx) == 1:
            for start, end in ranges:
                taken = self._copy_beside(ctx, mem, start, end, self.shape, acquire)
                if isinstance(taken, Missing):
                    return MissingPage(start, end, taken)
                if not self.shape_is_own:
                    self.shape_is_own = self.shape.fits(taken.view, start, end - start)
                accept(start, end, taken)
            return None
        with self._noted("lent"):
            llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, SCRATCH, END, END)
            missing = self._take_one_by_one(ctx, mem, ranges, acquire, accept)
            self._give_back(mem)
        return missing

    def _take_one_by_one(
        self,
        ctx: Any,
        mem: Any,
        ranges: Sequence[tuple[int, int]],
        acquire: Acquire,
        accept: Callable[[int, int, PooledBuffer], object],
    ) -> MissingPage | None:
        """Copy pages while sequence 1 holds all cells, and sequence 0 those of one page."""
        for start, end in ranges:
            llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
            llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, start, end)
            taken = self._copy(ctx, mem, start, end, acquire)
            if isinstance(taken, Missing):
                return MissingPage(start, end, taken)
            if self.shape is None:
                with contextlib.suppress(CorruptError):
                    self.shape, self.shape_is_own = shape_of_sequence(taken.view), True
            accept(start, end, taken)
        return None

    @staticmethod
    def _copy(ctx: Any, mem: Any, start: int, end: int, acquire: Acquire) -> PooledBuffer | Missing:
        """The page that sequence 0 holds alone."""
        first = llama_cpp.llama_memory_seq_pos_min(mem, SEQUENCE)
        last = llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE)
        if (first, last) != (start, end - 1):
            return Missing.INCOMPLETE
        size = llama_cpp.llama_state_seq_get_size(ctx, SEQUENCE)
        buffer = acquire(size)
        if buffer is None:
            return Missing.QUEUE_FULL
        with released_on_error(buffer):
            target = ctypes.cast(buffer.address, u8_p)
            if llama_cpp.llama_state_seq_get_data(ctx, target, size, SEQUENCE) != size:
                raise ContextError(f"llama.cpp did not write the state of tokens {start} to {end}")
        return buffer

    def _copy_beside(
        self, ctx: Any, mem: Any, start: int, end: int, shape: StateShape, acquire: Acquire
    ) -> PooledBuffer | Missing:
        """The page written as sequence 1, which needs no other cell to change."""
        n = end - start
        size, missing = shape.size(n), n * U32.size
        with self._noted("scratch"):
            llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, SCRATCH, start, end)
            first = llama_cpp.llama_memory_seq_pos_min(mem, SCRATCH)
            last = llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH)
            is_complete = (first, last) == (start, end - 1)
            buffer = acquire(size) if is_complete else None
            with released_on_error(buffer):
                if buffer is not None:
                    target = ctypes.cast(buffer.address + missing, u8_p)
                    written = llama_cpp.llama_state_seq_get_data(ctx, target, size - missing, SCRATCH)
                    if written != size - missing:
                        raise ContextError(f"llama.cpp did not write the state of tokens {start} to {end}")
                    complete_cells(buffer.view, n)
                llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        if buffer is None:
            return Missing.QUEUE_FULL if is_complete else Missing.INCOMPLETE
        return buffer
