"""The strategy for memory that cannot step back: its state is captured and restored as snapshots.

A snapshot is what is needed to resume at one position. For recurrent memory that is its whole state; the pages before
it hold only tokens. For hybrid memory it is the recurrent part, copied while the context is at that position, and the
rows of attention since the last boundary. Rows are final once they are computed, so they are cut out of a copy of the
state that is made later, once for all snapshots of a prompt and for its pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from prefixstore.buffers import PooledBuffer
from prefixstore.counters import Kind
from prefixstore.engine.page import Path
from prefixstore.errors import CorruptError
from prefixstore.format.keys import Tokens, as_tokens
from prefixstore.llama.binding import needs_evaluation, token_kinds
from prefixstore.llama.capture import Capture
from prefixstore.llama.context import Context
from prefixstore.llama.kv_memory import PARTIAL, WHOLE
from prefixstore.llama.state.form import Form
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.strategy import Strategy
from prefixstore.models.boundaries import prompt_boundaries

log = logging.getLogger("prefixstore")

# After a prompt is evaluated, its rows are copied at once if at least a quarter of them is new, else at the end of the
# turn. So the cost of copying is in proportion to what was computed.
WORTH_COPYING = 4
# a stop takes about as long as computing this many tokens in a batch
MIN_GAP = 64


class SnapshotStrategy(Strategy):
    """Stores a context whose memory cannot step back: snapshots, and the pages before them.

    Attributes
    ----------
    form
        What goes into pages, and what into snapshots; None until a state of this context was cut.
    waiting
        Recurrent parts whose rows are still to be copied, by position.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.form: Form | None = None
        self.waiting: dict[int, PooledBuffer] = {}
        # the generation of the lineage to which `waiting` belongs
        self._generation = context.lineage.generation
        self._token_kind = token_kinds(context.llm)
        # positions in the last prompt whose snapshots are thinned last
        self._valued: list[int] = []

    # -- restore ------------------------------------------------------------------------------------------------------

    def restore(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        live = self.live_prefix(tokens)
        return self._resume(self.place, self.form, tokens, limit, live, always=always, multiple_of=multiple_of)

    def path(self, tokens: Tokens, limit: int) -> Path:
        engine, lineage = self.context.engine, self.context.lineage
        return engine.match_snapshot(lineage.namespace, tokens, lineage.page_tokens, limit)

    def live_prefix(self, tokens: Tokens) -> int:
        """How much of a prompt the context holds and can continue from.

        All of the context has to be in the prompt. If it is all of the prompt, llama-cpp-python samples from the logits
        that it has, unless it must evaluate a token first.
        """
        self.context.catch_up()
        llm = self.context.llm
        n = llm.n_tokens
        is_usable = self.context.live_prefix(tokens) == n and not (n == len(tokens) and needs_evaluation(llm))
        return n if is_usable else 0

    # -- capture ------------------------------------------------------------------------------------------------------

    def stops(self, tokens: Sequence[int]) -> list[int]:
        context, parameters = self.context, self.context.parameters
        lineage, interval = context.lineage, parameters.snapshot_interval
        end = lineage.n + len(tokens)
        if len(tokens) == 1:
            return [end] if end % interval == 0 and end >= parameters.min_tokens else []
        prompt = np.concatenate([lineage.tokens, as_tokens(tokens)])
        found = partial(
            prompt_boundaries,
            prompt,
            self._token_kind,
            min_tokens=parameters.min_tokens,
            min_gap=min(MIN_GAP, interval),
        )
        # these are thinned last, including those that a restored prompt has already
        self._valued = found(most=parameters.max_snapshots // 2 + 1)[:-1]
        return found(
            start=lineage.n,
            most=parameters.max_snapshots,
            shared=[context.engine.match(lineage.namespace, prompt, lineage.page_tokens).n_tokens],
            interval=interval,
        )

    def is_due(self, before: int, stops: Sequence[int]) -> bool:
        """Whether the context has stopped for a snapshot."""
        return self.context.lineage.n in stops

    def capture(self, *, tail: bool, wait: bool = False) -> int:
        """Take a snapshot at the current position; with `tail`, copy the rows of all snapshots that wait."""
        context, lineage = self.context, self.context.lineage
        self._drop_outdated()
        captured = 0
        started = time.perf_counter()
        is_new = lineage.n >= context.parameters.min_tokens and lineage.n not in self.waiting
        if is_new and self._capture(wait=wait).needs(lineage.tokens):
            captured += self._take(wait=wait)
        if tail:
            captured += self._copy_rows(wait=wait)
        context.engine.counters.time("capture", time.perf_counter() - started)
        return captured

    def prompt_evaluated(self) -> None:
        """Copy the rows of the prompt's snapshots now if enough of them are new; see `WORTH_COPYING`."""
        if not self.waiting:
            return
        lineage, step = self.context.lineage, self.context.lineage.page_tokens
        missing = self.context.engine.lookups.missing(lineage.namespace, lineage.tokens, step)
        start = missing[0][0] if missing else lineage.n // step * step
        if (lineage.n - start) * WORTH_COPYING >= lineage.n:
            self.before_leaving()

    def before_leaving(self) -> None:
        """Copy the rows of all snapshots that still lack them."""
        if self.waiting and self.context.catch_up():
            self._drop_outdated()
            started = time.perf_counter()
            self._copy_rows(wait=False)
            self.context.engine.counters.time("capture", time.perf_counter() - started)

    def _capture(self, *, wait: bool) -> Capture:
        context = self.context
        form, rate, parameters = self.form or Form(), context.rate.compute_us, context.parameters
        return Capture(context.engine, self.place, form, rate, parameters, wait=wait, valued=self._valued)

    def _take(self, *, wait: bool) -> int:
        """Take a snapshot; returns how many pages and snapshots will be written."""
        context, memory = self.context, self.context.memory
        tokens = context.lineage.tokens
        if not memory.holds(len(tokens)):
            return 0  # the context was cleared behind the store's back
        captured = 0
        if not context.kind.has_pages:
            capture = self._capture(wait=wait)
            captured = capture.pages(tokens, None).n
            buffer = memory.copy(WHOLE, capture.acquire)
            if buffer is None:
                context.engine.counters.count("dropped:queue_full")
                return captured
            return captured + capture.snapshot_in(tokens, buffer).n
        waiting = sum(len(buffer.view) for buffer in self.waiting.values())
        if waiting * 2 > context.engine.queue_bytes:
            captured = self._copy_rows(wait=wait)
        taken = memory.copy(PARTIAL, memory.scratch.acquire)
        if taken is not None:
            self.waiting[len(tokens)] = taken
        return captured

    def _drop_outdated(self) -> None:
        """Drop waiting snapshots if the context has moved to other tokens since."""
        generation = self.context.lineage.generation
        if self._generation != generation:
            self._release("dropped:moved_on")
            self._generation = generation

    def _release(self, dropped: str | None = None) -> None:
        """Release the buffers of waiting snapshots; with a reason, count them as dropped."""
        if dropped is not None and self.waiting:
            self.context.engine.counters.count(dropped, len(self.waiting))
        while self.waiting:
            self.waiting.popitem()[1].release()

    def _copy_rows(self, *, wait: bool) -> int:
        """Submit missing pages and all waiting snapshots, from one copy of the state; returns how many."""
        if not self.waiting:
            return 0
        captured = 0
        context, memory = self.context, self.context.memory
        counters, tokens = context.engine.counters, context.lineage.tokens
        whole = memory.copy(WHOLE, memory.scratch.acquire)
        assert whole is not None  # this pool is unbounded
        try:
            rows = parse_sequence(whole.view)
            self.form = form = self.form or Form.ends(rows, memory.seen)
            if not form.is_complete(rows, len(tokens)):
                raise CorruptError("its positions are not those of one sequence")
            capture = self._capture(wait=wait)
            done = capture.pages(tokens, rows)
            captured = done.n
            if done.reason is not None:
                self._release(f"dropped:{done.reason}")
            for n, taken in sorted(self.waiting.items()):
                boundary = n - n % context.lineage.page_tokens
                snapshot = form.snapshot(rows, boundary, n, parse_sequence(taken.view))
                done = capture.snapshot(tokens[:n], snapshot)
                captured += done.n
                if done.reason is not None:
                    counters.count(f"dropped:{done.reason}")
            self._release()
        except CorruptError as error:
            log.warning(
                "the layout of this model's states is not known (%s): each is stored whole, and is of use only to "
                "prompts that continue it",
                error,
            )
            self._release("dropped:uncut")
            context.kind, self.form = Kind.SNAPSHOTS, None
        finally:
            whole.release()
        return captured
