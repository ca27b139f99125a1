"""A real llama-server, on a free port, with a slot directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixstore.server.client import LlamaServer
from tests.support import ROOT
from tests.support.ports import free_port
from tests.support.signals import started

PLACES = (ROOT.parent / "shared" / "bin", Path("/work/shared/bin"))
SHARED_MODELS = (ROOT.parent / "shared" / "models", Path("/work/shared/models"))
START_SECONDS = 180


def binary() -> Path:
    """The llama-server of the tests."""
    named = os.environ.get("LLAMA_SERVER")
    found = [Path(named)] if named else [place / "llama-server" for place in PLACES]
    for path in found:
        if path.is_file():
            return path
    pytest.fail("these tests need a llama-server: set LLAMA_SERVER= to the path of one")


def is_healthy(url: str) -> bool:
    """Whether a server answers, and has loaded its model."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=120, trust_env=False).status_code == 200
    return False


@dataclass
class Running:
    """A llama-server that runs."""

    argv: list[str]
    port: int
    slots_dir: Path
    log: Path
    process: subprocess.Popen[bytes]
    client: LlamaServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: Any, n: int = 12, slot: int = 0, **options: Any) -> dict[str, Any]:
        """A greedy completion, with the tokens and what was reused."""
        body = {"prompt": prompt, "n_predict": n, "id_slot": slot, "temperature": 0, "cache_prompt": True}
        answer = httpx.post(
            f"{self.url}/completion", json=body | {"return_tokens": True} | options, timeout=120, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def cold(self, prompt: Any, n: int = 12, slot: int = 0) -> str:
        """The answer to a prompt of which nothing is reused."""
        return str(self.complete(prompt, n, slot, cache_prompt=False)["content"])

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(
    model: str | Path,
    slots_dir: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    port: int | None = None,
) -> Running:
    """Start a server and wait until it answers. One thread; two slots, unless `options` say otherwise."""
    slots_dir.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    log = slots_dir.with_name(f"{slots_dir.name}.{port}.log")
    argv = [str(binary()), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "--no-warmup"]
    # two threads would wait for each other by spinning, beside other processes for longer than they compute
    argv += ["--slot-save-path", str(slots_dir), "-t", "1", "--threads-http", "4", *options]
    if not {"-np", "--parallel"} & set(options):
        argv += ["-np", "2"]
    if not {"-c", "--ctx-size"} & set(options):
        argv += ["-c", "8192"]
    process = started(argv, log, env={**os.environ, **(environment or {})})
    running = Running(argv, port, slots_dir, log, process, LlamaServer(f"http://127.0.0.1:{port}", timeout=120))
    try:
        until = time.monotonic() + START_SECONDS
        while not is_healthy(running.url):
            if not running.is_alive() or time.monotonic() > until:
                pytest.fail(f"llama-server did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
    except BaseException:
        running.stop()
        raise
    return running


@pytest.fixture
def llama_server(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers, which end with the test: ``llama_server(model, "-fa", "off")``."""
    started: list[Running] = []

    def starter(model: str | Path, *options: str, name: str = "slots", **named: Any) -> Running:
        running = start(model, tmp_path / name, *options, **named)
        started.append(running)
        return running

    yield starter
    for running in started:
        running.stop()
        shutil.rmtree(running.slots_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def docs_model() -> Path:
    """The small trained model."""
    for place in SHARED_MODELS:
        if (place / "docs-6m.gguf").is_file():
            return place / "docs-6m.gguf"
    pytest.fail("these tests need shared/models/docs-6m.gguf beside the repository")
