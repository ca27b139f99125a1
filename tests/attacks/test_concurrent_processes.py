"""One location, several processes: at the same time, forked while they write, and killed."""

from __future__ import annotations

import json
import random
import subprocess
import time

import pytest

from prefixstore import PrefixStore
from tests.support import PATIENCE, ROOT
from tests.support.models import TORTURE, answer, load, prompt
from tests.support.worker import command, in_fork


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
    results = [json.loads(process.communicate(timeout=5 * PATIENCE)[0].splitlines()[-1]) for process in running]
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


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_in_the_middle_of_writing_loses_nothing(models, tmp_path):
    llm = load(models("llama"))
    with PrefixStore(tmp_path, llm) as store:
        llm.set_cache(store)
        for seed in range(6 * TORTURE):
            llm.reset()
            answer(llm, prompt(1000, seed), 1)

            def child() -> None:
                assert store.engine.queued_bytes == 0
                assert store.check() == []
                store.match(prompt(1000, 0))

            in_fork(child)
        store.flush()
        for seed in range(6 * TORTURE):
            assert store.match(prompt(1000, seed)).n_tokens == 1000
        assert store.check() == []


def test_a_killed_process_leaves_a_store_that_serves_all_that_was_flushed(models, tmp_path):
    """A flushed prompt among the newest is missing only if a kill has lost it: the oldest use is evicted first.

    The default policy may soon evict a prompt that was asked once, in favor of those that each process asks again.
    """
    location, model = str(tmp_path / "kv"), str(models("llama"))
    rng = random.Random(7)
    options = {"max_bytes": "60MB", "policy": "lru"}
    arguments = {"model": model, "location": location, "options": {}, "store": options}
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
        with PrefixStore(location, llm, **options) as store:
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
