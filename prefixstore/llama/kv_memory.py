"""The memory of a llama.cpp context, through ctypes: what it holds, what fits into it, and how to empty it.

A change that is interrupted midway is undone later: `Unfinished` says how. It belongs to the ``Llama``, since the
store that began the change may be gone by then.
"""

from __future__ import annotations

import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import llama_cpp
import numpy as np

from prefixstore.buffers import PooledBuffer
from prefixstore.errors import ContextError, CorruptError
from prefixstore.format.keys import Tokens
from prefixstore.format.record import Buffer
from prefixstore.llama.residents import END, SCRATCH, SEQUENCE, Residents
from prefixstore.llama.size_limit import size_limit
from prefixstore.llama.state.shape import StateShape, shape_of, shape_of_sequence
from prefixstore.llama.state.view import StateView
from prefixstore.stats import Kind

__all__ = [
    "Acquire",
    "ContextMemory",
    "Unfinished",
    "is_closed",
    "kind_of",
    "page_tokens_for",
    "pointer_of",
    "u8_p",
]

SHORT_PAGE = 64

Acquire: TypeAlias = Callable[[int], "PooledBuffer | None"]
"""Supplies a buffer of so many bytes, or None if there is none."""

u8_p = ctypes.POINTER(ctypes.c_uint8)


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
    """The number of streams, one per sequence, into which llama.cpp divides attention rows; states contain it."""
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


@dataclass(slots=True)
class Unfinished:
    """What must be undone if a change of the memory of a ``Llama`` is interrupted. Recorded before the change.

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


# of the Llama, since the store may be gone before it
_unfinished: weakref.WeakKeyDictionary[llama_cpp.Llama, Unfinished] = weakref.WeakKeyDictionary()
_residents: weakref.WeakKeyDictionary[llama_cpp.Llama, Residents] = weakref.WeakKeyDictionary()


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
    residents
        Other sequences that wait in the context.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = weakref.ref(llm)
        self.unfinished = _unfinished.setdefault(llm, Unfinished())
        self.residents = _residents.setdefault(llm, Residents())
        self.window = int(llama_cpp.llama_model_n_swa(llm._model.model))
        self.overwrites_window = bool(self.window) and not llm.context_params.swa_full
        self.shape: StateShape | None = None
        self.shape_is_own = False
        self._size_limit = size_limit(llm)

    @property
    def unverified(self) -> bool:
        """Whether the context may hold something that was not verified; see `Unfinished`."""
        return self.unfinished.unverified

    @unverified.setter
    def unverified(self, value: bool) -> None:
        self.unfinished.unverified = value

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
        if not self.residents.has_tags and all(
            llama_cpp.llama_memory_seq_pos_max(mem, sequence) == -1 for sequence in others
        ):
            # a shift of positions that llama.cpp has not carried out yet goes with it
            llama_cpp.llama_memory_clear(mem, False)
        else:
            llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
        return self.end() == 0

    def discard(self) -> None:
        """Empty the context, including its data, and tell the Llama.

        Freeing cells is not enough: masked attention multiplies what is left in them by 0, which is NaN for NaN and
        infinity.
        """
        _, mem = self._pointers()
        llm = self._llm()
        assert llm is not None  # it has a context
        # first the count: whatever happens next, the context never seems to hold more than it does
        llm.n_tokens = 0
        llm._requires_eval = True
        llama_cpp.llama_memory_clear(mem, True)
        self.residents.lost()
        self.unverified = False

    def is_shared(self) -> bool:
        """Whether the sequence that the store needs for its copies is in use."""
        _, mem = self._pointers()
        return bool(llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH) != -1)

    def settle(self) -> bool:
        """Undo an interrupted change; returns whether the context was cleared."""
        unfinished = self.unfinished
        if not unfinished.is_open:
            return False
        _, mem = self._pointers()
        was_cleared = unfinished.unverified
        if was_cleared:
            self.discard()
        elif unfinished.lent:
            self._give_back(mem)
        else:
            llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        unfinished.lent = unfinished.scratch = False
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
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, u8_p)
        with self._noted("unverified"):
            taken = llama_cpp.llama_state_set_data(ctx, source, len(state))
            ends_at_n = llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE) == n - 1
            llama_cpp.llama_memory_clear(mem, True)
            self.residents.lost()
        return bool(taken == len(state) and ends_at_n)

    def _accepts(self, page: bytes) -> bool:
        """Whether llama.cpp accepts a page, which is not kept."""
        ctx, mem = self._pointers()
        if llama_cpp.llama_memory_seq_pos_max(mem, SCRATCH) != -1:
            return False
        source = (ctypes.c_uint8 * len(page)).from_buffer_copy(page)
        with self._noted("scratch"):
            is_taken = self._load_beside(ctx, source, len(page))
            llama_cpp.llama_memory_seq_rm(mem, SCRATCH, END, END)
        return is_taken

    def _load_beside(self, ctx: Any, source: Any, size: int) -> bool:
        """Load a state as sequence 1; false if llama.cpp refuses it. It may do so for want of cells: residents go."""
        while llama_cpp.llama_state_seq_set_data(ctx, source, size, SCRATCH) != size:
            if not self.drop_oldest():
                return False
        return True

    # -- residents ----------------------------------------------------------------------------------------------------

    def park(self, name: str, tokens: Tokens) -> bool:
        """Park the first tokens of sequence 0 under a name; false if no sequence is free."""
        return self.residents.add(self._pointers()[1], name, tokens)

    def longest_resident(self, tokens: Tokens, preferred: str) -> tuple[str, int]:
        """As `Residents.longest`."""
        return self.residents.longest(self._pointers()[1], tokens, preferred)

    def bring(self, name: str, n: int, *, keep: bool) -> bool:
        """As `Residents.bring`."""
        return self.residents.bring(self._pointers()[1], name, n, keep=keep)

    def make_room(self, live: Tokens, need: int) -> None:
        """Drop residents until there is space for so many more cells beside them and these live tokens.

        Where that is not certain, llama.cpp says it: then `drop_oldest`.
        """
        if self.residents.has_tags:
            ctx, mem = self._pointers()
            self.residents.make_room(mem, live, need, llama_cpp.llama_n_ctx(ctx))

    def drop_oldest(self) -> bool:
        """Free the cells of the resident parked longest ago; false if there is none."""
        return self.residents.has_tags and self.residents.drop_oldest(self._pointers()[1])

    def sweep(self) -> None:
        """Free the cells of residents that were forgotten. Raises `ContextError` if the ``Llama`` is closed."""
        if self.residents.has_tags:
            self.residents.sweep(self._pointers()[1])

    def drop_residents(self) -> None:
        """Free the cells of all residents, since other code may access them now. Raises `ContextError`, as `sweep`."""
        self.residents.forget_all()
        self.sweep()

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """A change that is undone if it does not complete: immediately, or by `settle` if that is interrupted too."""
        before = getattr(self.unfinished, name)
        setattr(self.unfinished, name, True)
        try:
            yield
        except BaseException:
            self.settle()
            raise
        setattr(self.unfinished, name, before)

    def _pointers(self) -> tuple[Any, Any]:
        ctx = pointer_of(self._llm())
        return ctx, llama_cpp.llama_get_memory(ctx)
