"""Parses the bytes of a llama.cpp state into a `StateView`. Pure; does not need llama.cpp.

The layout is in `view`; llama.cpp makes no promises about it, and writes nowhere how many parts a state has, how long a
cell is, or whether there is V. So each of the possible layouts is tried, and a state is parsed only if every byte is
accounted for. States that cannot be cut are refused: several streams, a cell in two sequences, and whatever a later
llama.cpp writes. Such a state is stored whole.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from typing import Any

import numpy as np

from prefixstore.errors import CorruptError
from prefixstore.format.record import Buffer
from prefixstore.llama.state.shape import MAX_POSITION, PAIR, SEQUENCE_0, U32
from prefixstore.llama.state.view import Bytes, Recurrent, Section, StateView, Tensor

ROWS = struct.Struct("<iQ")  # type, bytes of a row
CHANNELS = struct.Struct("<iII")  # type, bytes of an element, channels
CELL = struct.Struct("<iI")  # position, number of sequences
# a position, the number of sequences, what models have that see images or look up n-grams, and the sequence
CELL_SIZES = (12, 24, 20)
CELLS_AND_V = tuple(itertools.product(CELL_SIZES, (True, False)))

# attention; keys of an indexer; a sliding window
MAX_SECTIONS = 3
# llama.cpp's LLAMA_MAX_SEQ
MAX_STREAMS = 256
# there are some forty types
MAX_TYPE = 255
# llama.cpp's LLAMA_MAX_LAYERS: heads of tensors without bytes would be read for ever
MAX_LAYERS = 512


def parse_sequence(state: Buffer) -> StateView:
    """Parse what ``llama_state_seq_get_data`` wrote for sequence 0, in a context with one stream.

    Raises `CorruptError` if a byte is not accounted for.
    """
    data, start = memoryview(state), len(SEQUENCE_0)
    if data[:start] != SEQUENCE_0:
        raise CorruptError("these bytes are not the state of sequence 0")
    view = parse_memory(data[start:])
    if view.streams > 1:
        raise CorruptError(f"a state of {view.streams} streams cannot be cut")
    return view


def parse_memory(memory: Buffer, *, sequence: int = 0, before: int = MAX_POSITION) -> StateView:
    """Parse the memory in a state, or in the file of a server's slot. Raises `CorruptError` as `parse_sequence`.

    Parameters
    ----------
    memory
        What ``llama_state_seq_get_data`` wrote, after the magic and the sequence.
    sequence
        The sequence, or the slot.
    before
        Cells at this position and later ones are left out: those of images may share one.
    """
    parser = _Parser(memory, sequence, before)
    view = parser.rest(StateView()) if parser.left else None
    if view is None:
        raise CorruptError(f"{len(memory)} bytes of a state have an unknown layout")
    return view


class _Parser:
    """Reads bytes in order, and never past their end."""

    def __init__(self, memory: Buffer, sequence: int, before: int) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)
        self._at = 0
        self._sequence, self._before = sequence, before

    @property
    def left(self) -> int:
        return len(self._bytes) - self._at

    def _take(self, size: int) -> Bytes:
        if size > self.left:
            raise CorruptError(f"a state is {size - self.left} bytes too short")
        self._at += size
        return self._bytes[self._at - size : self._at]

    def _read(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self._take(layout.size).data)

    def rest(self, view: StateView) -> StateView | None:
        """A view with all that is left as well, in the first way to read it; None if there is none."""
        if not self.left:
            return view
        start, n = self._at, len(view.sections)
        for cell_bytes, has_v in CELLS_AND_V if n < MAX_SECTIONS else ():
            self._at = start
            try:
                section, streams = self._section(cell_bytes, has_v=has_v)
            except CorruptError:
                continue
            if n and streams != view.streams:
                break
            n_before = n + 1 if view.recurrent is None else view.n_before
            found = self.rest(StateView((*view.sections, section), view.recurrent, n_before, streams))
            if found is not None:
                return found
            if not section.head:
                # without cells it is the same whatever they would be
                break
        for end, recurrent in self._recurrent(start) if view.recurrent is None else ():
            self._at = end
            found = self.rest(replace(view, recurrent=recurrent))
            if found is not None:
                return found
        return None

    def _section(self, cell_bytes: int, *, has_v: bool) -> tuple[Section, int]:
        """A section, and how many streams it names."""
        (streams,) = self._read(U32)
        if not 1 <= streams <= MAX_STREAMS:
            raise CorruptError(f"a state cannot have {streams} streams")
        section = Section(np.empty(0, np.int32))
        for _ in range(streams):
            (n,) = self._read(U32)
            if n and section.head:
                raise CorruptError("a state with cells in several streams cannot be cut")
            section = self._cells(n, cell_bytes, has_v=has_v) if n else section
        return section, streams

    def _cells(self, n: int, cell_bytes: int, *, has_v: bool) -> Section:
        """The cells of a stream in the order of their positions, and their rows."""
        cells = self._take(n * cell_bytes).reshape(n, cell_bytes)
        words = cells.view("<i4")
        positions = words[:, 0]
        if (words[:, 1] != 1).any() or (words[:, -1] != self._sequence).any():
            raise CorruptError(f"a state with cells of other sequences than {self._sequence} cannot be cut")
        head = self._take(PAIR.size).tobytes()
        transposed, layers = PAIR.unpack(head)
        if transposed > 1 or layers > MAX_LAYERS:
            raise CorruptError(f"a state of {layers} layers, with {transposed} for a transposed V, is unknown")
        of_v = [CHANNELS if transposed else ROWS] if has_v else []
        tensors = [self._tensor(layout, n) for layout in (ROWS, *of_v) for _ in range(layers)]
        if (positions < 0).any():
            raise CorruptError("a cell has no position")
        kept = np.flatnonzero(positions < self._before)
        if (np.diff(positions[kept]) <= 0).any():
            kept = kept[np.argsort(positions[kept], kind="stable")]
            if (np.diff(positions[kept]) <= 0).any():
                raise CorruptError("two cells have the same position")
        extra = cells[:, 8:-4]
        is_ordered = np.array_equal(kept, np.arange(len(kept)))
        if len(kept) < n or not is_ordered:
            # a copy only where a window has written over its oldest cells
            which = slice(len(kept)) if is_ordered else kept
            tensors = [Tensor(tensor.head, tensor.rows[:, which]) for tensor in tensors]
            extra = extra[which]
        return Section(positions[kept], head, tuple(tensors), extra)

    def _tensor(self, layout: struct.Struct, n: int) -> Tensor:
        head = self._take(layout.size).tobytes()
        kind, width, *channels = layout.unpack(head)
        planes = channels[0] if channels else 1
        if not planes * width or not 0 <= kind <= MAX_TYPE:
            raise CorruptError("the rows of a layer have no bytes, or an unknown type")
        return Tensor(head, self._take(planes * n * width).reshape(planes, n, width))

    def _recurrent(self, start: int) -> list[tuple[int, Recurrent]]:
        """The recurrent parts that may begin here, and where they end, that with the most tensors first."""
        self._at = start
        found: list[tuple[int, Recurrent]] = []
        try:
            (n,) = self._read(U32)
            position, sequences = self._read(CELL) if n else (-1, 0)
            transposed, layers = self._read(PAIR)
            if n > 1 or sequences or transposed or layers > MAX_LAYERS or position < n - 1:
                return []
            heads = U32.pack(layers)
            # layers with attention have no tensors here, the others two each, some only one
            for _ in range(2 * layers):
                if not self.left:
                    break
                head = self._take(ROWS.size).tobytes()
                kind, width = ROWS.unpack(head)
                if not 0 <= kind <= MAX_TYPE:
                    break
                self._take(n * width)
                heads += head
                found.append((self._at, Recurrent(position, self._bytes[start : self._at].data, heads)))
        except CorruptError:
            pass
        return found[::-1]
