"""Takes states apart: the pages that are missing, and the snapshot at the end, go into the write queue."""

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

__all__ = ["Capture", "Captured", "Place", "memory_of"]


@dataclass(frozen=True)
class Place:
    """Where the pages of a sequence are, and how long they are."""

    namespace: Namespace
    page_tokens: int

    def of_ends(self) -> Place:
        """Where pages without rows of the window are, and snapshots."""
        return Place(Namespace({**self.namespace.settings, "window": "at the end"}), self.page_tokens)


@dataclass(frozen=True)
class Captured:
    """What was submitted of a state: how many pages and snapshots; and why something is missing, if it is."""

    n: int = 0
    n_bytes: int = 0
    reason: str | None = None


class Capture:
    """Stores states of sequences.

    Parameters
    ----------
    engine, place, form, parameters
        Of the store; where it goes; what goes into pages and what into snapshots; how many snapshots are kept.
    compute_us
        How long so many tokens take to compute, in microseconds.
    wait
        Whether to wait for space in the queue.
    valued
        Positions whose snapshots are given up last.
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
        # what was added and not submitted yet, and what was wanted of the rest
        self._added: list[PendingPage] = []
        self._wanted: list[PendingPage] = []

    def store(self, tokens: Tokens, state: StateView | None, memory: Buffer) -> Captured:
        """Submit what is not stored of a state, all of whose tokens are known. Raises `CorruptError` if it lacks any.

        The `state` is None if its layout is not understood; `memory` are its bytes after what says whose state it is.
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
        """Whether the snapshot at the end of these tokens is not stored."""
        parent, boundary = self._last_boundary(tokens)
        return not self._engine.lookups.has(page_key(parent, tokens[boundary:].tobytes(), SNAPSHOT))

    def pages(self, tokens: Tokens, state: StateView | None, *, tail: bool = False) -> Captured:
        """Submit the pages that are not stored: the full ones, with `tail` also the tokens after the last one."""
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
        """The page from `start` to the end of `tokens`, in pieces; none if rows are missing."""
        piece = StateView() if state is None else self._form.page(state, start, len(tokens))
        return [piece] if piece.holds(start, len(tokens)) else []

    def snapshot(self, tokens: Tokens, state: StateView, memory: Buffer = b"") -> Captured:
        """Submit a snapshot at the end of these tokens: a state, or the memory of one that is not understood."""
        buffer = self._joined([state], memory)
        if buffer is None:
            return Captured(reason="queue_full")
        return self.snapshot_in(tokens, buffer)

    def snapshot_in(self, tokens: Tokens, buffer: PooledBuffer) -> Captured:
        """Submit a snapshot at the end of these tokens that is in a buffer, which is handed over."""
        parent, boundary = self._last_boundary(tokens)
        self.add(tokens[boundary:], parent, boundary, buffer, SNAPSHOT)
        captured = self.submit()
        # those along the sequence that are too many now
        key, step = self._place.namespace.key, self._place.page_tokens
        keep, interval = self._parameters.max_snapshots, self._parameters.snapshot_interval
        if self._engine.write_queue.thin(key, tokens, step, keep, interval, self._valued):
            self._engine.write_queue.nudge()
        return captured

    def _last_boundary(self, tokens: Tokens) -> tuple[bytes, int]:
        """Key and boundary of the last full page."""
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

    # -- what is submitted together -----------------------------------------------------------------------------------

    # Handing a page over takes longer than copying it while the thread that writes computes. So the pages of one state
    # are handed over together, after they were copied.

    def acquire(self, size: int) -> PooledBuffer | None:
        """A buffer for a page; None if too much is queued."""
        buffer = self._engine.write_queue.acquire(size)
        if buffer is None:
            # these may be what others wait for
            self._hand_over()
            buffer = self._engine.write_queue.acquire(size, wait=self._wait)
        return buffer

    def add(self, tokens: Tokens, parent: bytes, start: int, buffer: PooledBuffer, form: int) -> None:
        """Have a page or a snapshot written at the next `submit`, of the tokens from `start` on; owns the buffer."""
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
            # no more than that is written at once
            self._hand_over()

    def submit(self, reason: str | None = None) -> Captured:
        """Submit what was added; what of it is wanted, the rest being stored already. `reason`: why not everything was.

        Parents come before their children.
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
    """The memory in what ``llama_state_seq_get_data`` wrote. Raises `CorruptError` if it is something else."""
    view = memoryview(state)
    if len(view) <= PAIR.size or view[: U32.size] != SEQUENCE_0[: U32.size]:
        raise CorruptError("these bytes are not the state of a sequence")
    return view[PAIR.size :]
