"""What a server does with sessions: admit, continue, evict, fail."""

from __future__ import annotations

import numpy as np
import pytest

from prefixstore import (
    ContextError,
    InvalidParameterError,
    MisuseError,
    NotAttachedError,
    PrefixStore,
    StaleLeaseError,
)
from prefixstore.sessions.session import Session
from tests.sessions.conftest import KINDS, SMALL, turn
from tests.support.models import answer, forget, load, logits, prompt


def fail_in_a_block(sessions, name):
    with sessions.admit(name) as session:
        session.eval([5])
        raise ZeroDivisionError


def computed(store, work):
    before = store.stats().tokens_computed
    work()
    return store.stats().tokens_computed - before


def evaluated(llm, tokens):
    """The logits after these tokens, in a new context."""
    llm.reset()
    llm.eval(tokens)
    return logits(llm)


# -- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_continues_where_it_was_left(kind, llama, open_store):
    arch, options = KINDS[kind]
    llm = llama(arch, **SMALL, **options)
    sessions = open_store(llm).sessions()
    source, n_live, n_restored, _, alice = turn(sessions, "alice", prompt(100))
    assert (source, n_live, n_restored, len(alice)) == ("cold", 0, 0, 105)
    assert turn(sessions, "bob", prompt(90, seed=1))[0] == "cold"
    assert turn(sessions, "alice", alice + prompt(10, seed=2))[:3] == ("store", 0, 105)
    source, n_live, n_restored, _, _ = turn(sessions, "alice", alice + prompt(20, seed=2))
    assert (source, n_live, n_restored) == ("live", 120, 0)


def test_what_is_live_of_another_session_is_used_and_is_not_held(store, sessions):
    system = prompt(64)
    turn(sessions, "alice", system + prompt(20, seed=1))
    with sessions.admit("bob") as bob:
        assert (bob.source, len(bob.tokens)) == ("cold", 0)
    assert "bob" not in sessions
    cost = computed(store, lambda: turn(sessions, "bob", system + prompt(20, seed=2), n=1))
    assert cost == 20


def test_a_chat_answers_as_without_sessions(llama, sessions):
    alone = llama(**SMALL)
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    options = {"max_tokens": 8, "temperature": 0}
    expected = alone.create_chat_completion(messages, **options)["choices"][0]["message"]["content"]
    with sessions.admit("alice") as alice:
        assert alice.create_chat_completion(messages, **options)["choices"][0]["message"]["content"] == expected
    with sessions.admit("bob") as bob:
        chunks = list(bob.create_chat_completion(messages, stream=True, **options))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected


# -- leases -----------------------------------------------------------------------------------------------------------


def test_an_exception_discards_a_session(store, sessions):
    tokens = prompt(100)
    _, _, _, _, held = turn(sessions, "alice", tokens)
    with pytest.raises(ZeroDivisionError):
        fail_in_a_block(sessions, "alice")
    assert "alice" not in sessions
    with sessions.admit("alice") as alice:
        assert (alice.generation, alice.source, len(alice.tokens)) == (1, "cold", 0)
        # its pages are there all the same
        alice.create_completion(held, max_tokens=1)
    assert computed(store, lambda: turn(sessions, "alice", held)) < 20
    assert sessions.stats().discarded == 1


def test_a_lease_that_has_ended_is_refused(sessions):
    with sessions.admit("alice") as alice:
        stream = alice.generate(prompt(30), temp=0)
        next(stream)
    for use in (
        lambda: alice.eval([5]),
        lambda: alice.create_completion([5]),
        lambda: alice.tokens,
        lambda: next(stream),
        alice.__enter__,
        lambda: sessions.release(alice),
    ):
        with pytest.raises(StaleLeaseError, match="has ended"):
            use()
    stream.close()
    alice.leave()  # does nothing the second time
    with sessions.admit("alice") as again:
        assert len(again.tokens) > 0


