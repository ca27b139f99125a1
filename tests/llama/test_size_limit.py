"""The bound on the size of states: no state of any kind of memory is larger, and it is not far from the largest."""

from __future__ import annotations

import llama_cpp
import pytest

from prefixstore import PrefixStore
from prefixstore.llama.kv_memory import size_limit
from tests.support.models import load, prompt, state_bytes

F32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}


@pytest.mark.parametrize(
    ("arch", "options"), [("llama", F32), ("gemma3", {}), ("olmo2", {}), ("mamba", F32), ("lfm2", {})]
)
def test_no_state_is_larger_than_the_bound(models, arch, options):
    llm = load(models(arch), n_ctx=512, **options)
    fixed, per_token = size_limit(llm)
    done = 0
    for n in (1, 10, 100, 400):
        llm.eval(prompt(n)[done:])
        done = n
        size = len(state_bytes(llm))
        assert size <= fixed + n * per_token
        # a forged page of gigabytes is refused for models of any size
        assert fixed + n * per_token < 64 * size + (8 << 20)


def test_the_bound_is_exact_once_a_page_was_written(llama):
    llm = llama(n_ctx=512)
    with PrefixStore("memory:", llm, page_tokens=32) as store:
        memory = store._hooks.current.context.memory
        fixed, per_token = size_limit(llm)
        assert memory.largest(32) == fixed + 32 * per_token
        llm.eval(prompt(64))
        sizes = {page.raw_bytes for page in store._engine.pages()}
        assert sizes == {memory.largest(32)}
