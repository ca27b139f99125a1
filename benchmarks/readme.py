"""The figures of README.md, from the results: ``python -m benchmarks.readme`` writes them, a test compares them.

Each row of its table is made here, and replaces the row that begins with the same words.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

__all__ = ["rows", "with_figures"]

ROOT = Path(__file__).parent.parent
OURS, NOTHING, FILES = "prefixstore, LMDB, raw", "no cache", "state files"
TURN = 2  # of the conversation that is asked again: the third one


def ms(seconds: float, decimals: int = 0) -> str:
    return f"{seconds * 1e3:,.{decimals}f} ms"


def mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def rows(results: dict[str, Any]) -> list[list[str]]:
    """The cells of each row."""
    users, chat = (results["comparison"]["1B"][load] for load in ("users", "chat"))
    restored, turns = results["restore"]["flash attention, auto"]["seconds"], results["conversation"]
    saved = [f"{ms(turns[peer]['last_5'])} {named(peer)}" for peer in ("LlamaRAMCache", "LlamaDiskCache", FILES)]
    first = {cache: ms(found["warm"]["first_token"][0]) for cache, found in users.items()}
    written = {cache: mb(sum(found[phase]["written_bytes"] for phase in PHASES)) for cache, found in users.items()}
    beside = [
        f"{ms(chat[cache]['warm']['seconds']['p50'])} {named(cache)} {_verdict(chat[cache])}"
        for cache in (NOTHING, FILES)
    ]
    return [
        [
            "first request after a restart, a system prompt shared by many users",
            first[OURS],
            ", ".join(f"{first[cache]} {named(cache)}" for cache in (NOTHING, "LlamaDiskCache", FILES)),
        ],
        [
            "bytes written for 20 requests of many users",
            written[OURS],
            ", ".join(f"{written[cache]} {named(cache)}" for cache in ("LlamaDiskCache", FILES)),
        ],
        ["saving a turn, the last of 20", ms(turns["prefixstore"]["last_5"], 1), ", ".join(saved)],
        [
            "restore of 4,096 tokens (134 MB)",
            ms(restored["prefixstore"]["p50"], 1),
            f"{ms(restored['load_state']['p50'])} `Llama.load_state`",
        ],
        ["llama-server, a conversation of 4,000 tokens after a restart: time to the first text", *_served(results)],
        ["lfm2 (hybrid), the question edited: time to first token", *_turn(results, "lfm2", "edited")],
        [
            "lookup of 32,000 tokens among 100,000 pages",
            f"{results['lookup']['lmdb']['whole_prompt']['p50'] * 1e6:.0f} µs",
            "the stock caches scan every key",
        ],
        [
            "a long chat after a restart, median request",
            ms(chat[OURS]["warm"]["seconds"]["p50"]),
            ", ".join(beside),
        ],
    ]


PHASES = ("cold", "warm")


def _verdict(figures: dict[str, Any]) -> str:
    """How a cache compares with ours, request by request."""
    warm = figures["warm"]
    word = f"**{warm['verdict']}**" if warm["verdict"] == "faster" else warm["verdict"]
    return f"({word}: {statistics.median(warm['relative']):.2f} of our time)"


def named(cache: str) -> str:
    return f"`{cache}`" if cache.startswith("Llama") else cache


def _served(results: dict[str, Any]) -> tuple[str, str]:
    after = {name: ms(found["restart"]["p50"]) for name, found in results["servers"]["servers"].items()}
    others = f"{after['llama-server']} alone, {after['llama-server, slot files']} its slot files, saved by the client"
    return after["prefixstore serve, llama-server"], others


def _turn(results: dict[str, Any], kind: str, step: str) -> list[str]:
    turns = results["architectures"][kind]["turns"]
    ours, cold, ram = (turns[cache][step][TURN]["seconds"] for cache in ("prefixstore", "cold", "LlamaRAMCache"))
    return [ms(ours, 1), f"{ms(cold)} cold, {ms(ram)} `LlamaRAMCache`"]


def with_figures(text: str, results: dict[str, Any]) -> str:
    """README.md with the rows of these results."""
    for cells in rows(results):
        line = f"| {' | '.join(cells)} |"
        text, n = re.subn(rf"^\| {re.escape(cells[0])} \|.*$", lambda _, line=line: line, text, flags=re.MULTILINE)
        if not n:
            raise ValueError(f"README.md has no row {cells[0]!r}")
    return text


def write(results: dict[str, Any]) -> None:
    """Write the figures into README.md."""
    path = ROOT / "README.md"
    path.write_text(with_figures(path.read_text("utf-8"), results), "utf-8")


if __name__ == "__main__":
    write(json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text()))
