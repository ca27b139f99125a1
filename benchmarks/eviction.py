"""Traces of a chat service and of coding agents through all eviction policies; see `benchmarks.replay`."""

from __future__ import annotations

from typing import Any

from benchmarks.common import SHARED
from benchmarks.replay import CAPACITIES, OURS, PEERS, figures, read
from benchmarks.tables import paragraph, table

TRACES = {
    "conversation": SHARED / "traces" / "mooncake-conversation.jsonl.gz",
    "agentic coding": SHARED / "traces" / "agentic-coding.jsonl.gz",
}
SIMPLE = ["lru", "lfu"]


def run() -> dict[str, Any] | None:
    if not all(path.exists() for path in TRACES.values()):
        return None
    return {name: figures(read(path), CAPACITIES, [*OURS, *PEERS])._asdict() for name, path in TRACES.items()}


def section(result: dict[str, Any] | None) -> list[str]:
    """The figures as Markdown."""
    if result is None:
        return []
    lines = [
        "## Eviction: block hit rates on two traces",
        "",
        *paragraph(
            """Capacities are fractions of the unique blocks: 182,790 of the Mooncake conversation trace, 56,215 of the
            agentic coding trace; a block is a hit if all blocks before it are. The policies run in the real engine and
            index. `arc` to `lecar` are simulations that evict leaves only, as a store of prefixes has to; `s3fifo` and
            `2q` evict any block. Belady knows the future. `adaptive` is the default."""
        ),
        "![Share of blocks found](plots/hits.png)",
        "",
    ]
    traces = list(result)
    head = ["policy", *(f"{trace}, {float(capacity):.0%}" for trace in traces for capacity in CAPACITIES)]
    rows = [
        [policy, *(f"{result[trace]['hits'][policy][each]:.3f}" for trace in traces for each in CAPACITIES)]
        for policy in result[traces[0]]["hits"]
    ]
    lines += table(head, rows)
    told = (f"{trace.capitalize()}: {_summary(found['hits'], found['written'])}" for trace, found in result.items())
    return lines + paragraph(" ".join(told))


def _summary(hits: dict[str, dict[str, float]], written: dict[str, dict[str, float]]) -> str:
    mine = hits["adaptive"]
    behind = max(
        max(rates[capacity] for policy, rates in hits.items() if policy in (*SIMPLE, *PEERS) and policy != "belady")
        - mine[capacity]
        for capacity in CAPACITIES
    )
    first = CAPACITIES[0]
    return f"""`adaptive` is behind the best of the others except Belady by at most
        {max(behind, 0):.4f} (goal: 0.003). At {float(first):.0%} it writes
        {written["adaptive"][first]:.1%} of all requested blocks (goal: 25 %), `lru` {written["lru"][first]:.1%}."""
