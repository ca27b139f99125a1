"""The sequence cache with the real scheduler of llama-cpp-python's example server."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from prefixstore import PrefixStore, UnavailableError
from prefixstore.errors import MisuseError
from prefixstore.server import sequence_cache
from tests.support.example_server import Example, example_server
from tests.support.models import answer, load, prompt, write_lora

SYSTEM = prompt(600)
# tokens of an answer; the scheduler evaluates the last one too
GENERATED = 8
USERS = [SYSTEM + prompt(40, seed) for seed in range(1, 7)]


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def store(tmp_path):
    with PrefixStore(tmp_path / "kv", namespace="example") as store:
        yield store


@pytest.fixture
def example(models, stack):
    """Makes a model with a scheduler, with a cache on a store or without."""

    def make(store=None, arch="llama", settings=None, **options):
        cache = None
        if store is not None:
            cache = lambda model: sequence_cache(store, model, settings=settings)  # noqa: E731
        made = Example(models(arch), cache, **options)
        stack.callback(made.close)
        return made

    return make


def cold_answers(example, prompts, **options):
    made, found = example(**options), []
    for tokens in prompts:
        made.forget()
        found.append(made.ask(tokens))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("flash_attn", [True, False])
def test_a_restarted_server_restores_to_the_token_and_answers_as_cold(example, store, unified, flash_attn):
    options = {"kv_unified": unified, "flash_attn": flash_attn, "n_ctx": 4096 if unified else 16384}
    expected = cold_answers(example, USERS[:3], **options)
    first = example(store, **options)
    assert [first.ask(tokens) for tokens in USERS[:3]] == expected
    store.flush()
    again = example(store, **options)
    for tokens, text in zip(USERS[:3], expected, strict=True):
        again.forget()
        again.computed = 0
        assert again.ask(tokens) == text
        # the last token of the prompt, and what was generated
        assert again.computed == 1 + GENERATED
    # to the token: a prompt that leaves a stored one in the middle of a page
    other = USERS[0][:617] + prompt(30, 99)
    again.forget()
    again.computed = 0
    (text,) = cold_answers(example, [other], **options)
    assert again.ask(other) == text
    assert again.computed == len(other) - 617 + GENERATED
    assert again.scheduler.metrics.sequence_cache_load_failures_total == 0
    assert store.check() == []


@pytest.mark.slow
@pytest.mark.parametrize(("unified", "page_tokens"), [(True, 256), (False, 256), (True, 64)])
def test_of_a_sliding_window_only_pages_with_all_rows_are_stored(
    example, tmp_path, stack, unified, page_tokens, models
):
    store = stack.enter_context(PrefixStore(tmp_path / "windowed", namespace="example", page_tokens=page_tokens))
    options = {"arch": "gemma3", "kv_unified": unified, "n_ctx": 4096 if unified else 16384, "flash_attn": False}
    window = 256
    grown = [USERS[0][: 180 * i] for i in (1, 2, 3)]
    jumped = prompt(200, 70) + prompt(500, 71)
    first = example(store, settings=options, **options)
    # all rows of a prompt of one window, and of what is new as it grows
    answers = [first.ask(tokens) for tokens in grown]
    first.forget()
    first.ask(jumped)
    store.flush()
    assert store.stats().dropped == {"incomplete": 1}
    again = example(store, settings=options, **options)
    for tokens, text in zip(grown, answers, strict=True):
        again.forget()
        again.computed = 0
        assert again.ask(tokens) == text
        assert again.computed == 1 + GENERATED
    # and one that branches off before the window of the longest: the scheduler goes back to it in the same sequence
    other = grown[2][:150] + prompt(30, 72)
    again.computed = 0
    assert [again.ask(other)] == cold_answers(example, [other], **options)
    assert again.computed == 30 + GENERATED
    assert again.cache.lookup(jumped) is None
    # what a Llama has stored has all rows
    llm = load(models("gemma3"))
    with PrefixStore(store.location, llm, namespace="example", page_tokens=page_tokens) as attached:
        assert attached.namespace == again.cache.namespace
        llm.set_cache(attached)
        answer(llm, jumped, 1)
    again.forget()
    again.computed = 0
    assert len(jumped) > 2 * window
    assert [again.ask(jumped)] == cold_answers(example, [jumped], **options)
    assert again.computed == 1 + GENERATED
    assert store.check() == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
@pytest.mark.parametrize("unified", [True, False])
def test_recurrent_states_continue_exactly_where_they_were_taken(example, store, arch, unified):
    options = {"arch": arch, "kv_unified": unified, "n_ctx": 4096 if unified else 16384}
    system, longer = USERS[0], USERS[0] + prompt(50, 3)
    expected = cold_answers(example, [longer], **options)[0]
    first = example(store, **options)
    first.ask(system)
    store.flush()
    again = example(store, **options)
    assert again.ask(longer) == expected
    assert again.computed == 50 + GENERATED
    # a prompt that is all of it needs logits; one that branches off before cannot be continued
    for tokens in (system, system[:-1] + prompt(3, 9)):
        again.forget()
        again.computed = 0
        assert again.ask(tokens) == cold_answers(example, [tokens], **options)[0]
        assert again.computed == len(tokens) + GENERATED
    assert again.scheduler.metrics.sequence_cache_load_failures_total == 0
    assert store.check() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"flash_attn": False}, {}),
        ({"flash_attn": True, "type_k": 8, "type_v": 8}, {"flash_attn": True, "type_k": 8, "type_v": 8}),
        # llama.cpp decides, and the states show how
        ({}, {"flash_attn": True}),
    ],
    ids=["plain", "q8_0", "auto"],
)
def test_with_its_settings_pages_are_shared_with_a_llama(models, example, store, options, same):
    made = example(store, settings=options, **options)
    made.ask(USERS[0])
    store.flush()
    llm = load(models("llama"), **same)
    cold = answer(llm, USERS[0])
    llm.reset()
    with PrefixStore(store.location, llm, namespace="example") as attached:
        assert attached.namespace == made.cache.namespace
        llm.set_cache(attached)
        assert answer(llm, USERS[0]) == cold
        assert attached.stats().tokens_restored == len(USERS[0]) - 1
        # and back
        answer(llm, USERS[1])
        attached.flush()
    expected = cold_answers(example, USERS[1:2], **options)[0]
    made.forget()
    made.computed = 0
    assert made.ask(USERS[1]) == expected
    assert made.computed == 1 + GENERATED


def test_an_adapter_separates_pages_and_is_the_one_of_a_llama(models, stack, store, tmp_path):
    write_lora(tmp_path / "one.gguf", 0.5)
    module, settings = example_server(), {"flash_attn": False}
    loras = [module.Model.LoraAdapter(path=str(tmp_path / "one.gguf"), scale=0.75)]

    def made(**options):
        one = Example(models("llama"), lambda model: sequence_cache(store, model, settings=settings), **options)
        stack.callback(one.close)
        return one

    adapted = made(loras=loras, flash_attn=False)
    llm = load(models("llama"), lora_path=str(tmp_path / "one.gguf"), lora_scale=0.75)
    with PrefixStore("memory:", llm, namespace="example") as attached:
        assert adapted.cache.namespace == attached.namespace
    assert made(flash_attn=False).cache.namespace != adapted.cache.namespace
    with pytest.raises(MisuseError, match="one LoRA adapter"):
        made(loras=loras * 2)


def test_nothing_is_matched_or_stored_from_an_image_on(example, store):
    made = example(store)
    image = [-5, -6, -7]
    made.ask(USERS[0])
    store.flush()
    with_image = USERS[0][:500] + image + USERS[0][503:]
    match = made.cache.lookup(with_image)
    assert match.tokens == tuple(USERS[0][:500])
    assert isinstance(match, example_server().SequenceCache.Match)
    assert made.cache.lookup(image + USERS[0]) is None
    loaded = made.cache.load(match)
    assert loaded.tokens == USERS[0][:500]
    # of a prompt with an image, the text before it is stored
    state = made.cache.load(made.cache.lookup([*USERS[0], 5])).state_bytes
    other = prompt(400, 50)
    made.cache.save([*other[:300], *image, *other[303:]], state[: len(state)], None)
    made.cache.save([*image, *other], state, None)
    store.flush()
    assert store.stats().dropped == {}
    assert made.cache.lookup(other).length == 300


def test_a_state_that_is_not_one_of_this_model_is_not_stored(example, store):
    made = example(store)
    made.ask(USERS[0])
    store.flush()
    state = made.cache.load(made.cache.lookup([*USERS[0], 5])).state_bytes
    pages = store.stats().entries
    for wrong in (state[:-1], np.append(state, np.uint8(0)), state[8:], state[:100], state[:0]):
        made.cache.save(prompt(640, 60), wrong, None)
    # too few rows for its tokens
    made.cache.save(prompt(700, 61), state, None)
    store.flush()
    # its first pages have all of their rows
    assert store.stats().dropped == {"error": 5, "incomplete": 1}
    assert store.stats().entries == pages + 2
    assert store.check() == []


@pytest.mark.parametrize("method", ["view", "update"])
def test_a_store_that_fails_is_a_miss(example, store, monkeypatch, method):
    expected = cold_answers(example, USERS[:1])[0]
    made = example(store)

    def broken(*_, **__):
        raise UnavailableError("the disk is on fire")

    with monkeypatch.context() as faulty:
        faulty.setattr(store.engine._backend, method, broken)
        for _ in range(2):
            made.forget()
            assert made.ask(USERS[0]) == expected
        store.engine.drain()
    assert made.scheduler.metrics.sequence_cache_lookup_failures_total == 0
    made.forget()
    assert made.ask(USERS[0]) == expected
    store.flush()
    made.forget()
    made.computed = 0
    assert made.ask(USERS[0]) == expected
    assert made.computed == 1 + GENERATED
    assert store.check() == []


def test_a_model_in_use_is_refused_and_one_without_states_is_left_alone(example, store, caplog):
    made = example()
    made.ask(USERS[0])
    with pytest.raises(MisuseError, match="before its first request"):
        sequence_cache(store, made.model)
    with pytest.raises(MisuseError, match="Model of the example server"):
        sequence_cache(store, object())
    cache = example(store, embedding=True).cache
    assert "embedding" in caplog.text
    assert cache.namespace is None
    assert cache.lookup(USERS[0]) is None
    cache.save(USERS[0], np.zeros(8, np.uint8), None)
    assert cache.load(example_server().SequenceCache.Match((1, 2), False)) is None
    options = {"arch": "gemma3", "swa_full": False}
    assert example(store, settings=options, **options).cache.namespace is None
    assert "swa_full" in caplog.text


def test_a_protocol_without_the_classes_of_the_server_is_refused(example, store):
    with pytest.raises(MisuseError, match="Match and Load"):
        sequence_cache(store, example().model, protocol=object())
