"""One location, several processes: what one commits others find, and a fork leaves a store that works on both sides."""

from __future__ import annotations

import pytest

from prefixstore import PrefixStore
from tests.support.models import TORTURE, answer, load, prompt
from tests.support.worker import in_fork, in_process


@pytest.mark.slow
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


@pytest.mark.slow
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
