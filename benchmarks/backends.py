"""Every backend: restore and capture of 4,096 tokens (134 MB), timed in turns with LMDB."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import alternate, forget, load, model_path, prompt_tokens, ratio, summary
from benchmarks.remote import postgresql
from benchmarks.tables import met, milliseconds, paragraph, table
from prefixstore import PrefixStore

N_TOKENS = 4096
ROUNDS = 11
CAPTURES = 3
GOALS = {"SQLite": 0.5}


def locations(directory: Path, stack: ExitStack) -> dict[str, str]:
    """Locations by name; PostgreSQL if it is installed."""
    found = {"LMDB": f"lmdb://{directory}/kv", "memory": "memory:", "SQLite": f"sqlite:///{directory}/kv.db"}
    for place in postgresql(stack).values():
        found["PostgreSQL"] = place.url
    return found


def run() -> dict[str, Any]:
    llm = load(model_path(), flash_attn=True)
    tokens = prompt_tokens(llm, N_TOKENS + 1)
    captures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        stores: dict[str, PrefixStore] = {}
        for name, location in locations(Path(root), stack).items():
            store = PrefixStore(location, namespace=name, codec="raw", queue_bytes="1GiB")
            stores[name] = stack.enter_context(store)
        llm.eval(tokens[:N_TOKENS])
        # including what the write queue does: pack, write, flush
        for _ in range(CAPTURES):
            for name, store in stores.items():
                store.clear(everything=True)
                taken = alternate({name: lambda store=store: (store.capture(llm), store.flush())}, 1, os.sync)
                captures.setdefault(name, []).extend(taken[name])

        for store in stores.values():
            forget(llm)
            assert store.restore(tokens, llm) == N_TOKENS
        times = alternate(
            {name: lambda store=store: store.restore(tokens, llm) for name, store in stores.items()},
            ROUNDS,
            lambda: forget(llm),
        )
    return {
        name: {
            "restore": summary(times[name]),
            "restore_of_lmdb": ratio(times["LMDB"], times[name]),
            "capture": summary(captures[name]),
            "capture_of_lmdb": ratio(captures["LMDB"], captures[name]),
        }
        for name in times
    }


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = []
    for name, figures in result.items():
        of_lmdb = figures["restore_of_lmdb"]
        rows.append(
            [
                name,
                milliseconds(figures["restore"]["p50"]),
                met(of_lmdb, GOALS[name]) if name in GOALS else f"{of_lmdb:.2f}",
                milliseconds(figures["capture"]["p50"]),
                f"{figures['capture_of_lmdb']:.2f}",
            ]
        )
    return [
        "## Backends: 4,096 tokens (134 MB), raw, flash attention, warm files",
        "",
        *paragraph(
            """Restore: the foreground's time. Capture: until everything is durable (`flush()`); in normal use a thread
            does most of that. Speeds are relative to LMDB's in the same round; medians. PostgreSQL is a private server
            on this machine, connected through a socket."""
        ),
        *table(["backend", "restore", "speed relative to LMDB", "capture and flush", "speed relative to LMDB"], rows),
    ]