def test_a_lease_is_not_ended_by_its_own_call(sessions):
    from llama_cpp import LogitsProcessorList

    def processor(_, scores):
        with pytest.raises(MisuseError, match="leave it after that"):
            sessions.release(alice)
        return scores

    with sessions.admit("alice") as alice:
        alice.create_completion(prompt(30), max_tokens=2, logits_processor=LogitsProcessorList([processor]))
    assert "alice" in sessions


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_are_forgotten(store):
    sessions = store.sessions(max_sessions=2)
    for i in range(4):
        turn(sessions, f"session {i}", prompt(40, seed=i))
    assert sessions.names() == ["session 2", "session 3"]
    assert sessions.evict("session 2")
    assert not sessions.evict("session 2")
    turn(sessions, "session 1", prompt(40, seed=1))
    assert sessions.names() == ["session 1", "session 3"]
    assert sessions.evict_all() == 2
    assert sessions.names() == []
    assert sessions.stats().evicted == 5
    # what they have stored is found by the prompts all the same
    assert computed(store, lambda: turn(sessions, "new", prompt(40, seed=2), n=1)) == 1


# -- what is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_past_the_store_is_not_held_and_not_stored(kind, llama, open_store):
    arch, options = KINDS[kind]
    llm, alone = llama(arch, **SMALL, **options), llama(arch, **SMALL, **options)
    store = open_store(llm)
    sessions = store.sessions()
    *_, alice = turn(sessions, "alice", prompt(100))
    with sessions.admit("alice") as session, store.bypass():
        # what was known before the block is known in it
        assert session.tokens.tolist() == alice
        session.eval([5, 6])
        # in other batches: of values that differ by 30 and more
        assert np.abs(logits(llm) - evaluated(alone, [*alice, 5, 6])).max() < 0.05
        assert session.last.miss is None
        found = session.create_completion(prompt(60, seed=1), max_tokens=4, temperature=0)["choices"][0]["text"]
        assert found == answer(alone, prompt(60, seed=1), 4)
        assert (session.last.miss, len(session.tokens)) == ("bypassed", 0)
    assert sessions.stats().discarded == 1
    assert store.match([*alice, 5, 6]).n_tokens <= len(alice)
    assert store.match(prompt(60, seed=1)).n_tokens == 0
    # nor is it restored: admitted in the block, it begins with what is live
    forget(llm)
    with store.bypass(), sessions.admit("alice") as session:
        assert (session.source, session.last.miss) == ("cold", None)
    *_, bob = turn(sessions, "bob", prompt(100, seed=2))
    forget(llm)
    with store.bypass(), sessions.admit("bob") as session:
        assert (session.source, session.last.miss) == ("cold", "bypassed")
    assert turn(sessions, "bob", [*bob, 1, 2, 3])[:2] == ("store", 0)
    assert store.check() == []


def test_a_session_tells_what_became_of_its_last_prompt(llm, store, sessions):
    *_, alice = turn(sessions, "alice", prompt(100))
    turn(sessions, "bob", prompt(80, seed=1))
    of_bob = store.last
    with sessions.admit("alice") as session:
        # its own tokens; the record of another session's prompt is left as it was
        assert (session.last.source, session.last.restored) == ("store", session.n_restored)
        assert session.n_restored == len(alice) == session.last.n_tokens
        assert store.last == of_bob
        session.create_completion([*alice, 1, 2, 3], max_tokens=1)
        assert (session.last.source, session.last.live, session.last.computed) == ("live", len(alice), 3)
        assert store.last == session.last == store.last_of(llm)
        made = session.generate(prompt(40, seed=2), temp=0)
        next(made)
        made.close()
        assert session.last.n_tokens == 40
        assert (store.last, session.last.source) == (session.last, "cold")
    with pytest.raises(StaleLeaseError):
        _ = session.last
    # the tokens of a resumed session are no prompt
    stats = store.stats()
    assert stats.prompt_tokens == 100 + 80 + len(alice) + 3 + 40
    # and no lookup
    assert (stats.hits, stats.live_hits, stats.misses) == (0, 1, {"not_found": 3})
    assert stats.tokens_restored == len(alice)


