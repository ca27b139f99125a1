"""A store that is not attached to a Llama, compared with the stock cache and with attached stores."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from contextlib import contextmanager

import llama_cpp
import lmdb
import numpy as np
import pytest
from llama_cpp.llama import LlamaState
from llama_cpp.llama_cache import LlamaRAMCache

from prefixstore import CorruptError, InvalidParameterError, Namespace, PrefixStore
from prefixstore.backends.memory import MemoryBackend
from prefixstore.format.keys import as_tokens, common_prefix
from prefixstore.format.whole_state import WholeState
from prefixstore.llama.portable import hook as portable
from prefixstore.llama.portable import restore as portable_restore
from prefixstore.llama.portable import target as portable_target
from prefixstore.llama.portable.lookup import OWN_HITS
from prefixstore.testing import FaultyBackend
from tests.support import seeds
from tests.support.models import TORTURE, answer, forget, load, logits, prompt
from tests.support.worker import in_process

Q8_0 = llama_cpp.GGML_TYPE_Q8_0
KINDS = {
    "llama": ("llama", {}),
    "llama with flash attention": ("llama", {"flash_attn": True}),
    "llama with q8_0": ("llama", {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0}),
    "llama with logits_all": ("llama", {"logits_all": True}),
    "gemma3": ("gemma3", {}),
    "gemma3 without swa_full": ("gemma3", {"swa_full": False}),
    "mamba": ("mamba", {}),
    "lfm2": ("lfm2", {}),
}
READERS = {
    "small batches": {"n_batch": 64, "n_ubatch": 32},
    "short context": {"n_ctx": 700},
    "large batches": {"n_ctx": 4096, "n_batch": 1024, "n_ubatch": 1024},
}
# around the boundary of a page
LENGTHS = (17, 255, 256, 257, 700)
PAGED = ("llama", "llama with flash attention", "llama with q8_0", "gemma3")


@pytest.fixture
def store():
    """A store in memory, which is checked after the test."""
    with PrefixStore("memory:") as store:
        yield store
        assert store.check() == []


@pytest.fixture
def llm_of(models):
    """Loads a model of a kind, with or without a cache."""

    def load_kind(kind, cache=None, **options):
        arch, own = KINDS[kind]
        llm = load(models(arch), **{"n_ctx": 2048, **own, **options})
        llm.set_cache(cache)
        return llm

    return load_kind


def held(llm) -> list[int]:
    """The prompt and what was evaluated of the answer."""
    return llm.input_ids[: llm.n_tokens].tolist()


def evaluated(llm, work) -> int:
    """How many tokens go through eval while `work` runs."""
    counts, original = [], llm.eval
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(llm.__dict__, "eval", lambda tokens: counts.append(len(tokens)) or original(tokens))
        work()
    return sum(counts)


# -- what the next completion finds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        *(("llama", n) for n in LENGTHS),
        ("llama with flash attention", 255),
        ("llama with flash attention", 257),
        ("llama with q8_0", 17),
        ("llama with q8_0", 700),
        ("gemma3", 256),
        ("gemma3", 700),
    ],
)
def test_the_same_prompt_evaluates_one_token_the_second_time(llm_of, store, kind, n):
    first = answer(llm_of(kind, store), prompt(n), 6)
    again = llm_of(kind, store)
    assert evaluated(again, lambda: answer(again, prompt(n), 1)) == 1
    assert answer(llm_of(kind, store), prompt(n), 6) == first == answer(llm_of(kind), prompt(n), 6)
    assert store.kind == "portable: pages"


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_evaluates_only_its_new_tokens(llm_of, store, kind):
    first = llm_of(kind, store)
    answer(first, prompt(600), 8)
    tokens = held(first) + prompt(50, seed=1)
    again = llm_of(kind, store)
    texts = []
    assert evaluated(again, lambda: texts.append(answer(again, tokens, 1))) == 50
    assert texts == [answer(llm_of(kind), tokens, 1)]
    assert store.stats().tokens_restored == len(tokens) - 50


@pytest.mark.parametrize("kind", PAGED)
def test_a_fork_reuses_the_common_prefix_to_the_token(llm_of, store, kind):
    answer(llm_of(kind, store), prompt(900), 1)
    fork = prompt(900)[:613] + prompt(100, seed=9)
    llm = llm_of(kind, store)
    assert evaluated(llm, lambda: answer(llm, fork, 1)) == 100


@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        *itertools.product(["llama", "gemma3 without swa_full"], READERS),
        ("llama with flash attention", "small batches"),
        ("llama with q8_0", "short context"),
        ("llama with logits_all", "short context"),
        ("gemma3", "large batches"),
        ("mamba", "small batches"),
        ("mamba", "short context"),
        ("lfm2", "short context"),
        ("lfm2", "large batches"),
    ],
)
def test_a_reader_may_have_another_n_batch_and_n_ctx(llm_of, store, kind, reader):
    options, first = READERS[reader], llm_of(kind, store)
    answer(first, prompt(600), 8)
    tokens = held(first) + prompt(20, seed=1)
    llm = llm_of(kind, store, **options)
    places = len(llm.input_ids)
    assert evaluated(llm, lambda: answer(llm, tokens, 1)) == 20
    assert store.stats().hits == 1
    assert len(llm.input_ids) == places
    # it continues as before
    further = tokens + prompt(20, seed=2)
    assert evaluated(llm, lambda: answer(llm, further, 1)) == 20


@pytest.mark.parametrize("kind", PAGED)
def test_a_reader_with_a_shorter_context_restores_what_fits(llm_of, store, kind):
    answer(llm_of(kind, store), prompt(900), 1)
    llm = llm_of(kind, store, n_ctx=512)
    assert evaluated(llm, lambda: answer(llm, prompt(900)[:500], 4)) == 1 + 3


def test_what_the_context_holds_already_is_not_loaded(llm_of, store, monkeypatch):
    llm = llm_of("llama", store)
    answer(llm, prompt(600), 4)
    monkeypatch.setattr(llm, "load_state", lambda _: pytest.fail("loaded"))
    answer(llm, prompt(600) + prompt(20, seed=1), 4)
    assert store.stats().live_hits == 1


def test_an_empty_store_and_a_short_prompt_are_misses(llm_of, store):
    llm = llm_of("llama", store)
    answer(llm, prompt(4), 4)
    answer(llm, prompt(50, seed=1), 4)
    store.flush()
    assert store.stats().misses == {"not_found": 2}
    assert store.stats().entries == 1


def test_a_longer_conversation_writes_only_its_new_pages(llm_of, store):
    llm, conversation = llm_of("llama", store), prompt(600)
    for turn in range(5):
        before = store.stats().pages_captured
        answer(llm, conversation, 4)
        conversation = held(llm) + prompt(100, seed=turn)
        if turn:
            assert store.stats().pages_captured - before <= 2
    store.flush()
    # every tail was replaced by what continued it
    assert store.stats().entries == -(-llm.n_tokens // 256)


# -- beside an attached store -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PAGED)
def test_an_attached_store_and_a_portable_one_share_their_pages(llm_of, tmp_path, kind):
    tokens = prompt(700)
    with PrefixStore(tmp_path, namespace="n") as loose:
        answer(llm_of(kind, loose), tokens, 1)
        loose.flush()
        bound_llm = llm_of(kind)
        with PrefixStore(tmp_path, bound_llm, namespace="n") as bound:
            bound_llm.set_cache(bound)
            assert evaluated(bound_llm, lambda: answer(bound_llm, tokens, 1)) == 1
            # the same bytes under the same keys: nothing is added
            assert bound.stats().pages_captured == 0
            forget(bound_llm)
            longer = tokens + prompt(300, seed=1)
            answer(bound_llm, longer, 1)
            bound.flush()
        llm = llm_of(kind, loose)
        assert evaluated(llm, lambda: answer(llm, longer, 1)) == 1
        assert loose.check() == []


def test_a_name_and_a_salt_separate_stores(llm_of, tmp_path):
    for options in ({"namespace": "a"}, {"namespace": "b"}, {"namespace": "a", "salt": "s"}):
        with PrefixStore(tmp_path, **options) as store:
            answer(llm_of("llama", store), prompt(100), 1)
            assert store.stats().misses == {"not_found": 1}
            store.flush()


@pytest.mark.parametrize(
    "options", [{"flash_attn": True}, {"type_k": Q8_0}, {"rope_freq_base": 5000.0}, {"logits_all": True}]
)
def test_a_state_of_another_shape_is_a_miss(llm_of, store, options):
    answer(llm_of("llama", store), prompt(300), 4)
    plain = answer(llm_of("llama", **options), prompt(300), 4)
    assert answer(llm_of("llama", store, **options), prompt(300), 4) == plain
    assert store.stats().hits == 0


def test_another_model_with_the_same_name_is_a_miss(models, store):
    for options in ({}, {"seed": 1}, {"n_layer": 2}):
        llm = load(models("llama", **options), n_ctx=512)
        llm.set_cache(store)
        plain = load(models("llama", **options), n_ctx=512)
        assert answer(llm, prompt(300), 4) == answer(plain, prompt(300), 4)
    assert store.stats().hits == 0


# -- in another process -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_process_stores_another_restores(llm_of, models, tmp_path, kind):
    arch, options = KINDS[kind]
    arguments = {"model": str(models(arch)), "location": str(tmp_path / "store")}
    first = in_process("complete", tokens=prompt(600), options={"n_ctx": 2048, **options}, **arguments)
    assert first["check"] == []
    assert first["captured"] > 0
    cold = llm_of(kind)
    assert answer(cold, prompt(600), 8) == first["text"]
    tokens = held(cold) + prompt(30, seed=1)
    again = in_process("complete", tokens=tokens, options={"n_ctx": 1024, "n_batch": 128, **options}, **arguments)
    assert (again["hits"], again["restored"]) == (1, len(tokens) - 30)
    assert again["check"] == []
    assert again["text"] == answer(llm_of(kind), tokens, 8)


# -- beside the stock cache -------------------------------------------------------------------------------------------


def workload(rng: random.Random, conversations: list[list[int]]) -> tuple[list[int], list[int] | None]:
    """The next prompt, and what it continues: a new conversation, a further turn, an edited one, or one again."""
    kind = rng.choice(["new", "turn", "turn", "turn", "edit", "again"]) if conversations else "new"
    user = prompt(rng.randint(1, 150), seed=rng.randrange(1 << 30))
    if kind == "new":
        # some begin with the same system prompt
        return prompt(rng.choice([0, 200, 300])) + user, None
    history = rng.choice(conversations)
    if kind == "edit":
        return history[: rng.randint(1, len(history))] + user, history
    if kind == "again":
        return history[: rng.randint(len(history) // 2 + 1, len(history))], history
    return (history + user)[:1500], history


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "gemma3" not in kind])
@pytest.mark.parametrize("seed", seeds(1, 2 * TORTURE))
def test_random_conversations_are_answered_as_by_the_stock_cache_with_as_much_reused(llm_of, kind, seed):
    with PrefixStore("memory:", min_tokens=1) as store:
        converse(llm_of, store, kind, random.Random(seed))
        assert store.stats().unreadable == {}
        assert store.stats().dropped == {}
        assert store.check() == []


def converse(llm_of, store, kind, rng) -> None:
    stock, ours = llm_of(kind, LlamaRAMCache()), llm_of(kind, store)
    conversations: list[list[int]] = []
    reused = {"stock": 0, "ours": 0}
    for _ in range(18):
        tokens, history = workload(rng, conversations)
        if history is not None and KINDS[kind][0] != "llama":
            # of a recurrent model the last state of a conversation stays; going back to an older one computes
            conversations.remove(history)
        if rng.random() < 0.4:
            forget(stock)
            forget(ours)
        texts: list[str] = []
        by_stock = evaluated(stock, lambda: texts.append(answer(stock, tokens, 6)))  # noqa: B023 - called at once
        by_ours = evaluated(ours, lambda: texts.append(answer(ours, tokens, 6)))  # noqa: B023
        assert by_ours <= by_stock
        assert texts[0] == texts[1]
        reused["stock"] += len(tokens) - by_stock
        reused["ours"] += len(tokens) - by_ours
        conversations.append(held(ours))
    assert reused["ours"] >= reused["stock"] > 0


def gap_where_they_part(llm, a: list[int], b: list[int]) -> float:
    """How much better the first candidate is than the second, where two answers differ."""
    n = common_prefix(as_tokens(a), as_tokens(b))
    forget(llm)
    llm.eval(a[:n])
    second, first = np.sort(logits(llm))[-2:]
    return float(first - second)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "gemma3 without swa_full"])
@pytest.mark.parametrize("seed", seeds(1, 2 * TORTURE))
def test_random_conversations_of_a_model_with_a_window_are_answered_as_without_a_cache(llm_of, store, kind, seed):
    # the stock cache continues where rows of the window were overwritten, so it cannot be compared with here
    rng = random.Random(seed)
    ours, plain = llm_of(kind, store), llm_of(kind)
    conversations: list[list[int]] = []
    for _ in range(12):
        tokens, _ = workload(rng, conversations)
        if rng.random() < 0.4:
            forget(ours)
        forget(plain)
        if answer(ours, tokens, 6) != answer(plain, tokens, 6):
            # other batches have other last bits: two candidates that are as good as each other may change places
            assert gap_where_they_part(plain, held(ours), held(plain)) < 0.02
        conversations.append(held(ours))
    assert store.stats().hits > 0
    assert store.stats().unreadable == {}


@pytest.mark.slow
def test_logprobs_and_echo_after_a_restore_are_those_of_the_stock_cache(llm_of, store):
    def complete(llm, tokens):
        return llm(tokens, max_tokens=4, temperature=0, logprobs=3, echo=True)["choices"][0]

    answers, computed = [], []
    for cache in (LlamaRAMCache(), store):
        llm = llm_of("llama with logits_all", cache)
        complete(llm, "the value of the module " * 10 + "is a list")
        other = llm_of("llama with logits_all", cache, n_batch=64)
        text = "the value of the module " * 10 + "and more of it"
        computed.append(evaluated(other, lambda: answers.append(complete(other, text))))  # noqa: B023 - called at once
    assert computed[0] == computed[1] < 20
    assert answers[0] == answers[1]
    assert len(answers[0]["logprobs"]["tokens"]) > 40
    assert store.kind == "portable: whole states"


# -- whole states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_the_next_turn_replaces_the_state_that_it_contains(llm_of, store, kind):
    llm, conversation = llm_of(kind, store), prompt(100)
    for turn in range(4):
        forget(llm)
        answer(llm, conversation, 4)
        store.flush()
        assert store.stats().entries == 1
        conversation = held(llm) + prompt(30, seed=turn)
    assert store.stats().hits == 3


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_a_state_that_other_prompts_hit_too_stays(llm_of, store, kind):
    llm = llm_of(kind, store)
    answer(llm, prompt(300), 1)
    system, texts = held(llm), []
    assert system == prompt(300)
    for user in range(3):
        forget(llm)
        n = evaluated(llm, lambda: texts.append(answer(llm, system + prompt(40, seed=user), 1)))  # noqa: B023
        # its own next turn hits it once; a retry of that turn counts as another
        if user == 0:
            assert n == 40
            store.flush()
            assert store.stats().entries == 1
            store.clear()
            forget(llm)
            answer(llm, system, 1)
            for _ in range(OWN_HITS + 1):
                forget(llm)
                store._portable.lookup([*system, 5], None)
        else:
            assert n == 40
    store.flush()
    assert store.stats().entries == 1 + 2
    for user, text in enumerate(texts):
        assert answer(llm_of(kind), system + prompt(40, seed=user), 1) == text
    # a prompt that continues it uses its own state
    further = system + prompt(40, seed=1) + prompt(10, seed=7)
    forget(llm)
    assert evaluated(llm, lambda: answer(llm, further, 1)) == 10
    store.flush()
    assert store.stats().entries == 1 + 2
    assert store.check() == []


def test_a_state_that_continues_one_that_stays_is_found_by_another_process(llm_of, tmp_path):
    llm, system, user, further = llm_of("mamba"), prompt(300), prompt(40, seed=1), prompt(50, seed=2)
    llm.eval(system)
    with PrefixStore(tmp_path, namespace="my-model") as store:
        store[system] = llm.save_state()
        for longer, more in ((system, user), (system + user, further)):
            store.flush()
            for _ in range(OWN_HITS + 1):
                assert store[[*longer, 5]].n_tokens == len(longer)
            llm.eval(more)
            store[longer + more] = llm.save_state()
    conversation = system + user + further
    for read_only in (True, False):
        with PrefixStore(tmp_path, namespace="my-model", read_only=read_only) as store:
            assert store[[*conversation, 5]].n_tokens == 390
            assert store.match(conversation[:345]).n_tokens == 345
            assert store[conversation[:345]].n_tokens == 340
            assert store.stats().entries == 3
    with PrefixStore(tmp_path, namespace="my-model") as store:
        # what is there already is not stored again
        store[conversation] = llm.save_state()
        store.flush()
        assert store.stats().entries == 3
        assert store.pin(conversation) == 390
        assert store.check() == []


def test_a_recurrent_state_that_is_not_a_prefix_of_the_prompt_is_a_miss(llm_of, store):
    llm = llm_of("mamba", store)
    answer(llm, prompt(300), 4)
    fork = prompt(300)[:200] + prompt(20, seed=3)
    forget(llm)
    assert answer(llm, fork, 6) == answer(llm_of("mamba"), fork, 6)
    assert store.stats().hits == 0
    assert store.stats().unreadable == {}


def test_the_stored_form_of_a_whole_state_is_checked():
    whole = WholeState(2, 64, memoryview(b"state"), np.arange(6, dtype=np.single).reshape(2, 3))
    stored = bytearray(whole.size)
    whole.write(memoryview(stored))
    again = WholeState.read(memoryview(stored))
    assert (again.n_tokens, again.n_ctx, bytes(again.state)) == (2, 64, b"state")
    assert np.array_equal(again.scores, whole.scores)
    for end in range(len(stored)):
        with pytest.raises(CorruptError):
            WholeState.read(memoryview(stored)[:end])
    for at in (0, 8, 16, 20):
        damaged = bytearray(stored)
        damaged[at] ^= 0x40
        with pytest.raises(CorruptError):
            WholeState.read(memoryview(damaged))


# -- as a mapping, outside a completion -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_a_user_stores_is_found_again_in_a_location_with_a_name(llm_of, tmp_path, kind):
    llm, tokens = llm_of(kind), prompt(300)
    llm.eval(tokens)
    with PrefixStore(tmp_path, namespace="my-model") as store:
        store[tokens] = llm.save_state()
        assert tokens in store
    with PrefixStore(tmp_path, namespace="my-model") as store:
        state = store[[*tokens, 5]]
    other = llm_of(kind)
    other.load_state(state)
    assert held(other) == tokens
    other.eval([5, 6])
    llm.eval([5, 6])
    assert np.array_equal(logits(other), logits(llm))
    with PrefixStore(tmp_path, namespace="another") as store, pytest.raises(KeyError):
        store[tokens]


def test_outside_a_completion_the_states_of_the_last_llama_are_found(llm_of, store):
    llm = llm_of("llama", store)
    answer(llm, prompt(300), 1)
    assert prompt(300) in store
    assert store.match(prompt(300)).n_tokens == 300
    state = store[prompt(300)]
    assert state.n_tokens == 300
    assert len(state.input_ids) == 2048


def test_an_object_that_is_not_a_state_is_refused(store):
    with pytest.raises(InvalidParameterError, match="save_state"):
        store[[1, 2]] = b"state"
    with pytest.raises(InvalidParameterError):
        store["text"]


def test_a_returned_state_has_no_token_after_its_own(llm_of, store):
    llm = llm_of("llama", store)
    answer(llm, prompt(300), 1)
    state = store[prompt(200)]
    assert (state.n_tokens, state.llama_state_size) == (200, len(state.llama_state))
    assert set(state.input_ids[200:].tolist()) == {-1}
    assert state.scores.shape == (1, 1)


# -- the promise ------------------------------------------------------------------------------------------------------


def test_a_state_that_contradicts_its_own_fields_is_not_stored(llm_of, store):
    llm = llm_of("llama")
    llm.eval(prompt(100))
    good = llm.save_state()

    def changed(**fields) -> LlamaState:
        return LlamaState(**{**vars(good), **fields})

    mamba = llm_of("mamba")
    mamba.eval(prompt(100))
    behind = mamba.save_state()
    behind.n_tokens = 90
    for state in (
        changed(llama_state_size=good.llama_state_size - 1),
        changed(input_ids=np.full_like(good.input_ids, -1)),
        behind,
    ):
        store[prompt(100)] = state
    store.flush()
    assert store.stats().entries == 0


def test_images_are_bypassed(llm_of, store):
    llm = llm_of("llama", store)
    llm.chat_handler = type("Handler", (), {"mtmd_ctx": None})()
    answer(llm, prompt(100), 1)
    assert store.stats().misses == {"multimodal": 1}
    assert store.stats().entries == 0


def test_a_read_only_store_restores(llm_of, tmp_path):
    with PrefixStore(tmp_path, namespace="n") as store:
        answer(llm_of("llama", store), prompt(300), 1)
    with PrefixStore(tmp_path, namespace="n", read_only=True) as store:
        llm = llm_of("llama", store)
        assert evaluated(llm, lambda: answer(llm, prompt(300) + prompt(300, seed=1), 1)) == 300
        assert store.stats().pages_captured == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mamba"])
@pytest.mark.parametrize("operation", ["view", "record", "payload", "update", "put", "commit"])
def test_a_backend_that_fails_causes_misses_until_it_recovers(llm_of, monkeypatch, kind, operation):
    faulty = FaultyBackend(MemoryBackend(), operation, times=4)
    monkeypatch.setattr("prefixstore.opening.open_backend", lambda *_, **__: faulty)
    expected = answer(llm_of(kind), prompt(300), 4)
    with PrefixStore("memory:") as store:
        llm = llm_of(kind, store)
        for _ in range(12):
            forget(llm)
            assert answer(llm, prompt(300), 4) == expected
            store.engine.drain()
        for _ in range(6):
            tokens = [*held(llm), 5]
            forget(llm)
            n = evaluated(llm, lambda: answer(llm, tokens, 1))  # noqa: B023 - called at once
            store.engine.drain()
        assert n == 1
        assert faulty.failures > 0
        assert store.check() == []


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_a_damaged_payload_is_a_miss_and_is_replaced(llm_of, tmp_path, kind):
    llm = llm_of(kind)
    with PrefixStore(tmp_path, namespace="n", codec="raw") as store:
        llm.set_cache(store)
        answer(llm, prompt(600), 4)
        tokens = [*held(llm), 5]
    damage_all_payloads(tmp_path)
    with PrefixStore(tmp_path, namespace="n", codec="raw") as store:
        llm.set_cache(store)
        forget(llm)
        assert evaluated(llm, lambda: answer(llm, tokens, 1)) == len(tokens)
        assert store.stats().misses == {"unreadable": 1}
        assert store.stats().unreadable == {"corrupt": 1}
        store.flush()
        assert store.check() == []
        forget(llm)
        assert evaluated(llm, lambda: answer(llm, [*tokens, 7], 1)) == 1


def damage_all_payloads(path) -> None:
    """Flip a bit in the middle of each, past the store."""
    with lmdb.open(str(path), max_dbs=8, map_size=64 << 20) as env:
        payloads = env.open_db(b"payloads")
        with env.begin(write=True) as transaction:
            for key, value in list(transaction.cursor(payloads)):
                damaged = bytearray(value)
                damaged[len(damaged) // 2] ^= 16
                transaction.put(key, bytes(damaged), db=payloads)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_an_undamaged_payload_that_is_not_a_state_is_a_miss(llm_of, store, monkeypatch, kind):
    llm = llm_of(kind, store)
    answer(llm, prompt(600), 4)
    tokens = [*held(llm), 5]
    forget(llm)

    @contextmanager
    def zeros(pages, **options):
        yield (memoryview(bytes(page.raw_bytes)) for page in pages)

    with monkeypatch.context() as faulty:
        faulty.setattr(store._engine, "fetching", zeros)
        assert evaluated(llm, lambda: answer(llm, tokens, 1)) == len(tokens)
    assert store.stats().misses == {"not_found": 1, "unreadable": 1}
    assert store.stats().unreadable == {"shape": 1}


@pytest.mark.slow
def test_a_page_that_is_gone_ends_a_restore_before_it(llm_of, store, monkeypatch):
    for kind in ("llama", "gemma3"):
        llm = llm_of(kind, store)
        answer(llm, prompt(900), 1)
        fetching = store._engine.fetching

        @contextmanager
        def without_the_third(pages, fetching=fetching, **options):
            with fetching(pages, **options) as found:
                yield itertools.islice(found, 2)

        again = llm_of(kind, store)
        with monkeypatch.context() as faulty:
            faulty.setattr(store._engine, "fetching", without_the_third)
            texts = []
            n = evaluated(again, lambda: texts.append(answer(again, prompt(900), 1)))  # noqa: B023 - called at once
        assert n == 900 - 512
        assert texts == [answer(llm_of(kind), prompt(900), 1)]


def test_pages_of_another_shape_end_a_restore_before_them(llm_of, store, monkeypatch):
    """They cannot be there unless two models have one fingerprint; but a mixture could end the process."""
    monkeypatch.setattr(portable_target, "namespace_of", lambda *_, **__: Namespace({"label": "one for all"}))
    answer(llm_of("llama", store), prompt(256), 1)
    other = llm_of("llama", type_k=Q8_0)
    other.eval(prompt(600))
    hook = store._unbound()
    hook._save(hook._target(other), other.save_state())
    assert store.match(prompt(600)).n_tokens == 600
    llm = llm_of("llama", store)
    assert evaluated(llm, lambda: answer(llm, prompt(600), 1)) == 600 - 256
    assert store.stats().unreadable == {"shape": 1}


def test_an_unexpected_exception_does_not_reach_a_completion(llm_of, store, monkeypatch, caplog):
    llm, cold = llm_of("llama", store), answer(llm_of("llama"), prompt(300), 4)
    with monkeypatch.context() as faulty, caplog.at_level(logging.WARNING, "prefixstore"):
        faulty.setattr(portable_restore.StateBuilder, "build", lambda *_: 1 / 0)
        faulty.setattr(portable, "parse_context", lambda *_: 1 / 0)
        assert answer(llm, prompt(300), 4) == cold
    assert store.stats().misses == {"error": 1}
    assert store.stats().dropped == {"error": 1}
    assert "continues without the store" in caplog.text


def test_pages_that_do_not_fit_into_the_queue_are_dropped_and_stored_the_next_time(llm_of):
    with PrefixStore("memory:", queue_bytes=300_000) as store:
        llm, busy = llm_of("llama", store), threading.Event()
        commit = store._engine.commit
        store._engine.commit = lambda batch: busy.wait(120) and commit(batch)
        answer(llm, prompt(900), 1)
        assert store.stats().dropped == {"queue_full": 1}
        busy.set()
        store.flush()
        answer(llm, prompt(900), 1)
        store.flush()
        assert store.match(prompt(900)).n_tokens > 256


def test_a_state_that_cannot_be_parsed_is_stored_whole(llm_of, store, monkeypatch):
    def refuse(_):
        raise CorruptError("written by a llama.cpp of the future")

    monkeypatch.setattr(portable, "parse_context", refuse)
    monkeypatch.setattr(portable_restore, "parse_context", refuse)
    llm = llm_of("llama", store)
    answer(llm, prompt(300), 4)
    tokens = held(llm) + prompt(20, seed=1)
    again = llm_of("llama", store)
    texts = []
    assert evaluated(again, lambda: texts.append(answer(again, tokens, 1))) == 20
    assert texts == [answer(llm_of("llama"), tokens, 1)]
    # it cannot be cut
    fork = llm_of("llama", store)
    assert evaluated(fork, lambda: answer(fork, [*tokens[:200], 7], 1)) == 201
