"""HTTP servers, alone and with a store: the same conversations cold, after a restart, and live.

Each server is a process of its own and is asked by HTTP. Between the first and the second phase it is ended and started
again, with what it has left on the disk. Throughput is measured with prompts of which nothing can be found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common import SHARED, load, model_path, summary, tree_bytes
from benchmarks.tables import megabytes, met, milliseconds, paragraph, table
from prefixstore.testing.models import DEMO, write_model

ROOT = Path(__file__).parent.parent
LLAMA_SERVER = Path(os.environ.get("LLAMA_SERVER", SHARED / "bin" / "llama-server"))
THREADS = "2"
SLOTS, SLOT_TOKENS = 4, 6144
CONVERSATIONS, PROMPT_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 4, 4000, 40, 8
PHASES = ("cold", "again", "restart", "live")
# conversations whose first prompt is repeated after a restart
REPEATED = 2
CLIENTS, SHORT_TOKENS, LONGER_ANSWER = (1, 4, 8, 32), 64, 16
# at least, and two for each client
REQUESTS = 24
# alternating requests to a live slot, and rounds of throughput
LIVE, ROUNDS = 30, 3
# seconds to start, and for one answer
LONGEST = 600.0
# a hybrid model: documents, each with two questions, and rounds of them
HYBRID = replace(DEMO, arch="lfm2", n_layer=9, n_embd=1024, n_head_kv=4, n_ff=3072, conv=3)
DOCUMENT_TOKENS, QUESTION_TOKENS, HYBRID_ROUNDS = 3850, 150, 3
GOALS = {"restart": 0.05, "live": 0.005, "throughput": 0.97, "stops": 1.03, "question": 1.3}


@dataclass(frozen=True)
class Server:
    """How a server is started, and what is done around its requests."""

    command: tuple[str, ...]
    # whether it is asked to save its slot to a file after each answer, and to restore it before the next one
    slot_files: bool = False
    path: str = "/v1/completions"


@dataclass
class Asked:
    """What the answers of one phase have cost."""

    seconds: list[float] = field(default_factory=list)
    computed: int = 0
    is_counted: bool = True
    # bytes of slot files
    written: int = 0

    def add(self, other: Asked) -> None:
        self.seconds += other.seconds
        self.computed += other.computed
        self.is_counted = self.is_counted and other.is_counted
        self.written += other.written


def llama_server(model: Path, *extra: str, slots: int = SLOTS, slot_tokens: int = SLOT_TOKENS) -> tuple[str, ...]:
    return (
        *(str(LLAMA_SERVER), "-m", str(model), "-t", THREADS, "-np", str(slots), "-c", str(slots * slot_tokens)),
        *("--no-webui", "--log-disable", *extra),
    )


CONTEXT = ("--n_ctx", str(SLOT_TOKENS), "--n_threads", THREADS, "--n_threads_batch", THREADS)


def servers(model: Path, directory: Path) -> dict[str, Server]:
    """All servers; those that keep something keep it below a directory of their own."""

    def kept(name: str) -> str:
        path = directory / name
        path.mkdir(exist_ok=True)
        return str(path)

    def ours(name: str, *options: str) -> tuple[str, ...]:
        serve = (sys.executable, "-m", "prefixstore", "serve", f"lmdb://{kept(name)}", "--port", "{port}")
        return (*serve, *options, "--")

    stock = (sys.executable, "-m", "llama_cpp.server", "--model", str(model), *CONTEXT, "--port", "{port}")
    stock += ("--cache", "true")
    return {
        "llama-server": Server((*llama_server(model), "--port", "{port}")),
        "llama-server, slot files": Server(
            (*llama_server(model, "--slot-save-path", kept("files")), "--port", "{port}"), slot_files=True
        ),
        "prefixstore serve, llama-server": Server((*ours("ours"), *llama_server(model))),
        "llama_cpp.server, RAM cache": Server(stock),
        # it keeps its files in the working directory
        "llama_cpp.server, disk cache": Server((*stock, "--cache_type", "disk")),
        "prefixstore serve --model": Server((*ours("python", "--model", str(model)), *CONTEXT)),
    }


# -- processes --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def running(server: Server, directory: Path) -> Iterator[httpx.Client]:
    """A started server, as a client of it; it is ended as an operator would, by SIGTERM."""
    with started(server, directory) as (client, _):
        yield client


@contextmanager
def started(server: Server, directory: Path) -> Iterator[tuple[httpx.Client, int]]:
    """As `running`, with the number of the process."""
    port = free_port()
    command = [part.replace("{port}", str(port)) for part in server.command]
    log = directory / f"{port}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=directory, env=environment)
        try:
            # llama-server sometimes closes a connection after an answer without saying so
            limits = httpx.Limits(max_keepalive_connections=0)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONGEST, limits=limits) as client:
                _wait_until_ready(client, process, log)
                yield client, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + LONGEST
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended: {log.read_text(errors='replace')[-2000:]}")
        with contextlib.suppress(httpx.TransportError):
            if client.get("/v1/models").status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise RuntimeError("the server does not answer")


# -- requests ---------------------------------------------------------------------------------------------------------


class Words:
    """Texts of so many tokens, different for each seed."""

    def __init__(self, model: Path) -> None:
        llm = load(model, vocab_only=True)
        found = [llm.detokenize([token]).decode(errors="replace") for token in range(300, 8000)]
        self._words = [
            word for word in found if word[:1] == " " and word[1:].isalpha() and len(llm.tokenize(word.encode())) == 1
        ]

    def text(self, n: int, seed: int) -> str:
        return "".join(np.random.default_rng(seed).choice(self._words, n))


def ask(client: httpx.Client, prompt: str, asked: Asked | None = None, **options: Any) -> str:
    """The answer to a prompt, streamed; the seconds to its first text are noted."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True, **options}
    if asked is not None:
        body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    seconds, pieces, computed, told = 0.0, [], None, None
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        # what was computed ahead of the request counts as cached in the server's own figures
        told = re.search(r"computed=(\d+)", answer.headers.get("x-prefixstore", ""))
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            found = json.loads(line.removeprefix("data: "))
            pieces += [choice["text"] for choice in found.get("choices", [])]
            seconds = seconds or time.perf_counter() - started
            usage = found.get("usage") or {}
            if "timings" in found:
                computed = found["timings"]["prompt_n"]
            elif "prompt_tokens_details" in usage:
                computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    computed = int(told[1]) if told is not None else computed
    if asked is not None:
        asked.seconds.append(seconds)
        asked.computed += computed or 0
        asked.is_counted = asked.is_counted and computed is not None
    return "".join(pieces)


