"""Four workloads, three models, and every cache beside the others: how long a request waits, and what it costs.

Each cell is two processes: one that starts with an empty cache, and one that starts with what the first has left. The
answers without a cache are the history of all conversations, so every cache gets the same prompts.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent import MODEL
from benchmarks.common import LIGHT, LIGHT_8B, in_child, load, model_path, peak_rss, summary, tree_bytes, written_bytes
from benchmarks.peers import LMDB_AUTO, LMDB_RAW, NOTHING, PEERS, RAM, SQLITE
from benchmarks.tables import megabytes, milliseconds, paragraph, table
from benchmarks.workloads import LARGE, SMALL, Sizes, prompt_of, workload

N_CTX = 4096
ANSWER_TOKENS = 8
OURS = (LMDB_RAW, LMDB_AUTO, SQLITE)
WORKLOADS = {
    "users": "One system prompt, many users",
    "chat": "A long chat",
    "documents": "Documents in prompts",
    "agent": "An agent session of the trace",
}
# the cache that ends with its process, used further in the same process
STAYED = f"{RAM}, not restarted"


@dataclass(frozen=True)
class Model:
    title: str
    path: Path | None
    shape: dict[str, int]
    sizes: Sizes


MODELS = {
    "1B": Model("32 KiB of state a token, as of a 1B model", None, {**LIGHT, "n_vocab": 32000}, LARGE),
    "8B": Model(
        "128 KiB of state a token, as of an 8B model",
        None,
        {**LIGHT_8B, "n_vocab": 32000},
        SMALL,
    ),
    "trained": Model("the trained model, 3 KiB of state a token", MODEL, {}, LARGE),
}


def model_file(name: str) -> Path:
    model = MODELS[name]
    return model.path if model.path is not None else model_path(**model.shape)


def ask(llm: Any, peer: Any, prompt: list[int]) -> tuple[float, str, list[int]]:
    """Seconds to the first token, the answer, and its tokens that were evaluated."""
    started = time.perf_counter()
    peer.before(prompt)
    stream = llm(prompt, max_tokens=ANSWER_TOKENS, temperature=0, stream=True)
    pieces = [next(stream)]
    seconds = time.perf_counter() - started
    pieces += stream
    peer.after()
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    return seconds, text, llm.input_ids[len(prompt) : llm.n_tokens].tolist()


def process(model: str, name: str, cache: str, phases: list[str], directory: Path) -> dict[str, Any]:
    """One process: load, open the cache, ask the requests of the phases, close."""
    llm = load(model_file(model), n_ctx=N_CTX)
    # the first batch of a context takes longer
    llm.eval(list(range(300, 308)))
    llm.reset()
    evaluated = [0]
    original = llm.eval

    def count(tokens: list[int]) -> None:
        evaluated[0] += len(tokens)
        original(tokens)

    llm.eval = count
    requests = workload(name, llm, MODELS[model].sizes, trained=MODELS[model].path is not None)
    known = directory / "answers.json"
    answers = json.loads(known.read_text()) if known.exists() else []
    figures: dict[str, Any] = {}
    before = written_bytes()
    peer = PEERS[cache](llm, directory)
    for phase in phases:
        asked = requests.cold if phase == "cold" else requests.warm
        counted, lost = evaluated[0], peer.watch.seconds
        times, texts = [], []
        for request in asked:
            seconds, text, tokens = ask(llm, peer, prompt_of(request, answers))
            times.append(seconds)
            texts.append(text)
            if cache == NOTHING:
                answers.append(tokens)
        figures[phase] = {
            "first_token": times,
            "texts": texts,
            "prompt_tokens": sum(len(prompt_of(request, answers)) for request in asked),
            "evaluated": evaluated[0] - counted,
            "lost_seconds": peer.watch.seconds - lost,
        }
    peer.close()
    figures[phases[0]] |= {"written_bytes": written_bytes() - before, "peak_rss": peak_rss()}
    if cache == NOTHING:
        known.write_text(json.dumps(answers))
    return figures


def child(model: str, name: str, cache: str, phases: str, directory: Path) -> dict[str, Any]:
    """Run `process` as a process."""
    return json.loads(in_child(__spec__.name, model, name, cache, phases, str(directory)).splitlines()[-1])


def held_bytes(directory: Path) -> int:
    return sum(tree_bytes(path) for path in directory.iterdir() if path.is_dir()) + sum(
        path.stat().st_blocks * 512 for path in directory.glob("kv.db*")
    )


def cell(model: str, name: str, cache: str, answers: str | None) -> tuple[dict[str, Any], str]:
    """Both phases of one cache: its figures, and the answers without a cache."""
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        if answers is not None:
            (directory / "answers.json").write_text(answers)
        # a cache that ends with its process is also measured without the restart
        figures = child(model, name, cache, "cold,warm" if cache == RAM else "cold", directory)
        stayed = figures.pop("warm", None)
        figures |= child(model, name, cache, "warm", directory)
        figures["disk_bytes"] = held_bytes(directory)
        if stayed is not None:
            figures["stayed"] = stayed
        return figures, (directory / "answers.json").read_text()


def compare(model: str, name: str, caches: list[str]) -> dict[str, Any]:
    """Every cache on one workload and model. Answers are compared with those without a cache."""
    found: dict[str, Any] = {}
    answers: str | None = None
    for cache in caches:
        figures, answers = cell(model, name, cache, answers)
        found[cache] = figures
    reference = {phase: found[NOTHING][phase]["texts"] for phase in ("cold", "warm")}
    for cache, figures in found.items():
        for phase in [phase for phase in ("cold", "warm", "stayed") if phase in figures]:
            pairs = zip(figures[phase]["texts"], reference["cold" if phase == "cold" else "warm"], strict=True)
            figures[phase]["differing"] = sum(text != expected for text, expected in pairs)
        if name == "chat" and cache in OURS:
            # the live prefix makes the same batches as without a cache
            assert not figures["cold"]["differing"], f"{cache} gives another answer on {model}"
    for figures in found.values():
        for phase in [phase for phase in ("cold", "warm", "stayed") if phase in figures]:
            del figures[phase]["texts"]
            figures[phase]["seconds"] = summary(figures[phase]["first_token"])
    return found


def run(models: list[str] | None = None, names: list[str] | None = None, caches: list[str] | None = None) -> Any:
    if not MODEL.exists():
        return None
    results: dict[str, Any] = {}
    for model in models or MODELS:
        results[model] = {}
        for name in names or WORKLOADS:
            started = time.perf_counter()
            results[model][name] = compare(model, name, caches or list(PEERS))
            print(f"  {model}, {name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return results


def section(result: dict[str, Any] | None) -> list[str]:
    """The figures as Markdown."""
    if result is None:
        return []
    models = "; ".join(f"{name}: {MODELS[name].title}" for name in result)
    lines = ["## Beside the other caches", "", *paragraph(ABOUT), *paragraph(READ)]
    cells = [is_lost(found) for by_workload in result.values() for found in by_workload.values()]
    lines += paragraph(
        f"""{models}. In {sum(cells)} of {len(cells)} cells, marked with an asterisk, another cache had a lower median
        after the restart than {LMDB_RAW}."""
    )
    lines += [f"![Time to the first token, {model}]({plot(model)})" for model in result]
    names = next(iter(result.values()))
    rows = [
        [
            f"{model}, {cache}",
            *(waited(found[cache]) + " \\*" * (cache == LMDB_RAW and is_lost(found)) for found in by_workload.values()),
        ]
        for model, by_workload in result.items()
        for cache in next(iter(by_workload.values()))
    ]
    lines += ["", *table(["after the restart", *(WORKLOADS[name] for name in names)], rows)]
    # of the other models they are alike, and in latest.json
    costs = [
        [f"1B, {cache}", *(spent(found[cache]) for found in result["1B"].values())]
        for cache in next(iter(names.values()))
    ]
    lines += table(["what it costs", *(WORKLOADS[name] for name in names)], costs)
    return lines


def waited(figures: dict[str, Any]) -> str:
    """How long requests have waited after the restart, and the tokens evaluated."""
    warm = figures["warm"]
    return f"{milliseconds(warm['first_token'][0])}; {waits(warm)}; {warm['evaluated']:,}"


def spent(figures: dict[str, Any]) -> str:
    """Time in the foreground, bytes, and answers that differ, of both phases."""
    cold, warm = figures["cold"], figures["warm"]
    lost = (cold["lost_seconds"] + warm["lost_seconds"]) / (len(cold["first_token"]) + len(warm["first_token"]))
    written = megabytes(cold["written_bytes"] + warm["written_bytes"])
    rss = megabytes(max(cold["peak_rss"], warm["peak_rss"]))
    differing = cold["differing"] + warm["differing"]
    return f"{milliseconds(lost)}; {written}; {megabytes(figures['disk_bytes'])}; {rss}; {differing}"


ABOUT = """Four seeded workloads on three models. *Many users*: one system prompt, and users who ask in turns. *A long
chat*: one conversation. *Documents*: a system prompt, three of six documents in varying order, and a question. *Agent*:
a session of the agent trace. Each cell is two processes: one starts with an empty cache, and ends; the next continues
with what the first has left, with 4 to 16 requests. *No cache* is what llama-cpp-python does by itself. *State files*
are what a careful user writes by hand, by `llama_state_save_file` and `llama_state_load_file`: they verify nothing,
make nothing durable, serve one process, and are never evicted. `LlamaDiskCache` removes an entry when it is hit."""

READ = """After the restart: time to the first token of the first request; p50, p95 of all; tokens evaluated. What it
costs, over both phases: the foreground's time for each request; bytes written to files; blocks on the disk at the end;
peak RSS of the larger process, with the mapped pages of LMDB's file; greedy answers that differ from those without a
cache. Files are in the system's memory. The same work took up to 1.5 times as long in one process as in the next: of
two cells that are closer than that, neither is faster."""


def plot(model: str) -> str:
    return f"plots/first-token-{model}.png"


def is_lost(found: dict[str, Any]) -> bool:
    """Whether another cache had the shorter wait after the restart, by the median."""
    seconds = {cache: each["warm"]["seconds"]["p50"] for cache, each in found.items()}
    return min(seconds[cache] for cache in found if cache not in OURS) < seconds[LMDB_RAW]


def waits(phase: dict[str, Any]) -> str:
    seconds = phase["seconds"]
    return f"{milliseconds(seconds['p50'])}, {milliseconds(seconds['p95'])}"


if __name__ == "__main__":
    # LlamaDiskCache prints every step
    with contextlib.redirect_stderr(io.StringIO()):
        print(json.dumps(process(*sys.argv[1:4], sys.argv[4].split(","), Path(sys.argv[5]))))
