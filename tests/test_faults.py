"""A fault of the store is a miss, counted: completions continue, and the store recovers."""

from __future__ import annotations

import logging

import llama_cpp
import pytest

from prefixstore import PrefixStore
from prefixstore.llama.paged_memory import PagedMemory
from tests.support.models import answer, prompt

TOKENS = prompt(700)


@pytest.fixture
def cold(llama) -> str:
    return answer(llama(), TOKENS, 6)


def test_an_unexpected_exception_does_not_reach_a_completion(llama, cold, monkeypatch, caplog):
    llm = llama()
    with PrefixStore("memory:", llm) as store:
        llm.set_cache(store)
        with monkeypatch.context() as faulty:
            faulty.setattr(PagedMemory, "take", lambda *_: 1 / 0)
            faulty.setattr(type(store.engine), "match", lambda *_: 1 / 0)
            with caplog.at_level(logging.WARNING, "prefixstore"):
                assert answer(llm, TOKENS, 6) == cold
        stats = store.stats()
        assert stats.misses == {"error": 1}
        assert stats.dropped["error"] >= 1
        assert "division by zero" in caplog.text


@pytest.mark.parametrize("write_behind", [True, False])
def test_llama_cpp_refusing_a_page_ends_the_restore_with_what_is_there(llama, cold, monkeypatch, write_behind):
    llm = llama()
    with PrefixStore("memory:", llm, write_behind=write_behind) as store:
        if write_behind:
            # pages that wait to be written need no check
            monkeypatch.setattr(store.engine.write_queue, "_commit", lambda batch: None)
        llm.set_cache(store)
        answer(llm, TOKENS, 1)
        real, loads = llama_cpp.llama_state_seq_set_data, []

        def second_fails(*arguments):
            loads.append(1)
            return real(*arguments) if len(loads) != 2 else 0

        monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", second_fails)
        llm.reset()
        assert answer(llm, TOKENS, 6) == cold
        stats = store.stats()
        assert stats.unreadable == {"refused": 1}
        assert stats.tokens_restored == 256
