"""A real Llama with a store: what it evaluates, what it answers, what it is left with."""

from __future__ import annotations

from contextlib import closing

import llama_cpp
import numpy as np
import pytest
from llama_cpp._internals import LlamaContext
from llama_cpp.llama_cache import BaseLlamaCache, LlamaRAMCache

from prefixstore import MisuseError, PrefixStore
from prefixstore.engine.pages import open_pages
from tests.support.models import answer, attached, caching, evaluated, forget, prompt, state_bytes


def test_a_stream_that_was_aborted_within_a_page_is_stored(llama, store):
    llm, tokens = attached(store, llama()), prompt(200)
    for then in (llm.reset, lambda: answer(llm, prompt(100, seed=3), 1)):
        stream = llm(tokens, max_tokens=9, stream=True)
        next(stream)
        stream.close()
        assert store.match(tokens).n_tokens == 0
        then()
        assert store.match(tokens).n_tokens == len(tokens)
        store.clear()
    # what a Llama that is not attached holds is not trusted at a lookup
    store.detach()
    llm.reset()
    llm.eval(tokens)
    store.restore(prompt(100, seed=3), llm)
    store.attach(llm)
    assert store.match(tokens).n_tokens == 0


@pytest.mark.parametrize("arch", ["llama", "mamba", "lfm2"])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513])
def test_prompts_around_the_boundaries_evaluate_one_token_the_second_time(llama, store, arch, n):
    llm = attached(store, llama(arch))
    cold = answer(llm, prompt(n), 6)
    forget(llm)
    again = evaluated(store, lambda: answer(llm, prompt(n), 1))
    # shorter than min_tokens with what was generated, it is not worth a page
    assert again == (1 if n > 16 else n)
    forget(llm)
    assert answer(llm, prompt(n), 6) == cold


