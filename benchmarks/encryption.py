"""An encrypted location beside one that is not, in turns: a commit, a lookup, a restore, and one by llama-server."""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import filled
from benchmarks.common import LIGHT, alternate, forget, load, model_path, prompt_tokens, ratio, seconds, summary
from benchmarks.servers import LLAMA_SERVER, PROMPT_TOKENS, Asked, Server, Words, ask, llama_server, running
from benchmarks.tables import milliseconds, paragraph, table
from prefixstore import PrefixStore
from prefixstore.engine.pages import open_pages
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import Usage

KEYS = {"plain": "none", "encrypted": "env:BENCHMARK_KEY"}
PAGES, PAGE_BYTES, STORED_PAGES = 16, 8 << 20, 10_000
N_TOKENS, ROUNDS = 4096, 15
SPACE = filled.namespace()

Times = dict[str, list[float]]


def commit(root: Path) -> Times:
    """16 pages of 8 MB in one update, as they are; not synchronized."""
    payload = os.urandom(PAGE_BYTES)
    pages = list(islice(filled.records_of(filled.LONG, SPACE.key, time.time_ns()), PAGES))
    found = {name: open_pages(root / f"commit-{name}", max_bytes=2 << 30, key=key) for name, key in KEYS.items()}

    def put(name: str) -> None:
        with found[name].update() as transaction:
            for key, record in pages:
                transaction.put(key, record, Usage(record.created), payload)

    def delete() -> None:
        for each in found.values():
            with each.update() as transaction:
                for key, _ in reversed(pages):
                    transaction.delete(key)

    return _in_turns(put, delete)


def lookups(root: Path) -> dict[str, Times]:
    """A stored prompt of 32,000 tokens, by a store that has just opened, and again."""
    prompt = as_tokens(filled.tokens_of(filled.LONG))
    times: dict[str, Times] = {which: {name: [] for name in KEYS} for which in ("first lookup", "lookup")}
    for turn in range(ROUNDS + 1):
        for name, key in KEYS.items():
            with PrefixStore(root / f"lookup-{name}", max_bytes="1GiB", key=key) as store:
                if turn == 0:
                    filled.fill(store._engine._backend, SPACE, STORED_PAGES)
                    continue
                match = partial(store.engine.match, SPACE.key, prompt, page_tokens=filled.PAGE_TOKENS)
                for each in times.values():
                    each[name].append(seconds(match))
                assert match().n_tokens == filled.LONG_TOKENS
    return times


def restores(root: Path) -> Times:
    """4,096 tokens of 32 KiB, raw, with flash attention, by two contexts in this process."""
    with ExitStack() as stack:
        llms, stores = {}, {}
        for name, key in KEYS.items():
            llm = llms[name] = load(model_path(**LIGHT), flash_attn=True)
            tokens = prompt_tokens(llm, N_TOKENS + 1)
            stores[name] = stack.enter_context(PrefixStore(root / f"restore-{name}", llm, codec="raw", key=key))
            llm.eval(tokens[:-1])
            stores[name].capture()
            stores[name].flush()

        def restore(name: str) -> None:
            assert stores[name].restore(tokens) == N_TOKENS

        return _in_turns(restore, lambda: [forget(llm) for llm in llms.values()])


def served(root: Path) -> Times:
    """Two prompts in turns to one slot: each first text is that of a restore of 4,000 tokens."""
    model = model_path(**LIGHT)
    words, times = Words(model), {name: [] for name in KEYS}
    prompts = [words.text(PROMPT_TOKENS, seed) for seed in range(2)]
    with ExitStack() as stack:
        clients = {}
        for name, key in KEYS.items():
            serve = (sys.executable, "-m", "prefixstore", "serve", f"lmdb://{root}/serve-{name}", "--port", "{port}")
            with patch.dict(os.environ, {"PREFIXSTORE_KEY": key}):
                command = Server((*serve, "--", *llama_server(model, slots=1)))
                clients[name] = stack.enter_context(running(command, root))
            for prompt in prompts:
                ask(clients[name], prompt)
        for turn in range(ROUNDS + 1):
            for name, client in clients.items():
                asked = Asked()
                ask(client, prompts[turn % 2], asked)
                assert asked.computed < PROMPT_TOKENS / 10
                times[name] += asked.seconds[: turn > 0]
    return times


def _in_turns(work: Callable[[str], object], before: Callable[[], object]) -> Times:
    """The times of both, but those of the first round."""
    times = alternate({name: partial(work, name) for name in KEYS}, ROUNDS + 1, before)
    return {name: taken[1:] for name, taken in times.items()}


def run() -> dict[str, Any]:
    key = {"BENCHMARK_KEY": base64.b64encode(bytes(32)).decode()}
    with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, key):
        root = Path(directory)
        found = {"commit": commit(root), **lookups(root), "restore": restores(root)}
        if LLAMA_SERVER.exists():
            found["llama-server"] = served(root)
    return {
        name: {each: summary(taken) for each, taken in times.items()}
        | {"ratio": ratio(times["encrypted"], times["plain"])}
        for name, times in found.items()
    }


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    titles = {
        "commit": f"a commit of {PAGES} pages of {PAGE_BYTES / 1e6:.1f} MB",
        "first lookup": f"a lookup of {filled.LONG_TOKENS:,} tokens, the first of a store",
        "lookup": "the same lookup again",
        "restore": f"a restore of {N_TOKENS:,} tokens, 134 MB",
        "llama-server": f"the first text of llama-server after a restore of {PROMPT_TOKENS:,} tokens",
    }
    rows = []
    for name, each in result.items():
        both = [f"{milliseconds(each[key]['p50'])} (p95 {milliseconds(each[key]['p95'])})" for key in KEYS]
        rows.append([titles[name], *both, f"{each['ratio']:.2f}"])
    text = f"""A location in LMDB with [a key](security.md#encryption), beside one without: medians of {ROUNDS} turns,
        and of their ratios. The goal is a restore that takes at most 2.5 times as long. Pages are raw; among
        {STORED_PAGES:,} a prompt is looked up. Without a key pages are read where they lie in the map of LMDB."""
    return ["## Encryption", "", *paragraph(text), *table(["", *KEYS, "times as long"], rows)]
