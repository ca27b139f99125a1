"""A chat service's trace through all eviction policies; see `benchmarks.replay`."""

from __future__ import annotations

from typing import Any

from benchmarks.common import SHARED
from benchmarks.replay import CAPACITIES, OURS, rates, read
from benchmarks.tables import paragraph, table

TRACE = SHARED / "traces" / "mooncake-conversation.jsonl.gz"
PEERS = ["s3fifo", "2q"]


def run() -> dict[str, Any] | None:
    if not TRACE.exists():
        return None
    return rates(read(TRACE), CAPACITIES, [*OURS, *PEERS, "belady"])


def section(result: dict[str, Any] | None) -> list[str]:
    """The figures as Markdown."""
    if result is None:
        return []
    rows = [[policy, *(f"{found[capacity]:.3f}" for capacity in CAPACITIES)] for policy, found in result.items()]
    ways = [
        (result["adaptive"][capacity] - result["lru"][capacity])
        / (result["belady"][capacity] - result["lru"][capacity])
        for capacity in CAPACITIES[:2]
    ]
    best = all(
        result["adaptive"][capacity] >= max(result[peer][capacity] for peer in ["lru", "lfu", *PEERS])
        for capacity in CAPACITIES
    )
    return [
        "## Eviction: block hit rates on the Mooncake conversation trace",
        "",
        *paragraph(
            f"""Capacities are fractions of the 182,790 unique blocks; a block is a hit if all blocks before it are. Our
            policies run in the real engine and index. Belady knows the future. `adaptive` is the default; it is
            {"at least as good as" if best else "not everywhere as good as"} the best of the others except Belady, and
            at 1 and 3 % it goes {ways[0]:.2f} and {ways[1]:.2f} of the way from LRU to Belady (goal: a third)."""
        ),
        "![Share of blocks found](plots/hits.png)",
        "",
        *table(["policy", *(f"{float(capacity):.0%}" for capacity in CAPACITIES)], rows),
    ]
