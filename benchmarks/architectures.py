"""One conversation on each kind of memory: time to the first token of each turn, and what is stored.

Before every prompt the context is emptied, as another conversation or a restart would empty it. Each turn is asked
three times: once, again with the same prompt (the answer is regenerated), and with another question (it was edited).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp.llama_cache import LlamaRAMCache

from benchmarks.common import CACHE, load
from benchmarks.tables import megabytes, milliseconds, paragraph, table
from prefixstore import PrefixStore
from prefixstore.testing.models import TINY, write_model

TURNS = 4
SYSTEM_TOKENS = 600
NEW_TOKENS = 150
ANSWER_TOKENS = 8
# large enough that a prefill takes longer than llama.cpp's fixed costs
SIZES = {
    "llama": {"n_layer": 6, "n_embd": 256, "n_head": 4, "head_dim": 64, "n_ff": 768},
    "gemma3": {"n_layer": 6, "n_embd": 256, "n_head": 4, "head_dim": 64, "n_ff": 768},
    "mamba": {"n_layer": 6, "n_embd": 256, "dt_rank": 16},
    "lfm2": {"n_layer": 9, "n_embd": 256, "n_head": 4, "head_dim": 64, "n_head_kv": 2, "n_ff": 768},
}
KINDS = {"llama": "attention", "gemma3": "sliding window", "mamba": "recurrent", "lfm2": "hybrid"}
STEPS = ("next turn", "regenerated", "edited")


def model_of(arch: str) -> Path:
    path = CACHE / f"bench-{arch}.gguf"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        write_model(path, replace(TINY[arch], **SIZES[arch]))
    return path


def message(llm: Any, role: str, n: int, seed: int) -> list[int]:
    """A message of `n` words, with the tokens that a chat template puts around it."""
    words = np.random.default_rng(seed).integers(300, 3000, n).tolist()
    return [*special(llm, f"<|im_start|>{role}\n"), *words, *special(llm, "<|im_end|>\n")]


def special(llm: Any, text: str) -> list[int]:
    return llm.tokenize(text.encode(), add_bos=False, special=True)


def converse(llm: Any, computed: Any) -> dict[str, list[dict[str, float]]]:
    """For each step of each turn: seconds to the first token, and the tokens evaluated for it."""
    figures: dict[str, list[dict[str, float]]] = {step: [] for step in STEPS}
    opening = special(llm, "<|im_start|>assistant\n")
    said = message(llm, "system", SYSTEM_TOKENS, 1000)
    for turn in range(TURNS):
        question, other = (message(llm, "user", NEW_TOKENS, seed) for seed in (turn, turn + 100))
        prompts = [said + question + opening] * 2 + [said + other + opening]
        for step, prompt in zip(STEPS, prompts, strict=True):
            llm.reset()
            before, started = computed(), time.perf_counter()
            stream = llm(prompt, max_tokens=ANSWER_TOKENS, temperature=0, stream=True)
            next(stream)
            seconds, tokens = time.perf_counter() - started, computed() - before
            for _ in stream:
                pass
            figures[step].append({"seconds": seconds, "tokens": tokens})
            if step == STEPS[0]:
                answer = llm.input_ids[len(prompt) : llm.n_tokens].tolist()
        said = said + question + opening + answer + special(llm, "<|im_end|>\n")
    return figures


def counting(llm: Any) -> Any:
    """A function that returns how many tokens have been evaluated so far."""
    count = [0]
    own = llm.eval

    def count_and_eval(tokens: Any) -> None:
        count[0] += len(tokens)
        own(tokens)

    llm.eval = count_and_eval
    return lambda: count[0]


def run() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for arch in SIZES:
        path = model_of(arch)
        llm = load(path, n_threads=1, n_threads_batch=1)
        figures = {"cold": converse(llm, counting(llm))}
        llm = load(path, n_threads=1, n_threads_batch=1)
        ram = LlamaRAMCache(capacity_bytes=64 << 30)
        llm.set_cache(ram)
        figures["LlamaRAMCache"] = converse(llm, counting(llm))
        held = sum(len(s.llama_state) + s.scores.nbytes + s.input_ids.nbytes for s in ram.cache_state.values())
        llm = load(path, n_threads=1, n_threads_batch=1)
        with tempfile.TemporaryDirectory() as directory, PrefixStore(directory, llm, codec="raw") as store:
            llm.set_cache(store)
            figures["prefixstore"] = converse(llm, lambda store=store: store.stats().tokens_computed)
            store.flush()
            stats = store.stats()
        results[arch] = {
            "kind": stats.kind,
            "turns": figures,
            "stored_bytes": stats.bytes_stored,
            "ram_bytes": held,
        }
    return results


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    lines = [
        "## A conversation on each kind of memory",
        "",
        *paragraph(
            f"""{TURNS} turns of {NEW_TOKENS} tokens after a system prompt of {SYSTEM_TOKENS}; the context is emptied
            before each prompt. Time to the first token, medians of turns 2 to {TURNS}, and in parentheses the tokens
            evaluated for it: cold; with `LlamaRAMCache`; with prefixstore."""
        ),
    ]
    systems = ["cold", "LlamaRAMCache", "prefixstore"]
    rows = []
    for arch, figures in result.items():
        row = [f"{arch} ({KINDS[arch]}): {figures['kind']}"]
        for step in STEPS:
            turns = [figures["turns"][system][step][1:] for system in systems]
            seconds = (milliseconds(statistics.median(turn["seconds"] for turn in each)) for each in turns)
            tokens = (f"{statistics.median(turn['tokens'] for turn in each):.0f}" for each in turns)
            row.append("; ".join(f"{took} ({n})" for took, n in zip(seconds, tokens, strict=True)))
        rows.append([*row, "; ".join(megabytes(figures[of]) for of in ("ram_bytes", "stored_bytes"))])
    return lines + table(["model", *STEPS, "LlamaRAMCache; prefixstore hold"], rows)
