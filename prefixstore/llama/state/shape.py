"""The shape of a state: all of its bytes but the rows. llama.cpp is given only pages with the shape of its context.

llama.cpp compares types and sizes itself, and refuses those that differ. It does not check positions and sequences, nor
anything after what it reads: a page that is wrong there would be accepted, and answers would be wrong. The layout is in
`view`.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError
from prefixstore.format.record import Buffer
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.view import CELL_BYTES, PAIR, SEQUENCE_MAGIC, U32, StateView

__all__ = ["StateShape", "complete_cells", "shape_of", "shape_of_sequence"]

# what follows the position of a cell; models that see images have coordinates between the two, and the token
ONE_SEQUENCE, SEQUENCE_0 = U32.pack(1), U32.pack(0)
CELLS = (CELL_BYTES, CELL_BYTES + 8, CELL_BYTES + 12)

TEMPLATES = 16
POSITIONS = 2**31


@dataclass(frozen=True)
class SectionShape:
    """A section: the bytes before its tensors, and for each tensor its head and the bytes of one cell."""

    head: bytes
    tensors: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True)
class StateShape:
    """What all states of a context have in common.

    Attributes
    ----------
    sections
        Sections of attention.
    cell_bytes
        Length of a cell.
    recurrent
        Types and sizes of the recurrent part, as written; None without one.
    """

    sections: tuple[SectionShape, ...]
    cell_bytes: int = CELL_BYTES
    recurrent: bytes | None = None

    def fits(self, state: Buffer, start: int, n: int) -> bool:
        """Whether a page of sequence 0 has this shape, and holds `n` positions from `start` on, once each.

        It costs a few microseconds: each head and each cell is compared.
        """
        if n < 1 or start + n > POSITIONS or len(state) != self.size(n):
            return False
        template = _template(self, n)
        found = np.frombuffer(state, np.uint8)
        if not np.array_equal(found[template.offsets], template.values):
            return False
        wanted = np.arange(start, start + n, dtype="<i4")
        for at in template.cells:
            held = found[at : at + n * self.cell_bytes].view("<i4").reshape(n, -1)[:, 0]
            # a window that has written over its oldest cells has them in another order
            if not np.array_equal(held, wanted) and not np.array_equal(np.sort(held), wanted):
                return False
        return True

    def example(self, position: int) -> bytes:
        """A page of this shape with one token at a position, whose rows are zeros."""
        template = _template(self, 1)
        data = np.zeros(self.size(1), np.uint8)
        data[template.offsets] = template.values
        for at in template.cells:
            data[at : at + U32.size] = np.frombuffer(U32.pack(position), np.uint8)
        return data.tobytes()

    @property
    def is_plain(self) -> bool:
        """Whether there is one section of attention, whose cells hold only a position and a sequence."""
        return len(self.sections) == 1 and self.cell_bytes == CELL_BYTES and self.recurrent is None

    def size(self, n: int) -> int:
        """Length of a page of `n` tokens in bytes."""
        size = PAIR.size
        for section in self.sections:
            size += PAIR.size + n * self.cell_bytes + len(section.head)
            size += sum(len(head) + n * width for head, width in section.tensors)
        return size


@dataclass(frozen=True)
class _Template:
    """For pages of so many tokens: the offsets and values of the bytes that all of them share; where cells begin."""

    offsets: npt.NDArray[np.intp]
    values: npt.NDArray[np.uint8]
    cells: tuple[int, ...]


@functools.lru_cache(TEMPLATES)
def _template(shape: StateShape, n: int) -> _Template:
    offsets: list[npt.NDArray[np.intp]] = []
    values: list[bytes] = []
    cells: list[int] = []
    at = 0

    def write(data: bytes) -> None:
        nonlocal at
        offsets.append(np.arange(at, at + len(data)))
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
    return _Template(np.concatenate(offsets), np.frombuffer(b"".join(values), np.uint8), tuple(cells))


def complete_cells(state: memoryview, n: int) -> None:
    """Turn a plain page of `n` cells that were written without a sequence into a page of sequence 0, in place.

    The written bytes are at the end of `state`; the start of it is free for the missing ones.
    """
    words = np.frombuffer(state, "<u4", 4 + 3 * n)
    positions = words[n + 4 : 3 * n + 4 : 2].copy()
    words[:4] = SEQUENCE_MAGIC, 0, 1, n
    cells = words[4:].reshape(n, 3)
    cells[:, 0] = positions
    cells[:, 1:] = 1, 0


def shape_of(parsed: StateView, cell_bytes: int = CELL_BYTES) -> StateShape:
    """The shape of a parsed state; that of a section without cells is not known."""
    sections = (
        SectionShape(
            section.head,
            tuple((tensor.head, tensor.rows.shape[0] * tensor.rows.shape[2]) for tensor in section.tensors),
        )
        for section in parsed.sections
    )
    return StateShape(tuple(sections), cell_bytes, parsed.recurrent.heads if parsed.recurrent is not None else None)


def shape_of_sequence(state: Buffer) -> StateShape:
    """The shape of what ``llama_state_seq_get_data`` wrote for sequence 0.

    Raises
    ------
    CorruptError
        If a byte is not accounted for.
    """
    for cell_bytes in CELLS:
        with contextlib.suppress(CorruptError):
            return shape_of(parse_sequence(state, cell_bytes=cell_bytes), cell_bytes)
    raise CorruptError("these bytes are not a state of sequence 0 with a known layout")
