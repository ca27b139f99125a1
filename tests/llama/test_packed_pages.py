"""Pages that were packed since space was short give the same states, in every kind of store."""

from __future__ import annotations

import pytest

from prefixstore import PrefixStore
from tests.support.models import answer, forget, prompt, state_bytes

TOKENS = prompt(700)
KINDS = {
    "pages": ("llama", {}),
    "pages, transposed V": ("llama", {"flash_attn": True}),
    "window": ("gemma3", {"swa_full": False}),
    "snapshots": ("mamba", {}),
    "pages and snapshots": ("lfm2", {}),
}


def _be_short_of_space(store) -> None:
    store.engine._encode.is_short_of_space = True
    store.engine._committer._low_bytes = -1


def n_packed(store) -> int:
    return sum(page.stored_bytes < page.raw_bytes for page in store.engine.pages())


@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_of_packed_pages_gives_the_same_bytes_and_the_same_answer(llama, tmp_path, kind):
    arch, options = KINDS[kind]
    llm = llama(arch, **options)
    with PrefixStore(tmp_path / "kv", llm, ram_bytes="64MiB") as store:
        llm.set_cache(store)
        first = answer(llm, TOKENS)
        store.flush()
        forget(llm)
        n = store.restore(TOKENS, always=True)
        held = state_bytes(llm)
        assert n > 500
        assert n_packed(store) == 0
        store.clear()
        forget(llm)
        _be_short_of_space(store)
        assert answer(llm, TOKENS) == first
        store.flush()
        forget(llm)
        assert store.restore(TOKENS, always=True) == n
        assert state_bytes(llm) == held
        assert answer(llm, TOKENS) == first
        assert store.stats().packed >= n_packed(store) > 0
        assert store.stats().unreadable == {}
        assert store.check() == []
