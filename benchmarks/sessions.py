"""Interleaved conversations on one ``Llama``: what a switch costs."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import llama_cpp
from llama_cpp import LlamaRAMCache

from benchmarks.common import LIGHT, load, model_path, prompt_tokens, summary
from benchmarks.tables import milliseconds, paragraph, table
from prefixstore import PrefixStore

ANSWER = 4


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    conversations: tuple[int, ...] = (4, 16, 64)
    # tokens of each at its beginning, and of each turn
    first: int = 400
    turn: int = 24
    # turns at most, for each way to serve them
    measured: int = 32
    n_ctx: int = 8192


FULL = Sizes()

# how the conversations are served
WAYS = {"no cache": "none", "LlamaRAMCache": "ram", "sessions": "sessions"}

# the seconds of the switch, of the first token in all, and where the conversation came from
Turn = Callable[[str, list[int]], tuple[float, float, str]]


def _first_token(complete: Callable[..., Iterator[Any]], prompt: list[int], started: float) -> float:
    chunks = complete(prompt, max_tokens=ANSWER, temperature=0, stream=True)
    next(chunks)
    seconds = time.perf_counter() - started
    list(chunks)
    return seconds


@contextmanager
def _served(kind: str, llm: llama_cpp.Llama, sizes: Sizes) -> Iterator[Turn]:
    """A function that has a conversation continue."""
    with ExitStack() as stack:
        if kind == "sessions":
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            store = stack.enter_context(PrefixStore(directory, llm))
            sessions = store.sessions(max_sessions=max(sizes.conversations))

            def turn(name: str, prompt: list[int]) -> tuple[float, float, str]:
                started = time.perf_counter()
                with sessions.admit(name) as session:
                    switch = time.perf_counter() - started
                    return switch, _first_token(session.create_completion, prompt, started), session.source

        else:
            llm.set_cache(LlamaRAMCache(8 << 30) if kind == "ram" else None)
            stack.callback(llm.set_cache, None)

            def turn(name: str, prompt: list[int]) -> tuple[float, float, str]:
                return 0.0, _first_token(llm.create_completion, prompt, time.perf_counter()), kind

        yield turn


def _turns(kind: str, llm: llama_cpp.Llama, n: int, sizes: Sizes) -> dict[str, Any]:
    """Each conversation has a turn after all others had theirs; figures of all but the first round."""
    said = {f"conversation {i}": prompt_tokens(llm, sizes.first, seed=i) for i in range(n)}
    switches, firsts, sources = [], [], []
    llm.reset()
    with _served(kind, llm, sizes) as turn:
        for k in range(1 + math.ceil(sizes.measured / n)):
            for i, name in enumerate(said):
                if len(firsts) == sizes.measured:
                    break
                # without a cache, nothing is left of an earlier turn
                if k or kind != "none":
                    switch, first, source = turn(name, said[name])
                if k:
                    switches.append(switch)
                    firsts.append(first)
                    sources.append(source)
                said[name] += prompt_tokens(llm, sizes.turn, seed=1000 * (k + 1) + i)
    return {
        "switch": summary(switches),
        "first_token": summary(firsts),
        "sources": {source: sources.count(source) for source in sorted(set(sources))},
    }


def run(sizes: Sizes = FULL) -> dict[str, Any]:
    llm = load(model_path(**LIGHT), n_ctx=sizes.n_ctx)
    turns = {str(n): {way: _turns(kind, llm, n, sizes) for way, kind in WAYS.items()} for n in sizes.conversations}
    llm.close()
    return {"sizes": vars(sizes), "turns": turns}


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    sizes = result["sizes"]
    rows = [
        [
            n,
            *(milliseconds(figures[way]["first_token"]["p50"]) for way in WAYS),
            f"{milliseconds(figures['sessions']['switch']['p50'])} {_mostly(figures['sessions'])}",
        ]
        for n, figures in _by_n(result)
    ]
    return [
        "## Sessions",
        "",
        *paragraph(
            f"""Time to the first token, p50, when each conversation has its turn after all others: {sizes["first"]:,}
            tokens, and {sizes["turn"]} more in each turn; an eighth of the computation of the model above. The
            switch is `admit`, to the beginning of the block; in parentheses where most conversations came from."""
        ),
        *table(["conversations", *WAYS, "of that, the switch"], rows),
    ]


def _by_n(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(result["turns"].items())


def _mostly(figures: dict[str, Any]) -> str:
    sources: dict[str, int] = figures["sources"]
    return f"({max(sources, key=lambda source: sources[source])})"