def test_a_failing_location_costs_time_and_no_answer(llm, llama, tmp_path, monkeypatch):
    alone = llama(**SMALL)
    with PrefixStore(tmp_path / "kv", llm, page_tokens=16, min_tokens=4) as store:
        sessions = store.sessions()
        held = turn(sessions, "alice", prompt(60))[4]
        turn(sessions, "bob", prompt(50, seed=1))
        store.flush()

        def fail(*_, **__):
            from prefixstore import UnavailableError

            raise UnavailableError("the location is away")

        monkeypatch.setattr(store.engine._backend, "view", fail)
        monkeypatch.setattr(store.engine._backend, "update", fail)
        tokens = held + prompt(9, seed=2)
        source, _, _, text, _ = turn(sessions, "alice", tokens)
        assert source == "cold"
        assert text == answer(alone, tokens, 6)
        assert sessions.names() == ["alice", "bob"]
        monkeypatch.undo()


STEPS = {
    "capture": lambda store: type(store._current.strategy),
    "before_leaving": lambda store: type(store._current.strategy),
    "known": lambda store: Session,
    "set_bookmark": lambda store: type(store.engine.write_queue),
    **{name: lambda store: type(store.engine.bookmarks) for name in ("read", "whole")},
}


@pytest.mark.parametrize("step", STEPS)
def test_a_fault_of_the_store_leaves_no_block(step, llama, store, monkeypatch, caplog):
    alone = llama(**SMALL)
    sessions = store.sessions(max_sessions=2)
    turn(sessions, "alice", prompt(60))
    turn(sessions, "bob", prompt(50, seed=1))

    def fail(*_, **__):
        raise OSError(28, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(STEPS[step](store), step, fail)
        for name in ("alice", "carol", "bob"):
            tokens = prompt(60, seed=len(name))
            with sessions.admit(name) as session:
                found = session.create_completion(tokens, max_tokens=4, temperature=0)["choices"][0]["text"]
            assert found == answer(alone, tokens, 4)
        sessions.names()
        sessions.evict("carol")
        sessions.evict_all()
    assert "the completion continues without the store" in caplog.text
    counts = store.engine.counters
    assert counts["dropped:error"] + counts["resume:miss:error"] > 0
    assert turn(sessions, "erin", prompt(40, seed=5), 4)[3] == answer(alone, prompt(40, seed=5), 4)
    assert len(sessions.queue) == 0


# -- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": ""}, "non-empty string"),
        ({"name": 7}, "non-empty string"),
        ({"name": "x" * 513}, "513 bytes"),
        ({"name": "\ud800"}, "valid text"),
        ({"name": "a", "timeout": -1}, "timeout=-1"),
        ({"name": "a", "timeout": float("nan")}, "timeout=nan"),
        ({"name": "a", "timeout": 10**400}, "of at most .* or None for no limit"),
        ({"name": "a", "timeout": 10**5000}, "of at most .* or None for no limit"),
        ({"name": "a", "timeout": "1"}, "timeout='1'"),
    ],
)
def test_bad_input_says_what_to_do(sessions, arguments, says):
    with pytest.raises(InvalidParameterError, match=says):
        sessions.admit(**arguments)
    assert len(sessions.queue) == 0


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1.5], "^tokens must be a flat sequence of integers, not list of shape .* float64"),
        (12, "^tokens must be a flat sequence of integers, not int"),
        (None, "flat sequence of integers, not NoneType"),
        ("text", "not str of shape"),
        ([[1, 2], [3]], "flat sequence of integers: "),
        ([2**31], "32-bit integers"),
        ([-1, 5], r"the model has the tokens 0 to \d+; these are -1 to 5"),
        ([10**6], "these are 1000000 to 1000000"),
    ],
)
def test_what_is_no_token_is_refused_before_anything_is_evaluated(llm, sessions, tokens, says):
    held = turn(sessions, "alice", prompt(30))[4]
    with sessions.admit("alice") as alice:
        with pytest.raises(InvalidParameterError, match=says) as caught:
            alice.eval(tokens)
        assert str(caught.value).count("flat sequence") <= 1
        if not isinstance(tokens, str):
            with pytest.raises(InvalidParameterError, match=says):
                alice.create_completion(tokens, max_tokens=1)
        assert alice.tokens.tolist() == held
        for reset in (True, False):
            with pytest.raises(InvalidParameterError, match=says):
                alice.generate(tokens, reset=reset)
    assert turn(sessions, "alice", held)[0] == "live"


