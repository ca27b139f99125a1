"""Stored pages into a live context."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import llama_cpp
import numpy as np

from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page
from prefixstore.errors import StorageError
from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.llama.lineage import Lineage
from prefixstore.llama.memory import Memory
from prefixstore.llama.rate import Pace
from prefixstore.stats import Counters

__all__ = ["Restorer"]

log = logging.getLogger("prefixstore")


class Restorer:
    """Puts what is stored of a prompt behind what the context holds of it already.

    Parameters
    ----------
    engine, counters
        Of the store.
    memory, lineage
        Of the context.
    pace
        Tells whether a restore is worth it.
    on_used
        Called after pages were used.
    min_tokens
        Shorter prefixes are computed.
    """

    def __init__(
        self,
        engine: Engine,
        counters: Counters,
        memory: Memory,
        lineage: Lineage,
        pace: Pace,
        on_used: Callable[[], None],
        min_tokens: int,
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._memory = memory
        self._lineage = lineage
        self._pace = pace
        self._on_used = on_used
        self._min_tokens = min_tokens

    def restore(
        self, llm: llama_cpp.Llama, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1
    ) -> bool:
        """Restore at most `limit` tokens of a prompt, as many as a `multiple_of` this; with `always` even if slower.

        Returns
        -------
        bool
            Whether the prompt is in the store, and as much of it in the context now as the store has (up to `limit`).
        """
        limit -= limit % multiple_of
        live, known = self.live_prefix(llm, tokens)
        try:
            path = self._engine.match(self._lineage.namespace, tokens, self._lineage.page_tokens)
        except StorageError as error:
            log.warning("a lookup failed: %s", error)
            self._counters.count("miss:unavailable")
            return False
        n = min(path.n_tokens, limit)
        if n < self._min_tokens:
            self._use(())
            self._counters.count("miss:short" if path.n_tokens else "miss:not_found")
            return False
        # those before the live prefix ends are used as well: they are there for it
        used = path.pages[: -(-n // self._lineage.page_tokens)]
        if n <= live:
            self._use(used)
            self._counters.count("live_hits")
            return True
        # the page in which the live prefix ends is loaded whole; what is not known to be there is replaced
        first = live // self._lineage.page_tokens if known else 0
        pages = used[first:]
        if not always and not self._pace.is_worth(n - live, len(pages)):
            self._counters.count("miss:slow")
            return False
        if not self._load(llm, tokens[:n], live, pages):
            return False
        self._use(used)
        return True

    def _use(self, pages: Sequence[Page]) -> None:
        self._engine.touch(self._lineage.namespace, pages)
        self._on_used()

    def live_prefix(self, llm: llama_cpp.Llama, tokens: Tokens) -> tuple[int, bool]:
        """How much of a prompt the context holds and can go on from, and whether it came there before our eyes."""
        known = self._lineage.catch_up(llm, self._memory)
        live = common_prefix(np.asarray(llm.input_ids[: llm.n_tokens], "<i4"), tokens)
        if known and 0 < live < llm.n_tokens and not self._memory.holds(live):
            # llama-cpp-python would go on from there, with rows missing from the window
            llm.reset()
            return 0, True
        return live, known

    def _load(self, llm: llama_cpp.Llama, prompt: Tokens, live: int, pages: Sequence[Page]) -> bool:
        started = time.perf_counter()
        loaded: list[Page] = []
        at = pages[0].start
        cut = False
        try:
            with self._engine.fetching(pages, streamed=True, look=self._fits) as states:
                for page, state in zip(pages, states, strict=False):
                    # that there is a next state says that those before it are what was written
                    at = page.start
                    if not cut:
                        # not before there is something to put in its place
                        self._memory.cut(at)
                        cut = True
                    if not self._memory.load(state):
                        log.warning("llama.cpp refused page %s", page.key.hex())
                        self._counters.count("unreadable:refused")
                        break
                    loaded.append(page)
                # the last one was loaded while it was verified
                loaded = loaded[: states.verified()]
                at = loaded[-1].end if loaded else pages[0].start
        except StorageError as error:
            log.warning("a restore ended early: %s", error)
            self._counters.count("unreadable:unavailable")
            loaded = [page for page in loaded if page.end <= at]
        finally:
            if cut:
                self._settle(llm, prompt[:at])
        if not loaded:
            self._counters.count("miss:unreadable")
            return False
        self._note(loaded, len(prompt[:at]) - live, time.perf_counter() - started)
        return True

    def _fits(self, page: Page, state: memoryview) -> bool:
        memory = self._memory
        fits = memory.fits(state, page.start, page.n_tokens)
        if not fits and memory.is_own and memory.shape is not None:
            self._engine.condemn(page, memory.shape.fits)
        return fits

    def _settle(self, llm: llama_cpp.Llama, prompt: Tokens) -> None:
        """The context holds this prompt, and must decode a token before it samples one."""
        n = len(prompt)
        self._memory.cut(n)
        llm.input_ids[:n] = prompt
        llm.n_tokens = n
        llm._requires_eval = True
        self._lineage.restored(prompt)

    def _note(self, loaded: Sequence[Page], gained: int, seconds: float) -> None:
        self._pace.restored(len(loaded), seconds)
        self._counters.count("hits")
        self._counters.count("tokens_restored", max(gained, 0))
        self._counters.time("restore", seconds)
        share = max(gained, 0) / sum(page.n_tokens for page in loaded)
        self._counters.time("saved", sum(page.compute_us for page in loaded) * share / 1e6 - seconds)
