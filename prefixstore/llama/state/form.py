"""What of a state goes into pages, and what into snapshots. Pure; does not need llama.cpp.

=========  =========================  ============================================================================
Form       Pages                      Snapshots: what else is needed to continue at a certain position
=========  =========================  ============================================================================
``rows``   rows of all sections       none: the state can be cut at any token
``ends``   rows of full attention,    rows of full attention since the last page, those that the sliding window
           or only tokens             still sees, and the recurrent part
``whole``  only tokens                all of the state, as llama.cpp wrote it: its layout is not understood
=========  =========================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prefixstore.errors import CorruptError
from prefixstore.format.record import Buffer
from prefixstore.llama.state.parse import ROWS, parse_sequence
from prefixstore.llama.state.shape import SEQUENCE_0, U32, StateShape
from prefixstore.llama.state.view import StateView, zeros

# the architecture whose window is in chunks; those whose memory is written in a format of its own, and cannot step back
CHUNKED = "llama4"
OWN_FORMAT = ("deepseek4",)
# Rows of zeros before a window. llama-server continues from a restored window only if it finds rows before it, and goes
# back by one token if the same prompt comes again. They are outside of the window of every later token.
HIDDEN_ROWS = 2
# Pages of hybrid memory are no longer than this, in a `Llama` and in a server: they share them.
SHORT_PAGE = 64
# of a snapshot, beside its rows: what the heads and the cell of a recurrent part take
RECURRENT_SLACK = 1 << 16
UNKNOWN_SIZE = 1 << 40


@dataclass(frozen=True)
class Window:
    """What tokens see of those before them, in the layers that do not see all: `size` of them.

    Attributes
    ----------
    is_chunked
        Whether a token sees its chunk of this many tokens up to itself, instead of the last that many.
    """

    size: int
    is_chunked: bool = False

    def first(self, n: int) -> int:
        """The first position that llama.cpp saves of a sequence of `n` tokens."""
        return (n - 1) // self.size * self.size if self.is_chunked else max(n - self.size, 0)


@dataclass(frozen=True)
class Form:
    """How states of one shape are divided into pages and snapshots.

    Attributes
    ----------
    shape
        Of whole states; None if their layout is not understood.
    has_snapshots
        Whether something cannot be cut.
    window
        The window of the last section before the recurrent part, if there is one.
    """

    shape: StateShape | None = None
    has_snapshots: bool = True
    window: Window | None = None

    @classmethod
    def rows(cls, shape: StateShape) -> Form:
        """States that can be cut at any token."""
        return cls(shape, has_snapshots=False)

    @classmethod
    def ends(cls, state: StateView, window: Window | None = None) -> Form:
        """States like this one, with a recurrent part or a window, that can be continued only at their end."""
        # a model may name a window that llama.cpp does not use
        return cls(state.shape, window=window if state.n_before > 1 else None)

    @classmethod
    def of_stored(cls, payloads: Sequence[Buffer], window: Window | None = None) -> Form:
        """The form of a snapshot, the last of these payloads, and of the pages before it. Raises `CorruptError`."""
        pieces = [parse_sequence(payload) for payload in payloads]
        end = pieces[-1]
        sections = (
            # a snapshot at a boundary has no rows of full attention
            next((piece.sections[i] for piece in pieces if i < len(piece.sections) and piece.sections[i].head), section)
            for i, section in enumerate(end.sections)
        )
        return cls.ends(replace(end, sections=tuple(sections)), window)

    @property
    def n_full(self) -> int:
        """How many sections pages have."""
        n = len(self.shape.sections) if self.shape is not None else 0
        return n - (self.window is not None and self.has_snapshots)

    @property
    def page_shape(self) -> StateShape | None:
        """The shape of pages; None if they hold only tokens."""
        return self.shape.of_sections(self.n_full) if self.shape is not None and self.n_full else None

    # -- out of a state -----------------------------------------------------------------------------------------------

    def page(self, state: StateView, start: int, end: int) -> StateView:
        """A page of a state; without sections if it holds only tokens."""
        return replace(state, sections=state.cut(start, end).sections[: self.n_full], recurrent=None)

    def snapshot(self, rows: StateView, boundary: int, n: int, taken: StateView) -> StateView:
        """The snapshot of `n` tokens, the last full page of which ends at `boundary`.

        `rows` have full attention; `taken` was copied while the memory was at position `n`, and has the window and the
        recurrent part. Raises `CorruptError` if something is missing.
        """
        sections = rows.cut(boundary, n).sections[: self.n_full]
        if self.window is not None:
            # a partial copy has no others
            sections += taken.sections[taken.n_before - 1 : taken.n_before]
        found = StateView(sections, taken.recurrent, self.shape.n_before if self.shape is not None else 0)
        self._check(found, boundary, n)
        return found

    # -- into a state -------------------------------------------------------------------------------------------------

    def parse(self, payload: Buffer, start: int, n: int) -> StateView:
        """A snapshot of `n` tokens whose last full page ends at `start`. Raises `CorruptError` if it does not fit."""
        found = parse_sequence(payload)
        self._check(found, start, n)
        return found

    def _check(self, found: StateView, start: int, n: int) -> None:
        wanted, shape = self.shape, found.shape
        if wanted is None or len(shape.sections) != len(wanted.sections) or shape.recurrent != wanted.recurrent:
            raise CorruptError("it has other parts")
        if not self._has(found, start, n):
            raise CorruptError("its rows, or its recurrent part, are those of other positions")
        for section, own in zip(shape.sections, wanted.sections, strict=True):
            if section.head and section != own:
                raise CorruptError("its rows have other sizes")

    def _has(self, state: StateView, start: int, n: int) -> bool:
        """Whether a state has the rows from `start` on that llama.cpp keeps of `n` tokens, no others, and their end."""
        of_window = self.window.first(n) if self.window is not None else start
        for i, positions in enumerate(state.positions):
            if not np.array_equal(positions, np.arange(start if i < self.n_full else of_window, n)):
                return False
        return state.recurrent is None or state.recurrent.position == n - 1

    def fits(self, payload: memoryview, start: int, n_tokens: int, *, is_page: bool) -> bool:
        """Whether a payload is a page, or a snapshot, of such states."""
        if is_page:
            shape = self.page_shape
            return shape is not None and shape.fits(payload, start, n_tokens)
        if self.shape is None:
            return payload[: len(SEQUENCE_0)] == SEQUENCE_0
        try:
            self.parse(payload, start, start + n_tokens)
        except CorruptError:
            return False
        return True

    def largest(self, n_tokens: int) -> int:
        """The most bytes that a page or a snapshot with rows of this many tokens can have."""
        if self.shape is None:
            return UNKNOWN_SIZE
        n_seen = self.window.size if self.window is not None else 0
        recurrent: int = sum(size for _, size in ROWS.iter_unpack((self.shape.recurrent or b"")[U32.size :]))
        return self.shape.size(n_tokens + n_seen) + recurrent + RECURRENT_SLACK * self.has_snapshots

    def hidden(self, n: int) -> StateView | None:
        """Rows of zeros before the window of `n` tokens; None without a window, or where there is no place for them."""
        if self.window is None or self.shape is None or n < self.window.size + HIDDEN_ROWS:
            return None
        end = n - self.window.size
        positions = [np.arange(0, dtype="<i4")] * (len(self.shape.sections) - 1)
        return zeros(self.shape, [*positions, np.arange(end - HIDDEN_ROWS, end, dtype="<i4")])[1]

    def is_complete(self, state: StateView, n: int) -> bool:
        """Whether a state holds all rows of `n` tokens that llama.cpp keeps, and none of the hidden ones.

        A request that ended at once may have moved the end back by a token: then one of them is in the window.
        """
        if not self._has(state, 0, n):
            return False
        window = state.sections[-1] if self.window is not None else None
        return window is None or all(
            any(tensor.rows[:, i].any() for tensor in window.tensors)
            for i in range(min(HIDDEN_ROWS, len(window.positions)))
        )
