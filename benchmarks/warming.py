"""Warming a list of 200 prompts, compared with loops that call the model for each of them."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from benchmarks.common import load, model_path, ratio, seconds, tree_bytes
from benchmarks.tables import megabytes, met, paragraph, table
from prefixstore import PrefixStore, WarmReport, warm
from prefixstore.format.keys import as_tokens
from prefixstore.warming.prompt_list import PromptTrie

PROMPTS = 200
SYSTEMS, SYSTEM_TOKENS = 4, 300
DOCUMENTS, DOCUMENT_TOKENS = 10, (150, 500)
QUESTION_TOKENS = (20, 80)
N_CTX = 2048
ROUNDS = 2
DEMO_PROMPTS = 8  # on the model of the other benchmarks
# Few layers (4 KiB a token) and a small vocabulary, whose scores the stock caches keep with every prompt: all together
# half a million tokens are evaluated. One thread, so that a second one can write and two jobs have a core each.
MODEL = {"n_layer": 2, "n_vocab": 2048}
CONTEXT = {"n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1}


def prompts() -> list[list[int]]:
    """System prompt, document, question; in random order, the same each time."""
    rng = np.random.default_rng(4)

    def tokens(n: int) -> list[int]:
        return rng.integers(300, 2000, n).tolist()

    systems = [tokens(SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    documents = [tokens(int(n)) for n in rng.integers(*DOCUMENT_TOKENS, DOCUMENTS)]
    return [
        systems[rng.integers(SYSTEMS)]
        + documents[rng.integers(DOCUMENTS)]
        + tokens(int(rng.integers(*QUESTION_TOKENS)))
        for _ in range(PROMPTS)
    ]


def plan_of(given: list[list[int]]) -> PromptTrie:
    return PromptTrie(((as_tokens(tokens), "") for tokens in given), 0)


@contextlib.contextmanager
def counted(llm: Any) -> Iterator[list[int]]:
    """The lengths of all batches that are evaluated."""
    lengths: list[int] = []
    original = llm.eval

    def evaluate(tokens: list[int]) -> None:
        lengths.append(len(tokens))
        original(tokens)

    llm.eval = evaluate
    try:
        yield lengths
    finally:
        llm.eval = original


def plainly(llm: Any, plan: PromptTrie) -> None:
    """Evaluate the tokens of the trie, and do nothing else: the lower bound for any walk."""
    llm.reset()
    for i in range(len(plan)):
        llm.n_tokens = plan.shared[i]
        llm.eval(plan.tokens(i)[plan.shared[i] :].tolist())


def beside(folder: Path, path: Path, given: list[list[int]]) -> tuple[list[float], list[float], WarmReport, WarmReport]:
    """Times of the plain evaluation and of warming, in turns; the reports of warming once and a second time."""
    plan, llm = plan_of(given), load(path, **CONTEXT)
    plain: list[float] = []
    warmed: list[float] = []
    for i in range(ROUNDS):
        plain.append(seconds(lambda: plainly(llm, plan)))
        with PrefixStore(folder / str(i), llm, codec="raw") as store:
            report = warm(llm, store, given)
            warmed.append(report.seconds)
            again = warm(llm, store, given)
    return plain, warmed, report, again


def loop(given: list[list[int]], path: Path, cache: Callable[[Any], Any], held: Callable[[Any], int]) -> dict[str, Any]:
    """Call the model for each prompt, with a cache."""
    llm = load(path, **CONTEXT)
    kept = cache(llm)
    llm.set_cache(kept)
    # LlamaDiskCache prints every step
    with counted(llm) as lengths, contextlib.redirect_stderr(io.StringIO()):
        taken = seconds(lambda: [llm(tokens, max_tokens=1, temperature=0) for tokens in given])
    result = {"evaluated": sum(lengths), "seconds": taken, "bytes": held(kept)}
    if isinstance(kept, PrefixStore):
        kept.close()
    return result


def held_in_ram(cache: Any) -> int:
    return sum(len(s.llama_state) + s.scores.nbytes + s.input_ids.nbytes for s in cache.cache_state.values())


def two_jobs(directory: Path, given: list[list[int]], path: Path) -> dict[str, Any]:
    """Two processes on one list, with one thread each."""
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in given))
    command = [sys.executable, "-m", "benchmarks.warming", str(path), str(directory / "two"), str(file)]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) for _ in range(2)
    ]
    evaluated = [json.loads(job.communicate()[0].splitlines()[-1]) for job in jobs]
    return {"evaluated": evaluated}


def job(path: str, location: str, file: str) -> None:
    """One of the two processes."""
    llm = load(Path(path), **CONTEXT)
    with PrefixStore(location, llm, codec="raw") as store:
        print(json.dumps(warm(llm, store, [Path(file)]).evaluated_tokens))


def run() -> dict[str, Any]:
    path = model_path(**MODEL)
    given = prompts()
    plan = plan_of(given)
    results: dict[str, Any] = {"prompts": len(given), "sum": plan.prompt_tokens, "unique": plan.unique_tokens}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        plain, warmed, report, again = beside(folder / "small", path, given)
        results["plain"] = {"evaluated": plan.unique_tokens, "seconds": min(plain), "bytes": 0}
        results["prefixstore.warm"] = {
            "evaluated": report.evaluated_tokens,
            "seconds": min(warmed),
            "bytes": report.stored_bytes,
        }
        results["again"] = {"evaluated": again.evaluated_tokens, "seconds": again.seconds}
        results["small_ratio"] = ratio(warmed, plain)
        plain, warmed, _, _ = beside(folder / "demo", model_path(n_vocab=2048), given[:DEMO_PROMPTS])
        results["demo_ratio"] = ratio(warmed, plain)
        results["two"] = two_jobs(folder, given, path)
        for name, cache, held in (
            (
                "a loop, PrefixStore",
                lambda llm: PrefixStore(folder / "loop", llm, codec="raw"),
                lambda store: store.flush() or store.stats().bytes_stored,
            ),
            ("a loop, LlamaRAMCache", lambda _: LlamaRAMCache(capacity_bytes=64 << 30), held_in_ram),
            (
                "a loop, LlamaDiskCache",
                lambda _: LlamaDiskCache(str(folder / "disk"), capacity_bytes=64 << 30),
                lambda _: tree_bytes(folder / "disk"),
            ),
            ("a loop, no cache", lambda _: None, lambda _: 0),
        ):
            results[name] = loop(given, path, cache, held)
            print(f"  {name}", file=sys.stderr, flush=True)
    return results


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    names = ["plain", "prefixstore.warm", *(name for name in result if name.startswith("a loop"))]
    rows = [
        [
            "the tokens of the trie, evaluated and not kept"
            if name == "plain"
            else f"`{name}`" * (name[0] == "p") or name,
            f"{result[name]['evaluated']:,}",
            f"{result[name]['evaluated'] / result['unique']:.2f}",
            f"{result[name]['seconds']:.1f} s",
            megabytes(result[name]["bytes"]) if result[name]["bytes"] else "",
        ]
        for name in names
    ]
    two = result["two"]["evaluated"]
    return [
        f"## Warming a list of {result['prompts']} prompts",
        "",
        *paragraph(
            f"""System prompts, documents and questions, in random order: {result["sum"]:,} tokens,
            {result["unique"]:,} of them unique. The model has 2 layers, and runs in one thread. A loop calls
            `llm(prompt, max_tokens=1)` for each prompt."""
        ),
        *table(["work", "tokens evaluated", "relative to the unique tokens", "time", "held"], rows),
        *paragraph(
            f"""On the model with 16 layers warming takes {met(result["demo_ratio"], 1.05, at_most=True)} of the time
            of a plain evaluation ({DEMO_PROMPTS} of the prompts, {ROUNDS} rounds). Warming the same list again takes
            {result["again"]["seconds"]:.2f} s. Two jobs on one list evaluate
            {met(sum(two) / result["unique"], 1.1, at_most=True)} of the unique tokens."""
        ),
    ]


if __name__ == "__main__":
    job(*sys.argv[1:])
