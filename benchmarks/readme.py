"""The figures of README.md, from the results: ``python -m benchmarks.readme`` writes them, a test compares them.

Each row of its tables is made here, and replaces the row that begins with the same words.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["rows", "with_figures"]

ROOT = Path(__file__).parent.parent
OURS = "prefixstore, LMDB, raw"
TURN = 2  # of the conversation that is asked again: the third one


def ms(seconds: float, decimals: int = 0) -> str:
    return f"{seconds * 1e3:,.{decimals}f} ms"


def mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def rows(results: dict[str, Any]) -> list[list[str]]:
    """The cells of each row."""
    users, chat = (results["comparison"]["1B"][load] for load in ("users", "chat"))
    restore, turns, backends = results["restore"], results["conversation"], results["backends"]
    peers, agent, scale = ("LlamaRAMCache", "LlamaDiskCache", "state files"), results["agent"], results["scale"]
    plain, transposed, planes = (restore[f"{kind}"]["seconds"] for kind in PLAIN)
    saved = [f"{ms(turns[peer]['last_5'])} {named(peer)}" for peer in peers]
    limits = f"{ms(plain['limit']['p50'], 1)}, {ms(transposed['limit']['p50'], 1)}"
    saving = [ms(turns["prefixstore"]["last_5"], 1), ", ".join(saved)]
    first = {cache: ms(found["warm"]["first_token"][0]) for cache, found in users.items()}
    median = {cache: ms(found["warm"]["seconds"]["p50"]) for cache, found in users.items()}
    written = {cache: mb(sum(found[phase]["written_bytes"] for phase in PHASES)) for cache, found in users.items()}
    lost = {cache: _lost(found) for cache, found in users.items()}
    slow = sorted((found["warm"]["seconds"]["p50"], cache) for cache, found in chat.items() if cache in PEERS_OF_A_CHAT)
    others = ["no cache", "LlamaDiskCache", "state files"]
    return [
        [
            "first request after a restart, a system prompt shared by many users",
            first[OURS],
            ", ".join(f"{first[cache]} {named(cache)}" for cache in others),
        ],
        ["restore of 4,096 tokens (134 MB)", ms(plain["prefixstore"]["p50"], 1), _load_state(plain)],
        ["saving a turn, the last of 20", *saving],
        [
            "bytes written for 20 requests of many users",
            written[OURS],
            ", ".join(f"{written[cache]} {named(cache)}" for cache in others[1:]),
        ],
        [
            "a long chat after a restart, median request: **slower**",
            ms(chat[OURS]["warm"]["seconds"]["p50"]),
            ", ".join(f"{ms(seconds)} {named(cache)}" for seconds, cache in slow),
        ],
        [
            "restore of 4,096 tokens (134 MB), flash attention; V transposed (the default of `Llama`)",
            f"{ms(plain['prefixstore']['p50'], 1)}; {ms(transposed['prefixstore']['p50'], 1)}",
            f"{_load_state(plain)}; {limits} one `set_data` from warm memory",
        ],
        [
            'the same with `codec="planes"` (15 % fewer bytes)',
            ms(planes["prefixstore"]["p50"], 1),
            f"{ms(planes['load_state']['p50'])}; {ms(planes['limit']['p50'], 1)}",
        ],
        [
            "the same, raw, from the RAM tier; from SQLite; from PostgreSQL",
            (
                f"{ms(backends['RAM tier over LMDB']['restore']['p50'], 1)}; "
                f"{ms(backends['SQLite']['restore']['p50'], 1)}; {ms(backends['PostgreSQL']['restore']['p50'])}"
            ),
            f"{ms(backends['LMDB']['restore']['p50'], 1)} LMDB in that run",
        ],
        [
            "many users of one system prompt (1,600 tokens), after a restart: first request, median",
            f"{first[OURS]}, {median[OURS]}",
            f"{first['no cache']}, {median['no cache']} without; "
            + "; ".join(f"{first[cache]}, {median[cache]} {named(cache)}" for cache in others[1:]),
        ],
        [
            "the same: written for 20 requests; foreground time lost for each",
            f"{written[OURS]}; {ms(lost[OURS], 1)}",
            "; ".join(f"{written[cache]}, {ms(lost[cache])} {named(cache)}" for cache in others[1:]),
        ],
        [
            "over HTTP, a conversation of 4,000 tokens goes on after a restart: time to the first text",
            *_served(results),
        ],
        ["mamba, an answer regenerated (1,110 tokens): time to first token", *_turn(results, "mamba", "regenerated")],
        ["lfm2 (hybrid), the question edited", *_turn(results, "lfm2", "edited")],
        [
            "an agent's 471 requests: bytes written, tokens evaluated",
            _asked(agent["prefixstore, LMDB"]),
            f"{_asked(agent['LlamaDiskCache'])} `LlamaDiskCache`",
        ],
        [
            "block hit rate on the traces of a chat service and of coding agents, capacity 3 % of their blocks",
            f"{_hits(results, 'adaptive')} `adaptive`",
            "; ".join(f"{_hits(results, policy)} {name}" for policy, name in RIVALS.items()),
        ],
        [
            "held after 20 turns, for a state of 199 MB",
            mb(turns["prefixstore"]["used_bytes"]),
            (
                f"{mb(turns['LlamaRAMCache']['held_bytes'])} `LlamaRAMCache`, "
                f"{mb(turns['LlamaDiskCache']['held_bytes'])} `LlamaDiskCache` (one entry)"
            ),
        ],
        [
            "lookup of 32,000 tokens among 100,000 pages",
            f"{results['lookup']['lmdb']['whole_prompt']['p50'] * 1e6:.0f} µs",
            "the stock caches scan every key",
        ],
        [
            (
                "opening a location with 1,000,000 pages, and the first lookup: LMDB; SQLite; PostgreSQL, which three "
                "others write to"
            ),
            "; ".join(_opened(scale[backend]["1000000"]) for backend in ("LMDB", "SQLite", "PostgreSQL")),
            "",
        ],
    ]


PLAIN = ("flash attention, auto", "V transposed, auto", "flash attention, planes")
PHASES = ("cold", "warm")
PEERS_OF_A_CHAT = ("no cache", "state files")
RIVALS = {"lru": "LRU", "2q": "2Q", "belady": "Belady"}


def named(cache: str) -> str:
    return f"`{cache}`" if cache.startswith("Llama") else cache


def _load_state(seconds: dict[str, Any]) -> str:
    return f"{ms(seconds['load_state']['p50'])} `Llama.load_state`"


def _lost(found: dict[str, Any]) -> float:
    """Seconds for each request."""
    lost, requests = (
        sum(found[phase]["lost_seconds"] for phase in PHASES),
        sum(len(found[phase]["first_token"]) for phase in PHASES),
    )
    return lost / requests


def _served(results: dict[str, Any]) -> tuple[str, str]:
    found = results["servers"]["servers"]
    after = {name: ms(each["restart"]["p50"]) for name, each in found.items()}
    ours = f"{after['prefixstore serve, llama-server']} llama-server, {after['prefixstore.server']} `llama_cpp.server`"
    others = f"{after['llama-server']} alone, {after['llama-server, slot files']} slot files"
    return ours, f"{others}; {after['llama_cpp.server, disk cache']} with its disk cache"


def _turn(results: dict[str, Any], kind: str, step: str) -> list[str]:
    turns = results["architectures"][kind]["turns"]
    ours, cold, ram = (turns[cache][step][TURN]["seconds"] for cache in ("prefixstore", "cold", "LlamaRAMCache"))
    return [ms(ours, 1), f"{ms(cold)} cold, {ms(ram)} `LlamaRAMCache`"]


def _asked(found: dict[str, Any]) -> str:
    return f"{mb(found['written_bytes'])}, {found['evaluated']:,}"


def _hits(results: dict[str, Any], policy: str) -> str:
    found = (results["eviction"][trace]["hits"][policy]["0.03"] for trace in ("conversation", "agentic coding"))
    return ", ".join(f"{share:.3f}" for share in found)


def _opened(found: dict[str, Any]) -> str:
    taken = found["open_ms"] + found["first_match_ms"]
    return f"{taken:.1f} ms" if taken < 10 else f"{taken:.0f} ms"


def with_figures(text: str, results: dict[str, Any]) -> str:
    """README.md with the rows of these results."""
    for cells in rows(results):
        line = f"| {' | '.join(cells)} |".replace("|  |", "| |")
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
