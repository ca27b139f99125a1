"""Converts the file that llama-server writes of a slot to a state that can be cut into pages, and back. Pure.

::

    file      = u32 "GGSQ" ‖ u32 version ‖ u32 words ‖ word... ‖ memory
    words     = i32 -1 ‖ u32 1 ‖ u32 n ‖ i32 token... ‖ u32 0        or only tokens, from older servers
    memory    = as in `llama.state.view`, but: u32 streams instead of 1, and for each stream u32 cells, then its cells
                and rows; a cell's sequence is the slot

The server checks little of it: a file that is cut in its rows ends the process, and tokens without cells do so at the
next request. So every byte is accounted for, when a file is read and when one is written; only memory of an unknown
layout is left as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError, UnknownVersionError
from prefixstore.format.keys import NO_TOKENS, Tokens
from prefixstore.format.record import Buffer
from prefixstore.llama.state.parse import parse_memory
from prefixstore.llama.state.shape import MAX_POSITION, StateShape
from prefixstore.llama.state.view import Assembly, StateView

SLOT_MAGIC = 0x67677371
STATE_VERSION = 3

HEAD = struct.Struct("<III")
# before the tokens, and after them: their number, and the number of images and sounds among them
PACKED = struct.Struct("<iII")
PACKED_VERSION = 1
NO_MEDIA = b"\0\0\0\0"


@dataclass(frozen=True)
class SlotLayout:
    """What all slot files of a server have in common."""

    # of the state, as that of one sequence; None if its layout is not understood
    shape: StateShape | None
    # of each section of attention
    streams: int
    # whether the tokens stand between a head and an end
    is_packed: bool


@dataclass(frozen=True)
class SlotFile:
    """A slot file that was parsed."""

    # up to the first image
    tokens: Tokens
    # its state, as views of the file, without cells if there are no tokens; None if its layout is not understood
    view: StateView | None
    # the bytes of its state, of all that the slot holds
    memory: memoryview
    # None if there are no tokens
    layout: SlotLayout | None
    # of the whole file
    n_bytes: int
    # whether there are images or sound: then the view has the attention of the tokens before them, and nothing more
    has_media: bool = False


def parse_slot_file(data: Buffer, slot: int, *, whole: bool = False) -> SlotFile:
    """Parse the file of a slot; `whole` if the layout of its state is not understood: then it is left as it is.

    Raises
    ------
    CorruptError
        If a byte is not accounted for.
    UnknownVersionError
        If the server is of another version.
    """
    if len(data) < HEAD.size:
        raise CorruptError("a slot file is too short")
    magic, version, n_words = HEAD.unpack_from(data)
    if magic != SLOT_MAGIC:
        raise CorruptError(f"a slot file begins with {magic:#x}")
    _check_version("slot files of", version, STATE_VERSION)
    start = HEAD.size + 4 * n_words
    if start > len(data):
        raise CorruptError("a slot file ends within its tokens")
    words = np.frombuffer(data, "<i4", n_words, HEAD.size)
    is_packed = bool(n_words >= 4 and words[0] == -1)
    found = _unpacked(words) if is_packed else words
    memory = memoryview(data)[start:]
    tokens, has_media = _before_media(found, words[3 + len(found) :] if is_packed else NO_TOKENS)
    if has_media and whole:
        tokens = NO_TOKENS
    if whole or (has_media and not len(tokens)):
        view, layout = None, SlotLayout(None, 1, is_packed)
    else:
        view = parse_memory(memory, sequence=slot, before=len(tokens) if has_media else MAX_POSITION)
        layout = SlotLayout(view.shape, view.streams, is_packed)
        if has_media:
            # what is recurrent has seen the images
            view = replace(view, recurrent=None)
        elif len(tokens) and not (
            all(map(len, view.positions)) and (view.recurrent is None or view.recurrent.position >= 0)
        ):
            raise CorruptError("a slot file has tokens, and no state of them")
    return SlotFile(tokens, view, memory, layout if len(tokens) else None, len(data), has_media)


def _check_version(what: str, version: int, known: int) -> None:
    if version != known:
        raise UnknownVersionError(
            f"this llama-server writes {what} version {version}, and prefixstore knows {known}: nothing is stored or "
            "restored; use a prefixstore that is as new as the llama-server"
        )


def _before_media(found: Tokens, end: Tokens) -> tuple[Tokens, bool]:
    """The tokens before the first image, and whether there is one."""
    has_media = bool(len(end) and end[0])
    is_none = found < 0
    if is_none.any() != has_media:
        raise CorruptError("a slot file has tokens that are not tokens")
    return found[: is_none.argmax() if has_media else len(found)].copy(), has_media


def _unpacked(words: Tokens) -> Tokens:
    """The tokens between their head and their end, which has what images and sound there are."""
    n = int(words[2])
    _check_version("the tokens of slot files in", int(words[1]), PACKED_VERSION)
    if not 0 <= n <= len(words) - 4 or (not words[3 + n] and n != len(words) - 4):
        raise CorruptError("the tokens of a slot file have an unknown layout")
    return words[3 : 3 + n]


def slot_assembly(
    layout: SlotLayout,
    shape: StateShape,
    positions: Sequence[npt.NDArray[np.int32]],
    tokens: Tokens,
    slot: int,
    recurrent: Buffer = b"",
) -> Assembly:
    """A slot file to be joined from pieces: `positions` are those of the cells that each section will have.

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
    return Assembly(shape, positions, recurrent=recurrent, head=head, streams=layout.streams, sequence=slot)
