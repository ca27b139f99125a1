"""Many sessions on one `Llama` answer as one `Llama` for each conversation, and compute no more than these."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from prefixstore import PrefixStore
from tests.sessions.conftest import SMALL
from tests.support import seeds
from tests.support.models import TORTURE, load

KINDS = {
    "attention": ("llama", {}),
    "window, full cache": ("gemma3", {"swa_full": True}),
    "window": ("gemma3", {"swa_full": False}),
    "recurrent": ("mamba", {}),
    "hybrid": ("lfm2", {}),
}
PAGE = 16


class BrokenError(Exception):
    """What ends a block in this test."""


class Conversations:
    """The same conversations twice: as sessions, and each with a `Llama` of its own."""

    def __init__(self, path, options, location, chance):
        self.chance = chance
        self.open = lambda: load(path, **SMALL, **options)
        self.llm = self.open()
        self.store = PrefixStore(
            location,
            self.llm,
            page_tokens=PAGE,
            min_tokens=1,
            snapshot_interval=32,
            max_snapshots=64,
        )
        self.sessions = self.store.sessions(max_sessions=64)
        self.alone = {}
        self.said = {}
        self.tail = {}
        self.n_separate = self.n_broken = 0
        for i in range(8):
            self.add(f"conversation {i}", self.new_tokens(40))

    def add(self, name, said):
        llm = self.open()
        evaluate = llm.eval

        def counted(tokens):
            self.n_separate += len(tokens)
            evaluate(tokens)

        llm.eval = counted
        self.alone[name] = llm
        self.said[name] = said

    def new_tokens(self, most=24):
        return [self.chance.randrange(300, 3000) for _ in range(self.chance.randint(1, most))]

    def step(self):
        name = self.chance.choice(list(self.said))
        act = self.chance.choices(["turn", "edit", "abort", "break"], [8, 3, 2, 2])[0]
        said = self.said[name]
        if act == "edit":
            said = said[: self.chance.randint(1, len(said))]
        prompt = said + self.new_tokens()
        if len(prompt) > SMALL["n_ctx"] - 32:
            prompt = prompt[:40]
        n = self.chance.randint(1, 9)
        before = self.n_separate
        answer, computed = self.in_session(name, prompt, n, act)
        assert answer == list(islice(self.alone[name].generate(prompt, temp=0), n)), (name, act)
        separate = self.n_separate - before
        assert computed <= separate + self.tail.pop(name, 0), (name, act, computed, separate)
        self.said[name] = prompt + answer
        if act == "break":
            # nothing is captured at the end of a block that fails
            self.tail[name] = n

    def in_session(self, name, prompt, n, act):
        before = self.store.stats().tokens_computed
        tokens = []
        try:
            with self.sessions.admit(name) as session:
                generation = session.generate(prompt, temp=0)
                tokens = list(islice(generation, n))
                if act == "abort":
                    generation.close()
                if act == "break":
                    raise BrokenError
        except BrokenError:
            self.n_broken += 1
        return tokens, self.store.stats().tokens_computed - before


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(1, 2 * TORTURE))
def test_sessions_answer_as_separate_contexts_and_compute_no_more(kind, seed, models, tmp_path):
    arch, options = KINDS[kind]
    both = Conversations(models(arch), options, tmp_path / "kv", random.Random(seed))
    for _ in range(60):
        both.step()
    stats, counts = both.store.stats(), both.sessions.stats()
    assert counts.store > 10
    assert counts.discarded == both.n_broken > 0
    assert stats.dropped == {}
    assert both.store.check() == []
    both.store.close()