def turn(client: httpx.Client, server: Server, name: str, prompt: str, asked: Asked, slot: int = 0) -> str:
    """One turn of a conversation, with what a user of slot files does before and after it."""
    if not server.slot_files:
        return ask(client, prompt, asked)
    file, lost = {"filename": f"{name}.bin"}, time.perf_counter()
    client.post(f"/slots/{slot}?action=restore", json=file)
    lost = time.perf_counter() - lost
    answer = ask(client, prompt, asked, id_slot=slot)
    asked.seconds[-1] += lost
    saved = client.post(f"/slots/{slot}?action=save", json=file).raise_for_status()
    asked.written += saved.json()["n_written"]
    return answer


def conversations(
    server: Server, directory: Path, words: Words, n: int = CONVERSATIONS, n_tokens: int = PROMPT_TOKENS
) -> dict[str, Any]:
    """Three turns of each conversation: with nothing stored, after a restart, and right after that.

    Before its second turn, some are asked for their first one again, also after a restart.
    """
    phases = {name: Asked() for name in PHASES}
    texts = [words.text(n_tokens, seed) for seed in range(n)]
    answers: list[str] = []
    with running(server, directory) as client:
        ask(client, words.text(8, 99))  # the first batch of a context takes longer
        for i, text in enumerate(texts):
            texts[i] += turn(client, server, str(i), text, phases["cold"])
    with running(server, directory) as client:
        ask(client, words.text(8, 99))
        for i in range(REPEATED):
            turn(client, server, str(i), words.text(n_tokens, i), phases["again"])
    with running(server, directory) as client:
        ask(client, words.text(8, 99))
        for i in range(n):
            for name in ("restart", "live"):
                texts[i] += words.text(TURN_TOKENS, 1000 + i)
                answers.append(turn(client, server, str(i), texts[i], phases[name]))
                texts[i] += answers[-1]
    return {
        **{
            name: summary(asked.seconds) | {"computed": asked.computed if asked.is_counted else None}
            for name, asked in phases.items()
        },
        "bytes": tree_bytes(directory),
        "answers": answers,
    }