def test_without_tokens_there_is_nothing_to_generate_from(sessions):
    with sessions.admit("alice") as alice:
        for reset in (True, False):
            with pytest.raises(InvalidParameterError, match="give at least one token"):
                alice.generate([], reset=reset)
        alice.eval(prompt(30))
        assert isinstance(next(alice.generate([], reset=False, temp=0)), int)


def test_only_a_session_can_be_released(sessions):
    for other in ("alice", None):
        with pytest.raises(InvalidParameterError, match=r"that admit\(\) has returned"):
            sessions.release(other)


@pytest.mark.parametrize("n_ctx", [128, 256])
def test_more_tokens_than_the_context_has_are_refused_and_the_session_stays(n_ctx, llama, open_store):
    """llama.cpp has 256 cells at least: with fewer tokens, llama-cpp-python loses what does not fit."""
    llm = llama(**SMALL | {"n_ctx": n_ctx})
    sessions = open_store(llm).sessions()
    with sessions.admit("alice") as alice:
        alice.eval(prompt(n_ctx - 2))
    with sessions.admit("alice") as alice:
        with pytest.raises(ContextError, match=rf"{n_ctx + 1} tokens do not fit into the context, which has {n_ctx}"):
            alice.eval([5, 6, 7])
        with pytest.raises(ContextError, match="begin with fewer in another session"):
            alice.generate(prompt(n_ctx + 1), temp=0)
        with pytest.raises(ContextError, match="larger n_ctx"):
            alice.generate([5, 6, 7], reset=False)
        alice.eval([5])
        stream = alice.generate([6], reset=False, temp=0)
        next(stream)
        with pytest.raises(ContextError, match="do not fit"):
            next(stream)
    with sessions.admit("alice") as alice:
        assert alice.tokens.tolist() == [*prompt(n_ctx - 2), 5, 6]
        assert len(alice.create_completion(prompt(n_ctx - 1), max_tokens=None)["choices"]) == 1


def test_there_is_one_for_each_store(llm, store, sessions):
    other = load(llm.model_path, **SMALL)
    assert store.sessions(max_sessions=8) is sessions
    with pytest.raises(MisuseError, match="max_sessions=8"):
        store.sessions(max_sessions=9)
    with pytest.raises(InvalidParameterError, match="max_sessions=0"):
        PrefixStore("memory:", other).sessions(max_sessions=0)
    with pytest.raises(NotAttachedError):
        PrefixStore("memory:").sessions()


def test_after_the_store_was_detached_nobody_is_admitted(llm, store, sessions):
    with sessions.admit("alice") as alice:
        alice.eval(prompt(30))
        store.detach()
        with pytest.raises(NotAttachedError, match="leave the block"):
            alice.eval([5])
    with pytest.raises(NotAttachedError, match="attach it"):
        sessions.admit("alice")
    store.attach(llm)
    assert store.sessions() is not sessions
    with store.sessions().admit("alice") as alice:
        assert alice.source == "cold"


def test_a_store_that_is_open_to_read_restores_sessions(llm, open_store):
    store = open_store(llm)
    held = turn(store.sessions(), "alice", prompt(60))[4]
    store.close()
    forget(llm)
    store = open_store(llm, read_only=True)
    sessions = store.sessions()
    assert sessions.names() == ["alice"]
    assert turn(sessions, "alice", [*held, 5, 6, 7])[:3] == ("store", 0, len(held))
    assert np.array_equal(turn(sessions, "bob", prompt(30))[1:3], (0, 0))
