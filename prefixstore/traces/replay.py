"""Replays traces in the real engine: at one size, or several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prefixstore.backends.memory import MemoryBackend
from prefixstore.buffers import BufferPool
from prefixstore.counters import Counters
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import policy_named
from prefixstore.engine.page import Path
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import InvalidParameterError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.keys import TOKEN_BYTES, namespace_key
from prefixstore.traces.read import Event, Trace

NAMESPACE = namespace_key(b"a trace replayed")

# sizes, as shares of what all pages of the trace take
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)


class InEngine(AbstractContextManager["InEngine"]):
    """The real engine with one of its policies: a page has one byte, and the capacity counts pages."""

    def __init__(self, policy: str, capacity: int) -> None:
        order, budget = policy_named(policy), Budget(1 << 60, max_entries=capacity)
        self._counters = Counters()
        self._engine = Engine(Pages(MemoryBackend()), budget, order, Encoder("raw"), self._counters, write_behind=False)
        lease = BufferPool(1 << 20).acquire(1)
        assert lease is not None
        self._lease = lease
        self.written = 0

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def request(self, blocks: Sequence[int]) -> int:
        """A request of blocks that are a page each."""
        path = self.ask(blocks)
        self.store(blocks, path=path)
        return path.n_tokens

    def ask(
        self,
        blocks: Sequence[int],
        *,
        namespace: bytes = NAMESPACE,
        page: int = 1,
        limit: int | None = None,
        least: int = 0,
    ) -> Path:
        """The first blocks that are stored, which are used; `page` blocks are a page.

        At most `limit` blocks are restored (of a whole prompt, the last token is computed), and not fewer than `least`.
        """
        path = self._engine.match(namespace, np.array(blocks, "<i4"), page)
        n = path.n_tokens if limit is None else min(path.n_tokens, limit)
        if n < max(least, 1):
            path, n = Path((), 0), 0
        path = Path(path.pages[: -(-n // page)], n)
        self._engine.touch(namespace, path.pages, len(blocks))
        return path

    def store(
        self, blocks: Sequence[int], *, namespace: bytes = NAMESPACE, page: int = 1, path: Path | None = None
    ) -> None:
        """Store the full pages of a prompt that are missing; `path` is what is there, if that is known."""
        self._store(blocks, 0, len(blocks) // page * page, namespace, page, path)

    def store_page(self, blocks: Sequence[int], *, namespace: bytes = NAMESPACE, page: int = 1) -> None:
        """Store the last page of a sequence, which may be shorter than others, if those before it are here."""
        self._store(blocks, (len(blocks) - 1) // page * page, len(blocks), namespace, page)

    def _store(
        self, blocks: Sequence[int], least: int, end: int, namespace: bytes, page: int, path: Path | None = None
    ) -> None:
        tokens = np.array(blocks[:end], "<i4")
        path = path or self._engine.match(namespace, tokens, page)
        n_whole = path.n_tokens // page
        if path.n_tokens == end or n_whole * page < least:
            return
        parent = path.pages[n_whole - 1].key if n_whole else namespace
        raw, batch = tokens.tobytes(), []
        for start in range(n_whole * page, end, page):
            piece = raw[start * TOKEN_BYTES : (start + page) * TOKEN_BYTES]
            new = PendingPage.of(namespace, b"{}", parent, start, piece, self._lease)
            if not self._engine.write_queue.announce(new):
                break
            batch.append(new)
            parent = new.page.key
        self.written += self._engine.commit(batch)


class Replayed(NamedTuple):
    """What a replay has found; blocks in place of tokens, in traces that do not say how long those are."""

    requests: int
    hits: int
    tokens: int
    hit_tokens: int

    @property
    def rate(self) -> float:
        """Tokens found as a fraction of all."""
        return self.hit_tokens / max(self.tokens, 1)


def replay(trace: Trace, policy: str, pages: int) -> Replayed:
    """Replay a trace in a store of this many pages, at least 1, with a policy of the engine."""
    least = int(trace.about.get("min_tokens") or 0)
    hits = hit_tokens = 0
    with InEngine(policy, max(pages, 1)) as cache:
        for event in trace.events:
            blocks = event.blocks
            if not trace.is_ours:
                n = cache.request(blocks)
            elif not event.is_request:
                cache.store_page(blocks, namespace=_key(event), page=event.page_blocks)
                continue
            else:
                limit = trace.blocks_of(event, event.n_tokens - 1)
                enough = trace.blocks_of(event, least - 1) + 1 if least else 0
                n = cache.ask(blocks, namespace=_key(event), page=event.page_blocks, limit=limit, least=enough).n_tokens
                # what is not found is computed, and stored as the context fills
                cache.store(blocks, namespace=_key(event), page=event.page_blocks)
            hits += n > 0
            hit_tokens += trace.tokens_of(event, n)
    requests = trace.requests
    tokens = sum(event.n_tokens if trace.is_ours else len(event.blocks) for event in requests)
    return Replayed(len(requests), hits, tokens, hit_tokens)


def _key(event: Event) -> bytes:
    return namespace_key(event.namespace.encode("utf-8", "surrogatepass"))


# -- at several sizes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """What each policy would have found in stores of several sizes, all in pages.

    `sizes` are rising, and among them are the budget and twice as much. With `total` pages, only what is new is not
    found. `page_bytes` is the mean size of a page; None if it is not known.
    """

    sizes: tuple[int, ...]
    found: dict[str, tuple[Replayed, ...]]
    budget: int
    total: int
    page_bytes: float | None

    @property
    def holds_all(self) -> bool:
        """Whether the budget holds all pages of the trace."""
        return self.budget >= self.total

    def bytes_of(self, pages: int) -> float | None:
        """About how many bytes this many pages take."""
        return pages * self.page_bytes if self.page_bytes is not None else None

    def gain(self, policy: str) -> int:
        """How many more tokens twice the budget would find."""
        at = self.sizes.index(self.budget)
        twice = self.sizes.index(2 * self.budget)
        return self.found[policy][twice].hit_tokens - self.found[policy][at].hit_tokens


def pages_in(trace: Trace, max_bytes: int | None) -> int | None:
    """The budget in pages: of this many bytes, or the recorded one; None if it is not known.

    Raises `InvalidParameterError` for bytes if the trace does not say how many of them a page has.
    """
    if max_bytes is not None and not trace.page_bytes:
        raise InvalidParameterError(f"max_bytes={max_bytes}: the trace has no sizes of pages; pass --pages")
    entries = trace.about.get("max_entries")
    recorded = trace.about.get("max_bytes")
    size = max_bytes if max_bytes is not None else recorded
    found = []
    if isinstance(entries, int) and max_bytes is None:
        found.append(entries)
    if isinstance(size, int) and trace.page_bytes:
        found.append(int(size / trace.page_bytes))
    return max(min(found), 1) if found else None


def simulate(
    trace: Trace,
    policies: Sequence[str],
    budget: int | None = None,
) -> Curve:
    """Replay a trace at several sizes.

    Sizes are shares of all pages of the trace, the budget (in pages; by default a tenth), and twice as much.
    """
    total = max(trace.pages, 1)
    budget = budget or max(round(0.1 * total), 1)
    sizes = tuple(sorted({max(round(share * total), 1) for share in SHARES} | {budget, 2 * budget}))
    found = {policy: tuple(replay(trace, policy, size) for size in sizes) for policy in policies}
    return Curve(sizes, found, budget, total, trace.page_bytes)
