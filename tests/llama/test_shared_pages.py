"""Contexts whose settings change no row share their pages, and restore what each of them would have computed."""

from __future__ import annotations

import functools
import itertools

import llama_cpp
import pytest

from prefixstore import PrefixStore
from tests.support.models import answer, caching, forget, load, prompt

TOKENS = prompt(600)
KINDS = {
    "attention": ("llama", {}),
    "attention, transposed V": ("llama", {"flash_attn": True}),
    "window": ("gemma3", {}),
    "window, short cache": ("gemma3", {"swa_full": False}),
    "shared rows": ("olmo2", {}),
    "recurrent": ("mamba", {}),
    "hybrid": ("lfm2", {}),
}
# fields of llama_context_params that Llama does not offer, and parameters of Llama
SETTINGS = {
    "several sequences": ({"n_seq_max": 4, "kv_unified": True}, {}),
    "unified": ({"kv_unified": True}, {}),
    "embedding": ({}, {"embedding": True}),
    "pooling": ({}, {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_MEAN}),
    "tokenizer": ({}, {"kv_overrides": {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.bos_token_id": 5}}),
}
CASES = [
    *itertools.product(KINDS, SETTINGS),
    *itertools.product(["attention", "window", "recurrent", "hybrid"], ["no window"]),
    ("recurrent", "streams"),
]
# these mean something for some kinds only
SETTINGS |= {"no window": ({}, {"swa_full": False}), "streams": ({"n_seq_max": 4}, {})}


@pytest.fixture
def opened(models, monkeypatch):
    """Loads a model with these fields of its context changed."""
    defaults = llama_cpp.llama_context_default_params

    def open_one(kind, setting=None):
        fields, options = SETTINGS[setting] if setting else ({}, {})
        arch, own = KINDS[kind]

        def changed():
            params = defaults()
            for name, value in fields.items():
                setattr(params, name, value)
            return params

        monkeypatch.setattr(llama_cpp.llama_cpp, "llama_context_default_params", changed)
        return load(models(arch), **own, **options)

    return open_one


def captured(location, llm):
    """The namespace of a context, the answer to the prompt, and the bytes of all pages that it has stored, by key."""
    with caching(location, llm) as store:
        text = answer(llm, TOKENS, 1)
        store.flush()
        with store._engine.view() as view:
            pages = {key: bytes(view.payload(key)) for key, _, _ in view.scan()}
        return store.namespace, text, pages


@pytest.fixture(scope="module")
def plain_of(models, tmp_path_factory):
    """A model as it is, the location where it has stored its pages, and these: once for each kind."""

    @functools.cache
    def one(kind):
        arch, own = KINDS[kind]
        llm, location = load(models(arch), **own), tmp_path_factory.mktemp("plain")
        return llm, location, captured(location, llm)

    return one


@pytest.mark.parametrize(("kind", "setting"), CASES, ids=lambda part: part.replace(", ", "-").replace(" ", "_"))
def test_settings_that_change_no_row_share_pages_that_are_equal_bit_by_bit(tmp_path, plain_of, opened, kind, setting):
    plain, location_of_plain, expected = plain_of(kind)
    changed = opened(kind, setting)
    got = captured(tmp_path, changed)
    assert got[0].differences(expected[0]) == {}
    # with lfm2, a context for embeddings has no logits to sample from
    assert got[1] == expected[1] or (kind == "hybrid" and setting in ("embedding", "pooling"))
    assert len(expected[2]) > 1
    assert got[2] == expected[2]
    # and each restores what the other has stored
    for location, llm in ((location_of_plain, changed), (tmp_path, plain)):
        forget(llm)
        with caching(location, llm) as store:
            assert answer(llm, TOKENS, 1) == (got[1] if llm is changed else expected[1])
            assert store.stats().tokens_restored == 599


@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
def test_attention_in_several_streams_is_neither_stored_nor_restored(tmp_path, opened, kind):
    # llama.cpp writes the number of streams into a state, and ends the process when part of a stream is copied
    expected = answer(opened(kind, "streams"), TOKENS, 1)
    namespace, text, pages = captured(tmp_path / "kv", llm := opened(kind, "streams"))
    assert (namespace.settings["streams"], text, pages) == (4, expected, {})
    with PrefixStore("memory:", namespace="n") as store:
        llm.set_cache(store)
        assert answer(llm, TOKENS, 1) == expected
