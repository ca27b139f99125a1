"""Pages of a context: out of it into the write queue, and stored ones back into it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page
from prefixstore.errors import StorageError
from prefixstore.format.keys import Tokens
from prefixstore.llama.context import Context, live_prefix_length, reusable_prefix
from prefixstore.llama.kv_memory import Missing, MissingPage, PagedMemory
from prefixstore.stats import Kind

__all__ = ["PageStrategy", "missing_ranges"]

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
        """Nothing is left to do."""

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
        counters = context.engine.counters
        limit -= limit % multiple_of
        known = context.catch_up()
        live = self._reusable(tokens, known)
        path = context.engine.match(lineage.namespace, tokens, lineage.page_tokens)
        n = min(path.n_tokens, limit)
        if n < context.parameters.min_tokens:
            context.note_use(())
            counters.count("miss:short" if path.n_tokens else "miss:not_found")
            return False
        # pages inside the live prefix are used as well: they are kept for it
        used = path.pages[: -(-n // lineage.page_tokens)]
        if n <= live:
            context.note_use(used)
            counters.count("live_hits")
            return True
        # reload the whole page in which the live prefix ends; if the context is not fully known, reload everything
        pages = used[live // lineage.page_tokens if known else 0 :]
        if not always and not context.rate.is_worth(n - live, len(pages)):
            counters.count("miss:slow")
            return False
        if not self._load(tokens[:n], live, pages):
            return False
        context.note_use(used)
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

    def _load(self, prompt: Tokens, live: int, pages: Sequence[Page]) -> bool:
        """Load the last pages of a prompt, of which `live` tokens are in the context; whether any was loaded."""
        started = time.perf_counter()
        context, memory = self.context, self.context.memory
        counters = context.engine.counters
        loaded: list[Page] = []
        at = pages[0].start
        cut = False
        try:
            with context.engine.fetching(pages, streamed=True, look=self._fits) as states:
                for page, state in zip(pages, states, strict=False):
                    # if there is a next state, those before it are verified
                    at = page.start
                    if not cut:
                        # only once there is a page to replace what is cut
                        memory.cut(at)
                        cut = True
                    if not memory.load(state):
                        log.warning("llama.cpp refused page %s", page.key.hex())
                        counters.count("unreadable:refused")
                        break
                    loaded.append(page)
                # the last one was loaded while it was verified
                loaded = loaded[: states.verified()]
                at = loaded[-1].end if loaded else pages[0].start
        except StorageError as error:
            log.warning("a restore ended early: %s", error)
            counters.count("unreadable:unavailable")
            loaded = [page for page in loaded if page.end <= at]
        finally:
            if cut:
                # the last page may reach beyond the prompt
                at = min(at, len(prompt))
                memory.cut(at)
                context.set_live(prompt[:at])
        if not loaded:
            counters.count("miss:unreadable")
            return False
        context.count_restore(len(loaded), max(at - live, 0), time.perf_counter() - started, loaded)
        return True

    def _fits(self, page: Page, state: memoryview) -> bool:
        memory = self.context.memory
        fits = memory.fits(state, page.start, page.n_tokens)
        if not fits and memory.shape_is_own and memory.shape is not None:
            self.context.engine.condemn(page, memory.shape.fits)
        return fits


def missing_ranges(
    engine: Engine, namespace: bytes, keys: Sequence[bytes], tokens: Tokens, page_tokens: int, *, tail: bool
) -> list[tuple[int, int]]:
    """First position and boundary of each page of a sequence that is not stored.

    Parameters
    ----------
    engine
        Knows what is stored.
    namespace
        Key of the namespace.
    keys
        The keys of all full pages.
    tokens
        The sequence.
    page_tokens
        Length of a page.
    tail
        Whether the tokens after the last full page are one, too.
    """
    missing = engine.missing(keys)
    ranges = [(i * page_tokens, (i + 1) * page_tokens) for i in missing]
    start = len(keys) * page_tokens
    if tail and start < len(tokens):
        # a page that is taken now has no children yet, so nothing can cover the tail
        parent = keys[-1] if keys else namespace
        if missing or engine.wants(namespace, parent, tokens[start:].tobytes()):
            ranges.append((start, len(tokens)))
    return ranges
