"""Stored snapshots into a live context that cannot step back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import llama_cpp
import numpy as np

from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page, Path
from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.llama.lineage import Lineage
from prefixstore.llama.parse import parse_sequence
from prefixstore.llama.rate import Pace
from prefixstore.llama.standing import Standing
from prefixstore.llama.state import Assembly, Blob
from prefixstore.stats import Counters

__all__ = ["Resumer"]

log = logging.getLogger("prefixstore")

# a damaged snapshot, or a page before it: the next one before that is tried
ATTEMPTS = 3


class Resumer:
    """Puts a context where the deepest snapshot of a prompt was taken, unless it stands behind that already.

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
    before
        Called before the context goes elsewhere.
    min_tokens
        Shorter prefixes are computed.
    """

    def __init__(
        self,
        engine: Engine,
        counters: Counters,
        memory: Standing,
        lineage: Lineage,
        pace: Pace,
        on_used: Callable[[], None],
        before: Callable[[], None],
        min_tokens: int,
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._memory = memory
        self._lineage = lineage
        self._pace = pace
        self._on_used = on_used
        self._before = before
        self._min_tokens = min_tokens

    def restore(
        self, llm: llama_cpp.Llama, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1
    ) -> bool:
        """Restore at most `limit` tokens of a prompt, as many as a `multiple_of` this.

        Parameters
        ----------
        llm
            The model.
        tokens
            The prompt.
        limit
            How many tokens may be restored.
        always
            Restore even if computing is faster.
        multiple_of
            Of which the restored position has to be a multiple.

        Returns
        -------
        bool
            Whether the context stands as far in the prompt as the store could put it.
        """
        live, _ = self.live_prefix(llm, tokens)
        self._before()
        try:
            for _ in range(ATTEMPTS):
                path = self._engine.match_snapshot(
                    self._lineage.namespace, tokens, self._lineage.page_tokens, limit, multiple_of
                )
                n = path.n_tokens
                if n < self._min_tokens:
                    self._use(())
                    self._counters.count("miss:short" if n else "miss:not_found")
                    return False
                if n <= live:
                    self._use(path.pages)
                    self._counters.count("live_hits")
                    return True
                if not always and not self._pace.is_worth(n - live, len(_with_bytes(path))):
                    self._counters.count("miss:slow")
                    return False
                if self._load(llm, tokens, live, path):
                    self._use(path.pages)
                    return True
                limit, live = n - 1, min(live, llm.n_tokens)
        except StorageError as error:
            log.warning("a lookup failed: %s", error)
            self._counters.count("miss:unavailable")
            return False
        self._counters.count("miss:unreadable")
        return False

    def _use(self, pages: Sequence[Page]) -> None:
        self._engine.touch(self._lineage.namespace, pages)
        self._on_used()

    def live_prefix(self, llm: llama_cpp.Llama, tokens: Tokens) -> tuple[int, bool]:
        """How much of a prompt the context holds and can go on from, and whether it came there before our eyes.

        All of the context has to be in the prompt; if it is all of the prompt, llama-cpp-python samples from the logits
        that it has, unless it must evaluate a token first.
        """
        known = self._lineage.catch_up(llm, self._memory)
        n = llm.n_tokens
        live = common_prefix(np.asarray(llm.input_ids[:n], "<i4"), tokens)
        return (0 if live < n or (n == len(tokens) and llm._requires_eval) else n), known

    def _load(self, llm: llama_cpp.Llama, prompt: Tokens, live: int, path: Path) -> bool:
        started = time.perf_counter()
        pages = _with_bytes(path)
        n = path.n_tokens
        with self._engine.fetching(pages) as fetched:
            states = list(fetched)
            if len(states) < len(pages):
                return False
            if (reason := self._put(states, n)) is not None:
                log.warning("snapshot %s cannot be restored: %s", path.pages[-1].key.hex(), reason)
                self._counters.count(f"unreadable:{reason}")
                if not self._memory.holds(llm.n_tokens):
                    llm.reset()
                return False
        llm.input_ids[:n] = prompt[:n]
        llm.n_tokens = n
        llm._requires_eval = True
        self._lineage.restored(prompt[:n])
        seconds = time.perf_counter() - started
        self._pace.restored(len(pages), seconds)
        self._counters.count("hits")
        self._counters.count("tokens_restored", n - live)
        self._counters.time("restore", seconds)
        self._counters.time("saved", _compute_seconds(path) * (n - live) / n - seconds)
        return True

    def _put(self, states: Sequence[memoryview], n: int) -> str | None:
        """Put the context behind `n` tokens, or say why not: ``"shape"`` or ``"refused"``."""
        try:
            pieces = [parse_sequence(state) for state in states]
            recurrent = pieces[-1].recurrent
            if recurrent is None or recurrent.position != n - 1:
                raise CorruptError("the recurrent part is that of another position")
            if len(pieces) == 1:
                # a whole state: of a recurrent memory, or shorter than a page
                if not _is_whole(pieces[0], n, self._memory.window):
                    raise CorruptError("a whole state lacks rows")
                return None if self._memory.put(states[0], n) else "refused"
            if len(pieces[0].sections) != 1:
                raise CorruptError("two kinds of attention cannot be joined")
            assembly = Assembly(pieces[0], [np.arange(n, dtype="<i4")], recurrent=recurrent.data)
            whole = self._memory.scratch.acquire(assembly.size)
            assert whole is not None  # this pool has no bound
            try:
                assembly.write(whole.view, pieces)
                return None if self._memory.put(whole.view, n) else "refused"
            finally:
                whole.release()
        except CorruptError as error:
            log.warning("a snapshot does not fit: %s", error)
            return "shape"


def _is_whole(state: Blob, n: int, window: int) -> bool:
    """Whether a state lacks no rows, as one would whose pages somebody has stored without theirs."""
    firsts = (0, max(n - window, 0))
    return all(
        len(positions) >= n - first and np.array_equal(positions, np.arange(n - len(positions), n))
        for positions, first in zip(state.positions, firsts, strict=False)
    )


def _with_bytes(path: Path) -> list[Page]:
    """What must be read: the snapshot, and the pages before it, unless they hold the tokens only."""
    return [page for page in path.pages[:-1] if page.raw_bytes] + [path.pages[-1]]


def _compute_seconds(path: Path) -> float:
    """What computing the tokens took."""
    pages = path.pages[:-1]
    covered = sum(page.n_tokens for page in pages)
    return sum(page.compute_us for page in pages) / 1e6 * path.n_tokens / covered if covered else 0.0
