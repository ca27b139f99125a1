"""The memory of a llama.cpp context, through ctypes: what it holds, what fits into it, and how to empty it.

A change that is interrupted is undone later, as `Unfinished` says. That belongs to the ``Llama``: the store that began
the change may be gone by then.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import llama_cpp
import numpy as np

from prefixstore.buffers import BufferPool, PooledBuffer, released_on_error
from prefixstore.counters import Kind
from prefixstore.errors import ContextError
from prefixstore.format.record import Buffer
from prefixstore.llama.binding import model_of, pointer_of, set_end
from prefixstore.llama.state.form import CHUNKED, OWN_FORMAT, SHORT_PAGE, Window
from prefixstore.llama.state.shape import StateShape

SEQUENCE = 0  # the sequence in which Llama computes
SCRATCH = 1
END = -1

# what is copied of a state: all of it, or its recurrent part and its window
WHOLE = 0
PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

# Bounds that hold for every model. For each channel of the residual stream and each layer: values of K and V of a token
# (8 in DeepSeek-V2 without MLA), and bytes of a recurrent part (some 2,000 in Falcon-H1). Bytes of a token's cells, and
# of all heads.
KV_VALUES = 16
RECURRENT_BYTES = 8192
MOST_CELL_BYTES = 128
HEAD_BYTES = 1 << 16

Acquire: TypeAlias = Callable[[int], "PooledBuffer | None"]
"""Supplies a buffer of this many bytes, or None if there is none."""

u8_p = ctypes.POINTER(ctypes.c_uint8)


def kind_of(llm: llama_cpp.Llama) -> Kind:
    """What can be stored of a context: pages, snapshots (recurrent), both (hybrid), or nothing, and why.

    Raises `ContextError` if the ``Llama`` is closed, or its model is no decoder: llama-cpp-python generates no text
    with it, and would fail with an assertion, or with an encoder beside a decoder, abort.
    """
    pointer = pointer_of(llm)
    model = model_of(llm)
    if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_get_memory(pointer):
        name = llm.metadata.get("general.architecture", "this model")
        raise ContextError(
            f"llama-cpp-python generates no text with {name}: it is not a decoder, or keeps no state between tokens. "
            "There is nothing to store; use it without a store, for embeddings for example"
        )
    if llama_cpp.llama_model_is_recurrent(model) or llm.metadata.get("general.architecture") in OWN_FORMAT:
        return Kind.SNAPSHOTS
    if streams_of(llm) > 1:
        # copying a part of one stream into another one aborts the process
        return Kind.STREAMS
    if llama_cpp.llama_model_is_hybrid(model):
        return Kind.PAGES_AND_SNAPSHOTS
    return Kind.PAGES


def streams_of(llm: llama_cpp.Llama) -> int:
    """The number of streams, one per sequence, into which llama.cpp divides attention rows; states contain it."""
    params = llm.context_params
    return 1 if params.kv_unified else max(int(params.n_seq_max), 1)


def page_tokens_for(llm: llama_cpp.Llama, wanted: int) -> int:
    """The length of a page: as wanted, but not longer than the sliding window, of which llama.cpp keeps no more rows.

    Nor longer than `SHORT_PAGE` where snapshots hold the rows since the last boundary.
    """
    if kind_of(llm) is Kind.PAGES_AND_SNAPSHOTS:
        return min(wanted, SHORT_PAGE)
    window = int(llama_cpp.llama_model_n_swa(model_of(llm)))
    return min(wanted, window) if window else wanted


def size_limit(llm: llama_cpp.Llama) -> tuple[int, int]:
    """A loose upper bound of the size of a state: a fixed number of bytes, and bytes for each token.

    Until a context has seen a state of its own, this keeps a forged record from claiming a larger payload.
    """
    model, params = model_of(llm), llm.context_params
    channels = llama_cpp.llama_model_n_layer(model) * llama_cpp.llama_model_n_embd(model)
    is_recurrent = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
    value_bytes = 4 if llama_cpp.GGML_TYPE_F32 in (params.type_k, params.type_v) else 2
    return HEAD_BYTES + RECURRENT_BYTES * channels * is_recurrent, MOST_CELL_BYTES + KV_VALUES * value_bytes * channels


@dataclass(slots=True)
class Unfinished:
    """What must be undone if a change of the memory of a ``Llama`` is interrupted.

    Attributes
    ----------
    lent
        Cells of sequence 0 may be in sequence 1 only: to be given back.
    scratch
        Sequence 1 may hold copies or samples: to be emptied.
    unverified
        The context may hold unverified data, a part of a state, or other tokens than ``llm.input_ids`` says: to be
        cleared with its data.
    thread
        The thread that began the last change.
    """

    lent: bool = False
    scratch: bool = False
    unverified: bool = False
    thread: int = 0

    def begin(self, name: str) -> None:
        """Set this flag before a change."""
        self.thread = threading.get_ident()
        setattr(self, name, True)

    @property
    def is_open(self) -> bool:
        """Whether a change is being made, or was interrupted."""
        return self.lent or self.scratch or self.unverified


# by Llama, since the store may be gone before it
_unfinished: weakref.WeakKeyDictionary[llama_cpp.Llama, Unfinished] = weakref.WeakKeyDictionary()


class ContextMemory:
    """Sequence 0 of a context. This class itself is for memory that cannot step back: `PagedMemory` can.

    Tags (see `paged_memory`) do not work here: with ``n_seq_max == 1`` recurrent memory knows no sequence 1.

    Attributes
    ----------
    seen
        The sliding window, or chunks, of tokens that some layers see; None without one.
    overwrites_window
        Whether rows that have left the window are overwritten (``swa_full=False``).
    shape
        The shape of its states; None until llama.cpp has written one, or accepted a sample of one token.
    shape_is_own
        Whether `shape` comes from a page that llama.cpp has written here.
    scratch
        Buffers for states that are cut or joined. Those of the write queue would not do: their holder may wait for it.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = weakref.ref(llm)
        self.unfinished = _unfinished.setdefault(llm, Unfinished())
        window = int(llama_cpp.llama_model_n_swa(model_of(llm)))
        self.overwrites_window = bool(window) and not llm.context_params.swa_full
        is_chunked = llm.metadata.get("general.architecture") == CHUNKED
        self.seen = Window(window, is_chunked=is_chunked) if window else None
        self.shape: StateShape | None = None
        self.shape_is_own = False
        self.scratch = BufferPool(limit=None)
        self.is_on_gpu = bool(
            llm.context_params.offload_kqv and llm.model_params.n_gpu_layers and llama_cpp.llama_supports_gpu_offload()
        )
        self._size_limit = size_limit(llm)

    def holds(self, n: int) -> bool:
        """Whether the context can continue from position `n`."""
        return n == 0 or self.end() == n

    def is_shared(self) -> bool:
        """Whether a sequence that the store needs is in use. Here it needs none but sequence 0."""
        return False

    def largest(self, n_tokens: int) -> int:
        """The most bytes that a state of this many tokens can have in this context."""
        if self.shape is not None and self.shape.recurrent is None:
            return self.shape.size(n_tokens)
        fixed, per_token = self._size_limit
        return fixed + n_tokens * per_token

    def end(self) -> int:
        """The position after the last that the context holds."""
        _, mem = self._pointers()
        return int(llama_cpp.llama_memory_seq_pos_max(mem, SEQUENCE)) + 1

    def empty(self) -> bool:
        """Remove everything from sequence 0; returns whether it is empty."""
        ctx, mem = self._pointers()
        others = range(SCRATCH, max(llama_cpp.llama_n_seq_max(ctx), SCRATCH + 1))
        if all(llama_cpp.llama_memory_seq_pos_max(mem, sequence) == -1 for sequence in others):
            # this also cancels a shift of positions that llama.cpp has not carried out yet
            llama_cpp.llama_memory_clear(mem, False)
        else:
            llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
        return self.end() == 0

    def discard(self) -> None:
        """Empty the context, including its data, and update the ``Llama``.

        Freeing cells is not enough: masked attention multiplies their data by 0, which is NaN for NaN and infinity.
        """
        _, mem = self._pointers()
        llm = self._llm()
        assert llm is not None  # it has a context
        # the count first: whatever happens next, the context never seems to hold more than it does
        set_end(llm, 0)
        llama_cpp.llama_memory_clear(mem, True)
        self.unfinished.unverified = False

    def put(self, state: memoryview, n: int) -> bool:
        """Replace what the context holds by a whole state of `n` tokens; in a block of `Context.loading`.

        False if it did not work, and the context is empty.
        """
        ctx, mem = self._pointers()
        llama_cpp.llama_memory_clear(mem, False)
        if self._read(ctx, state, SEQUENCE) and self.holds(n):
            return True
        self.discard()
        return False

    def copy(self, flags: int, acquire: Acquire) -> PooledBuffer | None:
        """Copy the state, `WHOLE` or `PARTIAL`, into a buffer from `acquire`; None if there is no buffer."""
        ctx, _ = self._pointers()
        size = llama_cpp.llama_state_seq_get_size_ext(ctx, SEQUENCE, flags)
        buffer = acquire(size)
        if buffer is not None:
            with released_on_error(buffer):
                self._write(ctx, buffer.address, size, SEQUENCE, flags)
        return buffer

    @staticmethod
    def _read(ctx: Any, state: Buffer, sequence: int) -> bool:
        """Load a state into a sequence; returns whether llama.cpp accepted it."""
        source = ctypes.cast(np.frombuffer(state, np.uint8).ctypes.data, u8_p)
        return bool(llama_cpp.llama_state_seq_set_data(ctx, source, len(state), sequence) == len(state))

    @staticmethod
    def _write(ctx: Any, address: int, size: int, sequence: int, flags: int = WHOLE) -> None:
        """Write the state of a sequence, of this many bytes, to this address."""
        target = ctypes.cast(address, u8_p)
        if llama_cpp.llama_state_seq_get_data_ext(ctx, target, size, sequence, flags) != size:
            raise ContextError("llama.cpp did not write the state of the context")

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

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """A change that is undone if it does not complete: at once, or if that is interrupted too, by `settle`."""
        before = getattr(self.unfinished, name)
        self.unfinished.begin(name)
        try:
            yield
        except BaseException:
            self.settle()
            raise
        setattr(self.unfinished, name, before)

    def _pointers(self) -> tuple[Any, Any]:
        ctx = pointer_of(self._llm())
        return ctx, llama_cpp.llama_get_memory(ctx)
