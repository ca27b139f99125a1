"""Capture in the foreground, beside one ``llama_state_seq_get_data`` of the same bytes.

The limit writes into a buffer that was written before. "As evaluated" is what a prefill pays: each page is captured
when its boundary is crossed, into a buffer that an earlier page has used, while the write queue is idle. "At once" is
``store.capture()`` of all pages, while the thread of the write queue packs and writes the first of them on the other
core.
"""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import llama_cpp

from benchmarks.common import (
    LIGHT,
    LIGHT_8B,
    Stopwatch,
    load,
    model_path,
    pointer_of,
    prompt_tokens,
    ratio,
    seconds,
    state_of,
    summary,
)
from benchmarks.tables import met, milliseconds, paragraph, table
from prefixstore import PrefixStore

# state a token: as of a 1B and of an 8B model, and how many tokens are captured
GEOMETRIES = {"32 KiB": (LIGHT, 4096), "128 KiB": (LIGHT_8B, 2048)}
PAGE = 256
ROUNDS = 7
GOAL = 0.8


def as_evaluated(llm: Any, store: PrefixStore, tokens: list[int]) -> None:
    """Evaluate the tokens page by page; each captured page is written before the next is evaluated."""
    llm.reset()
    for start in range(0, len(tokens), PAGE):
        llm.eval(tokens[start : start + PAGE])
        store.flush()


def measure(flash: bool, shape: dict[str, Any], n_tokens: int) -> dict[str, Any]:
    llm = load(model_path(**shape), n_ctx=n_tokens + PAGE, flash_attn=flash)
    tokens = prompt_tokens(llm, n_tokens)
    times: dict[str, list[float]] = {"limit": [], "as evaluated": [], "at once": []}
    with (
        tempfile.TemporaryDirectory() as directory,
        PrefixStore(directory, llm, codec="raw", queue_bytes="1GiB") as store,
    ):
        watch = Stopwatch()
        watch.watch(store._current.strategy, "capture")
        for turn in range(ROUNDS + 1):
            store.clear(everything=True)
            before = watch.seconds
            as_evaluated(llm, store, tokens)
            taken = {"as evaluated": watch.seconds - before}
            state = state_of(llm)
            ctx = pointer_of(llm)
            taken["limit"] = seconds(lambda: llama_cpp.llama_state_seq_get_data(ctx, state, len(state), 0))  # noqa: B023 - called at once
            store.clear(everything=True)
            gc.collect()
            taken["at once"] = seconds(store.capture)
            store.flush()
            assert store.stats().bytes_raw >= len(state)
            # the first round warms buffers and files
            for name in taken if turn else ():
                times[name].append(taken[name])
    return {
        "state_bytes": len(state),
        "seconds": {name: summary(taken) for name, taken in times.items()},
        "of_limit": {name: ratio(times["limit"], taken) for name, taken in times.items()},
    }


def run() -> dict[str, Any]:
    return {
        f"{state} a token, {'flash attention' if flash else 'V transposed'}": measure(flash, shape, n_tokens)
        for state, (shape, n_tokens) in GEOMETRIES.items()
        for flash in (True, False)
    }


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    ways = ("as evaluated", "at once")
    rows = [
        [
            name,
            milliseconds(figures["seconds"]["limit"]["p50"]),
            *(f"{milliseconds(figures['seconds'][way]['p50'])}; {met(figures['of_limit'][way], GOAL)}" for way in ways),
        ]
        for name, figures in result.items()
    ]
    return [
        "## Capture in the foreground: 4,096 tokens of 32 KiB (134 MB), 2,048 of 128 KiB (268 MB); LMDB, raw",
        "",
        *paragraph(
            f"""The limit is one `llama_state_seq_get_data` of the same state. As evaluated: pages of 256 tokens, each
            captured as its boundary is crossed. At once: `store.capture()` of all of them, while the queue's thread
            works on the other core. Medians of {ROUNDS} rounds in turns; speed relative to the limit."""
        ),
        *table(["context", "limit", *ways], rows),
    ]