def throughput(client: httpx.Client, words: Words, n_clients: int, seed: int) -> float:
    """Requests per second of so many clients, of whose prompts nothing can be found."""
    prompts = [words.text(SHORT_TOKENS, seed * 10_000 + i) for i in range(max(REQUESTS, 2 * n_clients))]
    started = time.perf_counter()
    with ThreadPoolExecutor(n_clients) as pool:
        list(pool.map(lambda prompt: ask(client, prompt, max_tokens=LONGER_ANSWER), prompts))
    return len(prompts) / (time.perf_counter() - started)


def side_by_side(alone: Server, ours: Server, directory: Path, words: Words) -> dict[str, Any]:
    """The server alone, and behind the proxy, in turns: what is added to a live slot, and the requests per second."""
    live: dict[str, list[float]] = {"alone": [], "ours": []}
    rates: dict[str, dict[str, list[float]]] = {str(n): {"alone": [], "ours": []} for n in CLIENTS}
    with running(alone, directory) as first, running(ours, directory) as second:
        clients = {"alone": first, "ours": second}
        prompt = words.text(PROMPT_TOKENS, 500)
        for client in clients.values():
            ask(client, prompt)
        for _ in range(LIVE):
            for name, client in clients.items():
                asked = Asked()
                ask(client, prompt, asked)
                live[name] += asked.seconds
        for round_ in range(ROUNDS):
            for n in CLIENTS:
                for i, (name, client) in enumerate(clients.items()):
                    rates[str(n)][name].append(throughput(client, words, n, 1 + round_ * 100 + n * 2 + i))
    return {
        "live": {name: summary(times) for name, times in live.items()},
        "rates": {
            n: {name: statistics.median(each) for name, each in found.items()}
            | {"ratio": statistics.median(o / a for a, o in zip(found["alone"], found["ours"], strict=True))}
            for n, found in rates.items()
        },
    }


def hybrid(directory: Path) -> dict[str, Any]:
    """Documents with a question, cold; after a restart with another question, beside that question alone.

    Returns
    -------
    dict
        Seconds to the first text, by phase and server, in the order of the rounds.
    """
    model = directory / "hybrid.gguf"
    write_model(model, HYBRID)
    words, found = Words(model), servers(model, directory)
    both = {"alone": found["llama-server"], "ours": found["prefixstore serve, llama-server"]}
    cold: dict[str, list[float]] = {name: [] for name in both}
    asked: dict[str, list[float]] = {name: [] for name in both}

    def prompt(number: int, question: int) -> str:
        return f"{words.text(DOCUMENT_TOKENS, number)}\n\n{words.text(QUESTION_TOKENS, 1000 + 10 * number + question)}"

    def first_text(client: httpx.Client, text: str, to: list[float]) -> None:
        each = Asked()
        ask(client, text, each)
        to += each.seconds

    with running(both["alone"], directory) as alone, running(both["ours"], directory) as ours:
        clients = {"alone": alone, "ours": ours}
        for client in clients.values():
            ask(client, words.text(600, 99))
        for i in range(HYBRID_ROUNDS):
            for j, (name, client) in enumerate(clients.items()):
                first_text(client, prompt(2 * i + j, 0), cold[name])
    with running(both["alone"], directory) as alone, running(both["ours"], directory) as ours:
        for client in (alone, ours):
            ask(client, words.text(8, 99))
        for i in range(HYBRID_ROUNDS):
            first_text(alone, words.text(QUESTION_TOKENS, 5000 + i), asked["alone"])
            first_text(ours, prompt(2 * i + 1, 1), asked["ours"])
    return {"cold": cold, "question": asked}


def run() -> dict[str, Any] | None:
    if not LLAMA_SERVER.exists():
        print(f"no llama-server at {LLAMA_SERVER}; set LLAMA_SERVER=", file=sys.stderr)
        return None
    model = model_path()
    words, results = Words(model), {}
    with tempfile.TemporaryDirectory() as root:
        found = servers(model, Path(root))
        for name, server in found.items():
            directory = Path(root) / f"work-{name.replace(' ', '-').replace(',', '')}"
            directory.mkdir()
            print(f"  {name} ...", file=sys.stderr, flush=True)
            results[name] = conversations(server, directory, words)
            kept = [path for path in Path(root).iterdir() if path.is_dir() and path != directory]
            results[name]["bytes"] += sum(map(tree_bytes, kept))
            for path in [directory, *kept]:
                for each in path.iterdir():
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
        beside = side_by_side(found["llama-server"], found["prefixstore serve, llama-server"], directory, words)
        of_hybrid = hybrid(Path(root))
    reference = results["llama-server"]["answers"]
    for figures in results.values():
        figures["differing"] = sum(a != b for a, b in zip(figures.pop("answers"), reference, strict=True))
    return {"servers": results, "beside": beside, "hybrid": of_hybrid}


