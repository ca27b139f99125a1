"""Completions with a store whose location fails, and without a store, in turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import llama_cpp

import prefixstore.opening
from benchmarks.common import load, model_path, prompt_tokens, ratio, summary
from benchmarks.tables import met, milliseconds, table
from prefixstore import PrefixStore
from prefixstore.engine.pages import Pages
from tests.support.faults import FlakyBackend

PROMPT, ANSWER, ROUNDS = 512, 24, 24
# seconds that each operation of the location takes, and whether it then fails
FAULTS = {"none": (0.0, False), "fails at once": (0.0, True), "fails after 2 s": (2.0, True), "takes 2 s": (2.0, False)}


def _completion(llm: llama_cpp.Llama, seed: int) -> float:
    llm.reset()
    tokens = prompt_tokens(llm, PROMPT, seed=seed)
    started = time.perf_counter()
    llm(tokens, max_tokens=ANSWER, temperature=0)
    return time.perf_counter() - started


def _under(fault: str, llm: llama_cpp.Llama, opened: Callable[[], FlakyBackend]) -> dict[str, Any]:
    times: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as directory, PrefixStore(directory, llm) as store:
        backend = opened()
        store.detach()
        backend.seconds, backend.fails = FAULTS[fault]
        for turn in range(ROUNDS):
            for kind in ("without", "with") if turn % 2 else ("with", "without"):
                if kind == "with":
                    store.attach(llm)
                    llm.set_cache(store)
                times[kind].append(_completion(llm, turn))
                llm.set_cache(None)
                store.detach()
        backend.seconds, backend.fails = FAULTS["none"]
        stats = store.stats()
    return {
        "seconds": {kind: summary(taken) for kind, taken in times.items()},
        "speed_of_without": ratio(times["without"], times["with"]),
        "whole": statistics.fsum(times["without"]) / statistics.fsum(times["with"]),
        "lost_seconds": stats.lost_seconds,
        "outages": stats.outages,
        "misses": stats.misses,
        "dropped": stats.dropped,
    }


def run() -> dict[str, Any]:
    llm = load(model_path(), n_ctx=1024)
    real, made = prefixstore.opening.open_pages, []

    def opened(*arguments: Any, **options: Any) -> Pages:
        made.append(FlakyBackend(real(*arguments, **options)))
        return made[-1]

    prefixstore.opening.open_pages = opened
    try:
        return {fault: _under(fault, llm, lambda: made[-1]) for fault in FAULTS}
    finally:
        prefixstore.opening.open_pages = real


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = [
        [
            fault,
            milliseconds(figures["seconds"]["without"]["p50"]),
            milliseconds(figures["seconds"]["with"]["p50"]),
            met(figures["speed_of_without"], 0.98),
            f"{figures['lost_seconds']:.1f} s",
            str(figures["outages"]),
        ]
        for fault, figures in result.items()
    ]
    head = ["the location", "without a store", "with it", "relative speed", "total wait for the location", "outages"]
    return ["## Completions while the location fails", "", *table(head, rows)]
