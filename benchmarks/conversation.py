"""A conversation of 20 turns: what saving costs each turn, and what is kept; beside stock caches and state files.

Foreground seconds for saving are what the completion spends in its cache after the last token; ours include the
captures between batches.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from benchmarks.common import LIGHT, load, model_path, prompt_tokens, state_of, tree_bytes
from benchmarks.peers import StateFiles
from benchmarks.tables import megabytes, met, milliseconds, paragraph, table
from prefixstore import PrefixStore

TURNS = 20
NEW_TOKENS = 300
ANSWER_TOKENS = 4
SHAPE = {**LIGHT, "n_vocab": 32000}


def converse(
    llm: Any,
    saving: Callable[[], float],
    after: Callable[[], object] = lambda: None,
    turns: int = TURNS,
    new_tokens: int = NEW_TOKENS,
) -> list[float]:
    """Foreground seconds for saving, turn by turn. Every turn appends to the conversation.

    Parameters
    ----------
    llm
        The model, with its cache set.
    saving
        Returns the seconds that saving has taken so far.
    after
        Saves a turn, for a cache that llama-cpp-python does not call.
    turns, new_tokens
        The length of the conversation, and what each turn adds to it.
    """
    said: list[int] = []
    per_turn = []
    for turn in range(turns):
        said += prompt_tokens(llm, new_tokens, seed=turn)
        before = saving()
        llm(said, max_tokens=ANSWER_TOKENS, temperature=0)
        after()
        per_turn.append(saving() - before)
        said = llm.input_ids[: llm.n_tokens].tolist()
    return per_turn


class Timed:
    """A stock cache, and the time that completions spend on saving into it: ``save_state`` and ``__setitem__``."""

    def __init__(self, cache: Any, llm: Any) -> None:
        self._cache = cache
        self._save = llm.save_state
        self.seconds = 0.0
        llm.save_state = self.save_state

    def save_state(self) -> Any:
        started = time.perf_counter()
        try:
            return self._save()
        finally:
            self.seconds += time.perf_counter() - started

    def __getitem__(self, key: Any) -> Any:
        return self._cache[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        started = time.perf_counter()
        self._cache[key] = value
        self.seconds += time.perf_counter() - started


def figures(per_turn: list[float], **more: Any) -> dict[str, Any]:
    first, last = statistics.median(per_turn[1:6]), statistics.median(per_turn[-5:])
    return {"seconds_per_turn": per_turn, "turns_2_to_6": first, "last_5": last, "growth": last / first, **more}


def ours(turns: int = TURNS, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    llm = load(model_path(**SHAPE))
    with tempfile.TemporaryDirectory() as directory:
        location = Path(directory) / "kv"
        with PrefixStore(location, llm, codec="raw") as store:
            llm.set_cache(store)
            per_turn = converse(llm, lambda: store.stats().capture_seconds, turns=turns, new_tokens=new_tokens)
            store.flush()
            stats = store.stats()
            state = len(state_of(llm))
        return figures(
            per_turn,
            state_bytes=state,
            stored_bytes=stats.bytes_stored,
            used_bytes=stats.bytes_used,
            used_of_state=stats.bytes_used / state,
            disk_bytes=tree_bytes(location),
            dropped=stats.dropped,
        )


def run() -> dict[str, Any]:
    results = {"prefixstore": ours()}
    path = model_path(**SHAPE)
    with tempfile.TemporaryDirectory() as directory:
        for name, make in (
            ("LlamaRAMCache", lambda: LlamaRAMCache(capacity_bytes=64 << 30)),
            ("LlamaDiskCache", lambda: LlamaDiskCache(f"{directory}/disk", capacity_bytes=64 << 30)),
        ):
            llm = load(path)
            cache = make()
            timed = Timed(cache, llm)
            llm.set_cache(timed)
            # LlamaDiskCache prints every step
            with redirect_stderr(io.StringIO()):
                per_turn = converse(llm, lambda timed=timed: timed.seconds)
            if name == "LlamaRAMCache":
                held = sum(
                    len(s.llama_state) + s.scores.nbytes + s.input_ids.nbytes for s in cache.cache_state.values()
                )
            else:
                held = tree_bytes(Path(directory) / "disk")
            results[name] = figures(per_turn, claimed_bytes=int(cache.cache_size), held_bytes=held)
        llm = load(path)
        files = StateFiles(llm, Path(directory) / "states")
        per_turn = converse(llm, lambda: files.watch.seconds, files.after)
        results["state files"] = figures(per_turn, held_bytes=tree_bytes(Path(directory) / "states"))
    return results


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = []
    for name, figures in result.items():
        held = figures.get("used_bytes", figures.get("held_bytes", 0))
        claimed = megabytes(figures["claimed_bytes"]) if "claimed_bytes" in figures else megabytes(held)
        rows.append(
            [
                name,
                milliseconds(figures["turns_2_to_6"]),
                milliseconds(figures["last_5"]),
                f"{figures['growth']:.2f}",
                claimed,
                megabytes(held),
            ]
        )
    ours = result["prefixstore"]
    head = ["cache", "saving, turns 2-6", "saving, last 5 turns", "growth", "claims to hold", "holds"]
    return [
        "## A conversation of 20 turns, 300 new tokens each, vocabulary of 32,000",
        "",
        *paragraph(
            """Foreground time for saving each turn, and what is held at the end. `LlamaDiskCache` keeps one entry.
            State files: one for each turn, and the previous one is deleted."""
        ),
        "![What saving a turn costs](plots/saving.png)",
        "",
        *table(head, rows),
        *paragraph(
            f"""Final state {megabytes(ours["state_bytes"])}; what the location holds, index included, is
            {met(ours["used_of_state"], 1.1, at_most=True)} of it.
            Blocks on the disk: {megabytes(ours["disk_bytes"])}."""
        ),
    ]
