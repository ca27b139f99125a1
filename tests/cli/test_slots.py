"""``prefixstore slots``, as hooks run it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.llama_server import Running


@pytest.fixture
def run(run):
    return partial(run, "slots")


@pytest.mark.slow
def test_hooks_before_unload_and_after_load(
    run: Callable[..., tuple[int, str, str]], docs_model: Path, llama_server: Callable[..., Running], tmp_path: Path
):
    store = tmp_path / "kv"
    running = llama_server(docs_model)
    messages = [{"role": "user", "content": "how are files copied? " * 30}]
    (tmp_path / "messages.json").write_text(json.dumps({"messages": messages}))
    (tmp_path / "prompt.txt").write_text("The options of a command. " * 30)
    text = running.client.apply_template(messages)
    running.complete(text, n=4, slot=0)
    running.complete((tmp_path / "prompt.txt").read_text(), n=4, slot=1)
    at = ["--server", running.url, "--slots-dir", running.slots_dir]

    code, out, err = run("save", store, "--all", *at, "--json")
    assert code == 0, err
    saved = json.loads(out)
    assert [one["reason"] for one in saved] == [None, None]
    assert all(one["new_pages"] > 0 for one in saved)
    running.stop()

    running = llama_server(docs_model, name="later")
    at = ["--server", running.url, "--slots-dir", running.slots_dir]
    code, out, err = run("restore", store, "--slot", "1", "--messages", tmp_path / "messages.json", *at, "--json")
    assert code == 0, err
    assert json.loads(out)["n_tokens"] > 100
    again = running.complete(text, n=4, slot=1)
    assert again["timings"]["prompt_n"] <= 1
    code, _, err = run("restore", store, "--slot", "0", "--prompt-file", tmp_path / "prompt.txt", *at)
    assert code == 0, err
    assert running.complete((tmp_path / "prompt.txt").read_text(), n=4)["timings"]["prompt_n"] <= 1

    (tmp_path / "other.txt").write_text("Something else. " * 30)
    code, _, err = run("restore", store, "--slot", "1", "--prompt-file", tmp_path / "other.txt", *at)
    assert code == 1
    assert "0 tokens" in err
    assert list(running.slots_dir.iterdir()) == []


def test_the_key_of_the_server_may_come_from_the_environment(
    run: Callable[..., tuple[int, str, str]],
    docs_model: Path,
    llama_server: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    running = llama_server(docs_model, "--api-key", "sk-slots")
    save = ("save", tmp_path / "kv", "--all", "--server", running.url, "--slots-dir", running.slots_dir)
    code, _, err = run(*save)
    assert code == 1
    assert "API key" in err
    monkeypatch.setenv("LLAMA_API_KEY", "sk-slots")
    assert run(*save)[0] == 0
    monkeypatch.setenv("PREFIXSTORE_SERVER_KEY", "sk-slots")
    monkeypatch.setenv("LLAMA_API_KEY", "of another one")
    assert run(*save)[0] == 0
