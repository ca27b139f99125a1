"""The state of a llama.cpp memory as views of its bytes: cut at positions, and joined. Pure; does not need llama.cpp.

::

    sequence  = u32 magic ‖ u32 sequence ‖ memory                   llama_state_seq_get_data
    memory    = section... [recurrent] section...                   at least one of them
    section   = u32 1 ‖ u32 cells ‖ cell... ‖ u32 V transposed ‖ u32 layers ‖ K of each layer ‖ V of each layer, or none
    cell      = i32 position ‖ u32 1 ‖ extra ‖ i32 sequence 0       extra: 0, 8 or 12 bytes: M-RoPE position, token
    K, V      = i32 type ‖ u64 bytes of a row ‖ row of each cell
    V, transp = i32 type ‖ u32 bytes of an element ‖ u32 channels ‖ for each channel: element of each cell
    recurrent = u32 cells ‖ cell... ‖ u32 0 ‖ u32 layers ‖ (i32 type ‖ u64 bytes of a row ‖ row of each cell)...

Full attention has one section, or two, the second for the keys of an indexer. A sliding window, or attention in chunks,
has the last section before the recurrent part. With multi-head latent attention (MLA) there is no V. A section without
cells ends after their number. llama.cpp promises nothing about this layout: see `parse`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError
from prefixstore.format.record import Buffer
from prefixstore.llama.state.shape import PAIR, SEQUENCE_0, U32, SectionShape, StateShape

Bytes: TypeAlias = npt.NDArray[np.uint8]

NO_EXTRA: Bytes = np.empty((0, 0), np.uint8)


@dataclass(frozen=True, slots=True)
class Tensor:
    """K or V of one layer.

    Attributes
    ----------
    head
        Type and sizes, as written.
    rows
        Shape ``(planes, cells, bytes)``: one plane of rows, or, transposed, a plane of elements for each channel.
    """

    head: bytes
    rows: Bytes


@dataclass(frozen=True, slots=True)
class Section:
    """The cells of one KV cache, as views of a state.

    Attributes
    ----------
    positions
        Positions of the cells, ascending, shape ``(cells,)``.
    head
        Whether V is transposed, and the number of layers, as written; empty if the section was written without cells.
    tensors
        K of all layers, then V of all layers.
    extra
        What else cells hold, shape ``(cells, bytes)``: their position in an image, their token.
    """

    positions: npt.NDArray[np.int32]
    head: bytes = b""
    tensors: tuple[Tensor, ...] = ()
    extra: Bytes = field(default_factory=lambda: NO_EXTRA)

    @property
    def shape(self) -> SectionShape:
        """What must be equal in sections that are joined."""
        tensors = tuple((tensor.head, tensor.rows.shape[0], tensor.rows.shape[2]) for tensor in self.tensors)
        return SectionShape(self.head, tensors, self.extra.shape[1])

    def cut(self, start: int, end: int) -> Section:
        """The cells at the positions from `start` up to `end`."""
        first, last = np.searchsorted(self.positions, (start, end)).tolist()
        tensors = tuple(Tensor(tensor.head, tensor.rows[:, first:last]) for tensor in self.tensors)
        return Section(self.positions[first:last], self.head, tensors, self.extra[first:last])


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A recurrent state: it is valid at one position, and cannot be cut.

    Attributes
    ----------
    position
        Position of the last token it holds; -1 if it is empty.
    data
        All of it, as written.
    heads
        Types and sizes of its tensors, as written.
    """

    position: int
    data: memoryview
    heads: bytes


@dataclass(frozen=True, slots=True)
class StateView:
    """A state, as views of the bytes it was parsed from.

    Attributes
    ----------
    sections
        Attention; empty for a recurrent model.
    n_before
        How many sections come before the recurrent part.
    streams
        How many streams each section names.
    """

    sections: tuple[Section, ...] = ()
    recurrent: Recurrent | None = None
    n_before: int = 0
    streams: int = 1

    @property
    def shape(self) -> StateShape:
        """Its shape; that of a section without cells is not known."""
        recurrent = self.recurrent.heads if self.recurrent is not None else None
        return StateShape(tuple(section.shape for section in self.sections), recurrent, self.n_before)

    @property
    def positions(self) -> list[npt.NDArray[np.int32]]:
        """Of the cells of each section."""
        return [section.positions for section in self.sections]

    def holds(self, start: int, end: int) -> bool:
        """Whether each section of the attention has every position from `start` up to `end`."""
        held = [len(positions) for positions in self.cut(start, end).positions]
        return held == [end - start] * len(held)

    def cut(self, start: int, end: int, *, window_from: int = 0) -> StateView:
        """The attention at the positions from `start` up to `end`, without a copy; no recurrent part.

        Of the section of a sliding window, only the positions from `window_from` on.
        """
        firsts = [start] * len(self.sections)
        if window_from and self.n_before > 1:
            firsts[self.n_before - 1] = max(start, window_from)
        sections = [section.cut(first, end) for section, first in zip(self.sections, firsts, strict=True)]
        return replace(self, sections=tuple(sections), recurrent=None)


