"""Parses the bytes of a llama.cpp state into a `StateView`. Pure; does not need llama.cpp.

The layout is in `view`; llama.cpp makes no promises about it. So a state is parsed only if every byte is accounted for.
States that cannot be cut are refused: several streams, a cell in two sequences or with the coordinates of an image, and
whatever a later llama.cpp writes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError
from prefixstore.format.record import Buffer
from prefixstore.llama.state.view import CELL_BYTES, PAIR, SEQUENCE_MAGIC, U32, Recurrent, Section, StateView, Tensor

__all__ = ["ROWS", "parse_context", "parse_sequence", "parse_slot"]

ROWS = struct.Struct("<iQ")  # type, bytes of a row
CHANNELS = struct.Struct("<iII")  # type, bytes of an element, channels
CELL = struct.Struct("<iI")  # position, number of sequences

# full attention, and a sliding window
MAX_SECTIONS = 2
MAX_ARCHITECTURE = 256
# llama.cpp's LLAMA_MAX_SEQ
MAX_STREAMS = 256


def parse_context(state: Buffer) -> StateView:
    """Parse what ``llama_state_get_data`` wrote.

    Raises
    ------
    CorruptError
        If a byte is not accounted for.
    """
    reader = _Reader(state)
    (length,) = reader.read(U32)
    if not 0 < length <= MAX_ARCHITECTURE:
        raise CorruptError(f"a state cannot begin with an architecture of {length} bytes")
    return _parse(reader, bytes(reader.take(length)))


def parse_sequence(state: Buffer, *, cell_bytes: int = CELL_BYTES) -> StateView:
    """Parse what ``llama_state_seq_get_data`` wrote for sequence 0.

    Parameters
    ----------
    state
        The bytes.
    cell_bytes
        Length of a cell; longer if it has the coordinates of an image.

    Raises
    ------
    CorruptError
        If a byte is not accounted for.
    """
    reader = _Reader(state)
    if reader.read(PAIR) != (SEQUENCE_MAGIC, 0):
        raise CorruptError("these bytes are not the state of sequence 0")
    return _parse(reader, None, cell_bytes)


def parse_slot(memory: Buffer, *, sequence: int, cell_bytes: int = CELL_BYTES) -> tuple[StateView, int]:
    """Parse the memory in the file of a server's slot, as if the slot were sequence 0 of a context with one stream.

    Parameters
    ----------
    memory
        What ``llama_state_seq_get_data`` wrote, after the magic and the flags.
    sequence
        The slot.
    cell_bytes
        Length of a cell; longer if it has the coordinates of an image.

    Returns
    -------
    StateView
        The state.
    int
        How many streams the file names for each section; 1 without sections.

    Raises
    ------
    CorruptError
        If a byte is not accounted for.
    """
    reader = _Reader(memory, sequence, MAX_STREAMS)
    view = _parse(reader, None, cell_bytes)
    return view, reader.streams or 1


class _Reader:
    """Reads bytes in order, and never past their end."""

    def __init__(self, state: Buffer, sequence: int = 0, max_streams: int = 1) -> None:
        self._bytes = np.frombuffer(state, np.uint8)
        self.at = 0
        self.sequence = sequence
        self.max_streams = max_streams
        # how many streams each section has; 0 before the first
        self.streams = 0

    @property
    def left(self) -> int:
        return len(self._bytes) - self.at

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        if size > self.left:
            raise CorruptError(f"a state is {size - self.left} bytes too short")
        self.at += size
        return self._bytes[self.at - size : self.at]

    def read(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size).data)

    def since(self, at: int) -> memoryview:
        return self._bytes[at : self.at].data


def _parse(reader: _Reader, architecture: bytes | None, cell_bytes: int = CELL_BYTES) -> StateView:
    sections: list[Section] = []
    recurrent = None
    while reader.left and recurrent is None:
        start = reader.at
        try:
            section = _section(reader, cell_bytes) if len(sections) < MAX_SECTIONS else None
        except CorruptError:
            section = None
        if section is not None:
            sections.append(section)
        else:
            reader.at = start
            recurrent = _recurrent(reader)
    if reader.left or not (sections or recurrent):
        raise CorruptError(f"{reader.left} bytes of a state have an unknown layout")
    return StateView(architecture, tuple(sections), recurrent)


def _section(reader: _Reader, cell_bytes: int) -> Section:
    (streams,) = reader.read(U32)
    if not 1 <= streams <= reader.max_streams or reader.streams not in (0, streams):
        raise CorruptError(f"a state of {streams} streams cannot be cut")
    section = Section(np.empty(0, np.int32), b"", ())
    for stream in range(streams):
        (n,) = reader.read(U32)
        if n == 0:
            continue
        if len(section.positions):
            raise CorruptError("a state with cells in several streams cannot be cut")
        section = _cells(reader, n, cell_bytes, after=U32.size * (streams - 1 - stream))
    reader.streams = streams
    return section


def _cells(reader: _Reader, n: int, cell_bytes: int, *, after: int) -> Section:
    """The cells of a stream, and their rows; `after` them come at least so many bytes."""
    cells = reader.take(n * cell_bytes).view("<i4").reshape(n, -1)
    if (cells[:, 1] != 1).any() or (cells[:, -1] != reader.sequence).any():
        raise CorruptError(f"a state with cells of other sequences than {reader.sequence} cannot be cut")
    positions = np.ascontiguousarray(cells[:, 0])
    head = reader.take(PAIR.size).tobytes()
    transposed, layers = PAIR.unpack(head)
    if transposed > 1:
        raise CorruptError(f"{transposed} is not a valid flag for a transposed V; it must be 0 or 1")
    tensors = [_rows(reader, n) for _ in _counted(layers, reader)]
    if reader.left > after:  # multi-head latent attention has no V
        tensors += [_channels(reader, n) if transposed else _rows(reader, n) for _ in range(layers)]
    return _sorted(positions, head, tensors)


def _counted(layers: int, reader: _Reader) -> Iterable[int]:
    """One number for each layer, unless the bytes cannot hold so many."""
    if layers * ROWS.size > reader.left:
        raise CorruptError(f"{layers} layers do not fit into {reader.left} bytes")
    return range(layers)


def _rows(reader: _Reader, n: int) -> Tensor:
    head = reader.take(ROWS.size).tobytes()
    _, width = ROWS.unpack(head)
    return Tensor(head, _planes(reader, 1, n, width))


def _channels(reader: _Reader, n: int) -> Tensor:
    head = reader.take(CHANNELS.size).tobytes()
    _, width, channels = CHANNELS.unpack(head)
    return Tensor(head, _planes(reader, channels, n, width))


def _planes(reader: _Reader, channels: int, n: int, width: int) -> npt.NDArray[np.uint8]:
    if not channels * width:
        raise CorruptError("the rows of a layer have no bytes")
    return reader.take(channels * n * width).reshape(channels, n, width)


def _sorted(positions: npt.NDArray[np.int32], head: bytes, tensors: Iterable[Tensor]) -> Section:
    """Cells in the order of their positions; a copy only where a window has written over its oldest cells."""
    steps = np.diff(positions)
    if positions.min() < 0:
        raise CorruptError("a cell has no position")
    if (steps > 0).all():
        return Section(positions, head, tuple(tensors))
    order = np.argsort(positions)
    positions = positions[order]
    if (np.diff(positions) <= 0).any():
        raise CorruptError("two cells have the same position")
    return Section(positions, head, tuple(Tensor(tensor.head, tensor.rows[:, order]) for tensor in tensors))


def _recurrent(reader: _Reader) -> Recurrent:
    start = reader.at
    (n,) = reader.read(U32)
    position = -1
    if n > 1:
        raise CorruptError("a recurrent state has the cells of several sequences")
    if n:
        position, sequences = reader.read(CELL)
        # the state of a sequence does not name it, that of a context does
        if sequences > 1 or (sequences and reader.read(U32) != (0,)):
            raise CorruptError("a recurrent state does not belong to sequence 0")
    transposed, layers = reader.read(PAIR)
    if transposed or position < -1 + n:
        raise CorruptError("a recurrent state has an unknown layout")
    # layers with attention have no tensors here, the others two each
    heads = []
    while reader.left:
        heads.append(reader.take(ROWS.size).tobytes())
        reader.take(n * ROWS.unpack(heads[-1])[1])
        if len(heads) > 2 * layers:
            raise CorruptError(f"{layers} layers cannot have {len(heads)} recurrent tensors")
    return Recurrent(position, reader.since(start), U32.pack(layers) + b"".join(heads))
