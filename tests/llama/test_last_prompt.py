"""What a store tells of the last prompt: where its tokens came from, and why nothing was found."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from prefixstore import UnavailableError
from prefixstore.llama.paged_memory import PagedMemory
from tests.support.models import answer, attached, forget, prompt

KINDS = {"llama": {}, "gemma3": {"swa_full": False}, "mamba": {}, "lfm2": {}}


def tokens_of(last):
    return last.live, last.restored, last.computed


@pytest.mark.parametrize("arch", KINDS)
def test_each_prompt_leaves_one_record(llama, store, arch):
    llm, tokens = attached(store, llama(arch, **KINDS[arch])), prompt(600)
    assert store.last is None
    answer(llm, tokens, 3)
    cold = store.last
    assert (cold.source, cold.n_tokens, cold.miss) == ("cold", 600, "not_found")
    assert tokens_of(cold) == (0, 0, 600)
    assert cold.compute_seconds > 0 == cold.restore_seconds
    assert cold.lookup_seconds > 0
    forget(llm)
    answer(llm, tokens, 3)
    warm = store.last
    assert (warm.source, warm.n_tokens, warm.miss) == ("store", 600, None)
    assert tokens_of(warm) == (0, 599, 1)
    assert min(warm.compute_seconds, warm.restore_seconds, warm.lookup_seconds) > 0
    # the next turn
    turn = llm.input_ids[: llm.n_tokens].tolist() + prompt(50, seed=1)
    answer(llm, turn, 3)
    live = store.last
    assert (live.source, live.miss) == ("live", None)
    assert tokens_of(live) == (len(turn) - 50, 0, 50)
    # what the records say was not changed by later prompts
    assert tokens_of(cold) == (0, 0, 600)
    with pytest.raises(FrozenInstanceError):
        cold.computed = 0
    assert store.last_of(llm) == store.last


def unavailable(*_):
    raise UnavailableError("gone")


@pytest.mark.parametrize(("fault", "miss"), [(lambda *_: 1 / 0, "error"), (unavailable, "unavailable")])
def test_a_location_that_fails_and_a_fault_of_the_store_are_counted_reasons_and_reach_no_completion(
    llama, store, monkeypatch, caplog, fault, miss
):
    llm, tokens = attached(store, llama()), prompt(700)
    with monkeypatch.context() as patched:
        patched.setattr(PagedMemory, "take", lambda *_: 1 / 0)
        patched.setattr(type(store.engine), "match", fault)
        assert answer(llm, tokens, 6) == answer(llama(), tokens, 6)
    assert (store.last.source, store.last.miss, store.last.computed) == ("cold", miss, 700)
    assert store.stats().misses == {miss: 1}
    assert store.stats().dropped["error"] >= 1
    assert "division by zero" in caplog.text
    answer(llm, tokens, 1)
    assert store.last.miss is None
