"""Ctrl-C at any place of a session: the `Llama` goes to the next one, and its answers are right."""

from __future__ import annotations

import gc

import pytest

from prefixstore import PrefixStore
from tests.support import PATIENCE, outcome
from tests.support.ctrl_c import interrupted, places_in, sample
from tests.support.models import TORTURE, answer, load, prompt

SMALL = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32}


# what is raised in a finalizer, Python ignores
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("arch", ["llama", "mamba"])
def test_ctrl_c_at_any_place_of_a_session(arch, models, tmp_path):
    llm, alone = (load(models(arch), **SMALL) for _ in range(2))
    texts = {seed: answer(alone, prompt(40, seed=seed), 3) for seed in range(2)}
    with PrefixStore(tmp_path / "kv", llm, page_tokens=16, min_tokens=4) as store:
        sessions = store.sessions(max_sessions=3)

        def turn(name, seed, timeout=None):
            with sessions.admit(name, timeout=timeout) as session:
                return session.create_completion(prompt(40, seed=seed), max_tokens=3, temperature=0)

        def work():
            turn("alice", 0)
            turn("bob", 1)
            turn("alice", 0)

        work()
        n = places_in(work)
        assert n > 500
        for at in sample(n, 150 * TORTURE):
            sessions.evict_all()
            turn("bob", 1)
            where = interrupted(work, at)
            # what an exception keeps alive, such as frames
            gc.collect()
            name = ("alice", "bob")[at % 2]
            found = outcome(lambda name=name, at=at: turn(name, at % 2, timeout=PATIENCE / 2), where)
            assert isinstance(found, dict), (where, found)
            assert found["choices"][0]["text"] == texts[at % 2], where
            assert len(sessions.queue) == 0, where
            assert llm.cache is None, where
            assert not store.engine.write_queue.wants_all, where
        assert store.check() == []
    # no cell is left to anybody
    llm.reset()
    llm.eval(prompt(255))
