"""What is known about one context."""

from __future__ import annotations

import pytest

from prefixstore import PrefixStore
from prefixstore.errors import ContextError
from prefixstore.llama.kv_memory import SnapshotMemory
from prefixstore.llama.paged_memory import PagedMemory
from prefixstore.stats import Kind
from tests.support.models import prompt


@pytest.mark.parametrize(
    ("arch", "kind", "memory"),
    [
        ("llama", Kind.PAGES, PagedMemory),
        ("mamba", Kind.SNAPSHOTS, SnapshotMemory),
        ("lfm2", Kind.PAGES_AND_SNAPSHOTS, SnapshotMemory),
    ],
)
def test_the_kind_of_a_context_decides_how_it_is_stored(llama, arch, kind, memory):
    llm = llama(arch)
    with PrefixStore("memory:", llm) as store:
        context = store._hooks.current.context
        assert store.kind is kind
        assert context.kind is kind
        assert type(context.memory) is memory
        assert context.llm is llm
        assert context.parameters.page_tokens == (64 if arch == "lfm2" else 256)


@pytest.mark.parametrize("name", ["llama_model_has_encoder", "llama_get_memory"])
def test_a_model_that_is_no_decoder_gets_an_error_that_says_so_before_anything_is_replaced(llama, monkeypatch, name):
    """bert has no memory, and t5 an encoder: without a store an AssertionError, and the end of the process."""
    llm = llama()
    tokens = prompt(40)
    with PrefixStore("memory:", namespace="any") as store:
        monkeypatch.setattr(f"llama_cpp.{name}", lambda _: name == "llama_model_has_encoder")
        with pytest.raises(ContextError, match="generates no text with llama"):
            store.attach(llm)
        monkeypatch.undo()
        assert llm.cache is None
        llm.eval(tokens)
        assert llm.n_tokens == 40
