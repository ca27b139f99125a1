"""The shape of states: all of their bytes but the rows. llama.cpp is handed only pages of the shape its context has.

llama.cpp compares types and sizes itself, and refuses. It does not look at positions and sequences, and at nothing
behind what it reads: a page that lies there would be taken, and answers would be wrong. The layout is in `blob`.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError
from prefixstore.llama.parse import PAIR, U32, parse_sequence
from prefixstore.llama.state import CELL_BYTES, SEQUENCE_MAGIC, Blob, Buffer

__all__ = ["Shape", "complete_cells", "shape_of", "shape_of_sequence"]

# behind the position of a cell; models that see images have coordinates between the two, and the token
ONE_SEQUENCE, SEQUENCE_0 = U32.pack(1), U32.pack(0)
CELLS = (CELL_BYTES, CELL_BYTES + 8, CELL_BYTES + 12)

TEMPLATES = 16
POSITIONS = 2**31


@dataclass(frozen=True)
class SectionShape:
    """A section: the bytes before its tensors, and of each tensor its head and the bytes that a cell has in it."""

    head: bytes
    tensors: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True)
class Shape:
    """What all states of a context have in common.

    Attributes
    ----------
    sections
        Attention.
    cell_bytes
        Length of a cell.
    recurrent
        Types and sizes of the recurrent part, as written; None without one.
    """

    sections: tuple[SectionShape, ...]
    cell_bytes: int = CELL_BYTES
    recurrent: bytes | None = None

    def fits(self, state: Buffer, start: int, n: int) -> bool:
        """Whether a page of sequence 0 has this shape, and holds the positions from `start` on, `n` of them, once each.

        It costs some microseconds: a look at each head, and at each cell.
        """
        if n < 1 or start + n > POSITIONS or len(state) != self.size(n):
            return False
        template = _template(self, n)
        found = np.frombuffer(state, np.uint8)
        if not np.array_equal(found[template.places], template.values):
            return False
        wanted = np.arange(start, start + n, dtype="<i4")
        for at in template.cells:
            held = found[at : at + n * self.cell_bytes].view("<i4").reshape(n, -1)[:, 0]
            # a window that has written over its oldest cells has them in another order
            if not np.array_equal(held, wanted) and not np.array_equal(np.sort(held), wanted):
                return False
        return True

    def example(self, position: int) -> bytes:
        """A page of this shape, with one token at a position and zeros as rows."""
        template = _template(self, 1)
        data = np.zeros(self.size(1), np.uint8)
        data[template.places] = template.values
        for at in template.cells:
            data[at : at + U32.size] = np.frombuffer(U32.pack(position), np.uint8)
        return data.tobytes()

    @property
    def is_plain(self) -> bool:
        """Whether there is one section of attention, with cells that hold a position and a sequence."""
        return len(self.sections) == 1 and self.cell_bytes == CELL_BYTES and self.recurrent is None

    def size(self, n: int) -> int:
        """Bytes of a page of `n` tokens."""
        size = PAIR.size
        for section in self.sections:
            size += PAIR.size + n * self.cell_bytes + len(section.head)
            size += sum(len(head) + n * width for head, width in section.tensors)
        return size


@dataclass(frozen=True)
class _Template:
    """Of a page of so many tokens: the places and values of the bytes that each such page has; where cells begin."""

    places: npt.NDArray[np.intp]
    values: npt.NDArray[np.uint8]
    cells: tuple[int, ...]


@functools.lru_cache(TEMPLATES)
def _template(shape: Shape, n: int) -> _Template:
    places: list[npt.NDArray[np.intp]] = []
    values: list[bytes] = []
    cells: list[int] = []
    at = 0

    def write(data: bytes) -> None:
        nonlocal at
        places.append(np.arange(at, at + len(data)))
        values.append(data)
        at += len(data)

    write(PAIR.pack(SEQUENCE_MAGIC, 0))
    for section in shape.sections:
        write(PAIR.pack(1, n))
        cells.append(at)
        for _ in range(n):
            at += U32.size
            write(ONE_SEQUENCE)
            at += shape.cell_bytes - CELL_BYTES
            write(SEQUENCE_0)
        write(section.head)
        for head, width in section.tensors:
            write(head)
            at += n * width
    return _Template(np.concatenate(places), np.frombuffer(b"".join(values), np.uint8), tuple(cells))


def complete_cells(state: memoryview, n: int) -> None:
    """Make a plain page of `n` cells that were written without a sequence one of sequence 0, in place.

    What was written lies at the end of `state`; in front of it is room for what it lacks.
    """
    words = np.frombuffer(state, "<u4", 4 + 3 * n)
    positions = words[n + 4 : 3 * n + 4 : 2].copy()
    words[:4] = SEQUENCE_MAGIC, 0, 1, n
    cells = words[4:].reshape(n, 3)
    cells[:, 0] = positions
    cells[:, 1:] = 1, 0


def shape_of(blob: Blob, cell_bytes: int = CELL_BYTES) -> Shape:
    """The shape of a state that was parsed; sections without cells show none."""
    sections = (
        SectionShape(
            section.head,
            tuple((tensor.head, tensor.rows.shape[0] * tensor.rows.shape[2]) for tensor in section.tensors),
        )
        for section in blob.sections
    )
    return Shape(tuple(sections), cell_bytes, blob.recurrent.heads if blob.recurrent is not None else None)


def shape_of_sequence(state: Buffer) -> Shape:
    """The shape of what ``llama_state_seq_get_data`` wrote for sequence 0.

    Raises
    ------
    CorruptError
        If a byte is not accounted for.
    """
    for cell_bytes in CELLS:
        with contextlib.suppress(CorruptError):
            return shape_of(parse_sequence(state, cell_bytes=cell_bytes), cell_bytes)
    raise CorruptError("these bytes are not understood as a state of sequence 0")
