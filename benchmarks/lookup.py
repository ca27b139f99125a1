"""The lookup of a 32,000-token prompt among 100,000 pages, and at a fork with 1,000 siblings."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from benchmarks import filled
from benchmarks.common import summary
from benchmarks.tables import milliseconds, table
from prefixstore import PrefixStore
from prefixstore.format.keys import as_tokens, page_key

PAGES = 100_000
SIBLINGS = 1_000
ROUNDS = 200
SPACE = filled.namespace()
# the page that has siblings
MIDDLE = filled.LONG_TOKENS // filled.PAGE_TOKENS // 2


def fill(store: PrefixStore) -> None:
    """Conversations, and siblings of the page in the middle of the prompt: 100,000 pages in all."""
    backend = store._engine._backend
    filled.fill(backend, SPACE, PAGES - SIBLINGS)
    rng = np.random.default_rng(1)
    *_, (parent, _), (_, middle) = islice(filled.records_of(filled.LONG, SPACE.key, time.time_ns()), MIDDLE + 1)
    siblings = []
    for shared in rng.integers(0, filled.PAGE_TOKENS, SIBLINGS).tolist():
        other = rng.integers(0, filled.VOCABULARY, filled.PAGE_TOKENS - shared).astype("<i4").tobytes()
        record = replace(middle, tokens=middle.tokens[: shared * 4] + other)
        siblings.append((page_key(parent, record.tokens), record))
    with backend.update() as transaction:
        filled.put(transaction, siblings)


def times(work: Callable[[], object], rounds: int) -> list[float]:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


def run() -> dict[str, Any]:
    prompt = as_tokens(filled.tokens_of(filled.LONG))
    # diverges from the stored prompt in the middle of the page that has the siblings
    forked = prompt.copy()
    forked[MIDDLE * filled.PAGE_TOKENS + 100 :] += 1
    results: dict[str, Any] = {}
    for kind in ("lmdb", "memory:"):
        with tempfile.TemporaryDirectory() as directory:
            location = directory if kind == "lmdb" else kind
            with PrefixStore(location, max_bytes="4GiB") as store:
                fill(store)
                match = partial(store.engine.match, SPACE.key, page_tokens=filled.PAGE_TOKENS)
                first = times(partial(match, prompt), 1)[0]
                assert match(prompt).n_tokens == filled.LONG_TOKENS
                warm = times(partial(match, prompt), ROUNDS)
                fork = times(partial(match, forked), ROUNDS)
                entries = store.stats().entries
        results[kind.rstrip(":")] = {
            "pages": entries,
            "siblings": SIBLINGS,
            "first_lookup": first,
            "whole_prompt": summary(warm),
            "fork_among_siblings": summary(fork),
        }
    return results


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = [
        [
            name,
            f"{figures['pages']:,}",
            milliseconds(figures["whole_prompt"]["p50"]),
            milliseconds(figures["whole_prompt"]["p95"]),
            milliseconds(figures["fork_among_siblings"]["p50"]),
            milliseconds(figures["fork_among_siblings"]["p95"]),
            milliseconds(figures["first_lookup"]),
        ]
        for name, figures in result.items()
    ]
    head = [
        "backend",
        "pages",
        "whole prompt",
        "p95",
        "fork among 1,000 siblings",
        "p95",
        "first lookup",
    ]
    return [
        "## Lookup of a 32,000-token prompt (int32 array)",
        "",
        "Goal: under 0.5 ms. The stock caches scan every key: O(entries x tokens).",
        "",
        *table(head, rows),
    ]
