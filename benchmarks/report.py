"""The figures as a page for people."""

from __future__ import annotations

import textwrap
from typing import Any


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def _met(value: float, target: float, *, at_most: bool = False) -> str:
    reached = value <= target if at_most else value >= target
    return f"{value:.2f} ({'reached' if reached else 'missed'}: {'at most' if at_most else 'at least'} {target:g})"


def _paragraph(text: str) -> list[str]:
    return [*textwrap.wrap(" ".join(text.split()), 118), ""]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _restore(result: dict[str, Any]) -> list[str]:
    rows = []
    for name, figures in result.items():
        seconds = figures["seconds"]
        target = 0.75 if name.startswith("flash") else 0.6
        of_limit = _met(figures["of_limit"], target) if name.endswith("raw") else f"{figures['of_limit']:.2f}"
        rows.append(
            [
                name,
                _ms(seconds["limit"]["p50"]),
                f"{_ms(seconds['prefixstore']['p50'])} (p95 {_ms(seconds['prefixstore']['p95'])})",
                of_limit,
                _ms(seconds["load_state"]["p50"]),
                f"{figures['times_load_state']:.1f} times faster",
                _mb(figures["stored_bytes"]),
            ]
        )
    head = ["context, codec", "limit", "prefixstore", "share of the limit", "`load_state`", "against it", "stored"]
    return [
        "## (a), (b) Restore of 4,096 tokens (134 MB) from LMDB in a second process",
        "",
        *_paragraph(
            """The limit is one `llama_state_seq_set_data` of the same state from a warm buffer; `Llama.load_state` is
            what the stock caches call. All three are timed in turns, medians of 15 rounds; a share is the median of the
            rounds' ratios. `auto` stores the random-weight model's pages raw: zstd saves less than a tenth of them."""
        ),
        *_table(head, rows),
    ]


def _conversation(result: dict[str, Any]) -> list[str]:
    rows = []
    for name, figures in result.items():
        held = figures.get("used_bytes", figures.get("held_bytes", 0))
        claimed = _mb(figures["claimed_bytes"]) if "claimed_bytes" in figures else _mb(held)
        rows.append(
            [
                name,
                _ms(figures["turns_2_to_6"]),
                _ms(figures["last_5"]),
                f"{figures['growth']:.2f}",
                claimed,
                _mb(held),
            ]
        )
    ours = result["prefixstore"]
    head = ["cache", "saving, turns 2-6", "saving, last 5 turns", "growth", "claims", "holds"]
    return [
        "## (c) A conversation of 20 turns, 300 new tokens each, vocabulary of 32,000",
        "",
        *_paragraph(
            """Foreground time for saving, a turn; and what is held at the end. `LlamaDiskCache` keeps one entry, since
            a hit removes it: it serves one conversation, as far as its last turn."""
        ),
        *_table(head, rows),
        *_paragraph(
            f"""Final state {_mb(ours["state_bytes"])}; what the location holds, index included, is
            {_met(ours["used_of_state"], 1.1, at_most=True)} of it. Blocks on the disk: {_mb(ours["disk_bytes"])}."""
        ),
    ]


def _lookup(result: dict[str, Any]) -> list[str]:
    rows = [
        [
            name,
            f"{figures['pages']:,}",
            _ms(figures["whole_prompt"]["p50"]),
            _ms(figures["whole_prompt"]["p95"]),
            _ms(figures["fork_among_siblings"]["p50"]),
            _ms(figures["fork_among_siblings"]["p95"]),
            f"{figures['first_lookup_builds_the_index']:.1f} s",
        ]
        for name, figures in result.items()
    ]
    head = [
        "backend",
        "pages",
        "whole prompt",
        "p95",
        "fork among 1,000 siblings",
        "p95",
        "first lookup, builds the index",
    ]
    return [
        "## (d) Lookup of a 32,000-token prompt (int32 array)",
        "",
        "To reach: under 0.5 ms. The peers scan every key: O(entries x tokens).",
        "",
        *_table(head, rows),
    ]


def _generation(result: dict[str, Any]) -> list[str]:
    rows = []
    for name, figures in result.items():
        rate = figures["tokens_per_second"]
        speed = figures["speed_of_without"]
        rows.append(
            [
                name,
                f"{rate['without']:.1f} tokens/s",
                f"{rate['with']:.1f} tokens/s",
                _met(speed, 0.98) if name == "generation" else f"{speed:.2f}",
                str(figures["pages_captured"]),
                _ms(figures["capture_seconds"] / max(figures["pages_captured"], 1)),
            ]
        )
    head = ["work", "without", "with the store", "speed of without", "pages captured", "foreground per page"]
    return ["## (e) The store on, nothing to hit", "", *_table(head, rows)]


def markdown(results: dict[str, Any]) -> str:
    """The page."""
    machine = results["machine"]
    lines = [
        "# Benchmarks",
        "",
        *_paragraph(
            f"""Written by `make bench`; the same figures are in `benchmarks/results/latest.json`. Measured on
            {machine["cpu"]}, {machine["cores"]} cores, {machine["system"]}, Python {machine["python"]},
            llama-cpp-python {machine["llama_cpp_python"]}, {machine["date"]}."""
        ),
        *_paragraph(
            """The model is generated: Llama shape, 16 layers, 32 KiB of f16 state a token (the geometry of a 1B model),
            random weights, and little to compute: prefill is faster here than on a real model with that much state.
            Machines are noisy: ratios count, taken within one run."""
        ),
    ]
    for name, section in (
        ("restore", _restore),
        ("conversation", _conversation),
        ("lookup", _lookup),
        ("generation", _generation),
    ):
        if name in results:
            lines += section(results[name])
    return "\n".join(lines)
