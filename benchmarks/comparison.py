"""Four workloads, three models, and every cache beside the others: how long a request waits, and what it costs.

Each cache has a process of its own, and they are asked in turns, request by request, so that a noisy moment reaches all
of them. They start with an empty cache, are ended, and start again with what they have left; that is repeated until
their ratios differ less from round to round than from 1. The answers without a cache are the history of all
conversations, so every cache gets the same prompts.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent import MODEL
from benchmarks.common import LIGHT, LIGHT_8B, ROOT, load, model_path, peak_rss, summary, tree_bytes, written_bytes
from benchmarks.peers import LMDB_AUTO, LMDB_RAW, NOTHING, PEERS, RAM, SQLITE
from benchmarks.tables import megabytes, milliseconds, paragraph, table
from benchmarks.workloads import LARGE, SMALL, Request, Sizes, Workload, prompt_of, workload

N_CTX = 4096
ANSWER_TOKENS = 8
OURS = (LMDB_RAW, LMDB_AUTO, SQLITE)
# restarts
ROUNDS, MOST_ROUNDS = 3, 6
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
    peer.settle()
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    return seconds, text, llm.input_ids[len(prompt) : llm.n_tokens].tolist()


def process(model: str, cache: str, directory: Path, tell: Any) -> None:
    """One process with one cache: it answers the prompts that it reads, and tells at the end what it has cost."""
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
    before = written_bytes()
    peer = PEERS[cache](llm, directory)
    tell({})
    for line in sys.stdin:
        counted, lost = evaluated[0], peer.watch.seconds
        seconds, text, answer = ask(llm, peer, json.loads(line))
        tell(
            {
                "first_token": seconds,
                "text": text,
                "answer": answer,
                "evaluated": evaluated[0] - counted,
                "lost_seconds": peer.watch.seconds - lost,
            }
        )
    peer.close()
    tell({"written_bytes": written_bytes() - before, "peak_rss": peak_rss()})


def relative(times: list[float], ours: list[float]) -> float:
    """Seconds to the first token relative to ours: the median of the requests' ratios."""
    return statistics.median(a / b for a, b in zip(times, ours, strict=True))


def verdict(ratios: list[float]) -> str:
    """Whether a cache is faster or slower than ours; equal, if its rounds differ by more than they differ from 1.

    The round that differs most is left out if there are five or more.
    """
    middle = statistics.median(ratios)
    kept = sorted(ratios, key=lambda one: abs(one - middle))[: len(ratios) - (len(ratios) >= 5)]
    if max(kept) - min(kept) >= abs(middle - 1):
        return "equal"
    return "slower" if middle > 1 else "faster"


def relatives(rounds: list[dict[str, Any]]) -> dict[str, list[float]]:
    """For each cache and round, its seconds to the first token relative to ours."""
    return {
        cache: [relative(each[cache]["first_token"], each[LMDB_RAW]["first_token"]) for each in rounds]
        for cache in rounds[0]
    }


def is_undecided(ratios: dict[str, list[float]]) -> bool:
    """Whether another cache than ours may still turn out to be faster or slower."""
    return any(verdict(found) == "equal" for cache, found in ratios.items() if cache not in OURS)


class Worker:
    """A process with one cache, and what its answers have cost."""

    def __init__(self, model: str, cache: str, directory: Path) -> None:
        self.cache, self.told = cache, []
        command = [sys.executable, "-m", __spec__.name, model, cache, str(directory)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._read()  # it is ready

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.cache} has ended with code {self._process.wait()}")
        return json.loads(line)

    def ask(self, prompt: list[int]) -> None:
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self.told.append(self._read())

    def figures(self) -> dict[str, Any]:
        """What was told since this was called last."""
        told, self.told = self.told, []
        return {
            "first_token": [one["first_token"] for one in told],
            "texts": [one["text"] for one in told],
            "evaluated": sum(one["evaluated"] for one in told),
            "lost_seconds": sum(one["lost_seconds"] for one in told),
        }

    def end(self) -> dict[str, Any]:
        """Close the cache, and end; returns what was told, with what it has cost in all."""
        self._process.stdin.close()
        return self.figures() | self._read()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def workers(model: str, caches: Sequence[str], directory: Path) -> Iterator[dict[str, Worker]]:
    """A process for each cache, with its own directory."""
    found: dict[str, Worker] = {}
    try:
        for cache in caches:
            (directory / cache).mkdir(parents=True, exist_ok=True)
            found[cache] = Worker(model, cache, directory / cache)
        yield found
    finally:
        for worker in found.values():
            worker.kill()


def in_turns(asked: Sequence[Worker], requests: list[Request], answers: list[list[int]]) -> None:
    """Ask each process each request; who is first changes. The answers without a cache are added, if they are new."""
    first = len(answers)
    for i, request in enumerate(requests):
        prompt = prompt_of(request, answers)
        for k in range(len(asked)):
            asked[(i + k) % len(asked)].ask(prompt)
        if len(answers) == first + i:
            answers += [worker.told[-1]["answer"] for worker in asked if worker.cache == NOTHING]


def begun(
    model: str, caches: list[str], directory: Path, requests: Workload, answers: list[list[int]]
) -> dict[str, dict[str, Any]]:
    """The figures of each cache when it begins empty; of the one that ends with its process also without a restart."""
    with workers(model, caches, directory) as asked:
        in_turns(list(asked.values()), requests.cold, answers)
        found = {cache: {"cold": worker.figures()} for cache, worker in asked.items()}
        if RAM in asked:
            # the answers are not known yet
            in_turns([asked[NOTHING], asked[RAM]], requests.warm, answers)
            found[RAM]["stayed"] = asked[RAM].figures()
        for cache, worker in asked.items():
            found[cache]["cold"] = worker.end() | found[cache]["cold"]
    return found


