"""Divides states into pages and snapshots, and submits what is not stored to the write queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from prefixstore.buffers import PooledBuffer, released_on_error
from prefixstore.engine.engine import Engine
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.write_queue import BATCH_BYTES
from prefixstore.errors import CorruptError
from prefixstore.format.keys import PAGE, SNAPSHOT, Tokens, page_key, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Buffer
from prefixstore.llama.state.form import Form
from prefixstore.llama.state.shape import PAIR, SEQUENCE_0, U32
from prefixstore.llama.state.view import Assembly, StateView
from prefixstore.parameters import Parameters


@dataclass(frozen=True)
class Place:
    """Where a sequence is stored: its namespace, and the length of its pages."""

    namespace: Namespace
    page_tokens: int

    def of_ends(self) -> Place:
        """The place of snapshots and of pages without rows of the window, as a llama-server stores them."""
        return Place(Namespace({**self.namespace.settings, "window": "at the end"}), self.page_tokens)


@dataclass(frozen=True)
class Captured:
    """What was submitted of a state: pages and snapshots, their bytes, and why something is missing, if it is."""

    n: int = 0
    n_bytes: int = 0
    reason: str | None = None


class Capture:
    """Submits states of sequences.

    Parameters
    ----------
    form
        What goes into pages, and what into snapshots.
    compute_us
        How many microseconds it takes to compute this many tokens.
    parameters
        Of the store: they say how many snapshots are kept.
    wait
        Whether to wait for space in the queue.
    valued
        Positions whose snapshots are thinned last.
    """

    def __init__(
        self,
        engine: Engine,
        place: Place,
        form: Form,
        compute_us: Callable[[int], int],
        parameters: Parameters,
        *,
        wait: bool = True,
        valued: Collection[int] = (),
    ) -> None:
        self._engine, self._place, self._form = engine, place, form
        self._compute_us, self._parameters, self._wait = compute_us, parameters, wait
        self._valued = valued
        # what was added and not handed over yet, and what the queue took of the rest
        self._added: list[PendingPage] = []
        self._wanted: list[PendingPage] = []

    def store(self, tokens: Tokens, state: StateView | None, memory: Buffer) -> Captured:
        """Submit what is not stored of a state, whose tokens are all known. Raises `CorruptError` if it lacks some.

        The `state` is None if its layout is not understood; `memory` has its bytes after the magic and the sequence.
        """
        if self._form.has_snapshots:
            return self._store_end(tokens, state, memory)
        assert state is not None  # of a layout that is understood
        return self.pages(tokens, state, tail=True)

    def _store_end(self, tokens: Tokens, state: StateView | None, memory: Buffer) -> Captured:
        if not self.needs(tokens):
            return self.pages(tokens, state)
        n = len(tokens)
        boundary = n - n % self._place.page_tokens
        if state is not None and self._form.shape is not None:
            snapshot = self._form.snapshot(state, boundary, n, state)
        else:
            snapshot = StateView()
        pages = self.pages(tokens, state)
        if pages.reason is not None:
            return pages
        end = self.snapshot(tokens, snapshot, b"" if self._form.shape is not None else memory)
        return Captured(pages.n + end.n, pages.n_bytes + end.n_bytes, end.reason)

    def needs(self, tokens: Tokens) -> bool:
        """Whether the snapshot at the end of these tokens is still to be captured."""
        parent, boundary = self._last_boundary(tokens)
        return not self._engine.lookups.has(page_key(parent, tokens[boundary:].tobytes(), SNAPSHOT))

    def pages(self, tokens: Tokens, state: StateView | None, *, tail: bool = False) -> Captured:
        """Submit the full pages that are not stored; with `tail` also the tokens after the last one."""
        key, step = self._place.namespace.key, self._place.page_tokens
        keys = page_keys(key, tokens, step)
        reason = None
        for start, end in self._engine.lookups.missing(key, tokens, step, tail=tail):
            pieces = self._rows(tokens[:end], state, start)
            if not pieces:
                reason = "incomplete"
                break
            buffer = self._joined(pieces) if pieces[0].sections else self.acquire(0)
            if buffer is None:
                reason = "queue_full"
                break
            self.add(tokens[start:end], keys[start // step - 1] if start else key, start, buffer, PAGE)
        return self.submit(reason)

    def _rows(self, tokens: Tokens, state: StateView | None, start: int) -> Sequence[StateView]:
        """The page from `start` to the end of `tokens`, as one piece; none if rows are missing."""
        piece = StateView() if state is None else self._form.page(state, start, len(tokens))
        return [piece] if piece.holds(start, len(tokens)) else []

    def snapshot(self, tokens: Tokens, state: StateView, memory: Buffer = b"") -> Captured:
        """Submit a snapshot at the end of these tokens: a state, or the memory of one of unknown layout."""
        buffer = self._joined([state], memory)
        if buffer is None:
            return Captured(reason="queue_full")
        return self.snapshot_in(tokens, buffer)

    def snapshot_in(self, tokens: Tokens, buffer: PooledBuffer) -> Captured:
        """Submit a snapshot at the end of these tokens, and hand its buffer over."""
        parent, boundary = self._last_boundary(tokens)
        self.add(tokens[boundary:], parent, boundary, buffer, SNAPSHOT)
        captured = self.submit()
        # now there may be too many along the sequence
        key, step = self._place.namespace.key, self._place.page_tokens
        keep, interval = self._parameters.max_snapshots, self._parameters.snapshot_interval
        if self._engine.write_queue.thin(key, tokens, step, keep, interval, self._valued):
            self._engine.write_queue.nudge()
        return captured

    def _last_boundary(self, tokens: Tokens) -> tuple[bytes, int]:
        """Key of the last full page, or of the namespace, and the boundary where it ends."""
        step = self._place.page_tokens
        keys = page_keys(self._place.namespace.key, tokens, step)
        return keys[-1] if keys else self._place.namespace.key, len(keys) * step

    def _joined(self, pieces: Sequence[StateView], memory: Buffer = b"") -> PooledBuffer | None:
        columns = zip(*(piece.positions for piece in pieces), strict=True)
        recurrent = pieces[-1].recurrent.data if pieces[-1].recurrent is not None else memory
        assembly = Assembly(pieces[0].shape, [np.concatenate(column) for column in columns], recurrent=recurrent)
        buffer = self.acquire(assembly.size)
        if buffer is not None:
            with released_on_error(buffer):
                assembly.write(buffer.view, pieces)
        return buffer

    # -- pages that are submitted together ----------------------------------------------------------------------------

    # Handing a page over takes longer than copying it while the thread that writes computes. So the pages of one state
    # are handed over together, after they were copied.

    def acquire(self, size: int) -> PooledBuffer | None:
        """A buffer for a page; None if too much is queued."""
        buffer = self._engine.write_queue.acquire(size)
        if buffer is None:
            # handed over first: the queue may be full of these
            self._hand_over()
            buffer = self._engine.write_queue.acquire(size, wait=self._wait)
        return buffer

    def add(self, tokens: Tokens, parent: bytes, start: int, buffer: PooledBuffer, form: int) -> None:
        """Add a page or a snapshot of the tokens from `start` on to the next `submit`; owns the buffer."""
        namespace, end = self._place.namespace, start + len(tokens)
        with released_on_error(buffer):
            # losing a snapshot costs recomputing about one interval
            n_tokens = len(tokens) if form == PAGE else min(end, self._parameters.snapshot_interval)
            cost = self._compute_us(n_tokens)
            page = PendingPage.of(
                namespace.key, namespace.canonical, parent, start, tokens.tobytes(), buffer, cost, form
            )
        self._added.append(page)
        if sum(new.n_bytes for new in self._added) >= BATCH_BYTES:
            # one commit writes no more than that
            self._hand_over()

    def submit(self, reason: str | None = None) -> Captured:
        """Submit what was added, parents before their children; counts what the queue took: the rest is stored already.

        `reason` says why not everything was added.
        """
        self._hand_over()
        wanted, self._wanted = self._wanted, []
        return Captured(len(wanted), sum(new.page.raw_bytes for new in wanted), reason)

    def _hand_over(self) -> None:
        added, self._added = self._added, []
        for new in self._engine.write_queue.submit(*added) if added else ():
            self._engine.counters.count("pages_captured" if new.page.form == PAGE else "snapshots_captured")
            self._wanted.append(new)


def memory_of(state: Buffer) -> memoryview:
    """The memory in what ``llama_state_seq_get_data`` wrote. Raises `CorruptError` for other bytes."""
    view = memoryview(state)
    if len(view) <= PAIR.size or view[: U32.size] != SEQUENCE_0[: U32.size]:
        raise CorruptError("these bytes are not the state of a sequence")
    return view[PAIR.size :]
