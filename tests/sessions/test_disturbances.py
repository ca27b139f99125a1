"""Whatever happens to the context, or to the other sessions meanwhile: nobody gets the rows of somebody else."""

from __future__ import annotations

import contextlib
import random
import time
from functools import partial

import llama_cpp
import pytest

from prefixstore import BusyError
from prefixstore.testing.together import together
from tests.sessions.conftest import SMALL, turn
from tests.support.models import answer, forget, prompt
from tests.support.trust import Injected, failing

REACHES = {
    "reset": lambda llm: llm.reset(),
    "clear": lambda llm: llm._ctx.kv_cache_clear(),
    "truncate": lambda llm: llm._ctx.kv_cache_seq_rm(-1, 3, -1),
    "another prompt": lambda llm: (llm.reset(), llm.eval(prompt(50, seed=7))),
    "save and load": lambda llm: llm.load_state(llm.save_state()),
    "pointer": lambda llm: llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True),
    "forget": forget,
}


@pytest.fixture
def alone(llama):
    return llama(**SMALL)


def turned(sessions, alone, name, tokens, n=6):
    """A turn with the right answer; what the session holds then."""
    *_, text, after = turn(sessions, name, tokens, n)
    assert text == answer(alone, tokens, n)
    return after


@pytest.mark.parametrize("is_inside", [False, True], ids=["between blocks", "inside a block"])
@pytest.mark.parametrize("how", REACHES)
def test_whatever_is_done_to_the_context_nobody_gets_wrong_rows(how, is_inside, llm, alone, store, sessions):
    held = {name: turned(sessions, alone, name, prompt(60, seed=i)) for i, name in enumerate(("alice", "bob"))}
    if is_inside:
        with sessions.admit("carol") as carol:
            carol.eval(prompt(20, seed=8))
            REACHES[how](llm)
    else:
        REACHES[how](llm)
    for name in ("bob", "alice"):
        turned(sessions, alone, name, held[name])
    assert store.check() == []


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_fault_at_any_call_of_llama_cpp_leaves_no_wrong_rows(after, alone, store, sessions):
    expected = {name: prompt(40, seed=i) for i, name in enumerate(("alice", "bob", "carol"))}

    def round_of_turns():
        for name, tokens in expected.items():
            turn(sessions, name, tokens, 2)

    round_of_turns()
    with failing(-1, after=after) as steps:
        round_of_turns()
    for k in range(0, steps.made, 4):
        with contextlib.suppress(Injected), failing(k, after=after):
            round_of_turns()
        name = list(expected)[k % 3]
        turned(sessions, alone, name, expected[name], 2)
    assert store.check() == []
    assert len(sessions.queue) == 0


@pytest.mark.slow
def test_threads_have_their_own_conversations_while_others_evict(alone, store):
    sessions = store.sessions(max_sessions=12)
    said = []

    def converse(i):
        tokens = prompt(60, seed=i)
        for k in range(5):
            *_, text, after = turn(sessions, f"session {i}", tokens, 4)
            assert after[: len(tokens)] == tokens
            said.append((tokens, text))
            tokens = after + prompt(10, seed=100 * i + k)

    def disturb():
        chance = random.Random(1)
        while len(said) < 30:
            time.sleep(0.002)
            name = f"session {chance.randrange(6)}"
            with contextlib.suppress(BusyError):
                sessions.evict(name)
            sessions.names()
            assert str(store.stats())

    together(disturb, *(partial(converse, i) for i in range(6)))
    for tokens, text in said:
        assert text == answer(alone, tokens, 4)
    assert store.check() == []
