"""Converts the file that llama-server writes of a slot to a state that can be cut into pages, and back. Pure.

::

    file      = u32 "GGSQ" ‖ u32 version ‖ u32 words ‖ word... ‖ memory
    words     = i32 -1 ‖ u32 1 ‖ u32 n ‖ i32 token... ‖ u32 0        or only tokens, from older servers
    memory    = as in `llama.state.view`, but: u32 streams instead of 1, and for each stream u32 cells, then its cells
                and rows; a cell's sequence is the slot

The server checks little of it: a file that is cut in its rows ends the process, and tokens without cells do so at the
next request. So every byte is accounted for, when a file is read and when one is written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError
from prefixstore.format.keys import Tokens
from prefixstore.format.record import Buffer
from prefixstore.llama.state.parse import parse_slot
from prefixstore.llama.state.shape import StateShape, shape_of
from prefixstore.llama.state.view import Assembly, StateView

__all__ = ["SLOT_MAGIC", "STATE_VERSION", "SlotFile", "SlotLayout", "parse_slot_file", "slot_assembly"]

SLOT_MAGIC = 0x67677371
STATE_VERSION = 3

HEAD = struct.Struct("<III")
# before the tokens, and after them: their number, and the number of images and sounds among them
PACKED = struct.Struct("<iII")
PACKED_VERSION = 1
NO_MEDIA = b"\0\0\0\0"
NO_TOKENS: Tokens = np.empty(0, "<i4")


@dataclass(frozen=True)
class SlotLayout:
    """What all slot files of a server have in common.

    Attributes
    ----------
    shape
        Of the state, as that of one sequence.
    streams
        How many streams each section of attention has.
    is_packed
        Whether the tokens stand between a head and an end.
    """

    shape: StateShape
    streams: int
    is_packed: bool


@dataclass(frozen=True)
class SlotFile:
    """A slot file that was parsed.

    Attributes
    ----------
    tokens
        What the slot holds.
    view
        Its state, as views of the file; without cells if there are no tokens.
    layout
        What all files of this server have in common; None if there are no tokens.
    n_bytes
        Length of the file.
    has_media
        Whether there are images or sound among the tokens. Then nothing else is read.
    """

    tokens: Tokens
    view: StateView
    layout: SlotLayout | None
    n_bytes: int
    has_media: bool = False


def parse_slot_file(data: Buffer, slot: int) -> SlotFile:
    """Parse a slot file.

    Parameters
    ----------
    data
        The whole file.
    slot
        The slot that was saved.

    Raises
    ------
    CorruptError
        If a byte is not accounted for.
    """
    if len(data) < HEAD.size:
        raise CorruptError("a slot file is too short")
    magic, version, n_words = HEAD.unpack_from(data)
    if (magic, version) != (SLOT_MAGIC, STATE_VERSION):
        raise CorruptError(f"a slot file begins with {magic:#x}, version {version}, instead of version {STATE_VERSION}")
    start = HEAD.size + 4 * n_words
    if start > len(data):
        raise CorruptError("a slot file ends within its tokens")
    words = np.frombuffer(data, "<i4", n_words, HEAD.size)
    is_packed = bool(n_words >= 4 and words[0] == -1)
    found = _unpacked(words) if is_packed else words
    if found is None:
        return SlotFile(NO_TOKENS, StateView(None, (), None), None, len(data), has_media=True)
    if (found < 0).any():
        raise CorruptError("a slot file has tokens that are not tokens")
    tokens = found.copy()
    view, streams = parse_slot(memoryview(data)[start:], sequence=slot)
    if not len(tokens):
        return SlotFile(tokens, view, None, len(data))
    if not all(len(section.positions) for section in view.sections) or (
        view.recurrent is not None and view.recurrent.position < 0
    ):
        raise CorruptError("a slot file has tokens, and no state of them")
    return SlotFile(tokens, view, SlotLayout(shape_of(view), streams, is_packed), len(data))


def _unpacked(words: Tokens) -> Tokens | None:
    """The tokens between their head and their end; None if there are images or sound among them."""
    n = int(words[2])
    if words[1] != PACKED_VERSION or not 0 <= n <= len(words) - 4:
        raise CorruptError("the tokens of a slot file have an unknown layout")
    if words[3 + n]:
        return None
    if n != len(words) - 4:
        raise CorruptError("the tokens of a slot file have an unknown layout")
    return words[3:-1]


def slot_assembly(
    layout: SlotLayout,
    like: StateView,
    positions: Sequence[npt.NDArray[np.int32]],
    tokens: Tokens,
    slot: int,
    recurrent: Buffer = b"",
) -> Assembly:
    """A slot file to be joined from pieces.

    Parameters
    ----------
    layout
        Of the server's own files.
    like
        A state with the layout of all pieces.
    positions
        Positions of the cells that each section will have.
    tokens
        What the slot will hold.
    slot
        The slot.
    recurrent
        The recurrent part, as written.

    Raises
    ------
    CorruptError
        If there are no tokens, or sections without cells: the server could not live with it.
    """
    if not len(tokens) or not all(len(of_section) for of_section in positions):
        raise CorruptError("a slot file needs tokens, and cells for them")
    if layout.is_packed:
        words = PACKED.pack(-1, PACKED_VERSION, len(tokens)) + tokens.tobytes() + NO_MEDIA
    else:
        words = tokens.tobytes()
    head = HEAD.pack(SLOT_MAGIC, STATE_VERSION, len(words) // 4) + words
    return Assembly(like, positions, recurrent=recurrent, head=head, streams=layout.streams, sequence=slot)
