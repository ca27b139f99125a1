"""The strategy for memory that cannot step back: captures snapshots, and has stored ones restored.

A snapshot is what is needed to resume at one position. For recurrent memory that is its whole state; the pages before
it are empty, and hold only tokens. For hybrid memory it is the recurrent part, copied while the context is at that
position, and the rows of attention since the last boundary. Rows are final once they are computed, so they are cut out
of a state that is copied later, once for all snapshots of a prompt, together with the pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from prefixstore.buffers import PooledBuffer, released_on_error
from prefixstore.errors import CorruptError
from prefixstore.format.keys import SNAPSHOT, Tokens, page_key
from prefixstore.llama.context import Context, live_prefix_length
from prefixstore.llama.kv_memory import Acquire
from prefixstore.llama.snapshot_memory import PARTIAL, WHOLE, SnapshotMemory
from prefixstore.llama.snapshot_restore import resume
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.view import Assembly, StateView
from prefixstore.llama.turns import TokenKinds, snapshot_stops
from prefixstore.stats import Kind

__all__ = ["SnapshotStrategy"]

log = logging.getLogger("prefixstore")

# While a prompt is evaluated, its rows are copied once a quarter of them is new; the rest at the end of the turn. So
# the cost of copying is in proportion to what was computed.
WORTH_COPYING = 4


class SnapshotStrategy:
    """Stores a context whose memory cannot step back: snapshots, and the pages before them.

    Parameters
    ----------
    context
        The context.

    Attributes
    ----------
    cuts_rows
        Whether rows of attention are cut out of a state. If not, a snapshot is the whole state, as without attention.
    waiting
        Recurrent parts whose rows are still to be copied, by position.
    """

    def __init__(self, context: Context[SnapshotMemory]) -> None:
        self.context = context
        self.cuts_rows = context.kind.has_pages
        self.waiting: dict[int, PooledBuffer] = {}
        # the generation of the lineage that they belong to
        self._generation = context.lineage.generation
        self._token_kinds = TokenKinds(context.llm)

    @property
    def kind(self) -> Kind:
        """What is stored of the context."""
        return self.context.kind if self.cuts_rows else Kind.SNAPSHOTS

    # -- restore ------------------------------------------------------------------------------------------------------

    def restore(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        """Restore the deepest snapshot of a prompt; see `Strategy`. Raises `StorageError`."""
        live = self.live_prefix(tokens)
        return resume(self.context, tokens, limit, live, always=always, multiple_of=multiple_of)

    def stored(self, tokens: Tokens, limit: int) -> int:
        """How many of the first `limit` tokens of a prompt the store can supply. Raises `StorageError`."""
        engine, lineage = self.context.engine, self.context.lineage
        return engine.match_snapshot(lineage.namespace, tokens, lineage.page_tokens, limit).n_tokens

    def live_prefix(self, tokens: Tokens) -> int:
        """How much of a prompt the context holds and can continue from.

        All of the context has to be in the prompt. If it is all of the prompt, llama-cpp-python samples from the logits
        that it has, unless it must evaluate a token first.
        """
        self.context.catch_up()
        llm = self.context.llm
        n = llm.n_tokens
        is_usable = live_prefix_length(llm, tokens) == n and not (n == len(tokens) and llm._requires_eval)
        return n if is_usable else 0

    # -- capture ------------------------------------------------------------------------------------------------------

    def stops(self, tokens: Sequence[int]) -> list[int]:
        """Positions at which to stop while these tokens are evaluated."""
        parameters = self.context.parameters
        return snapshot_stops(
            self.context.lineage.tokens,
            tokens,
            self._token_kinds.kind,
            interval=parameters.snapshot_interval,
            keep=parameters.max_snapshots,
            min_tokens=parameters.min_tokens,
        )

    def is_due(self, before: int, stops: Sequence[int]) -> bool:
        """Whether the context has stopped for a snapshot."""
        return self.context.lineage.n in stops

    def capture(self, *, tail: bool, wait: bool = False) -> int:
        """Take a snapshot at the current position; with `tail`, copy the rows of those that wait. See `Strategy`."""
        context, lineage = self.context, self.context.lineage
        if not context.catch_up():
            return 0
        self._drop_outdated()
        captured = 0
        started = time.perf_counter()
        if lineage.n >= context.parameters.min_tokens and not self._is_stored(lineage.n):
            captured += self._take(wait=wait)
        if tail:
            captured += self._copy_rows(wait=wait)
        context.engine.counters.time("capture", time.perf_counter() - started)
        return captured

    def prompt_evaluated(self) -> None:
        """Copy the rows of the prompt's snapshots, if they are a large part of all that must be copied."""
        if not self.waiting:
            return
        lineage = self.context.lineage
        missing = self._missing()
        first = missing[0] if missing else lineage.n // lineage.page_tokens
        if (lineage.n - first * lineage.page_tokens) * WORTH_COPYING >= lineage.n:
            self.before_leaving()

    def before_leaving(self) -> None:
        """Copy the rows of all snapshots that still lack them."""
        if self.waiting and self.context.catch_up():
            self._drop_outdated()
            started = time.perf_counter()
            self._copy_rows(wait=False)
            self.context.engine.counters.time("capture", time.perf_counter() - started)

    def _is_stored(self, n: int) -> bool:
        parent, start = self._last_boundary(n)
        return self.context.engine.needs_no_capture(
            page_key(parent, self.context.lineage.page_bytes(start, n), SNAPSHOT)
        )

    def _missing(self) -> list[int]:
        """Which full pages are not stored. Raises `CorruptError`."""
        lineage = self.context.lineage
        return self.context.engine.missing(lineage.namespace, lineage.keys(), lineage.tokens, lineage.page_tokens)

    def _last_boundary(self, n: int) -> tuple[bytes, int]:
        """Key and boundary of the last full page before position `n`."""
        lineage = self.context.lineage
        i = n // lineage.page_tokens
        return lineage.parent(i), i * lineage.page_tokens

    def _take(self, *, wait: bool) -> int:
        """Take a snapshot; how many pages and snapshots will be written."""
        context, memory = self.context, self.context.memory
        n = context.lineage.n
        if not memory.holds(n):
            return 0  # the context was cleared behind the store's back
        if not self.cuts_rows:
            captured = self._submit_empty_pages()
            captured += self._submit_snapshot(n, memory.copy(WHOLE, partial(context.engine.acquire, wait=wait)))
            self._thin()
            return captured
        captured = 0
        waiting = sum(len(buffer.view) for buffer in self.waiting.values())
        if waiting * 2 > context.engine.queue_bytes:
            captured = self._copy_rows(wait=wait)
        taken = memory.copy(PARTIAL, memory.scratch.acquire)
        if taken is not None:
            self.waiting[n] = taken
        return captured

    def _drop_outdated(self) -> None:
        """Drop the snapshots that wait, if the context has moved to other tokens since."""
        generation = self.context.lineage.generation
        if self._generation != generation:
            if self.waiting:
                self.context.engine.counters.count("dropped:moved_on", len(self.waiting))
            self._release()
            self._generation = generation

    def _release(self) -> None:
        while self.waiting:
            self.waiting.popitem()[1].release()

    # -- rows of attention --------------------------------------------------------------------------------------------

    def _copy_rows(self, *, wait: bool) -> int:
        """Submit the pages that are missing, and all snapshots that wait, from one copy of the state; how many."""
        if not self.waiting:
            return 0
        captured = 0
        context, scratch = self.context, self.context.memory.scratch
        missing = self._missing()
        whole = context.memory.copy(WHOLE, scratch.acquire)
        assert whole is not None  # this pool is unbounded
        try:
            rows = parse_sequence(whole.view)
            if not _is_plain(rows, context.lineage.n):
                raise CorruptError("its positions are not those of one sequence")
            acquire = partial(context.engine.acquire, wait=wait)
            captured, is_complete = self._submit_pages(rows, missing, acquire)
            if is_complete:
                for n, taken in sorted(self.waiting.items()):
                    captured += self._submit_snapshot(n, self._with_rows(rows, n, taken, acquire))
            self._release()
        except CorruptError as error:
            # a state of another llama.cpp, or with two kinds of attention: it is not stored, and later ones are whole
            log.warning("snapshots are stored as whole states, since a state of this context cannot be cut: %s", error)
            context.engine.counters.count("dropped:uncut", len(self.waiting))
            self._release()
            self.cuts_rows = False
        finally:
            whole.release()
        self._thin()
        return captured

    def _with_rows(self, rows: StateView, n: int, taken: PooledBuffer, acquire: Acquire) -> PooledBuffer | None:
        """A snapshot: the rows since the last boundary, and the recurrent part."""
        recurrent = parse_sequence(taken.view).recurrent
        if recurrent is None or recurrent.position != n - 1:
            raise CorruptError("the recurrent part is not that of the position where it was taken")
        return _joined(rows.cut(self._last_boundary(n)[1], n), acquire, recurrent.data)

    # -- to the write queue -------------------------------------------------------------------------------------------

    def _submit_pages(self, rows: StateView, missing: Sequence[int], acquire: Acquire) -> tuple[int, bool]:
        """Submit these pages; how many, and whether the queue had space for all of them."""
        context, captured = self.context, 0
        step = context.lineage.page_tokens
        for i in missing:
            buffer = _joined(rows.cut(i * step, (i + 1) * step), acquire)
            if buffer is None:
                context.engine.counters.count("dropped:queue_full", len(self.waiting))
                return captured, False
            captured += context.submit(i * step, (i + 1) * step, buffer)
        return captured, True

    def _submit_empty_pages(self) -> int:
        context, captured = self.context, 0
        step = context.lineage.page_tokens
        for i in self._missing():
            buffer = context.engine.acquire(0, wait=True)
            assert buffer is not None
            captured += context.submit(i * step, (i + 1) * step, buffer)
        return captured

    def _submit_snapshot(self, n: int, buffer: PooledBuffer | None) -> bool:
        if buffer is None:
            self.context.engine.counters.count("dropped:queue_full")
            return False
        return self.context.submit(self._last_boundary(n)[1], n, buffer, SNAPSHOT)

    def _thin(self) -> None:
        engine, lineage, parameters = self.context.engine, self.context.lineage, self.context.parameters
        keep, interval = parameters.max_snapshots, parameters.snapshot_interval
        if engine.thin(lineage.namespace, lineage.tokens, lineage.page_tokens, keep, interval):
            engine.nudge()


def _is_plain(state: StateView, n: int) -> bool:
    """Whether a state has one kind of attention, with all rows of `n` tokens, and a recurrent part after them."""
    return (
        len(state.sections) == 1
        and state.recurrent is not None
        and state.recurrent.position == n - 1
        and np.array_equal(state.sections[0].positions, np.arange(n))
    )


def _joined(rows: StateView, acquire: Acquire, recurrent: memoryview | bytes = b"") -> PooledBuffer | None:
    assembly = Assembly(rows, rows.positions, recurrent=recurrent)
    buffer = acquire(assembly.size)
    if buffer is not None:
        with released_on_error(buffer):
            assembly.write(buffer.view, [rows])
    return buffer
