"""Snapshots of slots: what is needed to resume at the end of what a slot held, where a state cannot be cut anywhere.

Recurrent memory has only its last state, and of a sliding window a slot's file has only the rows that the next token
sees. As in `llama.snapshots`, rows of full attention are pages, and a snapshot has the rest: the rows since the last
boundary, those in the window, and the recurrent part. Without attention, pages hold only tokens.

llama-server continues from a restored window only if it finds rows before it. They are never seen, since they are
outside of the window of every later token: two rows of zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError
from prefixstore.format.keys import PAGE, SNAPSHOT, Tokens, page_key, page_keys
from prefixstore.llama.compute_rate import ComputeRate
from prefixstore.llama.state.parse import ROWS, parse_sequence
from prefixstore.llama.state.shape import StateShape, shape_of
from prefixstore.llama.state.view import CELL_BYTES, U32, Section, StateView, Tensor
from prefixstore.server.slot_file import SlotFile, SlotLayout, slot_assembly
from prefixstore.server.slot_pages import Joined, Place, SlotPages, joined_page, submit_page

__all__ = ["HIDDEN_ROWS", "SlotSnapshots", "SlotWindows"]

log = logging.getLogger("prefixstore")

# rows before a window, so that the server continues after it, and one token before its end
HIDDEN_ROWS = 2
# which of the snapshots along a conversation are kept: the defaults of `PrefixStore`
KEEP, INTERVAL = 16, 1024


class SlotSnapshots:
    """Stores slots whose state can be resumed only at its end.

    Parameters
    ----------
    engine
        Of the store.
    layout
        Of the server's own slot files.
    rate
        How fast the server computes.
    window
        Tokens in the sliding window; 0 without one.
    """

    def __init__(self, engine: Engine, layout: SlotLayout, rate: ComputeRate, window: int = 0) -> None:
        self._engine = engine
        self._layout = layout
        self._rate = rate
        self._window = window
        sections = layout.shape.sections
        # a page has the rows of full attention
        self._page_shape = StateShape(sections[:1], layout.shape.cell_bytes) if sections else None
        examples = (parse_sequence(StateShape((section,)).example(0)) for section in sections)
        self._recurrent_bytes = _size_of_recurrent(layout.shape.recurrent or b"")
        self._like = StateView(None, tuple(example.sections[0] for example in examples), None)

    # -- out of the store ---------------------------------------------------------------------------------------------

    def find(self, place: Place, prompt: Tokens, limit: int) -> tuple[int, tuple[Page, ...]]:
        """How many of the first `limit` tokens of a prompt end at a snapshot, and the pages that it needs.

        Raises
        ------
        StorageError
            If the location cannot be asked.
        """
        # the server would have to step back if the prompt ended there, too
        limit = min(limit, len(prompt) if self._window else len(prompt) - 1)
        if limit < 1:
            return 0, ()
        path = self._engine.match_snapshot(place.namespace.key, prompt, place.page_tokens, limit)
        if not path.n_tokens:
            return 0, ()
        return path.n_tokens, (*(page for page in path.pages[:-1] if page.raw_bytes), path.pages[-1])

    @contextmanager
    def joined(
        self, place: Place, prompt: Tokens, pages: Sequence[Page], slot: int, buffers: BufferPool
    ) -> Iterator[Joined]:
        """The slot's file of a prompt that ends at a snapshot; see `SlotPages.joined`."""
        n = len(prompt)
        deadline = self._rate.deadline(pages, 0, n, whole=len(pages))
        with self._engine.fetching(pages, look=self._fits, admit=self._admits, deadline=deadline) as fetched:
            states = list(fetched)
            if len(states) < len(pages):
                yield Joined(None, n - 1)
                return
            pieces = [self._piece(parse_sequence(state)) for state in states]
            recurrent = pieces[-1].recurrent
            positions = [np.arange(n, dtype="<i4")] * min(len(self._like.sections), 1)
            if self._window:
                hidden = self._hidden(n)
                positions.append(np.concatenate([hidden.positions[1], pieces[-1].positions[1]]))
                pieces.insert(0, hidden)
            data = recurrent.data if recurrent is not None else b""
            assembly = slot_assembly(self._layout, self._like, positions, prompt, slot, data)
            buffer = buffers.acquire(assembly.size)
            assert buffer is not None  # this pool is unbounded
            try:
                assembly.write(buffer.view, [replace(piece, recurrent=None) for piece in pieces])
                yield Joined(buffer.view, n)
            finally:
                buffer.release()

    def _piece(self, parsed: StateView) -> StateView:
        """A page or snapshot, with as many sections as a slot's file has."""
        missing = len(self._like.sections) - len(parsed.sections)
        empty = Section(np.empty(0, np.int32), b"", ())
        return replace(parsed, sections=(*parsed.sections, *[empty] * missing))

    def _hidden(self, n: int) -> StateView:
        """Rows of zeros before the window."""
        base, window = self._like.sections
        end = n - self._window
        rows = (
            Tensor(one.head, np.zeros((one.rows.shape[0], HIDDEN_ROWS, one.rows.shape[2]), np.uint8))
            for one in window.tensors
        )
        before = Section(np.arange(end - HIDDEN_ROWS, end, dtype="<i4"), window.head, tuple(rows))
        return StateView(None, (base.cut(0, 0), before), None)

    def _admits(self, page: Page) -> bool:
        """Whether a page or snapshot can have so many bytes."""
        return page.raw_bytes <= self._layout.shape.size(page.n_tokens + self._window) + self._recurrent_bytes

    def _fits(self, page: Page, state: memoryview) -> bool:
        if page.form != SNAPSHOT:
            return self._page_shape is not None and self._page_shape.fits(state, page.start, page.n_tokens)
        try:
            self._check(parse_sequence(state), page.start, page.end)
        except CorruptError as error:
            log.warning("snapshot %s is not one of this server: %s", page.key.hex(), error)
            return False
        return True

    def _check(self, parsed: StateView, start: int, n: int) -> None:
        """Raise `CorruptError` unless a state is what is needed to resume after `n` tokens, from the boundary on."""
        wanted = self._layout.shape
        found = shape_of(parsed)
        if len(found.sections) != len(wanted.sections) or found.recurrent != wanted.recurrent:
            raise CorruptError("it has other parts")
        if parsed.recurrent is not None and parsed.recurrent.position != n - 1:
            raise CorruptError("its recurrent part is that of another position")
        firsts = (start, n - self._window)
        for section, shape, own, first in zip(parsed.sections, found.sections, wanted.sections, firsts, strict=False):
            if not np.array_equal(section.positions, np.arange(first, n)):
                raise CorruptError("its rows are those of other positions")
            if len(section.positions) and shape != own:
                raise CorruptError("its rows have other sizes")

    # -- into the store -----------------------------------------------------------------------------------------------

    def store(self, place: Place, file: SlotFile) -> tuple[int, int, str | None]:
        """Submit the snapshot of a slot, and pages before it that are not stored; see `SlotPages.store`."""
        tokens, step, key, engine = file.tokens, place.page_tokens, place.namespace.key, self._engine
        n = len(tokens)
        if self._window and n < self._window + HIDDEN_ROWS:
            # the server would compute it all again
            return 0, 0, "short"
        view = self._without_hidden(file.view, n)
        if view is None:
            return 0, 0, "incomplete"
        # so that the index has what is stored
        engine.match_snapshot(key, tokens, step, n)
        keys = page_keys(key, tokens, step)
        boundary = len(keys) * step
        parent = keys[-1] if keys else key
        n_new = n_bytes = 0
        spans = [(i * step, (i + 1) * step, PAGE) for i in engine.missing(key, keys, tokens, step)]
        if not engine.needs_no_capture(page_key(parent, tokens[boundary:].tobytes(), SNAPSHOT)):
            spans.append((boundary, n, SNAPSHOT))
        for start, end, form in spans:
            buffer = self._cut(view, start, end) if form == PAGE else self._rest(view, start, end)
            if buffer is None:
                return n_new, n_bytes, "queue_full"
            size = len(buffer.view)
            before = keys[start // step - 1] if start else key
            if submit_page(engine, self._rate, place, before, tokens, (start, end), buffer, form):
                n_new, n_bytes = n_new + 1, n_bytes + size
        if engine.thin(key, tokens, step, KEEP, INTERVAL):
            engine.nudge()
        return n_new, n_bytes, None

    def _cut(self, view: StateView, start: int, end: int) -> PooledBuffer | None:
        """A page: the rows of full attention; without attention, only its tokens matter."""
        if not view.sections:
            return self._engine.acquire(0, wait=True)
        return joined_page(self._engine, StateView(None, (view.sections[0].cut(start, end),), None))

    def _rest(self, view: StateView, start: int, end: int) -> PooledBuffer | None:
        """A snapshot."""
        sections = view.cut(start, end).sections[:1] + view.sections[1:]
        recurrent = view.recurrent.data if view.recurrent is not None else b""
        return joined_page(self._engine, StateView(None, sections, None), recurrent)

    def _without_hidden(self, view: StateView, n: int) -> StateView | None:
        """The state of a slot of `n` tokens, if nothing is missing.

        The server does not save rows outside of the window. But a request that ended at once may have moved its end
        back by a token, so that a row of zeros is in the window: then nothing is stored.
        """
        if view.recurrent is not None and view.recurrent.position != n - 1:
            return None
        firsts = (0, n - self._window)
        for section, first in zip(view.sections, firsts, strict=False):
            if not np.array_equal(section.positions, np.arange(first, n)):
                return None
        if self._window:
            window = view.sections[1]
            if not all(any(tensor.rows[:, i].any() for tensor in window.tensors) for i in range(HIDDEN_ROWS)):
                return None
        return view


def _size_of_recurrent(heads: bytes) -> int:
    """The bytes of a recurrent part of one sequence, by the number of its layers and the heads of its tensors."""
    starts = range(U32.size, len(heads), ROWS.size)
    rows: list[int] = [ROWS.unpack_from(heads, start)[1] for start in starts]
    return CELL_BYTES + 2 * U32.size + len(heads) + sum(rows)


class SlotWindows:
    """Stores slots of models with a sliding window, of which the server keeps only the last rows.

    What it stores are snapshots, under a namespace of their own. Pages of a ``Llama`` have all rows of the window, and
    are used, too.

    Parameters
    ----------
    pages
        Restores pages of a ``Llama``.
    snapshots
        Stores and restores snapshots.
    """

    def __init__(self, pages: SlotPages, snapshots: SlotSnapshots) -> None:
        self._pages = pages
        self._snapshots = snapshots

    def find(self, place: Place, prompt: Tokens, limit: int) -> tuple[int, tuple[Page, ...]]:
        """How much of a prompt is stored, in one form or the other; see `SlotPages.find`."""
        n, pages = self._pages.find(place, prompt, limit)
        n_resumed, resumed = self._snapshots.find(place.of_ends(), prompt, limit)
        return (n_resumed, resumed) if n_resumed >= n else (n, pages)

    @contextmanager
    def joined(
        self, place: Place, prompt: Tokens, pages: Sequence[Page], slot: int, buffers: BufferPool
    ) -> Iterator[Joined]:
        """The slot's file of a prompt; see `SlotPages.joined`."""
        is_snapshot = pages[-1].form == SNAPSHOT
        joined = self._snapshots.joined if is_snapshot else self._pages.joined
        with joined(place.of_ends() if is_snapshot else place, prompt, pages, slot, buffers) as file:
            yield file

    def store(self, place: Place, file: SlotFile) -> tuple[int, int, str | None]:
        """Submit the snapshot of a slot; see `SlotSnapshots.store`."""
        return self._snapshots.store(place.of_ends(), file)
