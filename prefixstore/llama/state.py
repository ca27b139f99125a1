"""The state of a llama.cpp memory as views of its bytes: cut at positions, and joined. Pure; needs no llama.cpp.

::

    context   = u32 length ‖ architecture ‖ memory                  llama_state_get_data
    sequence  = u32 magic ‖ u32 sequence ‖ memory                   llama_state_seq_get_data
    memory    = section [section] [recurrent]                       two sections: the second is a sliding window's
    section   = u32 1 ‖ u32 cells ‖ cell... ‖ u32 V transposed ‖ u32 layers ‖ K of each layer ‖ V of each layer
    cell      = i32 position ‖ u32 1 ‖ i32 sequence 0
    K, V      = i32 type ‖ u64 bytes of a row ‖ row of each cell
    V, transp = i32 type ‖ u32 bytes of an element ‖ u32 channels ‖ for each channel: element of each cell
    recurrent = u32 cells ‖ cell... ‖ u32 0 ‖ u32 layers ‖ (i32 type ‖ u64 bytes of a row ‖ row of each cell)...

A section without cells ends behind their number. llama.cpp promises nothing about this layout: see `parse`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError

__all__ = ["CELL_BYTES", "SEQUENCE_MAGIC", "Assembly", "Blob", "Buffer", "Recurrent", "Section", "Tensor", "assemble"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = "bytes | bytearray | memoryview"

SEQUENCE_MAGIC = 0xAF143CD8

U32 = struct.Struct("<I")
PAIR = struct.Struct("<II")
CELL_BYTES = 12


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
    """The cells of one KV cache, as views of the blob.

    Attributes
    ----------
    positions
        Of the cells, ascending, shape ``(cells,)``.
    head
        Whether V is transposed, and the number of layers, as written.
    tensors
        K of all layers, then V of all layers.
    """

    positions: npt.NDArray[np.int32]
    head: bytes
    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[bytes, ...]:
        """What must be equal in sections that are joined; empty if it was written without cells."""
        return (self.head, *(tensor.head for tensor in self.tensors)) if self.head else ()

    def cut(self, start: int, end: int) -> Section:
        """The cells at the positions from `start` up to `end`."""
        first, last = np.searchsorted(self.positions, (start, end)).tolist()
        tensors = tuple(Tensor(tensor.head, tensor.rows[:, first:last]) for tensor in self.tensors)
        return Section(self.positions[first:last], self.head, tensors)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A recurrent state: it is valid behind one position, and cannot be cut.

    Attributes
    ----------
    position
        Of the last token it holds; -1 if it is empty.
    data
        All of it, as written.
    heads
        Of its tensors: types and sizes, as written.
    """

    position: int
    data: memoryview
    heads: bytes


@dataclass(frozen=True, slots=True)
class Blob:
    """A state, as views of the bytes it was parsed from.

    Attributes
    ----------
    architecture
        As ``llama_state_get_data`` writes it; None for a state of a sequence.
    sections
        Attention; empty for a recurrent model.
    recurrent
        The recurrent part, if there is one.
    """

    architecture: bytes | None
    sections: tuple[Section, ...]
    recurrent: Recurrent | None

    @property
    def positions(self) -> list[npt.NDArray[np.int32]]:
        """Of the cells of each section."""
        return [section.positions for section in self.sections]

    def holds(self, start: int, end: int, *, window_from: int = 0) -> bool:
        """Whether the attention has all positions that `cut` would keep."""
        held = [len(section.positions) for section in self.cut(start, end, window_from=window_from).sections]
        return held == [max(end - first, 0) for first in self._firsts(start, window_from)]

    def cut(self, start: int, end: int, *, window_from: int = 0) -> Blob:
        """The attention at the positions from `start` up to `end`, without a copy; no recurrent part.

        Parameters
        ----------
        start, end
            First position, and the one behind the last.
        window_from
            Of a second section, the positions from here on: what its window can see from where the state goes on.
        """
        firsts = self._firsts(start, window_from)
        sections = [section.cut(first, end) for section, first in zip(self.sections, firsts, strict=True)]
        return Blob(self.architecture, tuple(sections), None)

    def _firsts(self, start: int, window_from: int) -> list[int]:
        return [max(start, window_from) if i else start for i in range(len(self.sections))]


# -- writing ----------------------------------------------------------------------------------------------------------


