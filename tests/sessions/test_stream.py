"""Streams beyond the context: what they generate, what is stored of them, and where they are refused."""

from __future__ import annotations

from itertools import islice

import llama_cpp
import numpy as np
import pytest

from prefixstore import ContextError, InvalidParameterError, MisuseError
from prefixstore.llama.binding import pointer_of
from prefixstore.llama.moving_window import MovingWindow
from tests.support.models import answer, logits, prompt

SMALL = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64}
SINK, WINDOW = 4, 100
ROOM = WINDOW // 4


def greedy(llm):
    return int(logits(llm).argmax())


def by_hand(llm, tokens, n):
    """The same with llama.cpp alone: rows are dropped and moved."""
    memory, found = llama_cpp.llama_get_memory(pointer_of(llm)), []
    llm.reset()
    tokens = list(tokens)
    while len(found) < n:
        while tokens:
            room = SINK + WINDOW + ROOM - llm.n_tokens
            if room:
                some, tokens = tokens[: min(room, 64)], tokens[min(room, 64) :]
                llm.eval(some)
                continue
            drop = llm.n_tokens - SINK - WINDOW
            llama_cpp.llama_memory_seq_rm(memory, 0, SINK, SINK + drop)
            llama_cpp.llama_memory_seq_add(memory, 0, SINK + drop, -1, -drop)
            llm.n_tokens -= drop
        found.append(greedy(llm))
        tokens = [found[-1]]
    return found


def computed_again(llm, tokens, n):
    """The same with a new context each time that something is dropped."""
    text, found = list(tokens), []
    llm.reset()
    at = 0
    while len(found) < n:
        while at < len(text):
            if llm.n_tokens == SINK + WINDOW + ROOM:
                llm.reset()
                llm.eval(text[:SINK])
                llm.eval(text[at - WINDOW : at])
            some = text[at : at + min(SINK + WINDOW + ROOM - llm.n_tokens, 64)]
            llm.eval(some)
            at += len(some)
        found.append(greedy(llm))
        text.append(found[-1])
    return found


def test_a_stream_goes_beyond_the_context(llama, open_store):
    llm, alone = llama(**SMALL), llama(**SMALL)
    store = open_store(llm)
    tokens = prompt(600)
    with store.sessions().admit("alice") as alice:
        found = list(alice.stream(tokens, sink=SINK, window=WINDOW, max_tokens=400, temp=0))
    assert found == by_hand(alone, tokens, 400)
    assert store.check() == []


@pytest.mark.parametrize("arch", ["llama", "mamba", "lfm2"])
def test_an_exact_one_is_that_of_a_new_context(arch, llama, open_store):
    llm, alone = llama(arch, **SMALL), llama(arch, **SMALL)
    store = open_store(llm)
    tokens = prompt(200)
    with store.sessions().admit("alice") as alice:
        found = list(alice.stream(tokens, sink=SINK, window=WINDOW, exact=True, max_tokens=100, temp=0))
    assert found == computed_again(alone, tokens, 100)
    assert store.check() == []


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_is_stored_after_the_first_shift_and_nothing_wrong_is_reused(exact, llama, open_store):
    llm, alone = llama(**SMALL), llama(**SMALL)
    store = open_store(llm)
    sessions = store.sessions()
    tokens = prompt(100)
    with sessions.admit("alice") as alice:
        stream = alice.stream(tokens, sink=SINK, window=WINDOW, exact=exact, temp=0)
        text = tokens + list(islice(stream, 29))
        # the next one does not fit
        before = alice.tokens.tolist()
        store.flush()
        pages = store.stats().entries
        text += list(islice(stream, 200))
        # a completion between two tokens of a stream begins where nothing was moved
        assert alice.create_completion(tokens[:90], max_tokens=4, temperature=0)["choices"][0]["text"] == answer(
            alone, tokens[:90], 4
        )
        with pytest.raises(MisuseError, match="something else"):
            next(stream)
        list(alice.stream(tokens, sink=SINK, window=WINDOW, exact=exact, temp=0, max_tokens=60))
        store.flush()
        # the tail, taken before the first shift
        assert store.stats().entries <= pages + 1
        assert len(alice.tokens) == 0
        assert llm.n_tokens == 0
    with sessions.admit("alice") as alice:
        # what it was before anything was dropped
        assert alice.source == "store"
        assert alice.tokens.tolist()[: len(before)] == text[: len(before)]
    assert store.match(text).n_tokens == len(before) + 1 == SINK + WINDOW + ROOM
    longer = text[:150]
    with sessions.admit("bob") as bob:
        found = bob.create_completion(longer, max_tokens=6, temperature=0)["choices"][0]["text"]
    assert found == answer(alone, longer, 6)
    assert store.check() == []


