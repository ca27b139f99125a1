"""Pages that were packed since space was short give the same states, in every kind of store."""

from __future__ import annotations

import io

import pytest

from prefixstore import PrefixStore
from prefixstore.format.export import ExportReader
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import export_store, import_store
from tests.support.models import answer, forget, prompt, state_bytes

TOKENS = prompt(700)
KINDS = {
    "pages": ("llama", {}),
    "pages, transposed V": ("llama", {"flash_attn": True}),
    "window": ("gemma3", {"swa_full": False}),
    "snapshots": ("mamba", {}),
    "pages and snapshots": ("lfm2", {}),
}


def with_cache(store, llm):
    """The Llama that a store was opened with, with the store as its cache."""
    llm.set_cache(store)
    return llm


def _be_short_of_space(store) -> None:
    store.engine._encode.is_short_of_space = True
    store.engine._committer._low_bytes = -1


def n_packed(store) -> int:
    return sum(page.stored_bytes < page.raw_bytes for page in store.engine.pages())


@pytest.mark.parametrize("ram_bytes", [None, "64MiB"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_of_packed_pages_gives_the_same_bytes_and_the_same_answer(llama, tmp_path, kind, ram_bytes):
    arch, options = KINDS[kind]
    llm = llama(arch, **options)
    with PrefixStore(tmp_path / "kv", llm, ram_bytes=ram_bytes) as store:
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


def test_an_export_of_packed_pages_can_be_imported_and_restored(llama, tmp_path):
    llm = llama()
    with PrefixStore(tmp_path / "kv", llm) as store:
        _be_short_of_space(store)
        first = answer(with_cache(store, llm), TOKENS)
        store.flush()
        assert n_packed(store) > 0
    file = io.BytesIO()
    with Archive(tmp_path / "kv") as archive:
        export_store(archive, file)
    file.seek(0)
    with Archive(tmp_path / "other", create=True) as archive:
        import_store(ExportReader(file, "file"), archive)
    with PrefixStore(tmp_path / "other", llm := llama()) as store:
        assert answer(with_cache(store, llm), TOKENS) == first
        assert store.stats().tokens_restored >= len(TOKENS) - 1


@pytest.mark.slow
def test_a_store_that_gets_full_packs_new_pages(llama, tmp_path):
    llm = llama()
    prompts = [prompt(513, seed) for seed in range(6)]
    with PrefixStore(tmp_path / "large", llm) as store:
        llm.set_cache(store)
        for tokens in prompts:
            answer(llm, tokens, 1)
        store.flush()
        size = store.stats().bytes_used
    with PrefixStore(tmp_path / "kv", llm, max_bytes=size // 2) as store:
        llm.set_cache(store)
        for tokens in prompts:
            answer(llm, tokens, 1)
            store.flush()
        assert store.stats().packed > 0
        assert store.stats().evictions > 0
        forget(llm)
        assert store.restore(prompts[-1], always=True) == 512
        assert "packed" in str(store.stats())
