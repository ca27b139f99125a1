"""One location, several processes: what one commits others find, and a fork leaves a store that works on both sides."""

from __future__ import annotations

import pytest

from tests.support import in_fork
from tests.support.models import answer, caching, load, prompt


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # 3.12: fork with threads, the case in question
@pytest.mark.parametrize("location", ["lmdb", "memory:"])
def test_a_forked_child_works_and_so_does_its_parent(models, tmp_path, location):
    # in one thread: the OpenMP runtime of llama.cpp does not survive a fork once it has started more
    llm = load(models("llama"))
    tokens = prompt(700)
    with caching(tmp_path if location == "lmdb" else location, llm) as store:
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
