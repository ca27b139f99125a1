"""Lists of prompts, and warming jobs in processes of their own: the command, and one that reports every step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import typer

from prefixstore import PrefixStore
from prefixstore.cli.command import ready
from prefixstore.cli.warm import warm as command_warm
from prefixstore.warming.job import Progress, warm
from tests.support.models import load, prompt
from tests.support.timeouts import disable_timeouts

app = typer.Typer()
app.command("warm")(ready(command_warm))


@app.command()
def job(arguments: str) -> None:
    """Warm prompts given as JSON; a line for each batch, and one for the end."""
    given = json.loads(arguments)
    llm = load(given["model"], n_batch=64)
    if given.get("waits"):
        # several jobs begin together, however long each of them has taken to start
        print(json.dumps({"phase": "loaded"}), flush=True)
        sys.stdin.readline()

    def show(progress: Progress) -> None:
        print(json.dumps({"phase": progress.phase, "evaluated": progress.evaluated_tokens}), flush=True)
        time.sleep(given.get("pause", 0.0))

    with PrefixStore(given["location"], llm, max_delay=None) as store:
        report = warm(llm, store, [Path(given["prompts"])], progress=show)
    print(json.dumps({"phase": "end", "evaluated": report.evaluated_tokens, "unstored": report.unstored}), flush=True)


def job_command(**arguments: object) -> list[str]:
    return [sys.executable, "-m", "tests.support.warming", "job", json.dumps(arguments)]


def shared_prompts(n: int = 60, seed: int = 0, *, question: int = 120) -> list[list[int]]:
    """Prompts that share system prompts and documents; none of the borders is that of a page."""
    rng = np.random.default_rng(seed)
    system = [prompt(700, seed + 1), prompt(333, seed + 2)]
    documents = [prompt(int(length), seed + 100 + i) for i, length in enumerate(rng.integers(50, 900, 8))]
    return [
        system[i % 2] + documents[i % 8] + prompt(int(rng.integers(3, question)), seed + 1000 + i) for i in range(n)
    ]


def unique_tokens(prompts: list[list[int]]) -> int:
    """The nodes of the trie, counted one by one."""
    return len({tuple(tokens[:end]) for tokens in map(tuple, prompts) for end in range(1, len(tokens) + 1)})


def write_jsonl(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


if __name__ == "__main__":
    disable_timeouts()
    app()
