"""Pages out of a live context, into the queue of the writer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import llama_cpp
import numpy as np

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.engine import Engine
from prefixstore.engine.engine import Engine as Writer
from prefixstore.engine.pending import PendingPage as NewPage
from prefixstore.llama.lineage import Lineage
from prefixstore.llama.memory import Memory
from prefixstore.llama.rate import Pace
from prefixstore.stats import Counters

__all__ = ["Capturer"]


class Capturer:
    """Takes the pages of a context that are not stored.

    Parameters
    ----------
    engine, writer, counters
        Of the store.
    memory, lineage
        Of the context.
    settings
        Canonical settings of the namespace.
    pace
        Tells what a page cost to compute.
    min_tokens
        Shorter sequences are not stored.
    """

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        counters: Counters,
        memory: Memory,
        lineage: Lineage,
        settings: bytes,
        pace: Pace,
        min_tokens: int,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._counters = counters
        self._memory = memory
        self._lineage = lineage
        self._settings = settings
        self._pace = pace
        self._min_tokens = min_tokens

    def stops(self, tokens: Sequence[int]) -> list[int]:
        """Where to stop while these tokens are evaluated: nowhere, pages can be taken later."""
        return []

    def is_due(self, before: int, stops: Sequence[int]) -> bool:
        """Whether to capture now that the context came here from `before`: a boundary was crossed."""
        return self._lineage.n // self._lineage.page_tokens > before // self._lineage.page_tokens

    def evaluated(self, llm: llama_cpp.Llama) -> None:
        """A prompt was evaluated; nothing waits."""

    def settle(self, llm: llama_cpp.Llama) -> None:
        """The context goes elsewhere; nothing waits."""

    def capture(self, llm: llama_cpp.Llama, *, tail: bool, wait: bool = False) -> int:
        """Copy what is not stored yet.

        Parameters
        ----------
        llm
            The model whose context it is.
        tail
            Whether to take the tokens behind the last boundary as well.
        wait
            Whether to wait while the queue is full, instead of leaving a page to the next time.

        Returns
        -------
        int
            The number of pages that were taken and will be written.
        """
        lineage = self._lineage
        if lineage.n < self._min_tokens or not lineage.catch_up(llm, self._memory):
            return 0
        wanted = self._wanted(tail)
        if not wanted:
            return 0
        before = self._counters["pages_captured"]
        started = time.perf_counter()
        # each page is on its way before the next is taken: while one waits for room, those before it are written
        self._memory.take(wanted, lambda size: self._writer.acquire(size, wait=wait), self._submit)
        self._counters.time("capture", time.perf_counter() - started)
        return self._counters["pages_captured"] - before

    def _wanted(self, tail: bool) -> list[tuple[int, int]]:
        """First position and boundary of each page to take. A page whose parent cannot be stored is not among them."""
        lineage = self._lineage
        step = lineage.page_tokens
        keys = lineage.keys()
        missing = self._engine.missing(keys)
        for i in missing:
            if keys[i] in lineage.gone:
                return [(j * step, (j + 1) * step) for j in missing if j < i]
        wanted = [(i * step, (i + 1) * step) for i in missing]
        start = len(keys) * step
        if tail and start < lineage.n:
            parent = lineage.parent(len(keys))
            # behind a page that is taken now there is nothing that could cover the tail
            if missing or self._engine.wants(lineage.namespace, parent, lineage.page_bytes(start, lineage.n)):
                wanted.append((start, lineage.n))
        return wanted

    def _submit(self, start: int, end: int, got: PooledBuffer | str) -> None:
        lineage = self._lineage
        if isinstance(got, str):
            self._counters.count(f"dropped:{got}")
            if got == "incomplete" and end % lineage.page_tokens == 0:
                lineage.gone.add(lineage.keys()[start // lineage.page_tokens])
            return
        new = NewPage.of(
            lineage.namespace,
            self._settings,
            lineage.parent(start // lineage.page_tokens),
            start,
            lineage.page_bytes(start, end),
            got,
            self._pace.compute_us(end - start),
        )
        self._counters.count("pages_captured", self._writer.submit(new))

    def vouch(self, llm: llama_cpp.Llama) -> None:
        """Take the context's word for what it holds."""
        self._lineage.replace(np.asarray(llm.input_ids[: llm.n_tokens], "<i4"))