# -- writing ----------------------------------------------------------------------------------------------------------


class Assembly:
    """One state, joined from pieces. A piece is needed only while it is added.

    Parameters
    ----------
    shape
        Of the state; that of its recurrent part does not matter.
    positions
        Positions of the cells that each section will have.
    recurrent
        The recurrent part, as written.
    head
        What the state begins with: for the file of a server's slot something else than that it is sequence 0.
    streams, sequence
        Of how many streams the cells are those of the first, and their sequence id.

    Attributes
    ----------
    size
        Length of the state in bytes.
    state
        The state, as views of the buffer it is written into; its rows are those of the pieces that were added.
    """

    def __init__(
        self,
        shape: StateShape,
        positions: Sequence[npt.NDArray[np.int32]],
        *,
        recurrent: Buffer = b"",
        head: bytes = SEQUENCE_0,
        streams: int = 1,
        sequence: int = 0,
    ) -> None:
        self._shape, self._positions = shape, positions
        self._recurrent, self._head, self._streams, self._sequence = recurrent, head, streams, sequence
        # the number of cells of each other stream
        self._others = bytes(U32.size * (streams - 1))
        # how many cells of each section were added
        self._filled = [0] * len(positions)
        of_sections = zip(shape.sections, positions, strict=True)
        sizes = (section.size(len(cells)) + len(self._others) for section, cells in of_sections)
        self.size = len(head) + sum(sizes) + len(recurrent)
        self.state = StateView()

    def open(self, target: memoryview) -> None:
        """Write everything but the cells' extra bytes and the rows into a buffer of exactly this size."""
        if len(target) != self.size:
            raise CorruptError(f"a state of {self.size} bytes cannot be joined into a buffer of {len(target)}")
        out, sections, n_before = np.frombuffer(target, np.uint8), [], self._shape.n_before
        at = _put(out, 0, self._head)
        for i, (shape, positions) in enumerate(zip(self._shape.sections, self._positions, strict=True)):
            if i == n_before:
                at = _put(out, at, self._recurrent)
            sections.append(self._open_section(out, at, shape, positions))
            at = _put(out, at + shape.size(len(positions)), self._others)
        if n_before >= len(sections):
            _put(out, at, self._recurrent)
        self.state = StateView(tuple(sections), None, n_before)

    def _open_section(self, out: Bytes, at: int, shape: SectionShape, positions: npt.NDArray[np.int32]) -> Section:
        n = len(positions)
        at = _put(out, at, PAIR.pack(self._streams, n))
        if not n:
            return Section(positions)
        cells = out[at : at + n * shape.cell_bytes].reshape(n, -1)
        words = cells.view("<i4")
        words[:, 0], words[:, 1], words[:, 2:], words[:, -1] = positions, 1, 0, self._sequence
        at = _put(out, at + cells.size, shape.head)
        tensors = []
        for head, planes, width in shape.tensors:
            at = _put(out, at, head)
            tensors.append(Tensor(head, out[at : at + planes * n * width].reshape(planes, n, width)))
            at += planes * n * width
        return Section(positions, shape.head, tuple(tensors), cells[:, 8:-4])

    def add(self, piece: StateView) -> None:
        """Write the rows of the next cells; a page may lack the last sections.

        Raises `CorruptError` if their layout differs, or if they are not the next ones.
        """
        if len(piece.sections) > len(self.state.sections):
            raise CorruptError("states of different kinds cannot be joined")
        for i, (section, target) in enumerate(zip(piece.sections, self.state.sections, strict=False)):
            first, last = self._filled[i], self._filled[i] + len(section.positions)
            if first == last:
                continue
            if section.shape != self._shape.sections[i]:
                raise CorruptError("states of different layouts cannot be joined")
            if not np.array_equal(section.positions, target.positions[first:last]):
                raise CorruptError("states whose positions do not follow each other cannot be joined")
            target.extra[first:last] = section.extra
            for to, tensor in zip(target.tensors, section.tensors, strict=True):
                to.rows[:, first:last] = tensor.rows
            self._filled[i] = last

    def close(self) -> None:
        """Raises `CorruptError` if a row is missing."""
        if self._filled != [len(positions) for positions in self._positions]:
            raise CorruptError("rows of a joined state are missing")

    def write(self, target: memoryview, pieces: Iterable[StateView]) -> None:
        """Write all of it: `open`, `add` each piece, and `close`."""
        self.open(target)
        for piece in pieces:
            self.add(piece)
        self.close()


def zeros(shape: StateShape, positions: Sequence[npt.NDArray[np.int32]]) -> tuple[bytearray, StateView]:
    """A state of sequence 0 whose rows are zeros, and views of it."""
    assembly = Assembly(shape, positions)
    data = bytearray(assembly.size)
    assembly.open(memoryview(data))
    return data, assembly.state


def _put(out: Bytes, at: int, data: Buffer) -> int:
    out[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return at + len(data)