def test_the_next_turn_of_a_live_conversation_restores_nothing_and_stores_only_its_own_tokens(llama, store):
    llm, conversation = attached(store, llama()), prompt(600)
    answer(llm, conversation, 1)
    for turn in range(4):
        conversation = conversation + prompt(300, seed=turn + 1)
        before = store.stats()
        assert evaluated(store, lambda: answer(llm, conversation, 1)) <= 301  # noqa: B023 - called at once
        after = store.stats()
        assert after.tokens_restored == before.tokens_restored
        assert after.pages_captured - before.pages_captured <= 3
    store.flush()
    # every tail but the last was replaced by what continued it
    assert store.stats().entries == -(-len(conversation) // 256)


def test_save_state_inside_a_completion_copies_nothing(llama, store, monkeypatch):
    llm = attached(store, llama())
    copies = []
    library = llama_cpp.llama_cpp  # where llama_cpp.llama looks the function up
    real = library.llama_state_get_data
    monkeypatch.setattr(library, "llama_state_get_data", lambda *a: copies.append(1) or real(*a))
    answer(llm, prompt(300), 2)
    list(llm(prompt(300), max_tokens=2, stream=True))
    assert not copies
    state = llm.save_state()
    assert copies
    assert state.llama_state_size == len(state.llama_state) > 300 * 1024


def test_a_users_save_state_and_load_state_behave_as_they_did(llama, store):
    llm, tokens = attached(store, llama()), prompt(700)
    llm.eval(tokens)
    state, bytes_then = llm.save_state(), state_bytes(llm)
    assert state.n_tokens == 700
    llm.reset()
    llm.eval(prompt(300, seed=5))
    llm.load_state(state)
    assert llm.n_tokens == 700
    assert state_bytes(llm) == bytes_then
    # the store saw what was saved, and keeps storing after it
    llm.eval(prompt(100, seed=6))
    store.capture()
    assert store.match(tokens + prompt(100, seed=6)).n_tokens == 800


def test_after_a_state_of_a_longer_context_a_restore_leaves_a_place_for_the_last_token(llama, store):
    llm, longer = llama(n_ctx=512), llama()
    store.attach(llm)
    store.attach(longer)
    longer.eval(prompt(600)[:300])
    state = longer.save_state()
    longer.eval(prompt(600)[300:])
    store.capture()
    llm.load_state(state)
    assert store.restore(prompt(600), llm, always=True) == 511
    llm.eval(prompt(600)[511:512])


def test_detach_leaves_the_llama_as_it_was(llama, store):
    llm, calls = llama(), []
    before, of_context = dict(vars(llm)), dict(vars(llm._ctx))
    for own in (None, lambda tokens: calls.append(len(tokens)) or type(llm).eval(llm, tokens)):
        if own is not None:
            # a method that the user has replaced
            llm.eval = before["eval"] = own
        bound = llm.eval
        store.attach(llm)
        assert llm.eval != bound
        llm.eval(prompt(600))
        store.detach()
        assert vars(llm).keys() == before.keys()
        assert llm.eval == bound
        assert (type(llm._ctx), vars(llm._ctx)) == (LlamaContext, of_context)
        llm.reset()
    assert calls == [512, 88]


def test_a_llama_whose_store_was_closed_continues_without_it(llama):
    llm = llama()
    with caching("memory:", llm):
        with_store = answer(llm, prompt(300), 4)
    assert llm.cache is None
    assert answer(llm, prompt(300), 4) == with_store
    other = LlamaRAMCache()
    llm.set_cache(other)
    with PrefixStore("memory:", llm):
        pass
    assert llm.cache is other


def test_the_store_is_a_llama_cpp_cache(llama, store):
    llm = attached(store, llama())
    assert isinstance(store, BaseLlamaCache)
    assert bool(store)
    assert store.capacity_bytes == 10 << 30
    tokens = prompt(400)
    assert tokens not in store
    with pytest.raises(KeyError):
        store[tokens]
    answer(llm, tokens, 2)
    assert tokens in store
    store.flush()
    assert store.cache_size > 400 * 512
    forget(llm)
    state = store[tokens]
    assert state.n_tokens == 399
    assert state.input_ids.tolist() == tokens[:399]
    llm.load_state(state)  # it is live already
    assert llm.n_tokens == 399


def test_a_read_only_store_restores_and_writes_nothing(llama, tmp_path):
    llm = llama()
    with caching(tmp_path, llm) as store:
        answer(llm, prompt(600), 1)
    before = (tmp_path / "data.mdb").read_bytes()
    other = llama()
    with caching(tmp_path, other, read_only=True) as store:
        assert evaluated(store, lambda: answer(other, prompt(600) + prompt(300, seed=2), 1)) == 300
        with pytest.raises(MisuseError, match="read_only"):
            store.clear()
        with pytest.raises(MisuseError, match="read_only"):
            store.pin(prompt(600))
    assert (tmp_path / "data.mdb").read_bytes() == before


class Wrapper(BaseLlamaCache):
    """A cache around a store, which a completion does not recognise as one."""

    cache_size = 0

    def __init__(self, store):
        self.store = store

    def __getitem__(self, tokens):
        return self.store[tokens]

    def __contains__(self, tokens):
        return tokens in self.store

    def __setitem__(self, tokens, state):
        self.store[tokens] = state


PROMPT_LOGITS = {
    "a saved state": lambda llm, store: llm.load_state(llm.save_state()),
    "no cache": lambda llm, store: llm.set_cache(None),
    "another cache": lambda llm, store: llm.set_cache(LlamaRAMCache()),
    "a wrapper": lambda llm, store: llm.set_cache(Wrapper(store)),
    "detached": lambda llm, store: store.detach(),
    "closed": lambda llm, store: store.close(),
    "unknown": lambda llm, store: (llm.ctx, llm.set_cache(None)),
    "unknown, and looked up": lambda llm, store: llm.ctx,
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "lfm2"])
@pytest.mark.parametrize("then", PROMPT_LOGITS.values(), ids=PROMPT_LOGITS)
def test_logprobs_of_a_prompt_never_come_from_rows_that_were_not_computed(llama, arch, then):
    # each token's row of logits costs a sort in Python
    text = "hello world this is a prompt with many words " * 4
    options = {"max_tokens": 2, "temperature": 0, "logprobs": 1, "echo": True}
    llm = llama(arch, logits_all=True, n_ctx=512)
    plain = llm(text, **options)["choices"][0]["logprobs"]["token_logprobs"]
    llm.reset()
    with caching("memory:", llm) as store:
        llm(text, max_tokens=1, temperature=0)
        forget(llm)
        llm.scores[:] = 0
        assert store.restore(llm.tokenize(text.encode()), always=True) > 30
        then(llm, store)
        got = llm(text, **options)["choices"][0]["logprobs"]["token_logprobs"]
    assert np.allclose(got[1:], plain[1:], atol=0.01)


