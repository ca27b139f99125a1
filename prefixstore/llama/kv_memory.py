"""The memory of a llama.cpp context, through ctypes: take states out of it, put them back.

A page leaves by tagging: its cells are given to sequence 1 as well, and ``llama_state_seq_get_data`` writes sequence 1.
With ``n_seq_max == 1`` the cells are written without a sequence id, 4 bytes shorter than the loader expects. They are
written that far after the start of the buffer, so that whole cells fit in before the rows. Where there are several
sections, or longer cells, sequence 1 is made to hold all cells, and sequence 0 those of the page while it is written;
retagging visits every live cell. A page comes back in the same way: it is loaded as sequence 1, whose cells are then
given to sequence 0. Tags change, tensors do not.

Tags do not work on memory that cannot step back: with ``n_seq_max == 1`` its recurrent half knows no sequence 1. But
the recurrent part can be copied alone (``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``), and rows of attention can be cut out of
a whole state if its layout is understood.

A change that is interrupted half-way is undone later: the `Journal` says how. It belongs to the ``Llama``, since the
store that began the change may be gone by then.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import llama_cpp
import numpy as np

from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.errors import ContextError, CorruptError
from prefixstore.format.record import Buffer
from prefixstore.llama.size_limit import size_limit
from prefixstore.llama.state.shape import StateShape, complete_cells, shape_of, shape_of_sequence
from prefixstore.llama.state.view import U32, StateView
from prefixstore.stats import Kind

__all__ = [
    "PARTIAL",
    "WHOLE",
    "Acquire",
    "ContextMemory",
    "Journal",
    "Missing",
    "MissingPage",
    "PagedMemory",
    "SnapshotMemory",
    "is_closed",
    "kind_of",
    "page_tokens_for",
    "pointer_of",
]

SHORT_PAGE = 64

SEQUENCE = 0  # the sequence in which Llama computes
SCRATCH = 1
END = -1

WHOLE = 0
PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

Acquire: TypeAlias = Callable[[int], "PooledBuffer | None"]
"""Supplies a buffer of so many bytes, or None if there is none."""

_u8_p = ctypes.POINTER(ctypes.c_uint8)


def pointer_of(llm: llama_cpp.Llama | None) -> int:
    """The ``llama_context`` of a ``Llama``, read past the attribute that a store watches.

    Raises
    ------
    ContextError
        If the ``Llama`` is closed or gone.
    """
    if llm is None or is_closed(llm):
        raise ContextError("the Llama is closed; load it again, and open a store for the new one")
    return int(vars(llm._ctx)["ctx"])


def is_closed(llm: llama_cpp.Llama) -> bool:
    """Whether the model or the context of a ``Llama`` is freed, so that no function of llama.cpp may be called."""
    return llm._model.model is None or vars(llm._ctx).get("ctx") is None


def kind_of(llm: llama_cpp.Llama) -> Kind:
    """What can be stored of a context: pages, snapshots (recurrent), both (hybrid), or nothing, and why.

    Raises
    ------
    ContextError
        If the ``Llama`` is closed.
    """
    pointer = pointer_of(llm)
    model = llm._model.model
    if llama_cpp.llama_model_has_encoder(model):
        return Kind.ENCODER
    if not llama_cpp.llama_get_memory(pointer):
        return Kind.NO_MEMORY
    if llama_cpp.llama_model_is_recurrent(model):
        return Kind.SNAPSHOTS
    if streams_of(llm) > 1:
        # to copy a part of one stream into another one ends the process
        return Kind.STREAMS
    if llama_cpp.llama_model_is_hybrid(model):
        return Kind.PAGES_AND_SNAPSHOTS
    return Kind.PAGES


def streams_of(llm: llama_cpp.Llama) -> int:
    """Into how many streams, one a sequence, llama.cpp divides the rows of attention; a state names their number."""
    params = llm.context_params
    return 1 if params.kv_unified else max(int(params.n_seq_max), 1)


def page_tokens_for(llm: llama_cpp.Llama, wanted: int) -> int:
    """The length of a page: as wanted, but no longer than the model's sliding window, since its rows would be missing.

    Nor longer than `SHORT_PAGE` where snapshots hold the rows since the last boundary.
    """
    if kind_of(llm) is Kind.PAGES_AND_SNAPSHOTS:
        return min(wanted, SHORT_PAGE)
    window = int(llama_cpp.llama_model_n_swa(llm._model.model))
    return min(wanted, window) if window else wanted


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


@dataclass(slots=True)
class Journal:
    """What has to be undone if a change of the memory of a ``Llama`` is interrupted. Written before the change.

    Attributes
    ----------
    lent
        Cells of sequence 0 may be in sequence 1 only: they are given back.
    scratch
        Sequence 1 may hold copies or samples: it is emptied.
    unverified
        The context may hold something that was not verified, or only a part of a state: it is cleared with its data.
    """

    lent: bool = False
    scratch: bool = False
    unverified: bool = False

    @property
    def is_open(self) -> bool:
        """Whether there is something to undo, or a change is being made."""
        return self.lent or self.scratch or self.unverified


_journals: weakref.WeakKeyDictionary[llama_cpp.Llama, Journal] = weakref.WeakKeyDictionary()


class ContextMemory(ABC):
    """Sequence 0 of a context.

    Attributes
    ----------
    window
        Length of the model's sliding window in tokens; 0 if it has none.
    overwrites_window
        Whether rows that have left the window are overwritten (``swa_full=False``).
    shape
        The shape of its states; None until llama.cpp has written one, or accepted a one-token sample.
    shape_is_own
        Whether `shape` comes from a page that llama.cpp has written here.
    unverified
        Whether a restore is not finished: bytes may be in the context that are not verified, or not those of the
        tokens that its Llama names. `discard` is the way back.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = weakref.ref(llm)
        self.journal = _journals.setdefault(llm, Journal())
        self.window = int(llama_cpp.llama_model_n_swa(llm._model.model))
        self.overwrites_window = bool(self.window) and not llm.context_params.swa_full
        self.shape: StateShape | None = None
        self.shape_is_own = False
        self._size_limit = size_limit(llm)

    @property
    def unverified(self) -> bool:
        """Whether the context may hold something that was not verified; see `Journal`."""
        return self.journal.unverified

    @unverified.setter
    def unverified(self, value: bool) -> None:
        self.journal.unverified = value

    @abstractmethod
    def holds(self, n: int) -> bool:
        """Whether the context can continue from position `n`."""

    def largest(self, n_tokens: int) -> int:
        """The most bytes that a state of so many tokens can have in this context."""
        if self.shape is not None and self.shape.recurrent is None:
            return self.shape.size(n_tokens)
        return self._size_limit.of(n_tokens)

    def end(self) -> int:
        """The position after the last that the context holds."""
        _, mem = self._pointers()
        return int(llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE)) + 1

    def empty(self) -> bool:
        """Remove everything from sequence 0; whether it is empty."""
        ctx, mem = self._pointers()
        others = range(SCRATCH, max(llama_cpp.llama_n_seq_max(ctx), SCRATCH + 1))
        if all(llama_cpp.llama_memory_seq_pos_max(mem, sequence) == -1 for sequence in others):
            # a shift of positions that llama.cpp has not carried out yet goes with it
            llama_cpp.llama_memory_clear(mem, False)
        else:
            llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
        return self.end() == 0

    def discard(self) -> None:
        """Empty the context, its data too, and have the Llama know that it is empty.

        Freeing cells is not enough: masked attention multiplies what is left in them by 0, which is NaN for NaN and
        infinity.
        """
        _, mem = self._pointers()
        llm = self._llm()
        assert llm is not None  # it has a context
        # first the count: whatever happens next, nobody takes the context for more than it holds
        llm.n_tokens = 0
        llm._requires_eval = True
        llama_cpp.llama_memory_clear(mem, True)
        self.unverified = False

    def is_shared(self) -> bool:
        """Whether somebody else uses the sequence that the store needs for its copies."""
        _, mem = self._pointers()
        return bool(llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH) != -1)

    def settle(self) -> bool:
        """Undo what was interrupted; whether the context was cleared."""
        journal = self.journal
        if not journal.is_open:
            return False
        _, mem = self._pointers()
        was_cleared = journal.unverified
        if was_cleared:
            self.discard()
        elif journal.lent:
            self._give_back(mem)
        else:
            llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        journal.lent = journal.scratch = False
        return was_cleared

    @staticmethod
    def _give_back(mem: Any) -> None:
        """Give sequence 0 all cells of sequence 1, and empty that. Doing it twice, or in part, does no harm."""
        llama_cpp.llama_memory_seq_cp(mem, SCRATCH, SEQUENCE, END, END)
        llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)

    def fits(self, state: Buffer, start: int, n_tokens: int) -> bool:
        """Whether a page has the shape that this context gives its pages, and the positions from `start` on."""
        if self.shape is None:
            try:
                shape = shape_of_sequence(state)
            except CorruptError:
                return False
            if not shape.fits(state, start, n_tokens) or not self._accepts(shape.example(start)):
                return False
            self.shape = shape
        return self.shape.fits(state, start, n_tokens)

    def fits_whole(self, state: Buffer, parsed: StateView, n: int) -> bool:
        """Whether a state of `n` tokens, as ``llama_state_get_data`` wrote it, has the shape of this context's."""
        found = shape_of(parsed)
        if self.shape is None and (
            self._accepts(found.example(0)) if found.recurrent is None else self.accepts_whole(state, n)
        ):
            self.shape = found
        return found == self.shape

    def accepts_whole(self, state: Buffer, n: int) -> bool:
        """Whether llama.cpp accepts a whole state of `n` tokens, which is not kept; false if the context is in use."""
        ctx, mem = self._pointers()
        if llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE) != -1:
            return False
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, _u8_p)
        with self._journaled("unverified"):
            taken = llama_cpp.llama_state_set_data(ctx, source, len(state))
            ends_at_n = llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE) == n - 1
            llama_cpp.llama_memory_clear(mem, True)
        return bool(taken == len(state) and ends_at_n)

    def _accepts(self, page: bytes) -> bool:
        """Whether llama.cpp accepts a page, which is not kept."""
        ctx, mem = self._pointers()
        if llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH) != -1:
            return False
        source = (ctypes.c_uint8 * len(page)).from_buffer_copy(page)
        with self._journaled("scratch"):
            taken = llama_cpp.llama_state_seq_set_data(ctx, source, len(page), SCRATCH)
            llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        return bool(taken == len(page))

    @contextmanager
    def _journaled(self, name: str) -> Iterator[None]:
        """A change that is undone if it does not end: at once, or by `settle` if that is interrupted as well."""
        before = getattr(self.journal, name)
        setattr(self.journal, name, True)
        try:
            yield
        except BaseException:
            self.settle()
            raise
        setattr(self.journal, name, before)

    def _pointers(self) -> tuple[Any, Any]:
        ctx = pointer_of(self._llm())
        return ctx, llama_cpp.llama_get_memory(ctx)


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

    def load(self, state: memoryview) -> bool:
        """Append a page that `fits`, without copying it first; whether llama.cpp accepted it.

        The page keeps its second tag until the next one is loaded, or until `cut`. Rows of one that is refused may have
        been copied: `discard` them.
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
        with self._journaled("lent"):
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
        with _released_on_error(buffer):
            target = ctypes.cast(buffer.address, _u8_p)
            if llama_cpp.llama_state_seq_get_data(ctx, target, size, SEQUENCE) != size:
                raise ContextError(f"llama.cpp did not write the state of tokens {start} to {end}")
        return buffer

    def _copy_beside(
        self, ctx: Any, mem: Any, start: int, end: int, shape: StateShape, acquire: Acquire
    ) -> PooledBuffer | Missing:
        """The page written as sequence 1, which needs no other cell to change."""
        n = end - start
        size, missing = shape.size(n), n * U32.size
        with self._journaled("scratch"):
            llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, SCRATCH, start, end)
            first = llama_cpp.llama_memory_seq_pos_min(mem, SCRATCH)
            last = llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH)
            is_complete = (first, last) == (start, end - 1)
            buffer = acquire(size) if is_complete else None
            with _released_on_error(buffer):
                if buffer is not None:
                    target = ctypes.cast(buffer.address + missing, _u8_p)
                    written = llama_cpp.llama_state_seq_get_data(ctx, target, size - missing, SCRATCH)
                    if written != size - missing:
                        raise ContextError(f"llama.cpp did not write the state of tokens {start} to {end}")
                    complete_cells(buffer.view, n)
                llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        if buffer is None:
            return Missing.QUEUE_FULL if is_complete else Missing.INCOMPLETE
        return buffer


@contextmanager
def _released_on_error(buffer: PooledBuffer | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if buffer is not None:
            buffer.release()
        raise


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
        with _released_on_error(buffer):
            target = ctypes.cast(buffer.address, _u8_p)
            if llama_cpp.llama_state_seq_get_data_ext(ctx, target, size, SEQUENCE, flags) != size:
                raise ContextError("llama.cpp did not write the state of the context")
        return buffer

    def put(self, state: memoryview, n: int) -> bool:
        """Replace what the context holds by a whole state of `n` tokens, for the caller to tell the Llama which.

        `unverified` is true until then. False if it did not work, and the context is empty.
        """
        ctx, mem = self._pointers()
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, _u8_p)
        self.unverified = True
        llama_cpp.llama_memory_clear(mem, False)
        taken = llama_cpp.llama_state_seq_set_data(ctx, source, len(state), SEQUENCE)
        if taken == len(state) and self.holds(n):
            return True
        self.discard()
        return False