def section(result: dict[str, Any] | None) -> list[str]:
    """The figures as Markdown."""
    if result is None:
        return []
    found, beside = result["servers"], result["beside"]
    rows = [
        [
            name,
            *(f"{milliseconds(each['p50'])}, {milliseconds(each['p95'])}" for each in _phases(figures)),
            ", ".join(_counted(each["computed"]) for each in _phases(figures)),
            megabytes(figures["bytes"]),
            str(figures["differing"]),
        ]
        for name, figures in found.items()
    ]
    ours = found["prefixstore serve, llama-server"]
    again, share = (ours[name]["p50"] / ours["cold"]["p50"] for name in ("again", "restart"))
    alone = found["llama-server"]
    least = alone["live"]["p50"] / alone["cold"]["p50"]
    added = beside["live"]["ours"]["p50"] - beside["live"]["alone"]["p50"]
    rates = [
        [n, f"{each['alone']:.2f}", f"{each['ours']:.2f}", met(each["ratio"], GOALS["throughput"])]
        for n, each in beside["rates"].items()
    ]
    return [
        "## Servers",
        "",
        *paragraph(
            f"""{CONVERSATIONS} conversations of {PROMPT_TOKENS:,} tokens, asked by HTTP and streamed; time to the first
            text, p50 and p95. Cold: nothing is stored. Again: all processes were ended by SIGTERM and started again,
            and {REPEATED} of the prompts are repeated. Restart: the same once more, and each conversation goes on with
            {TURN_TOKENS} tokens. Live: its next turn. llama-server has {SLOTS} slots; its "slot files" are
            saved after and restored before each turn by the client, and their time counts. `llama_cpp.server` has one
            context. Bytes: on the disk at the end. Differing: answers, of {2 * CONVERSATIONS}, that are not those of
            llama-server alone; the Python servers evaluate in other batches."""
        ),
        *table(
            ["server", "cold", "again", "restart", "live", "tokens computed in each phase", "bytes", "differing"], rows
        ),
        *paragraph(
            f"""After a restart the first text behind us takes {met(again, GOALS["restart"], at_most=True)} of its cold
            time for the same prompt, and {share:.3f} for the next turn, which takes {least:.3f} of it in a live slot of
            llama-server alone. To a live slot `prefixstore serve` adds {added * 1e3:.1f} ms (goal: at most
            {GOALS["live"] * 1e3:g}), {LIVE} requests in turns."""
        ),
        *paragraph(
            f"""Requests per second, of {SHORT_TOKENS} tokens of which nothing can be found, with answers of
            {LONGER_ANSWER} tokens; medians of {ROUNDS} rounds in turns, and the median of their ratios:"""
        ),
        *table(["clients", "llama-server", "behind the proxy", "ratio"], rates),
        *(_of_hybrid(result["hybrid"]) if "hybrid" in result else []),
    ]


def _of_hybrid(found: dict[str, Any]) -> list[str]:
    """The figures of the hybrid model as a paragraph."""
    alone, ours = (statistics.median(found["cold"][name]) for name in ("alone", "ours"))
    question, restored = (statistics.median(found["question"][name]) for name in ("alone", "ours"))
    return paragraph(
        f"""A hybrid model ({HYBRID.n_layer} layers of {HYBRID.n_embd:,}), a document of {DOCUMENT_TOKENS:,} tokens and
        a question of {QUESTION_TOKENS}: cold, the first text takes {milliseconds(alone)} alone and {milliseconds(ours)}
        behind us, with its stops for snapshots: {met(ours / alone, GOALS["stops"], at_most=True)} times as long. After
        a restart of everything, the document with another question takes {milliseconds(restored)}, and that question
        alone, without the document, {milliseconds(question)}:
        {met(restored / question, GOALS["question"], at_most=True)} times as long. Medians of
        {HYBRID_ROUNDS}, in turns."""
    )


def _phases(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return [figures[name] for name in PHASES]


def _counted(computed: int | None) -> str:
    return "not told" if computed is None else f"{computed:,}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="servers", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--hybrid", action="store_true", help="only the hybrid model")
    given = parser.parse_args(arguments)
    if given.hybrid:
        with tempfile.TemporaryDirectory() as directory:
            figures = hybrid(Path(directory))
        print(json.dumps(figures) if given.json else "\n".join(_of_hybrid(figures)))
        return
    found = run()
    print(json.dumps(found) if given.json else "\n".join(section(found)))


if __name__ == "__main__":
    main()
