"""The command ``prefixstore warm``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from prefixstore import PrefixStore
from prefixstore.cli.app import app
from prefixstore.cli.warm import prepare
from prefixstore.config import Config
from tests.support import ROOT
from tests.support.models import load, prompt
from tests.support.signals import default_signals
from tests.support.warming import shared_prompts, unique_tokens, write_jsonl

PROMPTS = shared_prompts(24)
UNIQUE = unique_tokens(PROMPTS)


@pytest.fixture
def warm(models, tmp_path):
    """Runs the command in this process, on its own store."""

    def run(*arguments, defaults=True, **more):
        given = ["--model", models("llama"), "--store", tmp_path / "kv", "--n-ctx", 4096, "--threads", 1]
        return CliRunner().invoke(app, ["warm", *map(str, given if defaults else ()), *map(str, arguments)], **more)

    return run


@pytest.fixture
def file(tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", [{"tokens": tokens} for tokens in PROMPTS])


@pytest.mark.slow
def test_two_stores_are_one_in_front_of_the_other(warm, file, tmp_path, models):
    result = warm(file, "--store", f"lmdb://{tmp_path / 'far'}", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["location"] == f"lmdb://{tmp_path / 'kv'}, lmdb://{tmp_path / 'far'}"
    for name in ("kv", "far"):
        llm = load(models("llama"))
        with PrefixStore(tmp_path / name, llm) as store:
            assert all(store.match(tokens).n_tokens == len(tokens) for tokens in PROMPTS)
    told = json.loads(warm(file, "--store", f"lmdb://{tmp_path / 'none'}", "--dry-run", "--json").stdout)
    assert told["location"] == f"lmdb://{tmp_path / 'kv'}, lmdb://{tmp_path / 'none'}"
    assert told["missing_tokens"] == 0


def test_problems_are_reported_with_file_and_line_and_the_rest_is_warmed(warm, tmp_path):
    bad = tmp_path / "bad.jsonl"
    lines = [{"prompt": ""}, {"tokens": [1] * 4096}, {"tokens": prompt(300)}]
    bad.write_text("no json\n" + "".join(json.dumps(line) + "\n" for line in lines))
    result = warm(bad, tmp_path / "nowhere.txt", "--json")
    assert result.exit_code == 1
    assert f"{bad}:1: not valid JSON: Expecting value" in result.stderr
    assert f"{bad}:2: the prompt has no tokens" in result.stderr
    assert f"{bad}:3: 4,096 tokens do not fit the context" in result.stderr
    assert f"{tmp_path / 'nowhere.txt'}: file not found" in result.stderr
    told = json.loads(result.stdout)
    assert (told["prompts"], told["evaluated_tokens"], len(told["problems"])) == (1, 300, 4)
    assert "problems" in warm(bad).stdout
    rows = dict(" ".join(line.split()).rsplit(" ", 1) for line in warm(bad, "--dry-run").stdout.splitlines() if line)
    assert rows["problems"] == "3"


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_without_n_ctx_the_context_holds_the_longest_prompt(warm, models, tmp_path, source):
    text = "It restores what another process has computed. " * 40
    lines = [{"prompt": text}, {"prompt": text * 3}, {"tokens": prompt(40_000)}]
    file = write_jsonl(tmp_path / "prompts.jsonl", lines)
    given = ["--model", models("llama"), "--store", tmp_path / "kv", "--threads", 1]
    piped = {"input": file.read_text()} if source == "stdin" else {}
    name, where = ("<stdin>", "-") if source == "stdin" else (file, file)
    result = warm(*given, where, "--json", defaults=False, **piped)
    assert result.exit_code == 1
    assert (
        f"{name}:3: 40,000 tokens do not fit the context of 32,768 tokens that the model was trained" in result.stderr
    )
    told = json.loads(result.stdout)
    assert (told["prompts"], len(told["problems"])) == (2, 1)
    longest = load(models("llama")).tokenize((text * 3).encode())
    assert told["n_ctx"] == -(-(len(longest) + 1) // 256) * 256
    assert told["evaluated_tokens"] == told["unique_tokens"] > 512
    again = warm(*given, where, defaults=False, **piped)
    rows = {" ".join(line.split()) for line in again.stdout.splitlines()}
    assert f"n_ctx {told['n_ctx']:,} (for the longest prompt, {len(longest):,} tokens; servers need as much)" in rows
    assert "evaluated tokens 0" in rows
    expected = json.loads(warm(*given, where, "--dry-run", "--json", defaults=False, **piped).stdout)
    assert (expected["n_ctx"], expected["missing_tokens"]) == (told["n_ctx"], 0)


@pytest.mark.parametrize(
    ("longest", "n_ctx"), [(1, 512), (511, 512), (512, 768), (767, 768), (768, 1024), (2047, 2048)]
)
def test_the_context_holds_one_token_more_than_the_longest_prompt(models, tmp_path, longest, n_ctx):
    lines = [{"tokens": prompt(n)} for n in (longest, 1, 2048)]
    file = write_jsonl(tmp_path / "prompts.jsonl", lines)
    ready = prepare(Config(str(models("llama", n_ctx_train=2048))), [str(file)], generation_prompt=False)
    assert ready.llm.n_ctx() == n_ctx
    # more than the model was trained with
    problem, *found = ready.prompts
    assert (problem.where, [len(one.content) for one in found]) == (f"{file}:3", [longest, 1])
    stopped = prepare(Config(str(models("llama"))), [str(file)], generation_prompt=False, stop=lambda: True)
    assert len(stopped.prompts) == 1


@pytest.mark.slow
def test_a_dry_run_counts_what_is_missing_and_stores_nothing(warm, file, tmp_path):
    told = json.loads(warm(file, "--dry-run", "--json").stdout)
    assert not (tmp_path / "kv").exists()
    assert (told["dry_run"], told["unique_tokens"], told["missing_tokens"]) == (True, UNIQUE, UNIQUE)
    assert not {"stored_bytes", "seconds", "evaluated_tokens"} & set(told)
    assert "evaluated" not in warm(file, "--dry-run").stdout
    warm(file)
    table = warm(file, "--dry-run")
    assert table.exit_code == 0
    assert "missing tokens 0" in {" ".join(line.split()) for line in table.stdout.splitlines()}


@pytest.mark.slow
def test_a_signal_keeps_what_is_computed(models, tmp_path):
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"tokens": prompt(3000, seed)} for seed in range(120)])
    arguments = ["--model", models("llama"), "--store", tmp_path / "kv", "--n-ctx", 4096, "--threads", 1, "--batch", 64]
    process = subprocess.Popen(
        [sys.executable, "-m", "prefixstore", "warm", *map(str, arguments), str(file), "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,  # noqa: PLW1509 - it only sets handlers
    )
    for line in process.stderr:
        if "evaluating" in line:
            process.terminate()
            break
    stdout, _ = process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM
    told = json.loads(stdout)
    assert told["interrupted"]
    assert 0 <= told["evaluated_tokens"] < 120 * 3000
    llm = load(models("llama"))
    with PrefixStore(tmp_path / "kv", llm) as store:
        found = sum(store.match(prompt(3000, seed)).n_tokens for seed in range(120))
        assert found == told["evaluated_tokens"]
        assert store.check() == []