def test_with_logprobs_a_restore_of_a_part_of_the_prompt_ends_between_batches(llama, store):
    options = {"max_tokens": 4, "temperature": 0, "logprobs": 3}
    batches = {"logits_all": True, "n_batch": 64, "n_ctx": 512}
    start = prompt(150)
    tokens = start + prompt(50, seed=1)
    cold = llama(**batches)(tokens, **options)["choices"][0]["logprobs"]
    llm = attached(store, llama(**batches))
    llm(start, max_tokens=1, temperature=0)
    forget(llm)
    warm = llm(tokens, **options)["choices"][0]["logprobs"]
    assert store.last.restored == 128
    assert warm["token_logprobs"] == cold["token_logprobs"]


class SeesImages:
    """Does what llama-cpp-python's multimodal handlers do, with an image that never goes through eval."""

    clip_model_path = "mmproj.gguf"

    def __init__(self) -> None:
        self.image = prompt(100, seed=1)

    def __call__(self, *, llama, messages, max_tokens=8, temperature=0.0, **_):
        llama.reset()
        llama._ctx.kv_cache_clear()
        llama.eval(prompt(300))
        # into the context without eval; input_ids keep what they held
        llama._batch.set_batch(batch=self.image, n_past=llama.n_tokens, logits_all=False)
        llama._ctx.decode(llama._batch)
        llama.n_tokens += len(self.image)
        llama.eval(prompt(300, seed=2))
        return llama.create_completion(
            prompt=llama.input_ids[: llama.n_tokens].tolist(), max_tokens=max_tokens, temperature=temperature
        )


@pytest.mark.parametrize("announced", [True, False])
def test_an_answer_never_uses_an_earlier_image(llama, store, monkeypatch, announced):
    if not announced:
        # a user's own handler, which cannot be distinguished from one for text
        monkeypatch.delattr(SeesImages, "clip_model_path")
    handler = SeesImages()

    def ask(llm, seed) -> str:
        handler.image = prompt(100, seed=seed)
        return llm.create_chat_completion([], max_tokens=8, temperature=0.0)["choices"][0]["text"]

    plain = llama(chat_handler=handler)
    expected = [ask(plain, seed) for seed in (1, 50, 51)]
    assert len(set(expected)) > 1
    llm = attached(store, llama(chat_handler=handler))
    assert [ask(llm, seed) for seed in (1, 50, 51)] == expected
    assert [ask(llm, seed) for seed in (51, 50, 1)] == expected[::-1]
    # the text before the image is in the store, and nothing more
    stored = store.match(np.array(prompt(300) + [0] * 400)).n_tokens
    assert stored == (300 if announced else 256)
    if announced:
        assert store.stats().misses["multimodal"] == 6


def test_a_window_that_has_moved_on_is_not_reused(llama, store):
    # what llama-cpp-python does on its own: it steps back 900 tokens, and attends to rows that were overwritten
    llm = attached(store, llama("gemma3", swa_full=False))
    answer(llm, prompt(1600), 1)
    store.clear()
    fork = prompt(1600)[:700] + prompt(200, seed=8)
    expected = answer(llama("gemma3", swa_full=False), fork, 12)
    assert answer(llm, fork, 12) == expected


def test_a_damaged_page_is_captured_again_by_the_prompt_that_has_found_it(llama, tmp_path):
    tokens = list(range(1, 700))
    llm = llama(n_ctx=1024)
    with PrefixStore(tmp_path / "kv", llm, page_tokens=64, codec="raw") as store:
        answer(llm, tokens, 1)
    with closing(open_pages(str(tmp_path / "kv"), max_bytes=1 << 30)) as pages, pages.update() as transaction:
        [key] = [key for key, record, _ in transaction.scan() if record.start == 256]
        transaction.put(key, transaction.record(key), transaction.usage(key), b"x" * len(transaction.payload(key)))
    llm = llama(n_ctx=1024)
    with caching(tmp_path / "kv", llm, page_tokens=64, codec="raw") as store:
        answer(llm, tokens, 1)
        assert store.stats().unreadable == {"corrupt": 1}
        store.flush()
        assert store.check() == []
        assert store.match(tokens).n_tokens >= len(tokens) - 1
