"""What is known about one context."""

from __future__ import annotations

import pytest

from prefixstore import PrefixStore
from prefixstore.llama.context import bypass_reason, is_multimodal, live_prefix_length
from prefixstore.llama.lineage import Lineage
from prefixstore.llama.paged_memory import Missing, PagedMemory
from prefixstore.llama.snapshot_memory import SnapshotMemory
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
        context = store._hook.context
        assert store.kind is kind
        assert context.kind is kind
        assert type(context.memory) is memory
        assert context.llm is llm
        assert context.parameters.page_tokens == (64 if arch == "lfm2" else 256)


def test_a_context_is_bypassed_for_what_it_is_and_for_what_its_handler_does(llama):
    llm = llama()
    assert bypass_reason(llm, Kind.PAGES) is None
    assert bypass_reason(llm, Kind.ENCODER) == "encoder"
    assert bypass_reason(llm, Kind.NO_MEMORY) == "no_memory"
    llm.chat_handler = type("Handler", (), {"mmproj_path": "mmproj.gguf"})()
    assert is_multimodal(llm)
    assert bypass_reason(llm, Kind.PAGES) == "multimodal"


def test_the_first_page_that_cannot_be_taken_is_returned_with_its_reason(llama):
    llm, tokens = llama(), prompt(600)
    llm.eval(tokens)
    assert live_prefix_length(llm, llm.input_ids[:600]) == 600
    memory, taken = PagedMemory(llm), []
    ranges = [(0, 256), (256, 512), (512, 768)]
    with PrefixStore("memory:", llm) as store:
        missing = memory.take(ranges, store.engine.acquire, lambda start, end, buffer: taken.append(buffer))
        assert (missing.start, missing.end, missing.reason) == (512, 768, Missing.INCOMPLETE)
        assert len(taken) == 2
        for buffer in taken:
            buffer.release()
        missing = memory.take(ranges, lambda size: None, lambda *page: pytest.fail("there was no buffer"))
        assert (missing.start, missing.end, missing.reason) == (0, 256, Missing.QUEUE_FULL)
    # the tags are as they were
    assert memory.holds(600)


def test_the_parent_of_a_page_is_right_even_if_no_keys_were_computed_before():
    lineage = Lineage(bytes(32), 4, 64)
    lineage.extend(range(10))
    parents = [lineage.parent(i) for i in (2, 1, 0)]
    assert parents == [lineage.keys()[1], lineage.keys()[0], bytes(32)]
    lineage.rewind(4)
    lineage.extend(range(20, 26))
    assert lineage.parent(2) == lineage.keys()[1] != parents[0]
