"""A context whose rows are slow to copy, as those of a GPU are: pages are copied together, after the completion.

No GPU is needed: what is tested is what the store does when it finds copying slow.
"""

from __future__ import annotations

from dataclasses import replace

import llama_cpp
import pytest

from prefixstore import PrefixStore
from prefixstore.engine import compute_rate
from tests.support.models import answer, forget, load, prompt, state_bytes

PAGE = 32
TOKENS = prompt(5 * PAGE + 9)
# more than any window
LONG = prompt(400)
SETTINGS = {"page_tokens": PAGE, "min_tokens": 16, "codec": "raw", "write_behind": False}
KINDS = {
    "attention": ("llama", {}),
    "flash attention": ("llama", {"flash_attn": True}),
    "window": ("gemma3", {}),
    "window, short cache": ("gemma3", {"swa_full": False}),
    "short window": ("olmo2", {}),
    "short window, short cache": ("olmo2", {"swa_full": False}),
}


@pytest.fixture
def gpu(models, monkeypatch):
    """Loads a model as with a GPU."""
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    return lambda arch="llama", **options: load(models(arch), n_gpu_layers=-1, n_ctx=512, **options)


def counted(monkeypatch, name):
    """Counts the calls of a function of llama.cpp, and the bytes it copies."""
    calls, real = [], getattr(llama_cpp, name)
    monkeypatch.setattr(llama_cpp, name, lambda *args: calls.append(args[2]) or real(*args))
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_are_copied_together_are_those_copied_one_by_one(gpu, models, kind):
    arch, options = KINDS[kind]
    with PrefixStore("memory:", **SETTINGS) as store, PrefixStore("memory:", **SETTINGS) as other:
        together, alone = gpu(arch, **options), load(models(arch), n_ctx=512, **options)
        states = []
        for llm, of in ((together, store), (alone, other)):
            of.attach(llm)
            llm.eval(LONG)
            of.capture(llm)
            of.detach()
            of.attach(llm)
            forget(llm)
            assert of.restore([*LONG, 1]) == len(LONG)
            states.append(state_bytes(llm))
            of.detach()
    assert states[0] == states[1]


def test_a_prompt_is_copied_twice_and_restored_at_once(gpu, monkeypatch):
    with PrefixStore("memory:", **SETTINGS) as store:
        llm = gpu()
        store.attach(llm)
        saves = counted(monkeypatch, "llama_state_seq_get_data_ext")
        llm.eval(TOKENS)
        # the first page shows what pages look like
        assert (len(saves), store.stats().pages_captured) == (2, 5)
        store.capture()
        loads = counted(monkeypatch, "llama_state_seq_set_data")
        forget(llm)
        assert store.restore([*TOKENS, 1]) == len(TOKENS)
        assert len(loads) == 1


@pytest.fixture
def slow(gpu, monkeypatch):
    """A Llama and its store, as a copy out of its memory takes half as long as computing a page."""
    monkeypatch.setattr(compute_rate, "MAX_CAPTURE_SHARE", 0.1)
    with PrefixStore("memory:", **SETTINGS) as store:
        llm = gpu(n_batch=PAGE)
        llm.set_cache(store)
        store.attach(llm)
        rate = store._current.context.rate
        monkeypatch.setattr(rate, "computed", lambda n, seconds: None)
        monkeypatch.setattr(rate, "captured", lambda n, seconds: None)
        rate.token_seconds, rate.copy_seconds = 1.0, PAGE / 2
        yield llm, store


def test_a_prompt_is_captured_after_its_answer_where_that_would_delay_it(slow):
    llm, store = slow
    chunks = llm(TOKENS, max_tokens=4, temperature=0, stream=True)
    next(chunks)
    assert store.stats().pages_captured == 0
    list(chunks)
    assert store.stats().pages_captured > 0
    assert store.match(TOKENS).n_tokens == len(TOKENS)


def test_a_completion_that_is_aborted_is_captured_when_the_context_moves_on(slow):
    llm, store = slow
    chunks = llm(TOKENS, max_tokens=4, temperature=0, stream=True)
    next(chunks)
    chunks.close()
    assert store.stats().pages_captured == 0
    answer(llm, prompt(PAGE, seed=1), 1)
    assert store.match(TOKENS).n_tokens == len(TOKENS)


def test_what_is_evaluated_by_hand_is_captured_at_once_since_no_end_is_seen(slow):
    llm, store = slow
    llm.eval(TOKENS)
    assert store.match(TOKENS).n_tokens == len(TOKENS) // PAGE * PAGE


def test_a_prompt_that_is_larger_than_the_queue_is_captured_along(slow, gpu, monkeypatch):
    llm, store = slow
    answer(llm, TOKENS, 1)
    hook = store._current
    size = hook.context.memory.largest(2 * PAGE)
    monkeypatch.setattr(hook.context, "parameters", replace(hook.context.parameters, queue_bytes=2 * size))
    answer(llm, LONG, 1)
    assert store.match(LONG).n_tokens == len(LONG)
    chunks = llm(prompt(400, seed=3), max_tokens=2, temperature=0, stream=True)
    captured = store.stats().pages_captured
    next(chunks)
    assert store.stats().pages_captured > captured


def test_what_takes_longer_to_capture_than_to_compute_is_dropped_and_said(slow, monkeypatch, caplog):
    llm, store = slow
    monkeypatch.setattr(compute_rate, "MAX_SLOWDOWN", 1.2)
    rate = store._current.context.rate
    answer(llm, prompt(PAGE, seed=2), 1)
    captured = store.stats().pages_captured
    rate.copy_seconds = 2.0 * len(TOKENS)
    answer(llm, TOKENS, 1)
    answer(llm, prompt(PAGE, seed=1), 1)
    assert store.stats().pages_captured == captured
    assert store.stats().dropped["slow"] == 6
    assert caplog.text.count("pass flash_attn=True") == 1
    # six pages are copied together, in the time of 26
    rate.copy_seconds = len(TOKENS) / 26
    answer(llm, TOKENS, 1)
    assert store.match(TOKENS).n_tokens == len(TOKENS)
