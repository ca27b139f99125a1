"""``prefixstore serve --model``: llama-cpp-python's server, by the same command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import httpx
import pytest

from prefixstore.cli import main
from tests.support import ROOT
from tests.support.models import write
from tests.support.ports import free_port
from tests.support.untimed import untimed


def command(*arguments):
    return [sys.executable, "-m", "prefixstore", "serve", *map(str, arguments)]


def asked(location, model, prompt):
    """The usage of one completion of a server of its own."""
    port = free_port()
    options = ["--port", port, "--max-bytes", "64MiB", "--", "--n_ctx", "1024", "--n_threads", "1"]
    process = subprocess.Popen(
        untimed("prefixstore", "serve", location, "--model", model, *options, "--n_threads_batch", "1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                answer = httpx.post(
                    f"http://127.0.0.1:{port}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=120
                )
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        return answer.json()["usage"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


@pytest.mark.slow
def test_a_restarted_server_computes_only_the_last_token(tmp_path):
    model, prompt = write(tmp_path, "llama"), "the value of a name is bound in a block " * 20
    first, second = (asked(tmp_path / "kv", model, prompt) for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "m.gguf", "--", "llama-server", "-m", "m.gguf"], "leave out --model"),
        (["--model", "m.gguf", "--salt-from", "api-key"], "--salt-from is for llama-server"),
        (["--model", "m.gguf", "--max-waiting", "3"], "--max-waiting is for llama-server"),
        (["--model", "m.gguf", "--server", "http://127.0.0.1:1"], "--server is for llama-server"),
        (["--model", "missing.gguf"], "prefixstore: model file not found: missing.gguf"),
    ],
)
def test_wrong_usage_is_told(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    assert main(["serve", "kv", *arguments]) == 2
    assert says in capsys.readouterr().err


WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "{package}":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize(
    ("package", "code", "says"),
    [
        (
            "fastapi",
            "from prefixstore.cli import main; sys.exit(main(['serve', 'kv', '--model', 'm.gguf']))",
            "prefixstore[python-server]",
        ),
        ("fastapi", "from prefixstore.server import create_app", "MissingExtraError: create_app needs fastapi; pip"),
        (
            "aiohttp",
            "from prefixstore.cli import main; sys.exit(main(['serve', 'kv', '--', 'llama-server']))",
            "serve needs aiohttp",
        ),
    ],
)
def test_a_missing_package_is_told_with_its_extra(package, code, says):
    program = WITHOUT.format(package=package) + code
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert says in done.stderr
