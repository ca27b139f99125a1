"""One location, several processes: at the same time, forked, and killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

import pytest

from prefixstore import PrefixStore
from tests.support.models import TORTURE, answer, load, prompt
from tests.support.worker import ROOT, command, in_process


def test_four_processes_share_one_location(models, tmp_path):
    location = str(tmp_path / "kv")
    seeds = [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    arguments = {"model": str(models("llama")), "location": location, "common": 800, "store": {"max_bytes": "40MB"}}
    running = [
        subprocess.Popen(
            command("write_at_the_same_time", seeds=mine, **arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for mine in seeds
    ]
    results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in running]
    assert [process.returncode for process in running] == [0] * 4

    llm = load(models("llama"))
    for result in results:
        assert set(result["dropped"]) <= {"orphan"}
        for seed, text in result["texts"].items():
            llm.reset()
            assert answer(llm, prompt(800) + prompt(300, int(seed)), 8) == text
    with PrefixStore(location, llm, max_bytes="40MB") as store:
        assert store.check() == []
        for seed in range(1, 7):
            assert store.match(prompt(800) + prompt(300, seed)).n_tokens == 1100
        # the pages that all have in common are there once
        assert store.stats().entries == 3 + 6 * 2


def test_what_one_process_commits_another_finds_at_its_next_lookup(models, tmp_path):
    location, llm = str(tmp_path / "kv"), load(models("llama"))
    with PrefixStore(location, llm) as store:
        llm.set_cache(store)
        assert store.match(prompt(1100)).n_tokens == 0
        arguments = {"location": location, "model": str(models("llama")), "store": {}}
        in_process("write_at_the_same_time", seeds=[1], common=800, **arguments)
        wanted = prompt(800) + prompt(300, 1)
        assert store.match(wanted).n_tokens == 1100
        answer(llm, wanted, 1)
        assert store.stats().tokens_restored == 1099
        store.clear()
        in_process("write_at_the_same_time", seeds=[2], common=800, **arguments)
        assert store.match(wanted).n_tokens == 800


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
    deadline = time.monotonic() + 60
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the forked child hangs")
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # 3.12: fork with threads, the case in question
@pytest.mark.parametrize("location", ["lmdb", "memory:"])
def test_a_forked_child_works_and_so_does_its_parent(models, tmp_path, location):
    # in one thread: the OpenMP runtime of llama.cpp does not survive a fork once it has started more
    llm = load(models("llama"))
    tokens = prompt(700)
    with PrefixStore(tmp_path if location == "lmdb" else location, llm) as store:
        llm.set_cache(store)
        cold = answer(llm, tokens, 4)
        store.flush()

        def child() -> None:
            llm.reset()
            assert store.match(tokens).n_tokens >= 700
            assert answer(llm, tokens, 4) == cold
            assert store.stats().tokens_restored == 699
            answer(llm, prompt(600, seed=5), 1)
            store.flush()
            assert store.match(prompt(600, seed=5)).n_tokens == 600
            assert store.check() == []
            store.close()

        in_fork(child)
        answer(llm, prompt(600, seed=6), 1)
        store.flush()
        assert store.match(prompt(600, seed=6)).n_tokens == 600
        # what the child wrote is the parent's too, where there is a place that both see
        assert store.match(prompt(600, seed=5)).n_tokens == (600 if location == "lmdb" else 0)
        assert store.check() == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_in_the_middle_of_writing_loses_nothing(models, tmp_path):
    llm = load(models("llama"))
    with PrefixStore(tmp_path, llm) as store:
        llm.set_cache(store)
        for seed in range(6 * TORTURE):
            llm.reset()
            answer(llm, prompt(1000, seed), 1)

            def child() -> None:
                assert store._engine.queued_bytes == 0
                assert store.check() == []
                store.match(prompt(1000, 0))

            in_fork(child)
        store.flush()
        for seed in range(6 * TORTURE):
            assert store.match(prompt(1000, seed)).n_tokens == 1000
        assert store.check() == []


def test_a_killed_process_leaves_a_store_that_serves_all_that_was_flushed(models, tmp_path):
    location, model = str(tmp_path / "kv"), str(models("llama"))
    rng = random.Random(7)
    arguments = {"model": model, "location": location, "options": {}, "store": {"max_bytes": "60MB"}}
    llm = load(model)
    for _ in range(5 * TORTURE):
        with subprocess.Popen(
            command("capture_until_killed", **arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            flushed = [int(process.stdout.readline())]
            deadline = time.monotonic() + rng.uniform(0.0, 0.7)
            while time.monotonic() < deadline:
                flushed.append(int(process.stdout.readline()))
            process.kill()
            flushed += [int(line) for line in process.stdout.read().splitlines()]
        with PrefixStore(location, llm, max_bytes="60MB") as store:
            assert store.check() == []
            llm.set_cache(store)
            for seed in flushed[-3:]:
                assert store.match(prompt(700, seed)).n_tokens == 700
            llm.reset()
            text = answer(llm, prompt(700, flushed[-1]), 4)
            assert store.stats().tokens_restored == 699
        llm.set_cache(None)
        llm.reset()
        assert answer(llm, prompt(700, flushed[-1]), 4) == text