@pytest.mark.parametrize("exact", [False, True])
def test_after_a_stream_in_the_same_block_the_session_goes_on_with_what_it_held_before(exact, llama, open_store):
    llm, alone = (llama("llama", **SMALL) for _ in range(2))
    sessions = open_store(llm).sessions()
    with sessions.admit("alice") as alice:
        alice.eval(prompt(60))
        held = alice.tokens.tolist()
        for _ in alice.stream([*held, 7], sink=SINK, window=WINDOW, max_tokens=200, exact=exact, temp=0):
            pass
        assert alice.tokens.tolist() == []
        alice.eval([5, 6])
        assert alice.tokens.tolist()[: len(held)] == held
        tokens = alice.tokens.tolist()
        alone.eval(tokens)
        assert np.allclose(logits(llm), logits(alone), atol=1e-3)
    with sessions.admit("alice") as alice:
        assert alice.tokens.tolist() == tokens


@pytest.mark.parametrize(
    ("arch", "options", "says"),
    [
        ("llama", {"type_k": llama_cpp.GGML_TYPE_Q8_0}, "keys are quantized"),
        ("llama", {"type_k": 30}, "or bf16"),
        ("gemma3", {"swa_full": False}, "swa_full=True"),
        ("mamba", {}, "recurrent memory"),
        ("lfm2", {}, "recurrent memory"),
    ],
)
def test_where_llama_cpp_would_end_the_process_it_is_refused(arch, options, says, llama, open_store):
    llm = llama(arch, **SMALL, **options)
    with open_store(llm).sessions().admit("alice") as alice:
        with pytest.raises(ContextError, match=says):
            alice.stream(prompt(10), sink=SINK, window=WINDOW)
        assert len(list(alice.stream(prompt(10), sink=SINK, window=WINDOW, exact=True, max_tokens=2))) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sink": -1, "window": 10}, "sink=-1"),
        ({"sink": 4, "window": 0}, "window=0"),
        ({"sink": True, "window": 10}, "sink=True"),
        ({"sink": 56, "window": 200}, "fewer than the 256 tokens"),
        ({"sink": "4", "window": 10}, "sink='4'"),
        ({"window": 1.5}, "window=1.5"),
        ({"window": 10, "max_tokens": "x"}, "max_tokens='x'"),
        ({"window": 10, "max_tokens": 1.5}, "max_tokens=1.5"),
        ({"window": 10, "max_tokens": -1}, "max_tokens=-1"),
        ({"window": 10, "max_tokens": True}, "max_tokens=True"),
    ],
)
def test_bad_sizes_are_refused(arguments, says, llama, open_store):
    llm = llama(**SMALL)
    with open_store(llm).sessions().admit("alice") as alice:
        with pytest.raises(InvalidParameterError, match=says):
            alice.stream(prompt(10), **arguments)
        with pytest.raises(InvalidParameterError, match="empty"):
            alice.stream([], sink=4, window=100)
        with pytest.raises(InvalidParameterError, match="valid text"):
            alice.stream("\ud800", sink=4, window=100)


def test_a_shift_that_is_interrupted_leaves_an_empty_context(llama, open_store, monkeypatch):
    llm, alone = llama(**SMALL), llama(**SMALL)
    store = open_store(llm)
    llm.set_cache(store)
    window, tokens = MovingWindow(store._current, SINK, WINDOW, exact=False), prompt(129)
    window.feed(tokens)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_memory_seq_add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            window.feed([5])
    assert llm.n_tokens == 0
    window.end()
    assert answer(llm, tokens, 4) == answer(alone, tokens, 4)
    assert store.check() == []
