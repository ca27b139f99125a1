"""Generation with a store that has nothing to hit, and without a store, in turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from benchmarks.common import load, model_path, prompt_tokens, ratio, summary
from benchmarks.tables import met, milliseconds, table
from prefixstore import PrefixStore

# tokens of prompt and answer, and rounds: each answer crosses a boundary and leaves a tail
WORKS = {"generation": (200, 120, 30), "prefill": (2048, 1, 6)}


def run(works: dict[str, tuple[int, int, int]] = WORKS) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (n_prompt, n_answer, rounds) in works.items():
        llm = load(model_path())
        times: dict[str, list[float]] = {"without": [], "with": []}
        with tempfile.TemporaryDirectory() as directory:
            store = PrefixStore(directory, llm)
            store.detach()
            for turn in range(rounds):
                for kind in ("without", "with") if turn % 2 else ("with", "without"):
                    if kind == "with":
                        store.attach(llm)
                        llm.set_cache(store)
                    llm.reset()
                    tokens = prompt_tokens(llm, n_prompt, seed=turn)
                    started = time.perf_counter()
                    chunks = iter(llm(tokens, max_tokens=n_answer, temperature=0, stream=True))
                    next(chunks)
                    if name == "generation":
                        started = time.perf_counter()
                    for _ in chunks:
                        pass
                    times[kind].append(time.perf_counter() - started)
                    llm.set_cache(None)
                    store.detach()
                    store.flush()
            stats = store.stats()
            store.close()
        results[name] = {
            "seconds": {kind: summary(taken) for kind, taken in times.items()},
            "tokens_per_second": {
                kind: (n_answer if name == "generation" else n_prompt) / statistics.median(t)
                for kind, t in times.items()
            },
            "speed_of_without": ratio(times["without"], times["with"]),
            "pages_captured": stats.pages_captured,
            "capture_seconds": stats.capture_seconds,
        }
    return results


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = []
    for name, figures in result.items():
        rate = figures["tokens_per_second"]
        speed = figures["speed_of_without"]
        rows.append(
            [
                name,
                f"{rate['without']:.1f} tokens/s",
                f"{rate['with']:.1f} tokens/s",
                met(speed, 0.98) if name == "generation" else f"{speed:.2f}",
                str(figures["pages_captured"]),
                milliseconds(figures["capture_seconds"] / max(figures["pages_captured"], 1)),
            ]
        )
    head = ["work", "without", "with the store", "relative speed", "pages captured", "foreground per page"]
    return ["## The cost of a store with nothing to hit", "", *table(head, rows)]
