"""The lookup of a 32,000-token prompt among 100,000 pages, and at a fork with 1,000 siblings."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import summary
from benchmarks.tables import milliseconds, table
from prefixstore.format.keys import as_tokens, page_key
from prefixstore.format.record import Record, Usage, checksum
from prefixstore.store import PrefixStore

PAGE_TOKENS = 256
PROMPT_TOKENS = 32_000
PAGES = 100_000
SIBLINGS = 1_000
ROUNDS = 200


def _put(transaction: Any, namespace: bytes, parent: bytes, start: int, tokens: bytes) -> bytes:
    payload = b"state"
    record = Record(
        namespace, parent, start, tokens, 0, len(payload), len(payload), checksum(payload), 0, time.time_ns()
    )
    key = page_key(parent, tokens)
    transaction.put(key, record, Usage(record.created), payload)
    return key


def fill(store: PrefixStore, prompt: Any) -> None:
    """The prompt, 1,000 siblings of its page in the middle, and conversations of 100 pages: 100,000 pages in all."""
    namespace = store.namespace.key
    rng = np.random.default_rng(1)
    raw = prompt.tobytes()
    step = PAGE_TOKENS * 4
    n_pages = len(prompt) // PAGE_TOKENS
    with store._engine._backend.update() as transaction:
        transaction.put_namespace(namespace, store.namespace.canonical)
        parent = namespace
        for i in range(n_pages):
            page = raw[i * step : (i + 1) * step]
            if i == n_pages // 2:
                for _ in range(SIBLINGS):
                    shared = int(rng.integers(0, PAGE_TOKENS))
                    other = rng.integers(0, 32_000, PAGE_TOKENS - shared).astype("<i4").tobytes()
                    _put(transaction, namespace, parent, i * PAGE_TOKENS, page[: shared * 4] + other)
            parent = _put(transaction, namespace, parent, i * PAGE_TOKENS, page)
        for _ in range((PAGES - n_pages - SIBLINGS) // 100):
            parent = namespace
            tokens = rng.integers(0, 32_000, 100 * PAGE_TOKENS).astype("<i4").tobytes()
            for i in range(100):
                parent = _put(transaction, namespace, parent, i * PAGE_TOKENS, tokens[i * step : (i + 1) * step])


def times(work: Callable[[], object], rounds: int) -> list[float]:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


def run() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompt = as_tokens(rng.integers(0, 32_000, PROMPT_TOKENS).astype(np.int32))
    results: dict[str, Any] = {}
    for kind in ("lmdb", "memory:"):
        with tempfile.TemporaryDirectory() as directory:
            location = directory if kind == "lmdb" else kind
            with PrefixStore(location, namespace="bench", page_tokens=PAGE_TOKENS, max_bytes="4GiB") as store:
                fill(store, prompt)
                first = times(lambda: store.match(prompt), 1)[0]
                assert store.match(prompt).n_tokens == PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
                warm = times(lambda: store.match(prompt), ROUNDS)
                # diverges from the stored prompt in the middle of the page that has the siblings
                forked = prompt.copy()
                forked[PROMPT_TOKENS // PAGE_TOKENS // 2 * PAGE_TOKENS + 100 :] += 1
                fork = times(lambda: store.match(forked), ROUNDS)  # noqa: B023 - called at once
                entries = store.stats().entries
        results[kind.rstrip(":")] = {
            "pages": entries,
            "siblings": SIBLINGS,
            "first_lookup_builds_the_index": first,
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
            f"{figures['first_lookup_builds_the_index']:.1f} s",
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
        "first lookup, builds the index",
    ]
    return [
        "## Lookup of a 32,000-token prompt (int32 array)",
        "",
        "Goal: under 0.5 ms. The stock caches scan every key: O(entries x tokens).",
        "",
        *table(head, rows),
    ]
