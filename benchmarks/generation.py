"""(e): generation with the store on and nothing to hit, beside generation without it, in turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from benchmarks.common import load, model_path, prompt_tokens, ratio, summary
from prefixstore import PrefixStore

ROUNDS = 12
PROMPT_TOKENS = 64
TOKENS = 320


def run() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, work in {"generation": (PROMPT_TOKENS, TOKENS), "prefill": (2048, 1)}.items():
        n_prompt, n_answer = work
        llm = load(model_path())
        times: dict[str, list[float]] = {"without": [], "with": []}
        with tempfile.TemporaryDirectory() as directory:
            store = PrefixStore(directory, llm)
            store.detach()
            for turn in range(ROUNDS if name == "generation" else 6):
                for kind in ("without", "with") if turn % 2 else ("with", "without"):
                    if kind == "with":
                        store.attach(llm)
                        llm.set_cache(store)  # type: ignore[arg-type]
                    llm.reset()
                    tokens = prompt_tokens(llm, n_prompt, seed=turn)
                    started = time.perf_counter()
                    llm(tokens, max_tokens=n_answer, temperature=0)
                    times[kind].append(time.perf_counter() - started)
                    llm.set_cache(None)
                    store.detach()
                    store.flush()
            stats = store.stats()
            store.close()
        results[name] = {
            "seconds": {kind: summary(taken) for kind, taken in times.items()},
            "tokens_per_second": {kind: (n_prompt + n_answer) / statistics.median(t) for kind, t in times.items()},
            "speed_of_without": ratio(times["without"], times["with"]),
            "pages_captured": stats.pages_captured,
            "capture_seconds": stats.capture_seconds,
        }
    return results
