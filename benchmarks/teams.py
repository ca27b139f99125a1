"""Four workloads of a team through HTTP, on three kinds of models: alone, with slot files, and behind us.

``python -m benchmarks.teams [--kind KIND] [--workload NAME] [--json]``. Each server is a process of its own. A workload
has two rounds: the first is asked twice, cold and then live; the second is asked after all processes were ended and
started again. The model swap has no live round: each request ends one server and starts the other, as llama-swap does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.common import CACHE, summary, tree_bytes
from benchmarks.servers import LLAMA_SERVER, Asked, Server, Words, ask, llama_server, started, turn
from benchmarks.tables import megabytes, paragraph, table
from prefixstore.testing.models import Shape, write_model

SLOTS, SLOT_TOKENS = 4, 20_480
# small, so that 15,000 tokens take seconds; with a larger model, whoever computes least gains more
KINDS = {
    "attention": Shape("llama", n_layer=6, n_embd=256, n_head=4, head_dim=64, n_ff=768, n_vocab=8192),
    "window": Shape(
        "gemma3",
        n_layer=6,
        n_embd=256,
        n_head=4,
        head_dim=64,
        n_ff=768,
        n_vocab=8192,
        sliding_window=1024,
        rope_freq_base=1e6,
        norm_eps=1e-6,
    ),
    "hybrid": Shape(
        "lfm2", n_layer=9, n_embd=256, n_head=4, head_dim=64, n_ff=768, n_vocab=8192, conv=3, rope_freq_base=1e6
    ),
}
RESTART, LIVE, COLD = "restart", "live", "cold"
PHASES = (COLD, LIVE, RESTART)
# the store writes what was captured within seconds of the last answer
SETTLE = 4.0


class Request(NamedTuple):
    """A prompt, and the conversation that it belongs to: a client keeps one slot file for each."""

    conversation: str
    prompt: str


@dataclass
class Figures:
    """What the requests of a workload have cost with one server, by phase; and bytes on the disk, kept and written."""

    asked: dict[str, Asked] = field(default_factory=lambda: {name: Asked() for name in PHASES})
    kept: int = 0
    # by the proxy
    written: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "phases": {
                name: summary(one.seconds) | {"total": sum(one.seconds), "computed": one.computed}
                for name, one in self.asked.items()
                if one.seconds
            },
            "kept": self.kept,
            "written": self.written + sum(one.written for one in self.asked.values()),
        }


# -- workloads --------------------------------------------------------------------------------------------------------


def agents(words: Words, round_: int) -> list[list[Request]]:
    """A coding agent with a prompt of 15,000 tokens, and subagents that begin with the same tools."""
    tools, files = words.text(6000, 1), words.text(9000, 2)
    found = []
    for number in range(3):
        turns = "".join(words.text(300, 100 + i) for i in range(3 * round_ + number))
        found.append([Request("agent", tools + files + turns)])
        task = words.text(800, 200 + 3 * round_ + number)
        found.append([Request(f"subagent {3 * round_ + number}", tools + task)])
    return found


def shared(words: Words, round_: int) -> list[list[Request]]:
    """A system prompt of 2,000 tokens, and eight users with something of their own, four at a time."""
    system = words.text(2000, 3)
    users = [
        Request(
            f"user {i}", system + words.text(400, 300 + i) + "".join(words.text(60, 400 + j) for j in range(round_))
        )
        for i in range(8)
    ]
    return [users[:4], users[4:]]


def rag(words: Words, round_: int) -> list[list[Request]]:
    """Questions about three of twelve documents each, the popular ones more often, the same ones in the same order."""
    chosen = np.random.default_rng(5 + round_)
    popularity = 1 / np.arange(1, 13)
    found = []
    for number in range(10):
        documents = sorted(chosen.choice(12, 3, replace=False, p=popularity / popularity.sum()).tolist())
        text = words.text(200, 4) + "".join(words.text(700, 500 + one) for one in documents)
        found.append([Request(f"documents {documents}", text + words.text(50, 600 + 10 * round_ + number))])
    return found


WORKLOADS: dict[str, Callable[[Words, int], list[list[Request]]]] = {"agents": agents, "shared": shared, "rag": rag}
NAMES = {
    "agents": "15,000 tokens, three turns, three subagents",
    "shared": "a system prompt of 2,000 tokens, 8 users",
    "rag": "three of twelve documents, 10 questions",
    "swap": "two models in turns, 4,000 tokens each",
}


# -- servers ----------------------------------------------------------------------------------------------------------

OURS, FILES = "prefixstore serve", "llama-server, slot files"
# by name: its own options, of llama-server
PEERS: dict[str, tuple[str, ...]] = {
    "llama-server, --cache-ram 0": ("--cache-ram", "0"),
    "llama-server": (),
    FILES: ("--slot-save-path", "{kept}"),
    OURS: (),
}


def server_of(name: str, model: Path, kept: Path) -> Server:
    """A server; what it keeps is in a directory."""
    kept.mkdir(exist_ok=True)
    port = ("--port", "{port}")
    own = [part.replace("{kept}", str(kept)) for part in PEERS[name]]
    command = llama_server(model, *own, slots=SLOTS, slot_tokens=SLOT_TOKENS)
    if name == OURS:
        return Server((sys.executable, "-m", "prefixstore", "serve", f"lmdb://{kept}", *port, "--", *command))
    return Server((*command, *port), slot_files=bool(own) and "--slot-save-path" in own)


def _written(process: int) -> int:
    """Bytes that a process has written so far, as Linux counts them; elsewhere 0."""
    counts = Path(f"/proc/{process}/io")
    return int(dict(line.split(": ") for line in counts.read_text().splitlines())["wchar"]) if counts.exists() else 0


@contextmanager
def begun(server: Server, directory: Path, figures: Figures) -> Iterator[httpx.Client]:
    """A started server, after the first batch of its context, which takes longer; what it writes is counted."""
    with started(server, directory) as (client, process):
        ask(client, "a few words to begin with", max_tokens=1)
        yield client
        if "serve" in server.command:
            time.sleep(SETTLE)
            figures.written += _written(process)


def play(client: httpx.Client, server: Server, groups: Sequence[Sequence[Request]], asked: Asked) -> None:
    """Ask the requests of a round, those of a group at the same time."""

    def answer(request: Request, slot: int) -> Asked:
        mine = Asked()
        turn(client, server, request.conversation.replace(" ", "-"), request.prompt, mine, slot)
        return mine

    with ThreadPoolExecutor(SLOTS) as pool:
        for group in groups:
            for mine in pool.map(answer, group, range(len(group))):
                asked.add(mine)


def measured(server: Server, kept: Path, directory: Path, words: Words, workload: str) -> Figures:
    """A workload with one server: cold, live, and after a restart."""
    figures, rounds = Figures(), WORKLOADS[workload]
    with begun(server, directory, figures) as client:
        play(client, server, rounds(words, 0), figures.asked[COLD])
        play(client, server, rounds(words, 0), figures.asked[LIVE])
    with begun(server, directory, figures) as client:
        play(client, server, rounds(words, 1), figures.asked[RESTART])
    figures.kept = tree_bytes(kept)
    return figures


def swapped(both: Sequence[Server], kept: Path, directory: Path, words: Words) -> Figures:
    """Two models in turns, each started for its request: the first of each is cold."""
    figures = Figures()
    for number in range(6):
        server = both[number % 2]
        prompt = words.text(4000, 700 + number % 2) + "".join(words.text(60, 800 + i) for i in range(number // 2))
        phase = figures.asked[COLD if number < 2 else RESTART]
        with begun(server, directory, figures) as client:
            turn(client, server, f"model-{number % 2}", prompt, phase)
    figures.kept = tree_bytes(kept)
    return figures


def model_of(kind: str, seed: int = 0) -> Path:
    path = CACHE / f"teams-{kind}-{seed}.gguf"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        write_model(path, KINDS[kind], seed=seed)
    return path


def run(kinds: Sequence[str] = tuple(KINDS), workloads: Sequence[str] = tuple(NAMES)) -> dict[str, Any] | None:
    if not LLAMA_SERVER.exists():
        print(f"no llama-server at {LLAMA_SERVER}; set LLAMA_SERVER=", file=sys.stderr)
        return None
    results: dict[str, Any] = {kind: {workload: {} for workload in workloads} for kind in kinds}
    for kind, workload, name in itertools.product(kinds, workloads, PEERS):
        print(f"  {kind}, {workload}: {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as root:
            kept, directory = Path(root) / "kept", Path(root) / "work"
            directory.mkdir()
            words = Words(model_of(kind))
            both = [server_of(name, model_of(kind, seed), kept) for seed in (0, 1)]
            if workload == "swap":
                figures = swapped(both, kept, directory, words)
            else:
                figures = measured(both[0], kept, directory, words, workload)
        results[kind][workload][name] = figures.as_dict()
    return results


# -- the report -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any] | None) -> list[str]:
    """The figures as Markdown."""
    if result is None:
        return []
    pairs = [(f"{kind}, {name}", found) for kind, workloads in result.items() for name, found in workloads.items()]
    rows, lost = [], 0
    for title, found in pairs:
        row = [title]
        for phase in PHASES:
            took = {name: of["phases"][phase]["p50"] for name, of in found.items() if phase in of["phases"]}
            ours = took.pop(OURS, 0.0)
            is_lost = any(seconds < ours for seconds in took.values())
            lost += is_lost
            shown = [f"{seconds * 1e3:.1f}" for seconds in took.values()]
            row.append("; ".join([*shown, f"**{ours * 1e3:.1f}**" if is_lost else f"{ours * 1e3:.1f}"]) if took else "")
        disk = (f"{megabytes(found[name]['kept'])}, {megabytes(found[name]['written'])}" for name in (FILES, OURS))
        rows.append([*row, "; ".join(disk)])
    described = "; ".join(f"{name} ({NAMES[name]})" for name in NAMES if any(name in each for each in result.values()))
    n_phases = sum(len(found[OURS]["phases"]) for _, found in pairs)
    return [
        "## Workloads of a team",
        "",
        *paragraph(
            f"""Through HTTP, with {SLOTS} slots, on small models with random weights (of larger ones, what is not
            computed counts for more): {described}. Live: the same requests once more. Restart: all processes were
            ended, and started again, and each conversation goes on, or asks something else. Time to the first text in
            ms, p50, of {"; ".join(PEERS)}. A client of slot files restores one before each request and saves it
            afterwards, of which the first counts. In {lost} of {n_phases} phases, in bold, another server is faster
            than `{OURS}`. Disk: of slot files and of `{OURS}` (with what it sends over sockets)."""
        ),
        *table(["model, workload", *PHASES, "disk at the end, written"], rows),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="teams", description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind of model")
    parser.add_argument("--workload", action="append", choices=NAMES, help="only this workload")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    found = run(given.kind or tuple(KINDS), given.workload or tuple(NAMES))
    print(json.dumps(found) if given.json else "\n".join(section(found)))


if __name__ == "__main__":
    main()
