"""A store that attaches by itself, to any number of Llamas; and the states of llama-cpp-python beside it."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial

import llama_cpp
import numpy as np
import pytest

from prefixstore import (
    ContextError,
    IncompatibleError,
    InvalidParameterError,
    MisuseError,
    NotAttachedError,
    PrefixStore,
)
from prefixstore.testing.together import together
from tests.support.models import answer, attached, evaluated, forget, logits, prompt

MESSAGES = [
    {"role": "system", "content": "You answer questions about the standard library. " * 20},
    {"role": "user", "content": "What does the module shutil do?"},
]


@pytest.fixture
def store(tmp_path):
    """A store as users open it, which is checked after the test."""
    with PrefixStore(tmp_path / "kv") as store:
        yield store
        assert store.check() == []


def cached(store, llm):
    """The Llama, with the store as its cache, and not attached."""
    llm.set_cache(store)
    return llm


# -- at the first prompt ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "lfm2"])
def test_the_first_prompt_attaches_and_the_next_turn_is_restored(llama, store, arch):
    tokens = prompt(600)
    llm = cached(store, llama(arch))
    assert not store.is_attached(llm)
    first = answer(llm, tokens, 8)
    assert store.is_attached(llm)
    assert first == answer(llama(arch), tokens, 8)
    held = llm.input_ids[: llm.n_tokens].tolist()
    other = cached(store, llama(arch))
    assert evaluated(store, lambda: answer(other, [*held, 5, 6, 7], 1)) == 3
    assert (store.stats().dropped, store.stats().unreadable) == ({}, {})


def chat(llm, **options) -> str:
    found = llm.create_chat_completion(MESSAGES, max_tokens=6, temperature=0, **options)
    if not options.get("stream"):
        return found["choices"][0]["message"]["content"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_and_streams_attach(llama, store, stream):
    cold = chat(llama())
    n = None
    for _ in range(2):
        llm = cached(store, llama())
        n = evaluated(store, lambda: chat(llm, stream=stream))  # noqa: B023 - called at once
        forget(llm)
        assert chat(llm, stream=stream) == cold
    assert n == 6


# -- where it cannot attach -------------------------------------------------------------------------------------------


def test_a_llama_that_another_store_is_attached_to_is_a_counted_and_logged_miss(llama, store, caplog):
    llm = llama()
    with PrefixStore("memory:") as first, caplog.at_level(logging.WARNING, "prefixstore"):
        first.attach(llm)
        cached(store, llm)
        assert answer(llm, prompt(100), 4) == answer(llama(), prompt(100), 4)
        assert store.stats().misses == {"not_attached": 1}
        assert "attached to another PrefixStore" in caplog.text
    llm.set_cache(store)
    answer(llm, prompt(100), 4)
    assert store.is_attached(llm)


def test_a_version_that_lacks_something_is_named_and_breaks_no_completion(llama, store, caplog):
    llm = llama()
    cold = answer(llama(), prompt(100), 4)
    del llm.lora_path

    def eval_of_a_fork(self, tokens, active_loras=None, control_vector=None):
        raise NotImplementedError

    with pytest.raises(IncompatibleError, match=r"lacks, or has changed, .*: Llama\.lora_path;"):
        store.attach(llm)
    with caplog.at_level(logging.WARNING, "prefixstore"):
        assert answer(cached(store, llm), prompt(100), 4) == cold
    assert "Llama.lora_path" in caplog.text
    assert store.stats().misses == {"not_attached": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(llama_cpp.Llama, "eval", eval_of_a_fork)
        with pytest.raises(IncompatibleError, match=r"Llama\.eval\(tokens\)"):
            store.attach(llama())


@pytest.mark.parametrize("name", ["llama_model_has_encoder", "llama_get_memory"])
def test_a_model_that_is_no_decoder_gets_an_error_that_says_so_before_anything_is_replaced(llama, monkeypatch, name):
    """bert has no memory, and t5 an encoder: without a store an AssertionError, and the end of the process."""
    llm = llama()
    tokens = prompt(40)
    with PrefixStore("memory:", namespace="any") as store:
        monkeypatch.setattr(f"llama_cpp.{name}", lambda _: name == "llama_model_has_encoder")
        with pytest.raises(ContextError, match="generates no text with llama"):
            store.attach(llm)
        monkeypatch.undo()
        assert llm.cache is None
        llm.eval(tokens)
        assert llm.n_tokens == 40


# -- many Llamas ------------------------------------------------------------------------------------------------------


def test_two_models_share_a_store_in_turns_each_in_its_own_namespace(llama, store):
    llms = {arch: cached(store, llama(arch)) for arch in ("llama", "mamba")}
    cold = {(arch, seed): answer(llama(arch), prompt(300, seed), 4) for arch in llms for seed in (1, 2)}
    for _ in range(2):
        for seed in (1, 2):
            for arch, llm in llms.items():
                assert answer(llm, prompt(300, seed), 4) == cold[arch, seed]
                assert store.llm is llm
    namespaces = set()
    for arch, llm in llms.items():
        assert store.match(prompt(300, 1), llm).n_tokens >= 299
        store.restore(prompt(300, 1), llm)
        answer(llm, prompt(20), 1)
        namespaces.add(store.namespace.key)
        assert store.kind == ("pages" if arch == "llama" else "snapshots")
    assert len(namespaces) == 2
    assert store.stats().unreadable == {}
    assert store.clear() > 0
    store.flush()
    assert len(store) == 0


@pytest.mark.slow
def test_llamas_in_threads_share_one_store(llama, store):
    plain = {arch: llama(arch) for arch in ("llama", "gemma3")}
    cold = {(arch, seed): answer(llm, prompt(300, seed), 4) for arch, llm in plain.items() for seed in range(4)}
    llms = [(arch, cached(store, llama(arch))) for arch in ("llama", "gemma3", "llama", "gemma3")]

    def work(arch, llm):
        for i in range(8):
            if i % 3 == 0:
                forget(llm)
            assert answer(llm, prompt(300, i % 4), 4) == cold[arch, i % 4]

    together(*(partial(work, *one) for one in llms))
    assert all(store.is_attached(llm) for _, llm in llms)
    assert store.stats().hits > 0
    assert store.stats().misses.keys() <= {"not_found", "slow"}


def test_a_llama_that_is_collected_leaves_nothing_behind(llama, store):
    llm, other = cached(store, llama()), cached(store, llama())
    answer(other, prompt(300), 1)
    answer(llm, prompt(300), 1)
    gone, hook = weakref.ref(llm), weakref.ref(store._find(llm))
    assert store.llm is llm
    del llm
    gc.collect()
    assert (gone(), hook()) == (None, None)
    assert store.llm is other
    assert store._all() == [store._find(other)]


def test_methods_take_a_llama_or_use_the_only_one_or_the_last(llama, store):
    one, other = llama(), llama("gemma3")
    store.attach(one)
    assert store.llm is one
    store.attach(other)
    assert store.llm is other
    one.eval(prompt(300))
    other.eval(prompt(300, 1))
    # the first page of each is captured already
    assert store.capture() == store.capture(one) == 1
    assert store.match(prompt(300)).n_tokens == 0
    assert store.match(prompt(300), one).n_tokens == 300
    assert store.pin(prompt(300), one) == store.unpin(prompt(300), one) == 300
    assert store.sessions() is store.sessions(other)
    assert store.sessions(one) is not store.sessions(other)
    # a prompt, or a restore, is a use
    answer(cached(store, one), prompt(20), 1)
    assert store.llm is one
    store.restore(prompt(300, 1), other)
    assert store.llm is other
    store.detach(other)
    assert (store.llm, store.is_attached(other)) == (one, False)
    store.detach(other)
    store.attach(other)
    store.detach()
    assert store.llm is None
    assert one.cache is None
    assert "eval" not in vars(one) | vars(other)


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "lfm2"])
@pytest.mark.parametrize("moved_on", [False, True])
def test_a_state_that_an_attached_llama_saved_can_be_stored_and_is_found(llama, store, arch, moved_on):
    llm, tokens = llama(arch), prompt(300)
    with PrefixStore("memory:", llm, read_only=False) as other:
        llm.eval(tokens)
        state = llm.save_state()
        other.detach()
    store.attach(llm)
    with pytest.raises(MisuseError, match="not saved by a Llama that the store is attached to"):
        store[tokens] = state
    llm.reset()
    llm.eval(tokens)
    state = llm.save_state()
    if moved_on:
        llm.reset()
        llm.eval(prompt(100, 2))
    before = llm.n_tokens
    store[tokens] = state
    assert llm.n_tokens == before
    assert [*tokens, 5] in store
    assert len(store.match(tokens).pages) > 0
    # the context is as it was
    llm.eval([5, 6])
    plain = llama(arch)
    plain.eval(prompt(100, 2) if moved_on else tokens)
    plain.eval([5, 6])
    # other batches have other last bits
    np.testing.assert_allclose(logits(llm), logits(plain), atol=0.01)
    # and a state that a lookup returns is live, or is made live again
    llm.reset()
    found = store[[*tokens, 5]]
    assert found.n_tokens == 300
    store[tokens] = found
    llm.reset()
    llm.load_state(found)
    assert llm.input_ids[: llm.n_tokens].tolist() == tokens


def test_what_is_no_known_state_is_refused(llama, store):
    llm = llama()
    llm.eval(prompt(100))
    state = llm.save_state()
    with pytest.raises(NotAttachedError, match="attach"):
        store[prompt(100)] = state
    attached(store, llm)
    with pytest.raises(InvalidParameterError, match="save_state"):
        store[prompt(100)] = b"state"
    llm.reset()
    llm.eval(prompt(100))
    state = llm.save_state()
    state.input_ids[3] += 1
    with pytest.raises(MisuseError, match="not known"):
        store[prompt(100)] = state
    assert store.stats().pages_captured == 0


def test_the_store_that_is_the_cache_takes_over_from_one_that_a_prompt_has_attached(llama, store):
    llm, tokens = llama("llama"), prompt(600)
    with PrefixStore("memory:") as first:
        answer(cached(first, llm), tokens)
        assert evaluated(store, lambda: answer(cached(store, llm), tokens, 1)) == 600
        assert (store.is_attached(llm), first.is_attached(llm)) == (True, False)
        # and back again
        assert evaluated(first, lambda: answer(cached(first, llm), tokens, 1)) == 1
        assert (store.is_attached(llm), first.is_attached(llm)) == (False, True)
    assert (store.stats().misses, first.is_attached(llm)) == ({"not_found": 1}, False)
