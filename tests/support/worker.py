"""Processes for tests: ``in_process("evaluate_and_store", ...)`` runs a function of this module, `in_fork` forks."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from prefixstore import PrefixStore
from tests.support import ROOT
from tests.support.models import load, prompt
from tests.support.timeouts import disable_timeouts


def command(function: str, **arguments: Any) -> list[str]:
    """The command that runs a function in a process of its own, which prints what it returns."""
    return [sys.executable, "-m", "tests.support.worker", function, json.dumps(arguments)]


class Worker:
    """A process that runs one function after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(self, function: str, arguments: dict[str, Any]) -> Any:
        """What the function returns; if it fails, so does this."""
        print(json.dumps([function, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()} in {function}"
        answered = json.loads(line)
        assert "error" not in answered, answered["error"]
        return answered["result"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


# Starting Python with llama.cpp costs more than most of what is done in it.
_workers: deque[Worker] = deque()


def in_process(function: str, **arguments: Any) -> Any:
    """Run a function of this module in another process: never in the one that ran the previous function."""
    if len(_workers) < 2:
        _workers.append(Worker())
    else:
        _workers.rotate(1)
    return _workers[-1].run(function, arguments)


def in_fork(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; what it raises fails the test."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 180
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the forked child hangs")
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(status) == 0


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
    sessions.fork(next(iter(turns)), "fork")
    cache.flush()
    print(json.dumps(held), flush=True)
    for i in range(1_000_000):
        with sessions.admit(f"later {i % 5}") as session:
            session.create_completion(prompt(40, seed=i), max_tokens=2, temperature=0)


def serve() -> None:
    """Run the functions that are named on standard input, one a line, until it ends."""
    for line in sys.stdin:
        function, arguments = json.loads(line)
        try:
            answered = {"result": globals()[function](**arguments)}
        except Exception:  # noqa: BLE001 - reported to the caller
            answered = {"error": traceback.format_exc()}
        gc.collect()
        print(json.dumps(answered), flush=True)


if __name__ == "__main__":
    disable_timeouts()
    if sys.argv[1:]:
        print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
    else:
        serve()
