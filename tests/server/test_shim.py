"""`prefixstore shim`: a llama-server for programs that start one, compared with the one that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixstore.cli import main
from tests.support import ROOT
from tests.support.llama_server import binary, is_healthy
from tests.support.ports import free_port
from tests.support.served import END_SECONDS, START_SECONDS, prompt
from tests.support.signals import started

Start = Callable[..., "tuple[subprocess.Popen[bytes], str]"]


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    written = ["shim", str(tmp_path / "bin"), "--store", str(tmp_path / "kv"), "--llama-server", str(binary())]
    assert main(written) == 0
    return tmp_path / "bin" / "llama-server"


@pytest.fixture
def start(tmp_path: Path, docs_model: Path) -> Iterator[Start]:
    """Starts a program as a launcher does, with llama-server's own options, and waits until it is healthy."""
    running: list[subprocess.Popen[bytes]] = []

    def starter(program: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        argv = [str(program), "--model", str(docs_model), "--host", "127.0.0.1", "--port", str(port), *options]
        argv += ["-t", "1", "-np", "1", "-c", "2048", "--no-warmup"]
        process = started(argv, tmp_path / "log", env={**os.environ, "PYTHONPATH": str(ROOT)})
        running.append(process)
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while not is_healthy(url):
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < until
            time.sleep(0.02)
        return process, url

    yield starter
    for process in running:
        process.kill()
        process.wait()


def _complete(url: str, **headers: str) -> dict[str, Any]:
    body = {"prompt": prompt(1), "n_predict": 4, "temperature": 0}
    answer = httpx.post(f"{url}/completion", json=body, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.slow
def test_a_launcher_that_starts_it_gains_the_store(shim: Path, start: Start):
    for n_found in (0, 200):
        process, url = start(shim, "--api-key", "sk-launcher")
        assert httpx.post(f"{url}/completion", json={"prompt": "a"}, trust_env=False).status_code == 401
        assert _complete(url, authorization="Bearer sk-launcher")["timings"]["cache_n"] >= n_found
        process.send_signal(signal.SIGTERM)
        ends = process.wait(END_SECONDS)
    alone, _ = start(binary())
    alone.send_signal(signal.SIGTERM)
    assert ends == alone.wait(END_SECONDS) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("--version",), ("-m", "/nowhere"), ("--no-such-option",), ("--port", "0", "--host", "1.2.3.4"), ("--port",)],
)
def test_it_says_and_ends_what_llama_server_does(shim: Path, docs_model: Path, options: tuple[str, ...]):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = ("-m", str(docs_model), "--no-warmup")

    def ended(program: Path) -> subprocess.CompletedProcess[bytes]:
        argv = [str(program), *before, *options]
        return subprocess.run(argv, check=False, capture_output=True, env=environment, timeout=START_SECONDS)

    ours, its = ended(shim), ended(binary())
    assert ours.returncode == its.returncode
    if options in (("--version",), ("--port",)):
        assert (ours.stdout, ours.stderr) == (its.stdout, its.stderr)


@pytest.mark.slow
def test_with_what_cannot_be_stored_it_is_llama_server_alone(shim: Path, start: Start, tmp_path: Path):
    _, url = start(shim, "--context-shift")
    _complete(url)
    assert httpx.get(f"{url}/prefixstore/health", trust_env=False).status_code == 404
    assert "--context-shift cannot be used behind the proxy" in (tmp_path / "log").read_text()
    assert not (tmp_path / "kv").exists()


def test_it_starts_nothing_that_is_not_there_nor_itself(
    shim: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(shim.parent))
    assert main(["shim", str(shim.parent)]) == 2
    assert "would start itself" in capfd.readouterr().err
    assert main(["shim", str(tmp_path), "--llama-server", str(tmp_path / "none")]) == 2
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["shim", str(tmp_path)]) == 2
    assert "is not on the PATH" in capfd.readouterr().err
    assert main(["shim", str(shim.parent), "--llama-server", str(binary())]) == 2
