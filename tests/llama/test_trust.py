"""Whatever reaches a context other than through the store makes it unknown, so nothing wrong is stored after it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging

import llama_cpp
import numpy as np
import pytest
from llama_cpp._internals import LlamaContext

from prefixstore import ContextError, MisuseError, PrefixStore
from tests.support.models import answer, caching, evaluated, forget, load, logits, prompt, state_bytes
from tests.support.trust import Injected, assert_right, failing, stored_sequences

SMALL = {"n_ctx": 512, "n_batch": 32, "n_ubatch": 32}
PAGES = {"page_tokens": 16, "min_tokens": 8}
KINDS = ["llama", "mamba", "lfm2"]
TEXT = prompt(50)


@pytest.fixture(scope="module")
def contexts(models):
    """Three contexts of each kind: one that is used, one to restore into, and one to compute in."""
    loaded = {}

    def get(arch="llama", **options):
        name = (arch, *sorted(options.items()))
        if name not in loaded:
            loaded[name] = [load(models(arch), **SMALL, **options) for _ in range(3)]
        for llm in loaded[name]:
            forget(llm)
        return loaded[name]

    return get


# -- every door -------------------------------------------------------------------------------------------------------

OTHER = prompt(30, seed=5)


def batch(llm, tokens=OTHER, at=None):
    llm._batch.set_batch(batch=tokens, n_past=llm.n_tokens if at is None else at, logits_all=False)
    return llm._batch


def foreign_state(llm):
    """A state of other tokens, which the store has not seen."""
    pointer = vars(llm._ctx)["ctx"]
    size = llama_cpp.llama_state_get_size(pointer)
    buffer = (ctypes.c_uint8 * size)()
    data = bytes(buffer[: llama_cpp.llama_state_get_data(pointer, buffer, size)])
    ids = llm.input_ids.copy()
    ids[: llm.n_tokens] = OTHER[0]
    return llama_cpp.LlamaState(ids, llm._scores.copy(), llm.n_tokens, data, len(data), 0)


def shift(llm):
    """A context shift, as a user makes it by hand."""
    llm._ctx.kv_cache_seq_rm(0, 4, 20)
    llm._ctx.kv_cache_seq_shift(0, 20, llm.n_tokens, -16)
    llm.n_tokens -= 16


def decode_more(llm):
    llm._ctx.decode(batch(llm))
    llm.n_tokens += len(OTHER)


def new_method(ctx, batch):
    """As a version of the future may have it."""
    llama_cpp.llama_decode(ctx.ctx, batch.batch)


def copy_to_other_positions(llm):
    llm._ctx.kv_cache_seq_cp(0, 1, 0, 10)
    llm._ctx.kv_cache_seq_rm(0, 0, 10)
    llm._ctx.kv_cache_seq_shift(1, 0, 10, 200)
    llm._ctx.kv_cache_seq_cp(1, 0, -1, -1)


# these never come near the context
TEXT_ONLY = dict.fromkeys(
    """
    detokenize longest_token_prefix logits_to_logprobs n_ctx n_embd n_vocab pooling_type set_seed token_bos token_eos
    token_nl tokenize tokenizer
    """.split()  # noqa: SIM905 - to be read at a glance
)
OF_LLAMA = {
    "close": None,
    "from_pretrained": None,  # loads from the network
    "create_chat_completion": lambda llm: llm.create_chat_completion([{"role": "user", "content": "a"}], max_tokens=2),
    "create_chat_completion_openai_v1": lambda llm: llm.create_chat_completion_openai_v1(
        [{"role": "user", "content": "a"}], max_tokens=2
    ),
    "create_completion": lambda llm: llm.create_completion(OTHER, max_tokens=2),
    "create_embedding": lambda llm: llm.create_embedding("other text"),
    "embed": lambda llm: llm.embed(["other text", "more text " * 40], truncate=False),
    "ctx": lambda llm: llama_cpp.llama_memory_seq_add(llama_cpp.llama_get_memory(llm.ctx), 0, 10, llm.n_tokens, 1),
    "model": lambda llm: llm.model,
    "eval": lambda llm: llm.eval(OTHER),
    "eval_logits": lambda llm: llm.eval_logits,
    "eval_tokens": lambda llm: llm.eval_tokens,
    "generate": lambda llm: next(llm.generate(TEXT[:20] + OTHER)),
    "load_state": lambda llm: llm.load_state(foreign_state(llm)),
    "reset": lambda llm: llm.reset(),
    "sample": lambda llm: llm.sample(),
    "save_state": lambda llm: llm.load_state(llm.save_state()),
    "set_cache": lambda llm: llm.set_cache(None),
    **TEXT_ONLY,
}
OF_CONTEXT = {
    "close": None,
    "decode": decode_more,
    "default_params": lambda llm: llm._ctx.default_params(),
    "encode": lambda llm: llm._ctx.encode(None),  # llama.cpp crashes if a model without an encoder encodes
    "get_embeddings": lambda llm: llm._ctx.get_embeddings(),
    "get_embeddings_ith": lambda llm: llm._ctx.get_embeddings_ith(0),
    "get_embeddings_seq": lambda llm: llm._ctx.get_embeddings_seq(0),
    "get_logits": lambda llm: llm._ctx.get_logits(),
    "get_logits_ith": lambda llm: llm._ctx.get_logits_ith(-1),
    "get_state_size": lambda llm: llm._ctx.get_state_size(),
    "grammar_accept_token": lambda llm: llm._ctx.grammar_accept_token(None, 1),
    "kv_cache_clear": lambda llm: llm._ctx.kv_cache_clear(),
    "kv_cache_seq_cp": copy_to_other_positions,
    "kv_cache_seq_keep": lambda llm: llm._ctx.kv_cache_seq_keep(1),
    "kv_cache_seq_rm": lambda llm: llm._ctx.kv_cache_seq_rm(0, 10, 20),
    "kv_cache_seq_shift": shift,
    "n_ctx": lambda llm: llm._ctx.n_ctx(),
    "pooling_type": lambda llm: llm._ctx.pooling_type(),
    "print_timings": lambda llm: llm._ctx.print_timings(),
    "reset_timings": lambda llm: llm._ctx.reset_timings(),
    "set_n_threads": lambda llm: llm._ctx.set_n_threads(1, 1),
    # not implemented in this version
    **dict.fromkeys(name for name in dir(LlamaContext) if name.startswith("sample_")),
    "set_rng_seed": None,
}
# what a version of the future may add, or a user may do: the store knows none of these
BESIDE = {
    "a method called on the class": lambda llm: LlamaContext.decode(llm._ctx, batch(llm, at=10)),
    "eval called on the class": lambda llm: llama_cpp.Llama.eval(llm, OTHER),
    "a truncation called on the class": lambda llm: LlamaContext.kv_cache_seq_rm(llm._ctx, 0, 10, -1),
    "a decode into the middle": lambda llm: (llm._ctx.kv_cache_seq_rm(0, 10, 40), llm._ctx.decode(batch(llm, at=10))),
    "an unknown method": lambda llm: new_method(llm._ctx, batch(llm)),
    "the memory": lambda llm: llama_cpp.llama_memory_seq_add(llm._ctx.memory, 0, 10, llm.n_tokens, 1),
    "the count": lambda llm: setattr(llm, "n_tokens", 30),
    "a larger count": lambda llm: setattr(llm, "n_tokens", llm.n_tokens + 5),
}
DOORS = (
    [(f"Llama.{name}", call) for name, call in OF_LLAMA.items() if call]
    + [(f"LlamaContext.{name}", call) for name, call in OF_CONTEXT.items() if call]
    + list(BESIDE.items())
)


def test_every_method_of_this_version_is_in_the_tables():
    assert {name for name in dir(llama_cpp.Llama) if not name.startswith("_")} == OF_LLAMA.keys()
    assert {name for name in dir(LlamaContext) if not name.startswith("_")} == OF_CONTEXT.keys()


@pytest.mark.slow
@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize(("name", "door"), DOORS, ids=[name for name, _ in DOORS])
def test_nothing_wrong_is_stored_after_a_call(contexts, arch, name, door):
    llm, warm, cold = contexts(arch, embedding="embed" in name)
    faults = [(None, False), (0, True), (1, False)]
    for k, after in faults if arch == "llama" else faults[:2]:
        forget(llm)
        with PrefixStore("memory:", llm, **PAGES) as store:
            llm.eval(TEXT)
            with contextlib.suppress(Exception, Injected):
                if k is None:
                    door(llm)
                else:
                    with failing(k, after=after):
                        door(llm)
            with contextlib.suppress(RuntimeError, ValueError):
                llm.eval(prompt(40, seed=7))
            store.capture()
            store.detach()
            forget(llm)
            llm._ctx.kv_cache_seq_rm(1, -1, -1)
            assert assert_right(store, warm, cold)


def test_a_call_that_only_reads_loses_no_hit(contexts):
    llm, *_ = contexts()
    with PrefixStore("memory:", llm, **PAGES) as store:
        llm.eval(TEXT)
        for name in ("get_logits", "get_state_size", "n_ctx", "pooling_type", "print_timings", "reset_timings"):
            getattr(llm._ctx, name)()
        llm.sample()
        llm.eval(OTHER)
        store.capture()
        assert store.match(TEXT + OTHER).n_tokens == 80
        # nor does what generate() does to reuse a prefix
        next(llm.generate(TEXT + prompt(20, seed=9)))
        store.capture()
        assert store.match(TEXT + prompt(20, seed=9)).n_tokens == 70
        assert store.stats().dropped == {}


def test_a_decode_that_no_python_code_can_see_is_noticed(contexts):
    llm, *_ = contexts()
    pointer = llm.ctx  # read before the store is attached
    with PrefixStore("memory:", llm, **PAGES) as store:
        llm.eval(TEXT)
        # the last tokens are replaced by others; the positions stay as they were
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(pointer), 0, 40, -1)
        assert llama_cpp.llama_decode(pointer, batch(llm, prompt(10, seed=3), at=40).batch) == 0
        llm.eval(OTHER)
        store.capture()
        assert store.match(TEXT + OTHER).n_tokens <= 48
        assert store.stats().dropped["changed"] > 0


@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize("lookup", ["completion", "restore", "eval", "a token", "save_state"])
def test_tokens_that_the_llama_names_and_does_not_hold_are_not_believed(contexts, arch, lookup):
    llm, warm, cold = contexts(arch)
    other = prompt(100, seed=8)
    question = [*other, *OTHER]
    with caching("memory:", llm, **PAGES) as store:
        answer(llm, other, 1)
        llm.reset()
        llm.eval(TEXT[:48])
        llm.input_ids[:48] = other[:48]
        if lookup == "completion":
            answer(llm, question, 2)
        elif lookup == "save_state":
            llm.load_state(llm.save_state())
            llm.eval(OTHER)
        elif lookup == "a token":
            for token in OTHER:
                llm.eval([token])
        else:
            n = store.restore(question, always=True) if lookup == "restore" else 48
            llm.eval(question[n:])
        store.capture()
        store.detach()
        assert assert_right(store, warm, cold)


def test_another_context_in_the_same_llama_is_not_used(llama):
    llm, other = llama(**SMALL), llama(**SMALL)
    with caching("memory:", llm, **PAGES) as store:
        answer(llm, TEXT, 1)
        own, llm._ctx = llm._ctx, other._ctx
        llm.n_tokens = 0
        assert answer(llm, TEXT, 4) == answer(llama(**SMALL), TEXT, 4)
        assert store.stats().misses["context_replaced"] == 1
        llm._ctx = own
        llm.n_tokens = 0
        assert answer(llm, TEXT, 4) == answer(llama(**SMALL), TEXT, 4)


# -- states of the user -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KINDS)
def test_a_load_that_fails_leaves_nothing_to_store(contexts, arch):
    llm, warm, cold = contexts(arch)
    with PrefixStore("memory:", llm, **PAGES) as store:
        llm.eval(TEXT)
        state = llm.save_state()
        state.llama_state = state.llama_state[:-100]
        state.llama_state_size -= 100
        with pytest.raises((RuntimeError, ValueError)):
            llm.load_state(state)
        assert llm.n_tokens == 0
        with contextlib.suppress(RuntimeError):
            llm.eval(OTHER)
        store.capture()
        assert store.match(TEXT + OTHER).n_tokens <= 50
        store.detach()
        assert_right(store, warm, cold)


def test_a_saved_state_that_was_changed_is_not_trusted(contexts):
    llm, other, _ = contexts()
    other.eval(prompt(50, seed=4))
    with PrefixStore("memory:", llm, **PAGES) as store:
        llm.eval(TEXT)
        state, foreign = llm.save_state(), other.save_state()
        state.llama_state, state.llama_state_size = foreign.llama_state, foreign.llama_state_size
        llm.load_state(state)
        llm.eval(OTHER)
        assert store.capture() == 0
        assert store.match(TEXT + OTHER).n_tokens <= 50


def test_a_loaded_state_is_used_for_one_prompt_and_then_computed_and_stored(contexts):
    llm, other, plain = contexts()
    other.eval(TEXT)
    state, question = other.save_state(), TEXT + OTHER
    expected = answer(plain, question, 4)
    with caching("memory:", llm, **PAGES) as store:
        llm.load_state(state)
        assert evaluated(store, lambda: answer(llm, question, 1)) == len(OTHER)
        assert stored_sequences(store) == []
        stats = store.stats()
        assert stats.misses == {"loaded_state": 1}
        assert stats.dropped["loaded_state"] > 0
        assert answer(llm, question, 4) == expected
        assert store.match(question).n_tokens == len(question)


def test_a_state_from_a_lookup_that_is_not_stored_any_more_is_an_error(contexts):
    llm, other, _ = contexts()
    with PrefixStore("memory:", llm, **PAGES) as store, PrefixStore("memory:", other, salt="b", **PAGES) as second:
        llm.eval(TEXT)
        store.capture()
        state = store[[*TEXT, 7]]
        with pytest.raises(MisuseError, match="belongs to another model"):
            other.load_state(state)
        llm.reset()
        llm.eval(OTHER)
        store.clear()
        with pytest.raises(MisuseError, match=r"store\.restore\(tokens\)"):
            llm.load_state(state)
        assert llm.n_tokens == len(OTHER)
        assert second.stats().hits == 0
        second.detach()
        with pytest.raises((ValueError, RuntimeError)):
            other.load_state(state)


def prepare(llm, n, ids):
    """Put `n` positions into the context that the store knows nothing of, as a handler does for an image."""
    llm._ctx.kv_cache_clear()
    llm.n_tokens = 0
    llm._ctx.decode(batch(llm, prompt(n, seed=9)))
    llm.input_ids[:n] = ids
    llm.n_tokens = n


@pytest.mark.parametrize("n", [3, 20])
def test_what_is_no_token_stays_for_every_prompt_that_continues_it(contexts, n):
    llm, plain, _ = contexts()
    questions = [[-1] * n + prompt(8, seed=seed) for seed in range(3)]
    prepare(plain, n, -1)
    expected = [answer(plain, question) for question in questions]
    with caching("memory:", llm, **PAGES) as store:
        for _ in range(2):
            prepare(llm, n, -1)
            assert [answer(llm, question) for question in questions] == expected
        assert store.restore(questions[-1], always=True) == n + 7
        assert store.capture() == 0
        assert stored_sequences(store) == []
        assert answer(llm, TEXT, 1)  # another prompt
        assert store.match(TEXT).n_tokens == len(TEXT)
    # what is no token cannot be trusted
    prepare(llm, 20, -1)
    with PrefixStore("memory:", namespace="n", **PAGES) as store:
        assert store.capture(llm) == 0
        assert store.restore([-1] * 20 + TEXT, llm) == 20


def test_what_a_handler_evaluated_is_continued_however_short_it_is(contexts):
    llm, plain, _ = contexts()
    question = [3] * 3 + prompt(8)
    prepare(plain, 3, 3)
    expected = answer(plain, question)
    with caching("memory:", llm, **PAGES) as store:
        prepare(llm, 3, 3)
        assert answer(llm, question) == expected
        assert stored_sequences(store) == []


# -- attaching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KINDS)
def test_a_store_attached_to_a_used_llama_works_at_once(contexts, arch):
    llm, plain, _ = contexts(arch)
    chat = TEXT + OTHER
    expected = answer(plain, chat, 4)
    answer(llm, TEXT, 4)  # the beginning of the same conversation
    with caching("memory:", llm, **PAGES) as store:
        assert answer(llm, chat, 4) == expected
        assert store.match(chat).n_tokens >= len(chat) - 1
        forget(llm)
        assert evaluated(store, lambda: answer(llm, chat, 1)) <= 2
        assert store.stats().dropped == {}


def test_tokens_evaluated_before_attaching_stay_until_the_first_lookup(contexts):
    llm, plain, _ = contexts()
    for context in (llm, plain):
        context.eval(TEXT)
    with PrefixStore("memory:", llm, **PAGES) as store:
        for context in (llm, plain):
            context.eval(OTHER)
        assert np.array_equal(logits(llm), logits(plain))
        assert store.capture() == 0
        assert store.stats().dropped["attached_late"] > 0


def test_a_store_that_is_gone_leaves_nothing_behind(contexts, tmp_path):
    llm, *_ = contexts()
    for _ in range(3):
        llm.set_cache(PrefixStore(tmp_path, llm, **PAGES))
        answer(llm, TEXT, 1)
        llm.set_cache(None)
        gc.collect()
        assert type(llm._ctx) is LlamaContext
        assert "eval" not in vars(llm)
    llm.set_cache(PrefixStore(tmp_path, llm, **PAGES))
    forget(llm)
    assert llm.cache.match(TEXT).n_tokens == len(TEXT)
    store = llm.cache
    answer(llm, TEXT, 1)
    assert store.stats().hits == 1
    with pytest.raises(MisuseError, match=r"it may be llm\.cache"):
        PrefixStore(tmp_path, llm)
    store.close()
    llm.eval(OTHER)


# -- what ends early --------------------------------------------------------------------------------------------------


def test_sequence_1_is_left_alone_if_it_is_in_use(contexts):
    llm, plain, _ = contexts()
    with caching("memory:", llm, **PAGES) as store:
        llm.eval(prompt(20, seed=1))
        llm._ctx.kv_cache_seq_cp(0, 1, -1, -1)
        pointer = vars(llm._ctx)["memory"]
        assert answer(llm, TEXT, 4) == answer(plain, TEXT, 4)
        assert llama_cpp.llama_memory_seq_pos_max(pointer, 1) == 19
        assert store.stats().misses == {"sequence_in_use": 1}
        assert store.match(TEXT).n_tokens == 0
        llm._ctx.kv_cache_seq_rm(1, -1, -1)
        answer(llm, TEXT, 4)
        assert store.match(TEXT).n_tokens == len(TEXT)


@pytest.mark.parametrize("arch", [*KINDS, "gemma3"])
def test_tokens_can_be_an_array_and_none_at_all(contexts, arch, caplog):
    llm, *_ = contexts(arch)
    with PrefixStore("memory:", llm, **PAGES) as store, caplog.at_level(logging.WARNING, "prefixstore"):
        llm.eval([])
        llm.eval(np.array(TEXT))
        llm.eval([])
        store.capture()
        assert store.match(TEXT).n_tokens == len(TEXT)
    assert caplog.records == []


# -- closed ------------------------------------------------------------------------------------------------------------


def test_a_llama_that_is_closed_is_an_error_and_no_crash(llama):
    llm = llama(**SMALL)
    store = PrefixStore("memory:", llm, **PAGES)
    llm.set_cache(store)
    answer(llm, TEXT, 1)
    state = llm.save_state()
    llm.close()
    for call in (
        lambda: PrefixStore("memory:", llm),
        lambda: llm.eval(TEXT),
        llm.reset,
        llm.save_state,
        lambda: llm.load_state(state),
        lambda: store.restore(TEXT),
        store.capture,
        lambda: store.restore(TEXT, llm),
        lambda: store.capture(llm),
        lambda: store.__setitem__(TEXT, state),
    ):
        with pytest.raises(ContextError, match="closed"):
            call()
    with pytest.raises(KeyError):
        store[TEXT]
    assert store.stats().misses["closed"] == 1
    assert store.match(TEXT).n_tokens == len(TEXT)
    store.close()


@pytest.mark.parametrize("options", [{}, {"namespace": "n"}], ids=["nameless", "named"])
def test_a_closed_store_that_is_still_set_is_a_miss(contexts, options, caplog):
    llm, plain, _ = contexts()
    store = PrefixStore("memory:", **options)
    llm.set_cache(store)
    store.close()
    try:
        with caplog.at_level(logging.WARNING, "prefixstore"):
            for _ in range(2):
                assert answer(llm, TEXT, 4) == answer(plain, TEXT, 4)
        assert [record.message.split(";")[0] for record in caplog.records] == ["a completion uses a closed store"]
        with pytest.raises(MisuseError, match="closed"):
            store[TEXT]
    finally:
        llm.set_cache(None)


def test_a_store_that_works_says_nothing(contexts, caplog):
    llm, *_ = contexts()
    with PrefixStore("memory:", llm, **PAGES) as store, caplog.at_level(logging.WARNING, "prefixstore"):
        llm.set_cache(store)
        for _ in range(3):
            answer(llm, TEXT, 1)  # nothing new to capture, nothing to restore
        for i in range(3):
            answer(llm, prompt(4, seed=i), 1)  # shorter than min_tokens
    assert caplog.records == []


@pytest.mark.parametrize("kv", ["F16", "Q8_0", "Q4_0"])
def test_a_shift_that_llama_cpp_has_not_carried_out_yet_changes_nothing_that_is_restored(contexts, kv):
    kind = getattr(llama_cpp, f"GGML_TYPE_{kv}")
    options = {"flash_attn": True, "type_k": kind, "type_v": kind}
    llm, plain, _ = contexts(**options)
    with PrefixStore("memory:", llm, **PAGES) as store:
        llm.eval(TEXT)
        store.capture()
        states = []
        for step in (0, 3):
            forget(llm)
            llm.eval(OTHER)
            if step:
                llm._ctx.kv_cache_seq_shift(0, 10, llm.n_tokens, step)
            assert store.restore([*TEXT, 7], always=True) == len(TEXT)
            llm.eval([7])
            states.append(state_bytes(llm))
        assert states[0] == states[1]
    plain.eval(TEXT)
    plain.eval([7])
    assert np.allclose(logits(llm), logits(plain), atol=0.1)
