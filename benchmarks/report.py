"""The figures as a page for people. Each benchmark writes its own section."""

from __future__ import annotations

from typing import Any

from benchmarks import (
    agent,
    architectures,
    backends,
    capture,
    codecs,
    comparison,
    conversation,
    eviction,
    generation,
    lookup,
    outages,
    restore,
    sweep,
    warming,
)
from benchmarks.tables import paragraph

BENCHMARKS: dict[str, Any] = {
    "comparison": comparison,
    "restore": restore,
    "sweep": sweep,
    "capture": capture,
    "conversation": conversation,
    "lookup": lookup,
    "generation": generation,
    "backends": backends,
    "architectures": architectures,
    "agent": agent,
    "warming": warming,
    "codecs": codecs,
    "eviction": eviction,
    "outages": outages,
}


def markdown(results: dict[str, Any]) -> str:
    """The page."""
    machine = results["machine"]
    lines = [
        "# Benchmarks",
        "",
        *paragraph(
            f"""Written by `make bench`, each section by the last run of its benchmark (`python -m benchmarks NAME` runs
            one); the same figures are in `benchmarks/results/latest.json`. Measured on
            {machine["cpu"]}, {machine["cores"]} cores, {machine["system"]}, Python {machine["python"]},
            llama-cpp-python {machine["llama_cpp_python"]}, {machine["date"]}."""
        ),
        *paragraph(
            """The model is generated: Llama shape, 16 layers, 32 KiB of f16 state a token (the geometry of a 1B model),
            random weights, and little to compute: prefill is faster here than on a real model with that much state.
            Machines are noisy: ratios count, taken within one run."""
        ),
    ]
    for name, benchmark in BENCHMARKS.items():
        if name in results:
            lines += benchmark.section(results[name])
    return "\n".join(lines)