def restarted(
    model: str, caches: list[str], directory: Path, requests: Workload, answers: list[list[int]]
) -> dict[str, Any]:
    """The figures of each cache when it begins with what is in its directory, which stays as it is."""
    with tempfile.TemporaryDirectory() as root:
        copied = Path(root) / "warm"
        shutil.copytree(directory, copied)
        with workers(model, caches, copied) as asked:
            in_turns(list(asked.values()), requests.warm, answers)
            found = {cache: worker.end() for cache, worker in asked.items()}
        return {cache: figures | {"disk_bytes": tree_bytes(copied / cache)} for cache, figures in found.items()}


def compare(model: str, name: str, caches: list[str]) -> dict[str, Any]:
    """Every cache on one workload and model. Answers are compared with those without a cache."""
    vocabulary = load(model_file(model), vocab_only=True)
    requests = workload(name, vocabulary, MODELS[model].sizes, trained=MODELS[model].path is not None)
    answers: list[list[int]] = []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        found = begun(model, caches, Path(root), requests, answers)
        while len(rounds) < ROUNDS or (len(rounds) < MOST_ROUNDS and is_undecided(relatives(rounds))):
            rounds.append(restarted(model, caches, Path(root), requests, answers))
    for cache, ratios in relatives(rounds).items():
        each = [round_[cache]["first_token"] for round_ in rounds]
        found[cache]["warm"] = {
            **rounds[0][cache],
            "first_token": list(map(statistics.median, zip(*each, strict=True))),
            "relative": ratios,
            "verdict": verdict(ratios),
        }
        found[cache]["disk_bytes"] = found[cache]["warm"].pop("disk_bytes")
    _compare_answers(found, is_live=name == "chat")
    return found


def _compare_answers(found: dict[str, Any], *, is_live: bool) -> None:
    """Count the answers that differ from those without a cache, in place of the answers."""
    reference = {phase: found[NOTHING][phase]["texts"] for phase in ("cold", "warm")}
    for cache, figures in found.items():
        for phase in [phase for phase in ("cold", "warm", "stayed") if phase in figures]:
            texts = figures[phase].pop("texts")
            pairs = zip(texts, reference["cold" if phase == "cold" else "warm"], strict=True)
            figures[phase]["differing"] = sum(text != expected for text, expected in pairs)
            figures[phase]["seconds"] = summary(figures[phase]["first_token"])
        if is_live and cache in OURS:
            # the live prefix makes the same batches as without a cache
            assert not figures["cold"]["differing"], f"{cache} gives another answer"


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
    lines += paragraph(f"{models}. {losses(result)}")
    lines += [f"![Time to the first token, {model}]({plot(model)})" for model in result]
    names = next(iter(result.values()))
    rows = [
        [
            f"{model}, {cache}",
            *(waited(found[cache]) for found in by_workload.values()),
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
    """How long requests have waited after the restart, beside ours, and the tokens evaluated."""
    warm, ratios = figures["warm"], figures["warm"]["relative"]
    beside = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) {warm['verdict']}"
    times = f"{milliseconds(warm['first_token'][0])}; {milliseconds(warm['seconds']['p50'])}"
    return f"{times}; {beside}; {warm['evaluated']:,}"


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

READ = """Each cache has a process of its own, and the processes are asked in turns, request by request; what one does
after an answer ends before the next is asked. The restart is repeated three to six times. A cell has, after the
restart, the time to the first token of the first request; the median of all; the time relative to prefixstore (LMDB,
raw), the median of the requests' ratios, and of the rounds, with the lowest and the highest round; tokens evaluated.
*Equal* is what differs more from round to round than from 1. What it costs, over both phases: the foreground's time
for each request; bytes written to files; blocks on the disk at the end; peak RSS of the larger process, with the mapped
pages of LMDB's file; greedy answers that differ from those without a cache. Files are in the system's memory."""


def plot(model: str) -> str:
    return f"plots/first-token-{model}.png"


def losses(result: dict[str, Any]) -> str:
    """The cells in which another cache was faster after the restart, or as fast."""
    cells: dict[str, list[str]] = {"faster": [], "equal": [], "slower": []}
    for model, by_workload in result.items():
        for name, found in by_workload.items():
            peers = {cache: found[cache]["warm"] for cache in found if cache not in OURS}
            best = min(peers, key=lambda cache: statistics.median(peers[cache]["relative"]))
            ratio = statistics.median(peers[best]["relative"])
            cells[peers[best]["verdict"]].append(f"{WORKLOADS[name].lower()}, {model} ({best}: {ratio:.2f})")
    n = sum(map(len, cells.values()))
    return f"""The best other cache beside prefixstore (LMDB, raw), in {n} cells: faster in {_listed(cells["faster"])};
        equal in {_listed(cells["equal"])}; slower in {_listed(cells["slower"])}."""


def _listed(cells: list[str]) -> str:
    return f"{len(cells)}: {', '.join(cells)}" if cells else "none"


if __name__ == "__main__":
    # LlamaDiskCache prints every step, and so may llama.cpp
    told = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        process(*sys.argv[1:3], Path(sys.argv[3]), lambda what: print(json.dumps(what), file=told, flush=True))
