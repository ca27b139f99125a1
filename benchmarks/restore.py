"""A restore of 4,096 tokens in a second process, compared with the limit and with ``Llama.load_state``.

The limit is one ``llama_state_seq_set_data`` of the same state from a warm buffer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.common import (
    alternate,
    forget,
    in_child,
    load,
    model_path,
    pointer_of,
    prompt_tokens,
    ratio,
    state_of,
    summary,
)
from benchmarks.tables import megabytes, met, milliseconds, paragraph, table
from prefixstore import PrefixStore

N_TOKENS = 4096
ROUNDS = 15


def capture(model: str, location: str, flash: bool, codec: str, n_tokens: int) -> None:
    llm = load(Path(model), flash_attn=flash)
    with PrefixStore(location, llm, codec=codec) as store:
        llm.eval(prompt_tokens(llm, n_tokens))
        store.capture()


def measure(model: Path, location: str, flash: bool, codec: str, n_tokens: int) -> dict[str, Any]:
    llm = load(model, flash_attn=flash)
    tokens = prompt_tokens(llm, n_tokens + 1)
    with PrefixStore(location, llm, codec=codec, read_only=True) as store:
        assert store.restore(tokens) == n_tokens
        state = state_of(llm)
        saved = llm.save_state()
        times = alternate(
            {
                "limit": lambda: llama_cpp.llama_state_seq_set_data(pointer_of(llm), state, len(state), 0),
                "prefixstore": lambda: store.restore(tokens),
                "load_state": lambda: llm.load_state(saved),
            },
            ROUNDS,
            lambda: forget(llm),
        )
        assert store.stats().tokens_restored == (ROUNDS + 1) * n_tokens
        stats = store.stats()
    return {
        "state_bytes": len(state),
        "stored_bytes": stats.bytes_stored,
        "seconds": {name: summary(taken) for name, taken in times.items()},
        "of_limit": ratio(times["limit"], times["prefixstore"]),
        "times_load_state": ratio(times["load_state"], times["prefixstore"]),
    }


def between(model: Path, flash: bool, codec: str, n_tokens: int) -> dict[str, Any]:
    """A prompt is captured in one process, and restored in this one."""
    with tempfile.TemporaryDirectory() as directory:
        location = str(Path(directory) / "kv")
        in_child("benchmarks.restore", str(model), location, str(int(flash)), codec, str(n_tokens))
        return measure(model, location, flash, codec, n_tokens)


def run() -> dict[str, Any]:
    found = {}
    for flash, context in ((True, "flash attention"), (False, "V transposed")):
        for codec in ("raw", "auto", "planes"):
            found[f"{context}, {codec}"] = between(model_path(), flash, codec, N_TOKENS)
    return found


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = []
    for name, figures in result.items():
        if name.endswith(", encrypted"):
            continue  # see the section about encryption
        seconds, share = figures["seconds"], figures["of_limit"]
        context, codec = name.split(", ")
        goal = 0.9 if context == "flash attention" else 0.75
        raw = result[f"{context}, raw"]["of_limit"]
        rows.append(
            [
                name,
                milliseconds(seconds["limit"]["p50"]),
                f"{milliseconds(seconds['prefixstore']['p50'])} (p95 {milliseconds(seconds['prefixstore']['p95'])})",
                met(share, goal) if codec == "raw" else f"{share:.2f}",
                met(share / raw, 0.75) if codec == "auto" else f"{share / raw:.2f}",
                milliseconds(seconds["load_state"]["p50"]),
                f"{figures['times_load_state']:.1f} times faster",
                megabytes(figures["stored_bytes"]),
            ]
        )
    head = [
        "context, codec",
        "limit",
        "prefixstore",
        "share of the limit",
        "relative to raw",
        "`load_state`",
        "speedup over it",
        "stored",
    ]
    return [
        "## Restore of 4,096 tokens (134 MB) from LMDB in a second process",
        "",
        *paragraph(
            """The limit is one `llama_state_seq_set_data` of the same state from a warm buffer; `Llama.load_state` is
            what the stock caches call. In turns, medians of 15 rounds; a share is the median of the rounds' ratios.
            `auto` leaves pages raw in a file that the system keeps in memory."""
        ),
        *table(head, rows),
    ]


if __name__ == "__main__":
    capture(*sys.argv[1:3], bool(int(sys.argv[3])), sys.argv[4], int(sys.argv[5]))
