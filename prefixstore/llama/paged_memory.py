"""Memory that can be cut into pages: copies pages out of a context, and loads them back.

A page is copied by tagging: its cells also become sequence 1, which ``llama_state_seq_get_data`` writes.
With ``n_seq_max == 1`` the cells are written without a sequence id, 4 bytes shorter than the loader expects. They are
written that much further into the buffer, so that complete cells fit in before the rows. With several sections, or
longer cells, sequence 1 gets all cells instead, and sequence 0 has only those of the page while it is written;
retagging visits every live cell. A page is loaded in the same way: as sequence 1, whose cells then become sequence 0.
Tags change, tensors do not.

Where each copy takes long, as with V transposed on a GPU, several pages are copied together and then cut, and joined
before they are loaded: see `PagedMemory.copies_together`.
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


class Missing(Enum):
    """Why a page cannot be copied."""

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
        """Keep only the first `n` tokens, with the tag of sequence 0 alone."""
        _, mem = self._pointers()
        llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        if not llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, n, END):
            raise ContextError(f"llama.cpp cannot cut this context at position {n}")

    def load(self, state: memoryview) -> bool:
        """Append a page that `fits`; returns whether llama.cpp accepted it.

        The page keeps its second tag until the next one is loaded, or until `cut`. If it was refused, some of its rows
        may be in the context: `discard` them.
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
        """Copy pages out of the context, up to the first that cannot be copied; returns why it cannot, or None.

        `ranges` has the first position and the boundary of each page. Each copy is passed to ``accept(start, end,
        buffer)``, which owns the buffer, before the next page is copied.
        """
        ctx, mem = self._pointers()
        self.settle()
        if self.is_shared():
            raise ContextError("sequence 1 of the context is in use; the store needs it")
        # the shape of pages that can be written beside the other cells; None if there is none
        plain = self.shape if self.shape is not None and self.shape.is_plain else None
        if llama_cpp.llama_n_seq_max(ctx) > 1:
            plain = None
        with self._lent(mem) if plain is None else contextlib.nullcontext():
            for i, (start, end) in enumerate(ranges):
                rest = ranges[i:]
                if len(rest) > 1 and self.copies_together and self.shape_is_own:
                    # from a new pool, so that this much memory is not kept
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
        """Whether a page has the shape of the pages of this context, and the positions from `start` on."""
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
        """Whether llama.cpp accepts a page, which is removed again."""
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
        """A block in which sequence 1 has all cells, so that sequence 0 may have those of a single page."""
        with self._noted("lent"):
            llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, SCRATCH, END, END)
            yield
            self._give_back(mem)

    def _copy_rows(self, start: int, end: int, plain: StateShape | None, acquire: Acquire) -> PooledBuffer | Missing:
        """Copy the rows of these positions: beside the other cells if a `plain` shape is given, else alone."""
        ctx, mem = self._pointers()
        if plain is None:
            return self._copy_alone(mem, start, end, acquire)
        return self._copy_beside(ctx, mem, start, end, plain, acquire)

    def _copy_alone(self, mem: Any, start: int, end: int, acquire: Acquire) -> PooledBuffer | Missing:
        """Copy a page that is written as sequence 0, without any other cells."""
        llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
        llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, start, end)
        if not _is_range(mem, SEQUENCE, start, end):
            return Missing.INCOMPLETE
        return self.copy(WHOLE, acquire) or Missing.QUEUE_FULL

    def _copy_beside(
        self, ctx: Any, mem: Any, start: int, end: int, shape: StateShape, acquire: Acquire
    ) -> PooledBuffer | Missing:
        """Copy a page that is written as sequence 1; no other cell changes."""
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

    `n_loaded` is the number of pages that are in the context.
    """

    def __init__(self, memory: PagedMemory, pages: Sequence[Page]) -> None:
        self._memory, self._pages = memory, pages
        self._joined: Assembly | None = None
        self.n_loaded = 0

    def load(self, state: memoryview) -> bool:
        """Append the state of the next page, or join it; returns False if llama.cpp refused it."""
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
        """Append the first `n_good` pages, if they were joined; returns False if llama.cpp refused them."""
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
        """An unwritten state of the first `n` pages, and memory for it."""
        shape = self._memory.shape
        assert shape is not None  # a page fits it
        positions = np.arange(self._pages[0].start, self._pages[n - 1].end, dtype="<i4")
        joined = Assembly(shape, [positions] * len(shape.sections))
        # from a new pool, so that this much memory is not kept
        buffer = BufferPool(limit=None).acquire(joined.size)
        assert buffer is not None  # this pool is unbounded
        return joined, buffer


def _cut(
    state: PooledBuffer,
    ranges: Sequence[tuple[int, int]],
    acquire: Acquire,
    accept: Callable[[int, int, PooledBuffer], object],
) -> Missing | None:
    """Cut pages out of a state that holds all of them; see `PagedMemory.take`."""
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
