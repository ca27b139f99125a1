"""Finds what is stored of a prompt, and joins it into one state.

This restores slots and sequences of servers, and snapshots of a live context. The pages of a live context are loaded
one by one instead (`page_strategy`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.engine.compute_rate import ComputeRate, RestoreDeadline
from prefixstore.engine.engine import Engine
from prefixstore.engine.page import Page, Path
from prefixstore.errors import CorruptError
from prefixstore.format.keys import PAGE, Tokens
from prefixstore.format.record import Buffer
from prefixstore.llama.capture import Place
from prefixstore.llama.state.form import Form
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.shape import PAIR, StateShape
from prefixstore.llama.state.view import Assembly, StateView

log = logging.getLogger("prefixstore")

Positions: TypeAlias = Sequence[npt.NDArray[np.int32]]
Frame: TypeAlias = Callable[[StateShape, Positions, int, Buffer], Assembly]
"""Makes an `Assembly` with the head of its owner: from a shape, positions, the number of tokens, a recurrent part."""


class StateBuffer(Protocol):
    """Memory for a state, such as a `PooledBuffer`."""

    @property
    def view(self) -> memoryview:
        """The memory."""

    def release(self) -> None:
        """Return it to where it came from."""


class StateBuffers(Protocol):
    """A supply of memory for states, such as an unbounded `BufferPool`."""

    def acquire(self, size: int) -> StateBuffer | None:
        """Memory of this size."""


@dataclass(frozen=True)
class Joined:
    """A state that was joined.

    Attributes
    ----------
    data
        The state of the first `n_good` tokens; None if nothing can be restored.
    n_good
        How many tokens come before the first page that could not be used.
    is_late
        Whether a snapshot was given up because it took longer than computing would.
    buffer
        Where `data` is; None if that is the payload of a page.
    """

    data: memoryview | None
    n_good: int
    is_late: bool = False
    buffer: StateBuffer | None = None


class Restore:
    """Finds and joins what is stored.

    Parameters
    ----------
    form
        What pages and snapshots hold.
    rate
        How fast tokens are computed.
    largest
        The most bytes that a page or a snapshot can have; needed if only the window of the form is known. The rest of
        it is then read from the snapshot and its pages.
    seen
        How many rows of its window a state joined from pages gets; None for all.
    hides
        Whether rows are put before a window; see `HIDDEN_ROWS`.
    """

    def __init__(
        self,
        engine: Engine,
        form: Form,
        rate: ComputeRate,
        buffers: StateBuffers,
        *,
        largest: Callable[[Page], int] | None = None,
        seen: int | None = None,
        hides: bool = False,
    ) -> None:
        self._engine, self._form, self._rate, self._buffers = engine, form, rate, buffers
        self._largest, self._seen, self._hides = largest, seen, hides
        self._shape = form.shape or StateShape()

    def find(self, place: Place, prompt: Tokens, limit: int, multiple_of: int = 1) -> Path:
        """What can be restored of the first `limit` tokens of a prompt. Raises `StorageError`."""
        key, step = place.namespace.key, place.page_tokens
        if self._form.has_snapshots:
            return self._engine.match_snapshot(key, prompt, step, limit, multiple_of) if limit > 0 else Path((), 0)
        path = self._engine.match(key, prompt, step)
        n = min(path.n_tokens, limit)
        if self._seen is not None and n < self._seen:
            # the server would compute it all again
            n = 0
        return Path(path.pages[: -(-n // step)], n)

    def joined(
        self, prompt: Tokens, found: Path, frame: Frame, *, live: int = 0, waits: bool = False
    ) -> AbstractContextManager[Joined]:
        """The state of what was found of a prompt, valid until the block is left. Raises `StorageError`.

        If a page is damaged or late, it is the state of the pages before that one, or none where a state cannot be cut.
        The context holds `live` of the tokens, which need not be computed if the restore is given up. With `waits`
        there is no deadline.
        """
        tokens, whole = prompt[: found.n_tokens], len(found.to_read) if found.ends_in_snapshot else None
        # nothing of a snapshot can be used before all of it has come
        deadline = None if waits else self._rate.deadline(found.pages, live, found.n_tokens, whole=whole)
        join = self._from_snapshot if found.ends_in_snapshot else self._from_pages
        return join(tokens, found.to_read, frame, deadline)

    def _buffer(self, size: int) -> StateBuffer:
        buffer = self._buffers.acquire(size)
        assert buffer is not None  # this pool is unbounded
        return buffer

    # -- pages --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _from_pages(
        self, prompt: Tokens, pages: Sequence[Page], frame: Frame, deadline: RestoreDeadline | None
    ) -> Iterator[Joined]:
        n = len(prompt)
        window_from = 0 if self._seen is None else n - self._seen
        assembly = frame(self._shape, self._positions(n, window_from), n, b"")
        buffer = self._buffer(assembly.size)
        try:
            assembly.open(buffer.view)
            with self._engine.fetching(
                pages, streamed=True, look=self.fits, admit=self.admits, deadline=deadline
            ) as states:
                for page, state in zip(pages, states, strict=False):
                    # pages are verified while they are copied: the state is good only if all of them are
                    assembly.add(parse_sequence(state).cut(page.start, min(page.end, n), window_from=window_from))
                n_verified = states.verified()
            n_good = min(pages[n_verified - 1].end, n) if n_verified else 0
            if n_good >= n:
                assembly.close()
                yield Joined(buffer.view, n, buffer=buffer)
            elif n_good and self._seen is None:
                # cut from what was joined already: reading the pages again could be late again
                shorter = frame(self._shape, self._positions(n_good, 0), n_good, b"")
                smaller = self._buffer(shorter.size)
                try:
                    shorter.write(smaller.view, [assembly.state.cut(0, n_good)])
                    yield Joined(smaller.view, n_good, buffer=smaller)
                finally:
                    smaller.release()
            else:
                yield Joined(None, n_good)
        finally:
            buffer.release()

    def _positions(self, n: int, window_from: int) -> Positions:
        firsts = [0] * len(self._shape.sections)
        if window_from:
            firsts[-1] = window_from
        return [np.arange(first, n, dtype="<i4") for first in firsts]

    # -- snapshots ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _from_snapshot(
        self, prompt: Tokens, pages: Sequence[Page], frame: Frame, deadline: RestoreDeadline | None
    ) -> Iterator[Joined]:
        n, buffer, data = len(prompt), None, None
        with self._engine.fetching(pages, look=self.fits, admit=self.admits, deadline=deadline) as fetched:
            states = list(fetched)
            if len(states) < len(pages):
                yield Joined(None, n - 1, deadline is not None and deadline.left(len(states)) <= 0)
                return
            try:
                if len(states) == 1 and frame is of_sequence:
                    data = self._whole(states[0], n)
                else:
                    buffer = self._put_together(states, pages[-1].start, n, frame)
                    data = buffer.view
            except CorruptError as error:
                log.warning("snapshot %s cannot be restored: %s", pages[-1].key.hex(), error)
                self._engine.counters.count("unreadable:shape")
            try:
                yield Joined(data, n if data is not None else n - 1, buffer=buffer)
            finally:
                if buffer is not None:
                    buffer.release()

    def _whole(self, state: memoryview, n: int) -> memoryview:
        """A snapshot that is a whole state: of recurrent memory, shorter than a page, or of an unknown layout."""
        try:
            parsed = parse_sequence(state)
        except CorruptError:
            return state  # llama.cpp will accept or refuse it
        if not Form.ends(parsed, self._form.window).is_complete(parsed, n):
            # as if the pages before it had been stored without rows
            raise CorruptError("rows of a whole state are missing")
        return state

    def _put_together(self, states: Sequence[memoryview], start: int, n: int, frame: Frame) -> StateBuffer:
        """The state of `n` tokens, from its pages and its snapshot, whose last full page ends at `start`.

        Raises `CorruptError` if something is missing, or has another form.
        """
        form = self._form if self._largest is None else Form.of_stored(states, self._form.window)
        pieces: list[StateView] = []
        positions: list[npt.NDArray[np.int32]] = []
        if form.shape is None:
            recurrent = states[-1][PAIR.size :]
        else:
            end = form.parse(states[-1], start, n)
            recurrent = end.recurrent.data if end.recurrent is not None else memoryview(b"")
            pieces = [*map(parse_sequence, states[:-1]), end]
            positions = [np.arange(n, dtype="<i4")] * form.n_full + end.positions[form.n_full :]
            hidden = form.hidden(n) if self._hides else None
            if hidden is not None:
                pieces.insert(0, hidden)
                positions[-1] = np.concatenate((hidden.positions[-1], positions[-1]))
        assembly = frame(form.shape or StateShape(), positions, n, recurrent)
        buffer = self._buffer(assembly.size)
        try:
            assembly.write(buffer.view, pieces)
        except BaseException:
            buffer.release()
            raise
        return buffer

    # -- what is read -------------------------------------------------------------------------------------------------

    def admits(self, page: Page) -> bool:
        """Whether a page or snapshot can have this many bytes."""
        size = self._largest(page) if self._largest is not None else self._form.largest(page.n_tokens)
        if page.raw_bytes > size and page.form == PAGE and self._form.page_shape is not None:
            self._engine.condemn(page)
        return page.raw_bytes <= size

    def fits(self, page: Page, state: memoryview) -> bool:
        """Whether the state of a page or snapshot is one of this form."""
        if self._largest is not None:
            return True
        fits = self._form.fits(state, page.start, page.n_tokens, is_page=page.form == PAGE)
        if not fits and page.form == PAGE and self._form.page_shape is not None:
            self._engine.condemn(page)
        return fits


def of_sequence(shape: StateShape, positions: Positions, n_tokens: int, recurrent: Buffer) -> Assembly:
    """A `Frame` of states for ``llama_state_seq_set_data``."""
    del n_tokens
    return Assembly(shape, positions, recurrent=recurrent)
