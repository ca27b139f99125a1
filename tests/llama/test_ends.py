"""Snapshots at the edges: taken once, and those of a window that a llama-server has stored."""

from __future__ import annotations

import pytest

from prefixstore import PrefixStore
from prefixstore.format.keys import as_tokens
from prefixstore.llama.capture import Capture, memory_of
from prefixstore.llama.paged_memory import PagedMemory
from prefixstore.llama.state.form import Form
from prefixstore.llama.state.parse import parse_sequence
from tests.support.models import answer, prompt, state_bytes


@pytest.fixture
def store():
    with PrefixStore("memory:", page_tokens=64) as store:
        yield store


@pytest.fixture
def window_end(llama, store):
    """A context with a window, attached, and the tokens of which only what a llama-server has is stored."""
    llm, tokens = llama("gemma3", swa_full=False), as_tokens(prompt(600))
    llm.set_cache(store)
    store.attach(llm)
    with store.bypass():
        llm.eval(tokens.tolist())
    state, context = state_bytes(llm), store._current.context
    view = parse_sequence(state)
    form = Form.ends(view, context.memory.seen)
    place = store._current.strategy.place.of_ends()
    to = Capture(store.engine, place, form, context.rate.compute_us, context.parameters)
    assert to.store(tokens, view, memory_of(state)).reason is None
    store.flush()
    llm.reset()
    return llm, tokens.tolist()


def test_the_end_of_a_window_that_a_server_has_stored_is_known_to_be_stored(store, window_end):
    llm, tokens = window_end
    assert store.match(tokens).n_tokens == 600
    assert store.explain([*tokens, 7]).n_matched == 600
    state = store[[*tokens, 7]]
    assert store.last.restored == 600
    llm.reset()
    llm.load_state(state)
    assert llm.n_tokens == 600


def test_the_end_of_a_window_that_is_refused_is_one_miss(store, window_end, monkeypatch):
    llm, tokens = window_end
    # pages of less of it, which are not tried after that
    llm.eval(tokens[:300])
    store.capture()
    llm.reset()
    monkeypatch.setattr(PagedMemory, "put", lambda *_: False)
    before = store.stats()
    answer(llm, [*tokens, 7], 2)
    stats = store.stats()
    assert stats.misses == {**before.misses, "unreadable": 1}
    assert stats.hits == before.hits
    assert (store.last.source, store.last.miss, store.last.restored) == ("cold", "unreadable", 0)
