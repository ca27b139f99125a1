"""The shape of a state: all of its bytes but the rows. llama.cpp is given only pages with the shape of its context.

llama.cpp compares types and sizes itself, and refuses those that differ. It does not check positions and sequences, nor
anything after what it reads: a page that is wrong there would be accepted, and answers would be wrong. The layout is in
`view`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixstore.format.record import Buffer

U32 = struct.Struct("<I")
PAIR = struct.Struct("<II")
# what the state of sequence 0 begins with
SEQUENCE_0 = PAIR.pack(0xAF143CD8, 0)
# of a cell: its position, the number of its sequences, and its sequence
CELL_BYTES = 12

MAX_POSITION = 2**31


@dataclass(frozen=True)
class SectionShape:
    """The shape of a section.

    Attributes
    ----------
    head
        The bytes before its tensors; empty if the section was written without cells, and its shape is not known.
    tensors
        For each tensor its head, its planes, and the bytes of a cell in one plane.
    extra_bytes
        What a cell has beside its position and its sequence.
    """

    head: bytes = b""
    tensors: tuple[tuple[bytes, int, int], ...] = ()
    extra_bytes: int = 0

    @property
    def cell_bytes(self) -> int:
        """Length of a cell."""
        return CELL_BYTES + self.extra_bytes

    def size(self, n: int) -> int:
        """Length of a section of `n` cells in bytes."""
        if not n:
            return PAIR.size
        rows = sum(len(head) + n * planes * width for head, planes, width in self.tensors)
        return PAIR.size + n * self.cell_bytes + len(self.head) + rows

    def fits(self, data: memoryview, wanted: npt.NDArray[np.int32]) -> bool:
        """Whether bytes of the right length are a section of this shape with cells at these positions, once each."""
        n = len(wanted)
        at = PAIR.size + n * self.cell_bytes
        cells = np.frombuffer(data[PAIR.size : at], "<i4").reshape(n, -1)
        if data[: PAIR.size] != PAIR.pack(1, n) or (cells[:, 1] != 1).any() or cells[:, -1].any():
            return False
        # a window that has written over its oldest cells has them in another order
        if not np.array_equal(np.sort(cells[:, 0]), wanted):
            return False
        for head, size in ((self.head, 0), *((head, n * planes * width) for head, planes, width in self.tensors)):
            if data[at : at + len(head)] != head:
                return False
            at += len(head) + size
        return True


@dataclass(frozen=True)
class StateShape:
    """What all states of a context have in common.

    Attributes
    ----------
    recurrent
        Types and sizes of the recurrent part, as written; None without one.
    n_before
        How many sections come before the recurrent part.
    """

    sections: tuple[SectionShape, ...] = ()
    recurrent: bytes | None = None
    n_before: int = 0

    def fits(self, state: Buffer, start: int, n: int) -> bool:
        """Whether a page of sequence 0 has this shape, and holds `n` positions from `start` on, once each.

        It costs some microseconds: each head and each cell is compared.
        """
        data, at = memoryview(state), len(SEQUENCE_0)
        if n < 1 or start + n > MAX_POSITION or len(data) != self.size(n) or data[:at] != SEQUENCE_0:
            return False
        wanted = np.arange(start, start + n, dtype="<i4")
        for section in self.sections:
            if not section.fits(data[at : at + section.size(n)], wanted):
                return False
            at += section.size(n)
        return True

    @property
    def is_plain(self) -> bool:
        """Whether there is one section of attention, and nothing else."""
        return len(self.sections) == 1 and self.recurrent is None

    @property
    def is_transposed(self) -> bool:
        """Whether V is transposed: llama.cpp copies each of its channels by itself."""
        return any(planes > 1 for section in self.sections for _, planes, _ in section.tensors)

    def of_sections(self, n: int) -> StateShape:
        """The shape of pages that have only the first `n` sections."""
        return StateShape(self.sections[:n], None, min(n, self.n_before))

    def size(self, n: int) -> int:
        """Length of a page of `n` tokens in bytes."""
        return len(SEQUENCE_0) + sum(section.size(n) for section in self.sections)


def complete_cells(state: memoryview, n: int, extra_bytes: int = 0) -> None:
    """Turn a plain page of `n` cells that were written without a sequence into a page of sequence 0, in place.

    The written bytes are at the end of `state`; the start of it is free for the missing ones.
    """
    short = (CELL_BYTES + extra_bytes) // U32.size - 1
    words = np.frombuffer(state, "<u4", 4 + (short + 1) * n)
    written = words[n + 4 :].reshape(n, short).copy()
    state[: 2 * PAIR.size] = SEQUENCE_0 + PAIR.pack(1, n)
    cells = words[4:].reshape(n, short + 1)
    cells[:, :short] = written
    cells[:, 1] = 1
    cells[:, -1] = 0
