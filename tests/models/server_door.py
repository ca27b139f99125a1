"""llama-server behind ``prefixstore serve``, and alone.

Each restart is one of the proxy and of llama-server. The proxy is the real command, in a process that is forked from
one which has its modules: importing them takes longer than all the rest.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any, cast

import httpx

from tests.models.python_door import N_PREDICT
from tests.models.records import Answer, Settings
from tests.support import ROOT, in_thread
from tests.support.llama_server import binary, start
from tests.support.served import END_SECONDS, Served

__all__ = ["Server", "alone", "proxied"]

N_CTX = 8192


def _options(settings: Settings) -> list[str]:
    kinds = ["-ctk", settings.kv, "-ctv", settings.kv if settings.fa == "on" else "f16"]
    return ["-c", str(N_CTX), "-np", "2", "-fa", settings.fa, *([] if settings.kv == "f16" else kinds)]


class Server:
    """Something that answers ``/completion``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, prompt: str, **options: Any) -> Answer:
        """A greedy completion."""
        body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "n_probs": 2, "ignore_eos": True}
        given = httpx.post(
            f"{self.url}/completion", json={**body, "return_tokens": True, **options}, timeout=120, trust_env=False
        )
        if given.status_code != 200:
            raise RuntimeError(f"status {given.status_code}: {given.text[:300]}")
        found = given.json()
        gaps = []
        for token in found.get("completion_probabilities", []):
            first, second = sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True)[:2]
            gaps.append(round(first - second, 4))
        return Answer([], found["tokens"], found["content"], gaps, found["timings"]["prompt_n"])

    def tokens_of(self, text: str) -> list[int]:
        given = httpx.post(f"{self.url}/tokenize", json={"content": text, "parse_special": True}, trust_env=False)
        return list(given.json()["tokens"])


@contextmanager
def alone(model: Path, settings: Settings, directory: Path) -> Iterator[Server]:
    """A llama-server without a store."""
    running = start(model, directory / "slots", *_options(settings))
    try:
        yield Server(running.url)
    finally:
        running.stop()


@contextmanager
def proxied(model: Path, settings: Settings, store: Path) -> Iterator[Server]:
    """``prefixstore serve`` on a store; at the end it is stopped, and has stored what is in the slots."""
    log = store.with_name(f"{store.name}.log")
    log.write_bytes(b"")  # it is read before the process has opened it
    command = [str(binary()), "-m", str(model), "--no-warmup", "-t", "1", "--threads-http", "4", *_options(settings)]
    process = _Forked(log, ["serve", str(store), "--port", "0", "--", *command])
    served = Served(cast("subprocess.Popen[bytes]", process), log)
    try:
        served.wait_ready()
        yield Server(served.url)
        served.stop()
    finally:
        served.end()


class _Forked:
    """A process that runs the command: as much of `subprocess.Popen` as `Served` needs."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["tests.models.server_door", "prefixstore.cli", "prefixstore.server.serving"])

    def __init__(self, log: Path, arguments: list[str]) -> None:
        self._process = self._context.Process(target=_command, args=(str(log), arguments), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("prefixstore serve", timeout or END_SECONDS)
        return self._process.exitcode


def _command(log: str, arguments: list[str]) -> None:
    """Run the command in this process, which was just forked."""
    from prefixstore.cli import main
    from tests.support.timeouts import disable_timeouts

    disable_timeouts()
    in_thread(_end_with_parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.chdir(ROOT)
    sys.argv = ["prefixstore", *arguments]
    sys.exit(main())


def _end_with_parent() -> None:
    """It does not outlive tests that are killed, and its llama-server does not outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
