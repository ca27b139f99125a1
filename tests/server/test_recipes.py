"""The programs in docs/servers.md run as they are, but for the location."""

from __future__ import annotations

import configparser
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress

import httpx
import pytest
from fastapi.testclient import TestClient

from prefixstore.config import load_config
from prefixstore.server import child, serving, slot_manager
from tests.support import ROOT
from tests.support.llama_server import binary, is_healthy
from tests.support.ports import free_port
from tests.support.python_server import START_SECONDS
from tests.support.untimed import untimed

MESSAGES = [{"role": "system", "content": "You know manual pages. " * 20}, {"role": "user", "content": "ls?"}]
TEXT = "The list of files is sorted. " * 20


def recipe(title: str) -> str:
    document = (ROOT / "docs" / "servers.md").read_text()
    section = document.split(f"\n### {title}\n", 1)[1].split("\n### ", 1)[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code.replace("lmdb:///var/cache/kv", "kv").replace("8192", "2048")


@pytest.fixture
def place(tmp_path, models, monkeypatch):
    """A directory with a model, its configuration, and no store yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(models("llama"))
    (tmp_path / "server.toml").write_text(
        '[model]\npath = "model.gguf"\nn_ctx = 2048\nn_threads = 1\nn_threads_batch = 1\n[store]\nlocation = "kv"\n'
    )
    return tmp_path


def run(code: str) -> dict:
    names = {"__name__": "app"}
    with warnings.catch_warnings():
        # packages that announce their own end
        warnings.simplefilter("ignore")
        exec(compile(code, "recipe", "exec", dont_inherit=True), names)
    return names


def stored(place) -> int:
    """How much of the chat is in the store."""
    config = load_config(place / "server.toml")
    llm = config.open_llama()
    with config.open_store(llm) as store:
        llm.set_cache(store)
        llm.create_chat_completion(MESSAGES, max_tokens=1, temperature=0)
        return store.stats().tokens_restored


def test_create_app(place):
    app = run(recipe("`llama_cpp.server`"))["app"]
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    with TestClient(app) as client:
        first, second = (client.post("/v1/chat/completions", json=body).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1
    assert stored(place) == second["usage"]["prompt_tokens"] - 1


def gunicorn(place) -> list[dict]:
    """Answers of two workers, each of them the first to be asked, and of a second server."""
    found = []
    for _ in range(2):
        port = free_port()
        workers = ("-k", "uvicorn.workers.UvicornWorker", "-w", "2")
        command = untimed("gunicorn", *workers, "-b", f"127.0.0.1:{port}", "app:app")
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{place}"}
        with (
            (place / "log").open("a") as log,
            subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log) as process,
        ):
            try:
                deadline = time.monotonic() + START_SECONDS
                while True:
                    try:
                        answer = httpx.post(f"http://127.0.0.1:{port}/chat", json=MESSAGES, timeout=120)
                        break
                    except httpx.TransportError:
                        assert process.poll() is None, (place / "log").read_text()
                        assert time.monotonic() < deadline
                        time.sleep(0.05)
                found.append(answer.json())
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == 0
            finally:
                process.kill()
    return found


@pytest.mark.slow
def test_gunicorn_workers(place):
    (place / "app.py").write_text(recipe("FastAPI with your own `Llama`"))
    first, second = gunicorn(place)
    assert first["choices"] == second["choices"]
    assert stored(place) == first["usage"]["prompt_tokens"] - 1


def test_systemd_and_compose_leave_the_time_to_store_what_slots_hold():
    document = (ROOT / "docs" / "servers.md").read_text()
    unit = configparser.ConfigParser()
    unit.read_string(document.split("```ini\n")[1].split("```")[0])
    # requests that run, slots, what was copied of them, and the server: each has a limit
    longest = serving.GRACE_SECONDS + 2 * slot_manager.STOP_SECONDS + child.STOP_SECONDS
    assert int(unit["Service"]["TimeoutStopSec"]) > longest
    # by default, systemd ends llama-server at the same time
    assert unit["Service"]["KillMode"] == "mixed"
    (minutes,) = re.findall(r"stop_grace_period: (\d+)m", document)
    assert int(minutes) * 60 > longest


@pytest.mark.slow
def test_the_hooks(place, tmp_path):
    section = (ROOT / "docs" / "servers.md").read_text().split("\n## Hooks\n")[1]
    start, hooks = (
        re.findall(rf"^    ({name} .*)$", section, re.MULTILINE)
        for name in ("(?:mkdir|llama-server)", "prefixstore slots")
    )
    assert (len(start), len(hooks)) == (2, 2)
    port, log = free_port(), tmp_path / "log"
    (place / "system.txt").write_text(TEXT)
    for one, other in (
        ("/dev/shm/slots", "slots"),
        ("8081", str(port)),
        ("/var/cache/kv", "kv"),
        ("llama-server -m", f"{binary()} -t 2 -c 2048 -m"),
        ("prefixstore s", f"{sys.executable} -m tests.support.untimed prefixstore s"),
    ):
        start, hooks = ([line.replace(one, other) for line in lines] for lines in (start, hooks))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # in the background, both end with the group
    script = "\n".join([*start, "wait"])
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-ec", script], cwd=place, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_healthy(f"http://127.0.0.1:{port}"):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.05)
        answer = httpx.post(f"http://127.0.0.1:{port}/completion", json={"prompt": TEXT, "n_predict": 2}, timeout=120)
        assert answer.status_code == 200, answer.text
        for hook in hooks:
            subprocess.run(["bash", "-ec", hook], cwd=place, env=environment, check=True, timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(120)