class Assembly:
    """One state, put together from pieces. A piece is needed only while it is added.

    Parameters
    ----------
    like
        Has the shape of all pieces.
    positions
        Of the cells that each section is going to have.
    architecture
        For ``llama_state_set_data``; None for ``llama_state_seq_set_data``, as sequence 0.
    recurrent
        The recurrent part that comes with them, as written.

    Attributes
    ----------
    size
        Bytes of the state.
    """

    def __init__(
        self,
        like: Blob,
        positions: Sequence[npt.NDArray[np.int32]],
        *,
        architecture: bytes | None = None,
        recurrent: Buffer = b"",
    ) -> None:
        self._sections = list(zip(like.sections, positions, strict=True))
        if architecture is None:
            self._head = PAIR.pack(SEQUENCE_MAGIC, 0)
        else:
            self._head = U32.pack(len(architecture)) + architecture
        self._recurrent = recurrent
        # the rows of each tensor in the target, and how many cells of each section they have
        self._rows: list[list[Bytes]] = []
        self._filled = [0] * len(self._sections)
        self.size = len(self._head) + sum(_size(*section) for section in self._sections) + len(recurrent)

    def open(self, target: memoryview) -> None:
        """Write all but the rows into a buffer of exactly this size."""
        if len(target) != self.size:
            raise CorruptError(f"{self.size} bytes cannot be joined into {len(target)}")
        out = np.frombuffer(target, np.uint8)
        at = _put(out, 0, self._head)
        for section, positions in self._sections:
            n, rows = len(positions), []
            at = _put(out, at, PAIR.pack(1, n))
            if n:
                cells = np.zeros((n, 3), "<i4")
                cells[:, 0] = positions
                cells[:, 1] = 1
                at = _put(out, at, cells.tobytes())
                at = _put(out, at, section.head)
            for tensor in section.tensors if n else ():
                at = _put(out, at, tensor.head)
                planes, _, width = tensor.rows.shape
                rows.append(out[at : at + planes * n * width].reshape(planes, n, width))
                at += rows[-1].size
            self._rows.append(rows)
        _put(out, at, self._recurrent)

    def add(self, piece: Blob) -> None:
        """Write the rows of the next cells.

        Raises
        ------
        CorruptError
            If they are of another shape, or not the next ones.
        """
        if len(piece.sections) != len(self._sections):
            raise CorruptError("states of different kinds cannot be joined")
        for i, section in enumerate(piece.sections):
            like, positions = self._sections[i]
            first, last = self._filled[i], self._filled[i] + len(section.positions)
            if first == last:
                continue
            if section.shape != like.shape:
                raise CorruptError("states of different shapes cannot be joined")
            if not np.array_equal(section.positions, positions[first:last]):
                raise CorruptError("states that do not follow each other cannot be joined")
            for rows, tensor in zip(self._rows[i], section.tensors, strict=True):
                rows[:, first:last] = tensor.rows
            self._filled[i] = last

    def close(self) -> None:
        """Make sure that no row is missing.

        Raises
        ------
        CorruptError
            If one is.
        """
        if self._filled != [len(positions) for _, positions in self._sections]:
            raise CorruptError("a joined state lacks rows")

    def write(self, target: memoryview, pieces: Iterable[Blob]) -> None:
        """Write all of it: `open`, `add` each piece, and `close`."""
        self.open(target)
        for piece in pieces:
            self.add(piece)
        self.close()


def _size(section: Section, positions: npt.NDArray[np.int32]) -> int:
    if not len(positions):
        return PAIR.size
    widths: list[int] = [tensor.rows.shape[0] * tensor.rows.shape[2] for tensor in section.tensors]
    heads = sum(len(tensor.head) for tensor in section.tensors)
    return PAIR.size + len(section.head) + heads + len(positions) * (CELL_BYTES + sum(widths))


def _put(out: Bytes, at: int, data: Buffer) -> int:
    out[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return at + len(data)


def assemble(pieces: Sequence[Blob], *, architecture: bytes | None = None, recurrent: Buffer = b"") -> bytearray:
    """The state that pieces make, each behind the one before; see `Assembly`.

    Raises
    ------
    CorruptError
        If they do not belong together.
    """
    if len({len(piece.sections) for piece in pieces}) != 1:
        raise CorruptError("states of different kinds cannot be joined")
    columns = zip(*(piece.sections for piece in pieces), strict=True)
    positions = [np.concatenate([section.positions for section in column]) for column in columns]
    if any((np.diff(of_section) <= 0).any() for of_section in positions):
        raise CorruptError("states that do not follow each other cannot be joined")
    assembly = Assembly(pieces[0], positions, architecture=architecture, recurrent=recurrent)
    target = bytearray(assembly.size)
    assembly.write(memoryview(target), pieces)
    return target
