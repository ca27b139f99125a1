"""Snapshots out of a live context that cannot step back, into the queue of the writer.

A snapshot is what is needed to go on behind one position. Of a recurrent memory that is its whole state; the pages
before it are empty, and hold the tokens only. Beside attention it is the recurrent part, copied while the context
stands there, and the rows of attention since the last boundary: they are final once they are computed, so they are cut
out of a state that is copied later, once for all snapshots of a prompt, together with the pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import llama_cpp
import numpy as np

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.engine import Engine
from prefixstore.engine.engine import Engine as Writer
from prefixstore.engine.pending import PendingPage as NewPage
from prefixstore.errors import CorruptError
from prefixstore.format.keys import page_key
from prefixstore.format.record import PAGE, SNAPSHOT
from prefixstore.llama.lineage import Lineage
from prefixstore.llama.parse import parse_sequence
from prefixstore.llama.rate import Pace
from prefixstore.llama.standing import PARTIAL, WHOLE, Standing
from prefixstore.llama.state import Assembly, Blob
from prefixstore.llama.turns import SnapshotPolicy
from prefixstore.stats import Counters

__all__ = ["SnapshotCapturer"]

log = logging.getLogger("prefixstore")

# While a prompt is evaluated its rows are copied as soon as so large a part of them is new; the rest at the end of the
# turn. So what copying costs is in proportion to what was computed.
WORTH_COPYING = 4


class SnapshotCapturer:
    """Takes snapshots of a context, and the pages before them.

    Parameters
    ----------
    engine, writer, counters
        Of the store.
    memory, lineage
        Of the context.
    settings
        Canonical settings of the namespace.
    pace
        Tells what tokens cost to compute.
    policy
        Where to take snapshots.

    Attributes
    ----------
    cuts_rows
        Whether rows of attention are cut out of a state. If not, a snapshot is the whole state, as without attention.
    """

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        counters: Counters,
        memory: Standing,
        lineage: Lineage,
        settings: bytes,
        pace: Pace,
        policy: SnapshotPolicy,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._counters = counters
        self._memory = memory
        self._lineage = lineage
        self._settings = settings
        self._pace = pace
        self._policy = policy
        self.cuts_rows = policy.has_attention
        # recurrent parts whose rows are still to be copied, by position; and the generation they belong to
        self._waiting: dict[int, PooledBuffer] = {}
        self._generation = lineage.generation

    def stops(self, tokens: Sequence[int]) -> list[int]:
        """Where to stop while these tokens are evaluated."""
        return self._policy.positions(self._lineage.tokens, tokens)

    def is_due(self, before: int, stops: Sequence[int]) -> bool:
        """Whether to capture now that the context came here."""
        return self._lineage.n in stops

    def capture(self, llm: llama_cpp.Llama, *, tail: bool, wait: bool = False) -> int:
        """Take a snapshot where the context stands.

        Parameters
        ----------
        llm
            The model whose context it is.
        tail
            Whether this is the end of a turn: what waits for its rows gets them.
        wait
            Whether to wait while the queue is full, instead of leaving something out.

        Returns
        -------
        int
            The number of pages and snapshots that will be written.
        """
        lineage = self._lineage
        if not lineage.catch_up(llm, self._memory):
            return 0
        self._drop_outdated()
        before = self._counters["pages_captured"] + self._counters["snapshots_captured"]
        started = time.perf_counter()
        if lineage.n >= self._policy.min_tokens and not self._is_stored(lineage.n):
            self._take(wait=wait)
        if tail:
            self._give_rows(wait=wait)
        self._counters.time("capture", time.perf_counter() - started)
        return self._counters["pages_captured"] + self._counters["snapshots_captured"] - before

    def evaluated(self, llm: llama_cpp.Llama) -> None:
        """A prompt was evaluated: give its snapshots their rows, if they are many beside all that must be copied."""
        if not self._waiting:
            return
        missing = self._engine.missing(self._lineage.keys())
        first = missing[0] if missing else self._lineage.n // self._lineage.page_tokens
        if (self._lineage.n - first * self._lineage.page_tokens) * WORTH_COPYING >= self._lineage.n:
            self.settle(llm)

    def settle(self, llm: llama_cpp.Llama) -> None:
        """Give all snapshots their rows, before the context goes elsewhere."""
        if self._waiting and self._lineage.catch_up(llm, self._memory):
            self._drop_outdated()
            started = time.perf_counter()
            self._give_rows(wait=False)
            self._counters.time("capture", time.perf_counter() - started)

    def vouch(self, llm: llama_cpp.Llama) -> None:
        """Take the context's word for what it holds."""
        self._lineage.replace(np.asarray(llm.input_ids[: llm.n_tokens], "<i4"))

    # -- where the context stands -------------------------------------------------------------------------------------

    def _is_stored(self, n: int) -> bool:
        parent, start = self._before(n)
        return self._engine.has(page_key(parent, self._lineage.page_bytes(start, n), SNAPSHOT))

    def _before(self, n: int) -> tuple[bytes, int]:
        """Key and boundary of the last page before position `n`."""
        self._lineage.keys()
        i = n // self._lineage.page_tokens
        return self._lineage.parent(i), i * self._lineage.page_tokens

    def _take(self, *, wait: bool) -> None:
        n = self._lineage.n
        if not self._memory.holds(n):
            return  # cleared behind our back
        if not self.cuts_rows:
            self._submit_empty_pages()
            self._submit_snapshot(n, self._memory.copy(WHOLE, partial(self._writer.acquire, wait=wait)))
            self._thin()
            return
        waiting = sum(len(buffer.view) for buffer in self._waiting.values())
        if waiting * 2 > self._writer.queue_bytes:
            self._give_rows(wait=wait)
        taken = self._memory.copy(PARTIAL, self._memory.scratch.acquire)
        if taken is not None:
            self._waiting[n] = taken

    def _drop_outdated(self) -> None:
        """Give up what was taken in a context that has gone elsewhere since."""
        if self._generation != self._lineage.generation:
            if self._waiting:
                self._counters.count("dropped:moved_on", len(self._waiting))
            self._release()
            self._generation = self._lineage.generation

    def _release(self) -> None:
        while self._waiting:
            self._waiting.popitem()[1].release()

    # -- rows of attention --------------------------------------------------------------------------------------------

    def _give_rows(self, *, wait: bool) -> None:
        """Submit the pages that are missing, and all that waits, from one copy of the state."""
        if not self._waiting:
            return
        whole = self._memory.copy(WHOLE, self._memory.scratch.acquire)
        assert whole is not None  # this pool has no bound
        try:
            rows = parse_sequence(whole.view)
            if not _is_understood(rows, self._lineage.n):
                raise CorruptError("its positions are not those of a sequence")
            acquire = partial(self._writer.acquire, wait=wait)
            if self._submit_pages(rows, acquire):
                for n, taken in sorted(self._waiting.items()):
                    self._submit_snapshot(n, self._with_rows(rows, n, taken, acquire))
            self._release()
        except CorruptError as error:
            # states of another llama.cpp, or with two kinds of attention: nothing was stored of them, and will be whole
            log.warning("snapshots are whole states, since a state of this context cannot be cut: %s", error)
            self._counters.count("dropped:uncut", len(self._waiting))
            self._release()
            self.cuts_rows = False
        finally:
            whole.release()
        self._thin()

    def _with_rows(
        self, rows: Blob, n: int, taken: PooledBuffer, acquire: Callable[[int], PooledBuffer | None]
    ) -> PooledBuffer | None:
        """A snapshot: rows since the last boundary, and the recurrent part."""
        recurrent = parse_sequence(taken.view).recurrent
        if recurrent is None or recurrent.position != n - 1:
            raise CorruptError("the recurrent part is not where it was taken")
        return _joined(rows.cut(self._before(n)[1], n), acquire, recurrent.data)

    # -- to the writer ------------------------------------------------------------------------------------------------

    def _submit_pages(self, rows: Blob, acquire: Callable[[int], PooledBuffer | None]) -> bool:
        """Submit the pages that are missing; whether there was room for all of them."""
        step = self._lineage.page_tokens
        for i in self._engine.missing(self._lineage.keys()):
            got = _joined(rows.cut(i * step, (i + 1) * step), acquire)
            if got is None:
                self._counters.count("dropped:queue_full", len(self._waiting))
                return False
            self._submit(i * step, (i + 1) * step, got, PAGE)
        return True

    def _submit_empty_pages(self) -> None:
        step = self._lineage.page_tokens
        for i in self._engine.missing(self._lineage.keys()):
            got = self._writer.acquire(0, wait=True)
            assert got is not None
            self._submit(i * step, (i + 1) * step, got, PAGE)

    def _submit_snapshot(self, n: int, got: PooledBuffer | None) -> None:
        if got is None:
            self._counters.count("dropped:queue_full")
        else:
            self._submit(self._before(n)[1], n, got, SNAPSHOT)

    def _submit(self, start: int, end: int, got: PooledBuffer, form: int) -> None:
        lineage = self._lineage
        # what is lost without a snapshot: the tokens since the one before, about an interval
        n_tokens = end - start if form == PAGE else min(end, self._policy.interval)
        new = NewPage.of(
            lineage.namespace,
            self._settings,
            lineage.parent(start // lineage.page_tokens),
            start,
            lineage.page_bytes(start, end),
            got,
            self._pace.compute_us(n_tokens),
            form,
        )
        name = "pages_captured" if form == PAGE else "snapshots_captured"
        self._counters.count(name, self._writer.submit(new))

    def _thin(self) -> None:
        lineage = self._lineage
        if self._engine.thin(
            lineage.namespace, lineage.tokens, lineage.page_tokens, self._policy.keep, self._policy.interval
        ):
            self._writer.nudge()


def _is_understood(state: Blob, n: int) -> bool:
    """Whether a state has one kind of attention, with all rows of `n` tokens, and a recurrent part behind them."""
    return (
        len(state.sections) == 1
        and state.recurrent is not None
        and state.recurrent.position == n - 1
        and np.array_equal(state.sections[0].positions, np.arange(n))
    )


def _joined(
    rows: Blob, acquire: Callable[[int], PooledBuffer | None], recurrent: memoryview | bytes = b""
) -> PooledBuffer | None:
    assembly = Assembly(rows, rows.positions, recurrent=recurrent)
    got = acquire(assembly.size)
    if got is not None:
        assembly.write(got.view, [rows])
    return got
