"""``prefixstore serve --model``, for llama-cpp-python's server: what is told of wrong usage and missing packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prefixstore.cli import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "m.gguf", "--", "llama-server", "-m", "m.gguf"], "leave out --model"),
        (["--model", "m.gguf", "--salt-from", "api-key"], "--salt-from is for llama-server"),
        (["--model", "m.gguf", "--max-waiting", "3"], "--max-waiting is for llama-server"),
        (["--model", "m.gguf", "--config", "c.toml"], "sets n_ctx in [model]: leave out --model"),
        (["--model", "missing.gguf"], "prefixstore: model file not found: missing.gguf"),
    ],
)
def test_wrong_usage_is_told(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    (tmp_path / "c.toml").write_text("[model]\nn_ctx = 1024\n")
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
