"""Memory that can be cut into pages: take pages out of a context, put them back.

A page leaves by tagging: its cells are given to sequence 1 as well, and ``llama_state_seq_get_data`` writes sequence 1.
With ``n_seq_max == 1`` the cells are written without a sequence id, 4 bytes shorter than the loader expects. They are
written that far after the start of the buffer, so that whole cells fit in before the rows. Where there are several
sections, or longer cells, sequence 1 is made to hold all cells, and sequence 0 those of the page while it is written;
retagging visits every live cell. A page comes back in the same way: it is loaded as sequence 1, whose cells are then
given to sequence 0. Tags change, tensors do not.

Where each copy takes long, as with V transposed on a GPU, several pages leave together and are cut, and are joined
before they come back: see `PagedMemory.copies_together`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import llama_cpp
import numpy as np

from prefixstore.buffers import BufferPool, PooledBuffer, released_on_error
from prefixstore.engine.page import Page
from prefixstore.errors import ContextError, CorruptError
from prefixstore.format.record import Buffer
from prefixstore.llama.kv_memory import END, SCRATCH, SEQUENCE, WHOLE, Acquire, ContextMemory
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.shape import U32, StateShape, complete_cells
from prefixstore.llama.state.view import Assembly, zeros

__all__ = ["Missing", "PageLoader", "PagedMemory"]


class Missing(Enum):
    """Why a page cannot be taken."""

    INCOMPLETE = "incomplete"
    """The context no longer holds all rows of the page."""
    QUEUE_FULL = "queue_full"
    """There is no buffer for it."""


class PagedMemory(ContextMemory):
    """Memory that can be cut into pages."""

    @property
    def copies_together(self) -> bool:
        """Whether pages are copied together: on a GPU llama.cpp copies each channel of a transposed V by itself.

        That is tens of thousands of copies, however few tokens there are: a third of a second on an H100 and an 8B.
        Of a window, llama.cpp would write only the last rows.
        """
        return self.is_on_gpu and self.seen is None and self.shape is not None and self.shape.is_transposed

    def is_shared(self) -> bool:
        """Whether sequence 1, through which pages are copied, is in use."""
        _, mem = self._pointers()
        return bool(llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH) != -1)

    def holds(self, n: int) -> bool:
        """Whether the context can continue from position `n`: all rows that the next token needs are there."""
        _, mem = self._pointers()
        first = llama_cpp.llama_memory_seq_pos_min(mem, SEQUENCE)
        last = llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE)
        needed_from = self.seen.first(n) if self.seen is not None else 0
        return n == 0 or (0 <= first <= needed_from and last >= n - 1)

    def cut(self, n: int) -> None:
        """Keep the first `n` tokens only, tagged as sequence 0 only."""
        _, mem = self._pointers()
        llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        if not llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, n, END):
            raise ContextError(f"llama.cpp cannot cut this context at position {n}")

    def load(self, state: memoryview) -> bool:
        """Append a page that `fits`, without copying it first; whether llama.cpp accepted it.

        The page keeps its second tag until the next one is loaded, or until `cut`. Rows of one that is refused may have
        been copied: `discard` them.
        """
        ctx, mem = self._pointers()
        if not self._read(ctx, state, SCRATCH):
            return False
        llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, END, END)
        return True

    def take(
        self,
        ranges: Sequence[tuple[int, int]],
        acquire: Acquire,
        accept: Callable[[int, int, PooledBuffer], object],
    ) -> Missing | None:
        """Copy pages out of the context, up to the first that cannot be taken; returns why it cannot, or None.

        Of each page, `ranges` has the first position and the boundary. Each is given to ``accept(start, end, buffer)``,
        which owns the buffer, before the next one is copied.
        """
        ctx, mem = self._pointers()
        self.settle()
        if self.is_shared():
            raise ContextError("sequence 1 of the context is in use; the store needs it")
        # what can be written beside the other cells
        plain = self.shape if self.shape is not None and self.shape.is_plain else None
        if llama_cpp.llama_n_seq_max(ctx) > 1:
            plain = None
        with self._lent(mem) if plain is None else contextlib.nullcontext():
            for i, (start, end) in enumerate(ranges):
                rest = ranges[i:]
                if len(rest) > 1 and self.copies_together and self.shape_is_own:
                    # a pool of its own: so much memory is not kept
                    together = self._copy_rows(start, rest[-1][1], plain, BufferPool(limit=None).acquire)
                    if isinstance(together, PooledBuffer):
                        return _cut(together, rest, acquire, accept)
                taken = self._copy_rows(start, end, plain, acquire)
                if isinstance(taken, Missing):
                    return taken
                if not self.shape_is_own:
                    self._learn_shape(taken.view, start, end)
                accept(start, end, taken)
        return None

    def fits(self, state: Buffer, start: int, n_tokens: int) -> bool:
        """Whether a page has the shape that this context gives its pages, and the positions from `start` on."""
        if self.shape is None:
            try:
                shape = parse_sequence(state).shape
            except CorruptError:
                return False
            first = [np.full(1, start, "<i4")] * len(shape.sections)
            if not shape.fits(state, start, n_tokens) or not self._accepts(zeros(shape, first)[0]):
                return False
            self.shape = shape
        return self.shape.fits(state, start, n_tokens)

    def _accepts(self, page: bytearray) -> bool:
        """Whether llama.cpp accepts a page, which is not kept."""
        ctx, mem = self._pointers()
        if self.is_shared():
            return False
        with self._noted("scratch"):
            is_accepted = self._read(ctx, page, SCRATCH)
            llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        return is_accepted

    def _learn_shape(self, page: memoryview, start: int, end: int) -> None:
        if self.shape is None:
            with contextlib.suppress(CorruptError):
                self.shape = parse_sequence(page).shape
        self.shape_is_own = self.shape is not None and self.shape.fits(page, start, end - start)

    @contextlib.contextmanager
    def _lent(self, mem: Any) -> Iterator[None]:
        """A block in which sequence 1 has all cells, so that sequence 0 can have those of one page."""
        with self._noted("lent"):
            llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, SCRATCH, END, END)
            yield
            self._give_back(mem)

    def _copy_rows(self, start: int, end: int, plain: StateShape | None, acquire: Acquire) -> PooledBuffer | Missing:
        """The rows of these positions: beside the other cells if they are `plain`, else alone, while cells are lent."""
        ctx, mem = self._pointers()
        if plain is None:
            return self._copy_alone(mem, start, end, acquire)
        return self._copy_beside(ctx, mem, start, end, plain, acquire)

    def _copy_alone(self, mem: Any, start: int, end: int, acquire: Acquire) -> PooledBuffer | Missing:
        """The page written as sequence 0, which has no other cells."""
        llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
        llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, start, end)
        if not _is_range(mem, SEQUENCE, start, end):
            return Missing.INCOMPLETE
        return self.copy(WHOLE, acquire) or Missing.QUEUE_FULL

    def _copy_beside(
        self, ctx: Any, mem: Any, start: int, end: int, shape: StateShape, acquire: Acquire
    ) -> PooledBuffer | Missing:
        """The page written as sequence 1, which needs no other cell to change."""
        n = end - start
        size, missing = shape.size(n), n * U32.size
        with self._noted("scratch"):
            llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, SCRATCH, start, end)
            is_complete = _is_range(mem, SCRATCH, start, end)
            buffer = acquire(size) if is_complete else None
            with released_on_error(buffer):
                if buffer is not None:
                    self._write(ctx, buffer.address + missing, size - missing, SCRATCH)
                    complete_cells(buffer.view, n, shape.sections[0].extra_bytes)
                llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        if buffer is None:
            return Missing.QUEUE_FULL if is_complete else Missing.INCOMPLETE
        return buffer


class PageLoader:
    """Appends pages to a context: one by one, or joined if `PagedMemory.copies_together`.

    Attributes
    ----------
    n_loaded
        How many of the pages are in the context.
    """

    def __init__(self, memory: PagedMemory, pages: Sequence[Page]) -> None:
        self._memory, self._pages = memory, pages
        self._joined: Assembly | None = None
        self.n_loaded = 0

    def load(self, state: memoryview) -> bool:
        """Append the state of the next page; whether llama.cpp accepted it, or will be asked when it is `finish`ed."""
        memory = self._memory
        if self._joined is None and memory.copies_together and len(self._pages) > 1:
            self._joined, self._buffer = self._opened(len(self._pages))
            self._joined.open(self._buffer.view)
        if self._joined is not None:
            self._joined.add(parse_sequence(state))
            return True
        is_loaded = memory.load(state)
        self.n_loaded += is_loaded
        return is_loaded

    def finish(self, n_good: int) -> bool:
        """Append what was joined of the first `n_good` pages; whether llama.cpp accepted it."""
        if self._joined is None or n_good == 0:
            return True
        buffer = self._buffer
        if n_good < len(self._pages):
            shorter, buffer = self._opened(n_good)
            shorter.write(buffer.view, [self._joined.state.cut(self._pages[0].start, self._pages[n_good - 1].end)])
        is_loaded = self._memory.load(buffer.view)
        self.n_loaded = n_good * is_loaded
        return is_loaded

    def _opened(self, n: int) -> tuple[Assembly, PooledBuffer]:
        """A state of the first `n` pages that is not written yet, and memory for it."""
        shape = self._memory.shape
        assert shape is not None  # a page fits it
        positions = np.arange(self._pages[0].start, self._pages[n - 1].end, dtype="<i4")
        joined = Assembly(shape, [positions] * len(shape.sections))
        # a pool of its own: so much memory is not kept
        buffer = BufferPool(limit=None).acquire(joined.size)
        assert buffer is not None  # this pool is unbounded
        return joined, buffer


def _cut(
    state: PooledBuffer,
    ranges: Sequence[tuple[int, int]],
    acquire: Acquire,
    accept: Callable[[int, int, PooledBuffer], object],
) -> Missing | None:
    """Cut pages out of a state that has all of them; see `PagedMemory.take`."""
    view = parse_sequence(state.view)
    for start, end in ranges:
        page = view.cut(start, end)
        assembly = Assembly(page.shape, page.positions)
        buffer = acquire(assembly.size)
        if buffer is None:
            return Missing.QUEUE_FULL
        with released_on_error(buffer):
            assembly.write(buffer.view, [page])
        accept(start, end, buffer)
    return None


def _is_range(mem: Any, sequence: int, start: int, end: int) -> bool:
    """Whether the first and the last cell of a sequence are those of these positions."""
    first = llama_cpp.llama_memory_seq_pos_min(mem, sequence)
    return bool((first, llama_cpp.llama_memory_seq_pos_max(mem, sequence)) == (start, end - 1))
