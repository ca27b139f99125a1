"""``python -m benchmarks.packing``: what packing under pressure gains on traces, and what restoring packed pages costs.

Measured: how much `planes` saves on states of the trained model, and how long a restore of raw and of packed pages, and
computing them, takes there. Replayed: traces through the real engine, with its water marks. Modelled
in the replay: one block of a trace is one page of one token, whose payload of `BLOCK_BYTES` saves as much as the
measured states do; and only payloads count against the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import codecs
from benchmarks.common import load
from benchmarks.eviction import TRACES
from benchmarks.replay import CAPACITIES, NAMESPACE, Prompts, read
from benchmarks.tables import paragraph, table
from prefixstore.backends.contract import Costs
from prefixstore.backends.memory import MemoryBackend
from prefixstore.buffers import BufferPool
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import PendingPage
from prefixstore.format.autocodec import pick
from prefixstore.format.codec import PACKINGS
from prefixstore.format.keys import TOKEN_BYTES, as_tokens
from prefixstore.stats import Counters

BLOCK_BYTES = 4096
# name -> codec
MODES = {"raw only": "raw", "packed always": "planes", "packed under pressure": "auto"}


# -- measured on a model -----------------------------------------------------------------------------------------------


def measure() -> dict[str, float]:
    """On 16 pages of the trained model: what planes save, and milliseconds for each page."""
    options = {"n_ctx": codecs.N_TOKENS + codecs.PAGE_TOKENS, "n_threads": 1, "n_threads_batch": 1}
    llm = load(codecs.TRAINED, flash_attn=True, **options)
    tokens = codecs.text_tokens(llm)
    # of the processor, by one thread: what else runs on the machine does not count
    started = time.process_time()
    llm.eval(tokens)
    computing = (time.process_time() - started) / codecs.N_PAGES
    pages = codecs.pages_of(llm)
    packed = [PACKINGS["planes"].pack(page) for page in pages]
    with tempfile.TemporaryDirectory() as directory:
        restores = codecs.Restores(llm, as_tokens(tokens), pages, Path(directory)).run()
    llm.close()
    n = len(pages)
    return {
        "page_bytes": len(pages[0]),
        "ratio": sum(map(len, pages)) / sum(map(len, packed)),
        "compute_ms": 1e3 * computing,
        **{
            f"{codec}_{how}_ms": 1e3 * restores[codec][how]["p50"] / n
            for codec in ("raw", "planes")
            for how in ("warm", "cold")
        },
    }


def payload_like(ratio: float) -> bytes:
    """A payload of `BLOCK_BYTES` that planes pack by about this ratio."""
    payload = np.frombuffer(np.random.default_rng(0).bytes(BLOCK_BYTES), np.uint8).copy()
    for n in range(0, BLOCK_BYTES, 8):
        # upper bytes, one after the other
        payload[1:n:2] = 0
        if BLOCK_BYTES / len(PACKINGS["planes"].pack(payload.tobytes())) >= ratio:
            break
    return payload.tobytes()


# -- replayed ----------------------------------------------------------------------------------------------------------


class _Payloads(Costs):
    """A row takes what its payload has, and nothing else."""

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        return payload or 0


class Replayed:
    """The engine with a budget in bytes."""

    def __init__(self, mode: str, policy: str, max_bytes: int, payload: bytes) -> None:
        self.counters = Counters()
        encode = pick(MODES[mode])
        self.engine = Engine(Pages(MemoryBackend()), Budget(max_bytes), POLICIES[policy](), encode, self.counters)
        buffer = BufferPool(1 << 20).acquire(len(payload))
        assert buffer is not None
        buffer.view[:] = payload
        self._buffer = buffer
        self.n_written = self.n_packed_hits = 0

    def request(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are restored; then all of them are stored."""
        tokens = np.array(blocks, "<i4")
        path = self.engine.match(NAMESPACE, tokens, 1)
        self.engine.touch(NAMESPACE, path.pages)
        self.n_packed_hits += sum(page.stored_bytes < page.raw_bytes for page in path.pages)
        raw, batch = tokens.tobytes(), []
        parent = path.pages[-1].key if path.pages else NAMESPACE
        for start in range(path.n_tokens, len(blocks)):
            at = start * TOKEN_BYTES
            new = PendingPage.of(NAMESPACE, b"{}", parent, start, raw[at : at + TOKEN_BYTES], self._buffer)
            if not self.engine.announce(new):
                break
            batch.append(new)
            parent = new.page.key
        self.n_written += self.engine.commit(batch)
        return path.n_tokens


