"""The state of a llama.cpp memory as views of its bytes: cut at positions, and joined. Pure; does not need llama.cpp.

::

    context   = u32 length ‖ architecture ‖ memory                  llama_state_get_data
    sequence  = u32 magic ‖ u32 sequence ‖ memory                   llama_state_seq_get_data
    memory    = section [section] [recurrent]                       the second section is a sliding window's
    section   = u32 1 ‖ u32 cells ‖ cell... ‖ u32 V transposed ‖ u32 layers ‖ K of each layer ‖ V of each layer
    cell      = i32 position ‖ u32 1 ‖ i32 sequence 0
    K, V      = i32 type ‖ u64 bytes of a row ‖ row of each cell
    V, transp = i32 type ‖ u32 bytes of an element ‖ u32 channels ‖ for each channel: element of each cell
    recurrent = u32 cells ‖ cell... ‖ u32 0 ‖ u32 layers ‖ (i32 type ‖ u64 bytes of a row ‖ row of each cell)...

A section without cells ends after their number. llama.cpp promises nothing about this layout: see `parse`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError
from prefixstore.format.record import Buffer

__all__ = [
    "CELL_BYTES",
    "PAIR",
    "SEQUENCE_MAGIC",
    "U32",
    "Assembly",
    "Recurrent",
    "Section",
    "StateView",
    "Tensor",
    "assemble",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

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
    """The cells of one KV cache, as views of a state.

    Attributes
    ----------
    positions
        Positions of the cells, ascending, shape ``(cells,)``.
    head
        Whether V is transposed, and the number of layers, as written.
    tensors
        K of all layers, then V of all layers.
    """

    positions: npt.NDArray[np.int32]
    head: bytes
    tensors: tuple[Tensor, ...]

    @property
    def layout(self) -> tuple[bytes, ...]:
        """What must be equal in sections that are joined; empty if the section was written without cells."""
        return (self.head, *(tensor.head for tensor in self.tensors)) if self.head else ()

    def cut(self, start: int, end: int) -> Section:
        """The cells at the positions from `start` up to `end`."""
        first, last = np.searchsorted(self.positions, (start, end)).tolist()
        tensors = tuple(Tensor(tensor.head, tensor.rows[:, first:last]) for tensor in self.tensors)
        return Section(self.positions[first:last], self.head, tensors)


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
        """Whether the attention has every position that `cut` would keep."""
        held = [len(section.positions) for section in self.cut(start, end, window_from=window_from).sections]
        return held == [max(end - first, 0) for first in self._firsts(start, window_from)]

    def cut(self, start: int, end: int, *, window_from: int = 0) -> StateView:
        """The attention at the positions from `start` up to `end`, without a copy; no recurrent part.

        Parameters
        ----------
        start, end
            First position, and the one after the last.
        window_from
            Of a second section, the positions from here on: what its window can see from where the state continues.
        """
        firsts = self._firsts(start, window_from)
        sections = [section.cut(first, end) for section, first in zip(self.sections, firsts, strict=True)]
        return StateView(self.architecture, tuple(sections), None)

    def _firsts(self, start: int, window_from: int) -> list[int]:
        return [max(start, window_from) if i else start for i in range(len(self.sections))]


# -- writing ----------------------------------------------------------------------------------------------------------


class Assembly:
    """One state, joined from pieces. A piece is needed only while it is added.

    Parameters
    ----------
    like
        A state with the layout of all pieces.
    positions
        Positions of the cells that each section will have.
    architecture
        For ``llama_state_set_data``; None for ``llama_state_seq_set_data``, as sequence 0.
    recurrent
        The recurrent part, as written.
    head
        What the state begins with, instead of what says whose state it is: for the file of a server's slot.
    streams, sequence
        Of how many streams the cells are those of the first, and their sequence id.

    Attributes
    ----------
    size
        Length of the state in bytes.
    """

    def __init__(
        self,
        like: StateView,
        positions: Sequence[npt.NDArray[np.int32]],
        *,
        architecture: bytes | None = None,
        recurrent: Buffer = b"",
        head: bytes | None = None,
        streams: int = 1,
        sequence: int = 0,
    ) -> None:
        self._sections = list(zip(like.sections, positions, strict=True))
        self._streams, self._sequence = streams, sequence
        if head is not None:
            self._head = head
        elif architecture is None:
            self._head = PAIR.pack(SEQUENCE_MAGIC, 0)
        else:
            self._head = U32.pack(len(architecture)) + architecture
        self._recurrent = recurrent
        # the rows of each tensor in the target, and how many cells of each section they have
        self._rows: list[list[Bytes]] = []
        self._filled = [0] * len(self._sections)
        # the number of cells of each other stream
        self._others = bytes(U32.size * (streams - 1))
        sizes = (_size(*section) + len(self._others) for section in self._sections)
        self.size = len(self._head) + sum(sizes) + len(recurrent)

    def open(self, target: memoryview) -> None:
        """Write everything but the rows into a buffer of exactly this size."""
        if len(target) != self.size:
            raise CorruptError(f"a state of {self.size} bytes cannot be joined into a buffer of {len(target)}")
        out = np.frombuffer(target, np.uint8)
        at = _put(out, 0, self._head)
        for section, positions in self._sections:
            n, rows = len(positions), []
            at = _put(out, at, PAIR.pack(self._streams, n))
            if n:
                cells = np.zeros((n, 3), "<i4")
                cells[:, 0] = positions
                cells[:, 1] = 1
                cells[:, 2] = self._sequence
                at = _put(out, at, cells.tobytes())
                at = _put(out, at, section.head)
            for tensor in section.tensors if n else ():
                at = _put(out, at, tensor.head)
                planes, _, width = tensor.rows.shape
                rows.append(out[at : at + planes * n * width].reshape(planes, n, width))
                at += rows[-1].size
            at = _put(out, at, self._others)
            self._rows.append(rows)
        _put(out, at, self._recurrent)

    def add(self, piece: StateView) -> None:
        """Write the rows of the next cells.

        Raises
        ------
        CorruptError
            If their layout differs, or if they are not the next ones.
        """
        if len(piece.sections) != len(self._sections):
            raise CorruptError("states of different kinds cannot be joined")
        for i, section in enumerate(piece.sections):
            like, positions = self._sections[i]
            first, last = self._filled[i], self._filled[i] + len(section.positions)
            if first == last:
                continue
            if section.layout != like.layout:
                raise CorruptError("states of different layouts cannot be joined")
            if not np.array_equal(section.positions, positions[first:last]):
                raise CorruptError("states whose positions do not follow each other cannot be joined")
            for rows, tensor in zip(self._rows[i], section.tensors, strict=True):
                rows[:, first:last] = tensor.rows
            self._filled[i] = last

    def added(self) -> StateView:
        """What was added so far, as views of the target."""
        sections = []
        for (like, positions), tensors, n in zip(self._sections, self._rows, self._filled, strict=True):
            rows = zip(like.tensors, tensors, strict=True)
            cells = tuple(Tensor(tensor.head, of_tensor[:, :n]) for tensor, of_tensor in rows) if tensors else ()
            sections.append(Section(positions[:n], like.head, cells))
        return StateView(None, tuple(sections), None)

    def close(self) -> None:
        """Check that no row is missing.

        Raises
        ------
        CorruptError
            If a row is missing.
        """
        if self._filled != [len(positions) for _, positions in self._sections]:
            raise CorruptError("rows of a joined state are missing")

    def write(self, target: memoryview, pieces: Iterable[StateView]) -> None:
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


def assemble(pieces: Sequence[StateView], *, architecture: bytes | None = None, recurrent: Buffer = b"") -> bytearray:
    """The state that pieces make, one after the other; see `Assembly`.

    Raises
    ------
    CorruptError
        If they cannot be joined.
    """
    if len({len(piece.sections) for piece in pieces}) != 1:
        raise CorruptError("states of different kinds cannot be joined")
    columns = zip(*(piece.sections for piece in pieces), strict=True)
    positions = [np.concatenate([section.positions for section in column]) for column in columns]
    if any((np.diff(of_section) <= 0).any() for of_section in positions):
        raise CorruptError("states whose positions do not follow each other cannot be joined")
    assembly = Assembly(pieces[0], positions, architecture=architecture, recurrent=recurrent)
    target = bytearray(assembly.size)
    assembly.write(memoryview(target), pieces)
    return target
