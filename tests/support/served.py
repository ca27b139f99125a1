"""`prefixstore serve` as a process of its own, in front of a real llama-server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixstore.server.slot_pool import WORTH_A_SAVE
from tests.support import ROOT
from tests.support.llama_server import Running, binary, start
from tests.support.signals import started
from tests.support.untimed import untimed

START_SECONDS = 180
# how long a process may take to end
END_SECONDS = 120
TEXT = " ".join((ROOT / "docs" / "design.md").read_text().split())
ADDRESS = re.compile(r"prefixstore: listening on (http://\S+)")


@dataclass
class Served:
    """A proxy that runs."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.http = httpx.Client(timeout=120, trust_env=False)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(self.url + path, **{"headers": self.headers, **options})

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(self.url + path, **{"headers": self.headers, **options})

    def complete(self, prompt: Any, n: int = 12, **options: Any) -> dict[str, Any]:
        """A greedy completion."""
        headers = options.pop("headers", self.headers)
        body = {"prompt": prompt, "n_predict": n, "temperature": 0} | options
        answer = self.http.post(f"{self.url}/completion", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def status(self) -> dict[str, Any]:
        answer = self.get("/prefixstore/status")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The status, once it is as wanted."""
        deadline = time.monotonic() + START_SECONDS
        while not holds(status := self.status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.02)
        return status

    def saved(self) -> dict[str, Any]:
        """The status, once nothing in the slots waits to be stored, and what was captured is written."""

        def holds(status: dict[str, Any]) -> bool:
            # fewer tokens are saved when the server stops
            waits = any(slot["unsaved_tokens"] >= WORTH_A_SAVE or slot["in_use"] for slot in status["slots"])
            return (
                not waits and not status["copies"] and status["store"]["pages_captured"] <= status["store"]["entries"]
            )

        return self.until(holds)

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        found = 0.0
        for line in self.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and wanted <= set(head.partition("{")[2].rstrip("}").split(",")):
                found += float(value)
        return found

    def counts(self, value: float, name: str, **labels: str) -> bool:
        """Whether a metric gets this value: an answer is counted just after its end was sent."""
        deadline = time.monotonic() + START_SECONDS
        while self.metric(name, **labels) != value and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.metric(name, **labels) == value

    @contextmanager
    def endless(self, text: str = "Hello") -> Iterator[Iterator[str]]:
        """An answer that is not at its end before it is read; its lines.

        The candidates for each token make it longer than what is kept of an answer that its client does not read.
        """
        body = {"prompt": text, "n_predict": -1, "temperature": 0, "stream": True, "ignore_eos": True, "n_probs": 200}
        with self.http.stream("POST", self.url + "/completion", json=body, headers=self.headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            yield response.iter_lines()

    def child(self) -> int:
        """The process id of llama-server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self.process.wait(END_SECONDS)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"prefixstore serve has ended: {self.text()[-2000:]}")
            found = ADDRESS.search(self.text())
            if found:
                self.url = found[1]
                if self.get("/prefixstore/health").status_code == 200:
                    return
            time.sleep(0.02)
        pytest.fail(f"prefixstore serve is not ready: {self.text()[-2000:]}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it, and return its exit code."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"prefixstore serve did not end: {self.text()[-2000:]}")

    def end(self) -> None:
        """End it at once, if it runs."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


Serve = Callable[..., Served]


def launch(
    tmp_path: Path,
    name: str,
    arguments: list[str],
    environment: dict[str, str] | None = None,
    program: object = "prefixstore",
) -> Served:
    """Start the command."""
    log = tmp_path / f"{name}.log"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    process = started(untimed(program, "serve", *arguments), log, env=environ, cwd=tmp_path)
    return Served(process, log)


@contextmanager
def proxies(directory: Path, docs_model: Path) -> Iterator[Serve]:
    """Starts proxies with children on a store in `directory`; they end with the block."""
    started: list[Served] = []

    def starter(
        *server_options: str,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        ready: bool = True,
        model: Path = docs_model,
    ) -> Served:
        argv = [str(binary()), "-m", str(model), "--no-warmup", "-t", "1", "--threads-http", "8", *server_options]
        if not {"-np", "--parallel"} & set(server_options):
            argv += ["-np", "2"]
        if not {"-c", "--ctx-size"} & set(server_options):
            argv += ["-c", "4096"]
        arguments = [str(directory / "store"), "--port", "0", *options, "--", *argv]
        served = launch(directory, f"served{len(started)}", arguments, environment)
        served.headers = headers or {}
        started.append(served)
        if ready:
            served.wait_ready()
        return served

    yield starter
    for served in started:
        served.end()


@pytest.fixture
def serve(tmp_path: Path, docs_model: Path) -> Iterator[Serve]:
    """Starts proxies with children, which end with the test: ``serve("-np", "1")`` with options of llama-server."""
    with proxies(tmp_path, docs_model) as starter:
        yield starter


@pytest.fixture(scope="module")
def shared_proxy(tmp_path_factory: pytest.TempPathFactory, docs_model: Path) -> Iterator[Served]:
    """One for the tests that need no empty store, and leave it at work."""
    with proxies(tmp_path_factory.mktemp("shared"), docs_model) as starter:
        yield starter()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, docs_model: Path) -> Any:
    """The server without the proxy, whose cold answers are right."""
    running = start(docs_model, tmp_path_factory.mktemp("alone") / "slots", "-c", "4096", "--cache-ram", "0")
    yield running
    running.stop()


def prompt(i: int, n: int = 1500) -> str:
    """Texts that differ from their first word on."""
    return f"{chr(65 + i)} is part {i} of it. " + TEXT[i * 400 :][:n]


# by server, prompt and number of tokens
_own: dict[tuple[str, str, int], set[str]] = {}


def own_answers(alone: Running, text: str, n: int = 12) -> set[str]:
    """What the server itself answers: cold, and after a part of the prompt or all of it was in the slot.

    These differ by rounding, since a prompt is then computed in batches of other sizes, and where two tokens are almost
    equally likely that shows.
    """
    asked = (alone.url, text, n)
    if asked not in _own:
        answers = _own[asked] = {alone.cold(text, n)}
        for before in (None, f"{text[0]} xyz", f"{text[:9]} xyz"):
            alone.client.erase(0)
            if before is not None:
                alone.complete(before, n)
            answers |= {alone.complete(text, n)["content"] for _ in range(2)}
    return _own[asked]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["timings"]["cache_n"])
