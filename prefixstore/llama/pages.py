"""The strategy for memory that can step back: captures pages into the write queue, and restores stored ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.fetch import States
from prefixstore.engine.index import Page
from prefixstore.engine.missing import missing_ranges
from prefixstore.errors import ClosedError, StorageError
from prefixstore.format.keys import Tokens
from prefixstore.llama.compute_rate import RestoreDeadline
from prefixstore.llama.context import Context, live_prefix_length, reusable_prefix
from prefixstore.llama.paged_memory import Missing, MissingPage, PagedMemory
from prefixstore.stats import Kind

__all__ = ["PageStrategy"]

log = logging.getLogger("prefixstore")


class PageStrategy:
    """Stores a context whose memory can be cut into pages.

    Parameters
    ----------
    context
        The context.
    """

    def __init__(self, context: Context[PagedMemory]) -> None:
        self.context = context

    @property
    def kind(self) -> Kind:
        """What is stored of the context."""
        return self.context.kind

    # -- capture ------------------------------------------------------------------------------------------------------

    def stops(self, tokens: Sequence[int]) -> list[int]:
        """No stops: pages can be captured later."""
        return []

    def is_due(self, before: int, stops: Sequence[int]) -> bool:
        """Whether a batch that began at position `before` crossed a boundary."""
        lineage = self.context.lineage
        return lineage.n // lineage.page_tokens > before // lineage.page_tokens

    def prompt_evaluated(self) -> None:
        """Nothing is left to do."""

    def before_leaving(self) -> None:
        """Capture the tail: a completion that was aborted has not saved it."""
        self.capture(tail=True)

    def capture(self, *, tail: bool, wait: bool = False) -> int:
        """Take the pages that are not stored, with `tail` also the tokens after the last boundary; see `Strategy`."""
        context = self.context
        if context.lineage.n < context.parameters.min_tokens or not context.catch_up():
            return 0
        wanted = self._wanted(tail)
        if not wanted:
            return 0
        engine = context.engine
        captured = 0
        started = time.perf_counter()

        def submit(start: int, end: int, buffer: PooledBuffer) -> None:
            nonlocal captured
            captured += context.submit(start, end, buffer)

        # each page is submitted before the next is taken: while one waits for the queue, those before it are written
        missing = context.memory.take(wanted, partial(engine.acquire, wait=wait), submit)
        if missing is not None:
            self._note_missing(missing)
        engine.counters.time("capture", time.perf_counter() - started)
        return captured

    def _wanted(self, tail: bool) -> list[tuple[int, int]]:
        """First position and boundary of each page to take. Skips pages whose parent cannot be stored."""
        lineage = self.context.lineage
        keys = lineage.keys()
        wanted = missing_ranges(
            self.context.engine, lineage.namespace, keys, lineage.tokens, lineage.page_tokens, tail=tail
        )
        full = len(keys) * lineage.page_tokens
        for i, (start, _) in enumerate(wanted):
            if start < full and keys[start // lineage.page_tokens] in lineage.gone:
                return wanted[:i]
        return wanted

    def _note_missing(self, page: MissingPage) -> None:
        lineage = self.context.lineage
        self.context.engine.counters.count(f"dropped:{page.reason.value}")
        if page.reason is Missing.INCOMPLETE and page.end % lineage.page_tokens == 0:
            lineage.gone.add(lineage.keys()[page.start // lineage.page_tokens])

    # -- restore ------------------------------------------------------------------------------------------------------

    def restore(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        """Restore the longest stored prefix of a prompt; see `Strategy`. Raises `StorageError`."""
        context, lineage = self.context, self.context.lineage
        limit -= limit % multiple_of
        known = context.catch_up()
        live = self._reusable(tokens, known)
        context.engine.token_seconds = context.rate.token_seconds
        asked = time.perf_counter()
        path = context.engine.match(lineage.namespace, tokens, lineage.page_tokens)
        looked_up = time.perf_counter() - asked
        n = min(path.n_tokens, limit)
        if n < context.parameters.min_tokens:
            context.note_use((), len(tokens))
            context.count_miss("miss:short" if path.n_tokens else "miss:not_found")
            return False
        # pages inside the live prefix are used as well: they are kept for it
        used = path.pages[: -(-n // lineage.page_tokens)]
        if n <= live:
            context.note_use(used, len(tokens))
            context.count_lookup("live_hits")
            return True
        # reload the whole page in which the live prefix ends; if the context is not fully known, reload everything
        first = live // lineage.page_tokens if known else 0
        if not always and not context.is_worth(used[first:], n - live):
            # what is near may be worth it all the same
            n_near = context.engine.n_near(used)
            n = min(used[n_near - 1].end, n) if first < n_near < len(used) else 0
            used = used[:n_near]
            if n < context.parameters.min_tokens or n <= live or not context.is_worth(used[first:], n - live):
                context.count_miss("miss:slow")
                return False
        if not self._load(tokens[:n], live, used, first, waits=always, looked_up=looked_up):
            return False
        context.note_use(used, len(tokens))
        return True

    def stored(self, tokens: Tokens, limit: int) -> int:
        """How many of the first `limit` tokens of a prompt the store can supply. Raises `StorageError`."""
        lineage = self.context.lineage
        return min(self.context.engine.match(lineage.namespace, tokens, lineage.page_tokens).n_tokens, limit)

    def live_prefix(self, tokens: Tokens) -> int:
        """How much of a prompt the context holds and can continue from."""
        return self._reusable(tokens, self.context.catch_up())

    def _reusable(self, tokens: Tokens, known: bool) -> int:
        context = self.context
        if not known:
            return live_prefix_length(context.llm, tokens)
        return reusable_prefix(context.llm, context.memory, tokens, context.empty)

    def _load(
        self,
        prompt: Tokens,
        live: int,
        path: Sequence[Page],
        first: int,
        *,
        waits: bool = False,
        looked_up: float = 0.0,
    ) -> bool:
        """Load the pages of a prompt from number `first` on; whether any was loaded.

        `live` tokens of the prompt are in the context. With `waits`, it takes as long as it takes. The lookup has
        taken `looked_up` seconds.
        """
        started = time.perf_counter()
        context = self.context
        pages = path[first:]
        n_near = context.engine.n_near(pages)
        deadline = None if waits else context.rate.deadline(pages, live, len(prompt), looked_up=looked_up)
        n_good, is_kept = self._copy(prompt, pages, deadline)
        is_late = deadline is not None and n_good < len(pages) and deadline.left(n_good) <= 0
        if is_late and is_kept:
            rate = context.far_rate if n_good >= n_near else context.rate
            rate.late(pages[n_good : n_good + 1], (time.perf_counter() - started) / (n_good + 1))
        elif n_good <= n_near < len(pages) and is_kept:
            # the first of the pages that are far has not come
            context.far_rate.restored(1, time.perf_counter() - started)
        if not is_kept and first + n_good:
            # the live prefix went with what was rejected: load it too, and verify each page before it is copied
            pages = path[: first + n_good]
            n_good, is_kept = self._copy(prompt, pages, along=False)
        if not (n_good and is_kept):
            context.count_miss("miss:unreadable")
            return False
        loaded = pages[:n_good]
        gained = max(min(loaded[-1].end, len(prompt)) - live, 0)
        seconds = time.perf_counter() - started
        context.count_restore(len(loaded), gained, seconds, loaded, is_far=n_near < n_good)
        return True

    def _copy(
        self, prompt: Tokens, pages: Sequence[Page], deadline: RestoreDeadline | None = None, *, along: bool = True
    ) -> tuple[int, bool]:
        """Copy pages of a prompt into the context, and cut off what it held from the first of them on.

        Whatever happens, the context then holds verified pages and what was there before them, or nothing: what cannot
        be verified is discarded, and everything else in the context with it.

        Parameters
        ----------
        prompt
            The tokens that the pages hold, and those before them; the last page may reach beyond it.
        pages
            The pages.
        deadline
            When to go on without the rest of them.
        along
            Whether to copy pages while they are verified, instead of afterwards.

        Returns
        -------
        int
            How many of the pages are good.
        bool
            Whether the context was kept; false if it was emptied.
        """
        context, memory = self.context, self.context.memory
        states: States | None = None
        is_refused = False
        try:
            with context.engine.fetching(
                pages, streamed=True, along=along, look=self._fits, admit=self._admits, deadline=deadline
            ) as states:
                for page, state in zip(pages, states, strict=False):
                    if not memory.unverified:
                        # only once there is a page to replace what is cut
                        memory.unverified = True
                        context.set_live(prompt[: page.start])
                        memory.cut(page.start)
                        memory.make_room(prompt[: page.start], pages[-1].end - page.start)
                    if not memory.load(state):
                        log.warning("llama.cpp refused page %s", page.key.hex())
                        context.engine.counters.count("unreadable:refused")
                        is_refused = True
                        break
                if not is_refused:
                    # the last one was copied while it was verified
                    states.verified()
        except (StorageError, ClosedError) as error:
            log.warning("a restore ended early: %s", error)
            context.engine.counters.count("unreadable:unavailable")
        finally:
            # after any other error, too
            n_good = states.n_verified if states is not None else 0
            is_kept = not memory.unverified
            if states is not None and memory.unverified:
                is_kept = not is_refused and n_good == states.n_given
                self._settle(prompt[: pages[n_good - 1].end] if is_kept else None)
        return n_good, is_kept

    def _settle(self, prompt: Tokens | None) -> None:
        """End a restore: the context holds this prompt, and perhaps more; None to discard everything."""
        context, memory = self.context, self.context.memory
        try:
            if prompt is not None:
                # the last page may reach beyond the prompt
                memory.cut(len(prompt))
                context.set_live(prompt)
                memory.unverified = False
        finally:
            # to be discarded, or interrupted
            if memory.unverified:
                memory.discard()
                context.lineage.replace(())

    def _admits(self, page: Page) -> bool:
        memory = self.context.memory
        size = memory.largest(page.n_tokens)
        if page.raw_bytes > size and memory.shape_is_own and memory.shape is not None:
            self.context.engine.condemn(page, memory.shape.fits, size)
        return page.raw_bytes <= size

    def _fits(self, page: Page, state: memoryview) -> bool:
        memory = self.context.memory
        fits = memory.fits(state, page.start, page.n_tokens)
        if not fits and memory.shape_is_own and memory.shape is not None:
            self.context.engine.condemn(page, memory.shape.fits)
        return fits
