"""Processes for tests: `command` runs a function of this module, `in_fork` forks."""

from __future__ import annotations

import json
import sys
from typing import Any

from prefixstore import PrefixStore
from tests.support import in_fork
from tests.support.models import load, prompt
from tests.support.timeouts import disable_timeouts

__all__ = ["command", "in_fork"]


def command(function: str, **arguments: Any) -> list[str]:
    """The command that runs a function of this module in a process of its own."""
    return [sys.executable, "-m", "tests.support.worker", function, json.dumps(arguments)]


def converse_until_killed(
    *, model: str, location: str, turns: dict[str, list[int]], options: dict, store: dict
) -> None:
    """A turn in each session, made durable, and their tokens printed; then more turns, until the process is killed."""
    llm = load(model, **options)
    cache = PrefixStore(location, llm, **store)
    sessions = cache.sessions()
    held = {}
    for name, tokens in turns.items():
        with sessions.admit(name) as session:
            session.create_completion(tokens, max_tokens=5, temperature=0)
            held[name] = session.tokens.tolist()
    cache.flush()
    print(json.dumps(held), flush=True)
    for i in range(1_000_000):
        with sessions.admit(f"later {i % 5}") as session:
            session.create_completion(prompt(40, seed=i), max_tokens=2, temperature=0)


if __name__ == "__main__":
    disable_timeouts()
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
