"""The agent trace through the trained model: what is written and kept on the disk, beside `LlamaDiskCache`.

471 requests of 25 sessions. Every request is a completion of one token, in the order of the trace, on one ``Llama``.
Each cache starts empty. The trace is in ``../shared/traces``; without it the benchmark is skipped.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llama_cpp.llama_cache import LlamaDiskCache

from benchmarks.common import SHARED, load, tree_bytes, written_bytes
from benchmarks.tables import megabytes, met, paragraph, table
from prefixstore import PrefixStore

TRACE = SHARED / "traces" / "agent-taubench.tar.gz"
MODEL = SHARED / "models" / "docs-6m.gguf"
GOAL = 0.1


def requests() -> list[dict[str, Any]]:
    """All requests, in the order of their timestamps."""
    with tarfile.open(TRACE) as archive:
        files = [archive.extractfile(member) for member in archive if member.isfile()]
        found = [json.loads(line) for file in files if file is not None for line in file]
    return sorted(found, key=lambda request: request["timestamp"])


def replay(cache_of: Callable[[], Any], directory: Path) -> dict[str, Any]:
    """Run the trace twice with a cache: tokens evaluated, seconds, bytes written, and bytes on the disk."""
    llm = load(MODEL, n_ctx=2048, n_threads=1, n_threads_batch=1)
    evaluated = [0, 0]
    second = False
    original = llm.eval

    def count(tokens: Any) -> None:
        evaluated[second] += len(tokens)
        original(tokens)

    llm.eval = count
    with contextlib.ExitStack() as stack:
        cache = cache_of()
        if hasattr(cache, "close"):
            stack.callback(cache.close)
        llm.set_cache(cache)
        # the stock cache prints a line for each entry
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        before, started = written_bytes(), time.perf_counter()
        for request in requests():
            llm(request["input"], max_tokens=1, temperature=0)
        seconds = time.perf_counter() - started
        if isinstance(cache, PrefixStore):
            cache.flush()
        figures = {"seconds": seconds, "disk_bytes": tree_bytes(directory), "written_bytes": written_bytes() - before}
        second = True
        for request in requests():
            llm(request["input"], max_tokens=1, temperature=0)
    return figures | {"evaluated": evaluated[0], "evaluated_again": evaluated[1]}


def run() -> dict[str, Any] | None:
    if not TRACE.exists() or not MODEL.exists():
        return None
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, make in {
            "prefixstore, LMDB": PrefixStore,
            "prefixstore, SQLite": lambda at: PrefixStore(f"sqlite:///{at}/kv.db"),
            "LlamaDiskCache": lambda at: LlamaDiskCache(str(at), capacity_bytes=64 << 30),
        }.items():
            directory = Path(root) / name.replace(", ", "-")
            directory.mkdir()
            results[name] = replay(partial(make, directory), directory)
    return results


def section(result: dict[str, Any] | None) -> list[str]:
    """The figures as Markdown."""
    if result is None:
        return []
    peer = result["LlamaDiskCache"]
    rows = [
        [
            name,
            megabytes(figures["written_bytes"]),
            "1" if figures is peer else met(figures["written_bytes"] / peer["written_bytes"], GOAL, at_most=True),
            megabytes(figures["disk_bytes"]),
            f"{figures['evaluated']:,}",
            f"{figures['evaluated_again']:,}",
            f"{figures['seconds']:.0f} s",
        ]
        for name, figures in result.items()
    ]
    return [
        "## The agent trace (471 requests, 110,554 tokens in prompts) through the trained model",
        "",
        *paragraph(
            """One completion of one token for each request, on one `Llama`, in the order of the trace. At the end
            `LlamaDiskCache` has one entry, the last."""
        ),
        *table(
            [
                "cache",
                "written",
                "relative to `LlamaDiskCache`",
                "on the disk at the end",
                "tokens evaluated",
                "tokens evaluated for the trace again",
                "time",
            ],
            rows,
        ),
    ]
