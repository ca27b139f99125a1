"""The strategy for memory that can step back: its state is captured and restored in pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from prefixstore.buffers import PooledBuffer
from prefixstore.counters import Kind
from prefixstore.engine.fetch import Deadline, States
from prefixstore.engine.page import Page, Path
from prefixstore.engine.source import Admit, Look
from prefixstore.errors import ClosedError, StorageError
from prefixstore.format.keys import PAGE, Tokens
from prefixstore.llama.binding import running_completion
from prefixstore.llama.capture import Capture, Place
from prefixstore.llama.context import Context
from prefixstore.llama.paged_memory import Missing, PagedMemory, PageLoader
from prefixstore.llama.state.form import Form
from prefixstore.llama.strategy import Strategy

log = logging.getLogger("prefixstore")

# what copying pages together takes beyond their bytes, in copies of a page: 0.3 s and 15 ms on an H100 and an 8B
COPIES_TOGETHER = 20


class PageStrategy(Strategy):
    """Stores a context whose memory can be cut into pages."""

    def __init__(self, context: Context, memory: PagedMemory) -> None:
        super().__init__(context)
        self._memory = memory
        # where a llama-server stores snapshots of a sliding window
        self._ends = self.place.of_ends() if memory.seen is not None else None
        # The longest sequence that is known to be stored or captured, and the engine's losses at that time. What comes
        # after it was computed since it was looked up, so the location need not be asked again. If another process has
        # stored that meanwhile, the commit finds it.
        self._known: tuple[Tokens, int] | None = None
        # how many pages were not worth capturing this time, and the context in which that was counted last
        self._n_slow = 0
        self._left: tuple[object, ...] = ()
        self._has_warned = False

    # -- capture ------------------------------------------------------------------------------------------------------

    def is_due(self, before: int, stops: Sequence[int]) -> bool:
        """Whether a batch that began at position `before` crossed a boundary."""
        lineage = self.context.lineage
        if lineage.n // lineage.page_tokens == before // lineage.page_tokens:
            return False
        return not self._waits_for_the_end()

    def _waits_for_the_end(self) -> bool:
        """Whether pages are captured when the completion ends, since on a GPU capturing would delay its first token."""
        context, memory = self.context, self._memory
        step = context.lineage.page_tokens
        # rows of a window may be overwritten before that, and an evaluation outside a completion has no visible end
        if not memory.is_on_gpu or memory.overwrites_window or not running_completion(context.llm):
            return False
        if context.rate.captures_along(step, self._n_copies(step)):
            return False
        # all of it has to fit into the queue then
        n_waiting = context.lineage.n - (len(self._known[0]) if self._known is not None else 0)
        return memory.largest(n_waiting) < context.parameters.queue_bytes / 2

    def before_leaving(self) -> None:
        """Capture the tail: a completion that was aborted has not saved it."""
        lineage = self.context.lineage
        # this is called more than once: for a lookup, and when the context is emptied
        if self.context.catch_up() and self._left != (left := (lineage.n, *lineage.keys()[-1:])):
            self.capture(tail=True)
            if self._n_slow:
                self.context.engine.counters.count("dropped:slow", self._n_slow)
                self._left = left

    def capture(self, *, tail: bool, wait: bool = False) -> int:
        """Capture the pages that are not stored; with `tail`, also the tokens after the last boundary."""
        context, engine, lineage = self.context, self.context.engine, self.context.lineage
        if wait:
            # the caller may have deleted pages by another way: ask the location
            self._known = None
        self._n_slow = 0
        wanted = self._wanted(tail) if lineage.n >= context.parameters.min_tokens else []
        if not wanted:
            return 0
        n_tokens = wanted[-1][1] - wanted[0][0]
        # on a CPU copying takes next to nothing
        may_be_slow = self._memory.is_on_gpu and not wait
        if may_be_slow and not context.rate.is_worth_capturing(n_tokens, self._n_copies(n_tokens)):
            self._n_slow = len(wanted)
            self._warn_once()
            return 0
        to = Capture(engine, self.place, Form(), context.rate.compute_us, context.parameters, wait=wait)
        n_taken, losses = 0, engine.losses
        started, handing_over = time.perf_counter(), 0.0

        def add(start: int, end: int, buffer: PooledBuffer) -> None:
            nonlocal n_taken, handing_over
            n_taken, began = n_taken + 1, time.perf_counter()
            to.add(lineage.tokens[start:end], lineage.parent(start // lineage.page_tokens), start, buffer, PAGE)
            handing_over += time.perf_counter() - began

        try:
            missing = self._memory.take(wanted, to.acquire, add)
            copying = time.perf_counter() - started - handing_over
        finally:
            # even after an error or a Ctrl-C: pages that were copied are good
            n_submitted = to.submit().n
        if n_taken:
            end = wanted[n_taken - 1][1]
            self._known = (lineage.tokens[:end].copy(), losses) if n_submitted == n_taken else None
        if missing is not None:
            engine.counters.count(f"dropped:{missing.value}")
            start, end = wanted[n_taken]
            if missing is Missing.INCOMPLETE and end % lineage.page_tokens == 0:
                lineage.gone.add(lineage.keys()[start // lineage.page_tokens])
        engine.counters.time("capture", time.perf_counter() - started)
        if n_taken and not wait:
            n_tokens = wanted[n_taken - 1][1] - wanted[0][0]
            # copies of fewer tokens say little about the rate
            if n_tokens >= lineage.page_tokens:
                context.rate.captured(self._n_copies(n_tokens), copying)
        return n_submitted

    def _warn_once(self) -> None:
        """Log, once, that capturing takes longer than computing, and what helps."""
        is_transposed = self._memory.shape is not None and self._memory.shape.is_transposed
        hint = ": pass flash_attn=True, since llama.cpp copies each channel of V by itself without it"
        if not self._has_warned:
            log.warning(
                "short prompts take longer to copy from the GPU than to compute%s", hint if is_transposed else ""
            )
        self._has_warned = True

    def _wanted(self, tail: bool) -> list[tuple[int, int]]:
        """First position and boundary of each page to capture, up to one that the context no longer holds."""
        lineage, step = self.context.lineage, self.context.lineage.page_tokens
        keys = lineage.keys()
        known, losses = self._known or ((), 0)
        is_known = losses == self.context.engine.losses and len(known) > 0
        if is_known and np.array_equal(lineage.tokens[: len(known)], known):
            first, n = len(known) // step, lineage.n if tail else len(keys) * step
            wanted = [(start, min(start + step, n)) for start in range(first * step, n, step)] if n > len(known) else []
        else:
            wanted = self.context.engine.lookups.missing(lineage.namespace, lineage.tokens, step, tail=tail)
        full = len(keys) * lineage.page_tokens
        for i, (start, _) in enumerate(wanted):
            if start < full and keys[start // lineage.page_tokens] in lineage.gone:
                return wanted[:i]
        return wanted

    # -- restore ------------------------------------------------------------------------------------------------------

    def restore(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        context, lineage = self.context, self.context.lineage
        limit -= limit % multiple_of
        live = self.live_prefix(tokens)
        asked = time.perf_counter()
        path = context.engine.match(lineage.namespace, tokens, lineage.page_tokens)
        self._known = tokens[: path.n_tokens].copy(), context.engine.losses
        looked_up = time.perf_counter() - asked
        n = min(path.n_tokens, limit)
        n -= n % multiple_of
        at_end = self._at_end(tokens, limit, multiple_of)
        if self._ends is not None and at_end.n_tokens > max(n, live, context.parameters.min_tokens - 1):
            return self._resume(self._ends, None, tokens, limit, live, always=always, multiple_of=multiple_of)
        # pages inside the live prefix count as used, too: it will need them when it is restored again
        used = path.pages[: -(-n // lineage.page_tokens)]
        settled = self._without_restore(self.place, tokens, limit, path.n_tokens, n, used, live)
        if settled is not None:
            return settled
        # reload the whole page in which the live prefix ends; if the context is not fully known, reload everything
        first = live // lineage.page_tokens if lineage.unknown is None else 0
        if not always and not self._is_worth(used[first:], n - live):
            # the pages of the near location alone may be worth it
            n_near = context.engine.n_near(used)
            n = min(used[n_near - 1].end, n) if first < n_near < len(used) else 0
            n -= n % multiple_of
            used = used[: min(n_near, -(-n // lineage.page_tokens))]
            if n < context.parameters.min_tokens or n <= live or not self._is_worth(used[first:], n - live):
                context.count_miss("slow")
                return False
        deadline = None if always else context.rate.deadline(used[first:], live, n, looked_up=looked_up)
        if not self._load(tokens[:n], live, used, first, deadline, multiple_of):
            return False
        context.note_use(self.place, used, len(tokens))
        return True

    def _at_end(self, tokens: Tokens, limit: int, multiple_of: int = 1) -> Path:
        """The snapshot of a prompt that a llama-server has stored, with only the last rows of its window."""
        if self._ends is None:
            return Path((), 0)
        key, step = self._ends.namespace.key, self._ends.page_tokens
        return self.context.engine.match_snapshot(key, tokens, step, limit, multiple_of)

    def _is_worth(self, pages: Sequence[Page], n_tokens: int) -> bool:
        """Whether restoring pages is expected to be faster than computing the `n_tokens` that they save."""
        step = self.context.lineage.page_tokens
        return self.context.rate_of(pages).is_worth(n_tokens, self._n_copies(len(pages) * step))

    def _n_copies(self, n_tokens: int) -> float:
        """The time that copying this many tokens takes, together if they are, in copies of a single page."""
        return n_tokens / self.context.lineage.page_tokens + COPIES_TOGETHER * self._memory.copies_together

    def path(self, tokens: Tokens, limit: int) -> Path:
        rows, at_end = self._rows(tokens), self._at_end(tokens, limit)
        return at_end if at_end.n_tokens > min(rows.n_tokens, limit) else rows

    def _rows(self, tokens: Tokens) -> Path:
        lineage = self.context.lineage
        return self.context.engine.match(lineage.namespace, tokens, lineage.page_tokens)

    def place_of(self, tokens: Tokens) -> tuple[Place, Kind]:
        at_end = self._at_end(tokens, len(tokens))
        if self._ends is not None and at_end.n_tokens > self._rows(tokens).n_tokens:
            return self._ends, Kind.PAGES_AND_SNAPSHOTS
        return super().place_of(tokens)

    def live_prefix(self, tokens: Tokens) -> int:
        context = self.context
        return context.reusable_prefix(tokens) if context.catch_up() else context.live_prefix(tokens)

    def _load(
        self,
        prompt: Tokens,
        live: int,
        path: Sequence[Page],
        first: int,
        deadline: Deadline | None,
        multiple_of: int,
    ) -> bool:
        """Load the pages of a prompt from number `first` on; returns whether any was loaded.

        The context holds `live` tokens of the prompt before, and a multiple of `multiple_of` after.
        """
        started = time.perf_counter()
        context, step = self.context, self.context.lineage.page_tokens
        pages = path[first:]
        n_near = context.engine.n_near(pages)
        n_good, is_kept = self._copy(prompt, pages, multiple_of, deadline)
        if n_good < len(pages):
            # pages that are damaged or gone will be captured again
            self._known = None
        is_late = deadline is not None and n_good < len(pages) and deadline.left(n_good) <= 0
        if is_late and is_kept:
            rate = context.far_rate if n_good >= n_near else context.rate
            seconds = (time.perf_counter() - started) / (n_good + 1)
            rate.late(pages[n_good : n_good + 1], seconds, self._n_copies(step))
        elif n_good <= n_near < len(pages) and is_kept:
            # no far page has arrived
            context.far_rate.restored(self._n_copies(step), time.perf_counter() - started)
        if not is_kept and first + n_good:
            # the context was emptied with its live prefix: load that too, and verify each page before it is copied
            pages = path[: first + n_good]
            n_good, is_kept = self._copy(prompt, pages, multiple_of, along=False)
        if not (n_good and is_kept):
            context.count_miss("unreadable")
            return False
        seconds = time.perf_counter() - started
        rate = context.far_rate if n_near < n_good else context.rate
        rate.restored(self._n_copies(n_good * step), seconds)
        context.count_restore(max(context.llm.n_tokens - live, 0), seconds, pages[:n_good])
        return True

    def _copy(
        self,
        prompt: Tokens,
        pages: Sequence[Page],
        multiple_of: int,
        deadline: Deadline | None = None,
        *,
        along: bool = True,
    ) -> tuple[int, bool]:
        """Copy pages of a prompt into the context, in place of what it held from the first of them on.

        Whatever happens, the context holds what was before the pages and verified pages then, or nothing: if a page
        turns out to be bad, the whole context is emptied. Returns how many of the pages are good, and whether the
        context was kept.

        The prompt includes the tokens before the pages; the last page may reach beyond it. With `along`, pages are
        verified while they are copied, instead of before.
        """
        context, memory = self.context, self._memory
        unfinished, (admit, look) = memory.unfinished, self._checks()
        states: States | None = None
        loader = PageLoader(memory, pages)
        try:
            with context.engine.fetching(
                pages, streamed=True, along=along, look=look, admit=admit, deadline=deadline
            ) as states:
                for page, state in zip(pages, states, strict=False):
                    if not unfinished.unverified:
                        # only once there is a page to replace what is cut off
                        unfinished.begin("unverified")
                        context.set_live(prompt[: page.start])
                        memory.cut(page.start)
                    is_loaded = loader.load(state)
                    if not is_loaded:
                        break
                else:
                    # the last one was copied while it was verified
                    is_loaded = loader.finish(states.verified())
                if not is_loaded:
                    log.warning("llama.cpp refused page %s", page.key.hex())
                    context.engine.counters.count("unreadable:refused")
        except (StorageError, ClosedError) as error:
            log.warning("a restore ended early: %s", error)
            context.engine.counters.count("unreadable:unavailable")
        finally:
            # After any other error, too. A verified page need not be in the context: llama.cpp may have refused it, or
            # its load was interrupted.
            n_good = min(states.n_verified, loader.n_loaded) if states is not None else 0
            is_kept = not unfinished.unverified
            if states is not None and not is_kept:
                is_kept = n_good == states.n_given
                if is_kept:
                    with context.loading():
                        # the last page may reach beyond the prompt
                        n = min(pages[n_good - 1].end, len(prompt))
                        n -= n % multiple_of
                        memory.cut(n)
                        context.set_live(prompt[:n])
                else:
                    context.settle()
        return n_good, is_kept

    def _checks(self) -> tuple[Admit, Look]:
        """The functions that decide whether a page may be read, and whether its state can be used."""
        memory = self._memory
        if memory.shape is not None and memory.shape_is_own:
            known = self._restore_of(Form.rows(memory.shape))
            return known.admits, known.fits
        return (
            lambda page: page.raw_bytes <= memory.largest(page.n_tokens),
            lambda page, state: memory.fits(state, page.start, page.n_tokens),
        )