def replay(prompts: Prompts, capacity: str, mode: str, policy: str, payload: bytes) -> dict[str, float]:
    """One trace through one store, whose budget is this part of all unique blocks, raw."""
    unique = len({block for prompt in prompts for block in prompt})
    n_blocks = sum(map(len, prompts))
    with patch("prefixstore.backends.memory.COSTS", _Payloads()):
        cache = Replayed(mode, policy, round(float(capacity) * unique * len(payload)), payload)
        hits = sum(cache.request(prompt) for prompt in prompts)
        used = cache.engine.used()
    return {
        "hit_rate": hits / n_blocks,
        "packed_hits": cache.n_packed_hits / max(hits, 1),
        "written": cache.n_written,
        "evicted": cache.counters["evictions"],
        "ratio": used[2] / max(used[1], 1),
        "n_blocks": n_blocks,
    }


def run(
    capacities: Sequence[str] = CAPACITIES, policies: Sequence[str] = ("adaptive",), requests: int | None = None
) -> dict[str, Any] | None:
    if not codecs.TRAINED.exists() or not all(path.exists() for path in TRACES.values()):
        return None
    measured = measure()
    payload = payload_like(measured["ratio"])
    found: dict[str, Any] = {}
    for trace, path in TRACES.items():
        prompts = read(path, requests)
        for policy in policies:
            for mode in MODES:
                for capacity in capacities:
                    print(f"{trace}, {policy}, {mode}, {capacity} ...", file=sys.stderr, flush=True)
                    result = replay(prompts, capacity, mode, policy, payload)
                    found.setdefault(trace, {}).setdefault(policy, {}).setdefault(mode, {})[capacity] = result
    return {
        "measured": measured,
        "block_ratio": len(payload) / len(PACKINGS["planes"].pack(payload)),
        "replayed": found,
    }


# -- shown -------------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any] | None) -> list[str]:
    """The figures as Markdown."""
    if result is None:
        return []
    measured = result["measured"]
    slower = measured["planes_warm_ms"] - measured["raw_warm_ms"]
    lines = ["## Packing under pressure", ""]
    lines += paragraph(
        f"""Measured on states of the trained model (pages of {measured["page_bytes"] / 1e6:.2f} MB, f16): `planes`
        save {1 - 1 / measured["ratio"]:.1%} (ratio {measured["ratio"]:.3f}). A page takes {measured["raw_warm_ms"]:.2f}
        ms to restore raw and {measured["planes_warm_ms"]:.2f} ms packed, from a file in memory;
        {measured["raw_cold_ms"]:.2f} and {measured["planes_cold_ms"]:.2f} ms from one that is not. It takes
        {measured["compute_ms"]:.0f} ms of one core to compute, with only six million parameters: one more hit pays for
        {measured["compute_ms"] / max(slower, 1e-3):.0f} restores of packed instead of raw pages."""
    )
    lines += paragraph(
        f"""Replayed through the real engine, with its water marks; modelled: a block is a page of one token with a
        payload of {BLOCK_BYTES} bytes that packs by {result["block_ratio"]:.3f}, and payloads alone count against the
        budget. Budgets are fractions of the bytes that all unique blocks take raw. Hit rate; in parentheses the share
        of the hits that restored packed pages; pages written, again or for the first time, for each block."""
    )
    if "no idle time" in json.dumps(result["replayed"]):
        lines += paragraph(
            """Measured when room was still made in idle time, from 95 % down to 90 % of the budget, in all rows but the
            first."""
        )
    for trace, policies in result["replayed"].items():
        for policy, modes in policies.items():
            capacities = list(next(iter(modes.values())))
            rows = [[mode, *(_cell(cell) for cell in cells.values())] for mode, cells in modes.items()]
            lines += paragraph(f"The {trace} trace, policy `{policy}`:")
            lines += table(["pages", *(f"{float(capacity):.0%}" for capacity in capacities)], rows)
    return lines


def _cell(found: dict[str, Any]) -> str:
    written = found["written"] / found["n_blocks"]
    return f"{found['hit_rate']:.3f} ({found['packed_hits']:.0%}); {written:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="packing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--capacity", nargs="+", default=CAPACITIES, metavar="C", help="fractions of all unique blocks")
    parser.add_argument("--policy", nargs="+", default=["adaptive"], choices=list(POLICIES))
    parser.add_argument("--requests", type=int, help="replay only this many, from the start of each trace")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = run(options.capacity, options.policy, options.requests)
    print(json.dumps(result) if options.json else "\n".join(section(result)))


if __name__ == "__main__":
    main()
