"""Speculative decoding: logits are asked for by their place in a batch, which a store must not split."""

from __future__ import annotations

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from prefixstore import PrefixStore
from tests.support.models import answer, forget, load, prompt

# a prompt in which the draft model finds something to repeat, longer than the windows of the models
PART = prompt(110)
TOKENS = [*PART, *PART, *PART[:70]]
MODELS = [
    ("llama", {}),
    ("gemma3", {"swa_full": False}),
    ("gemma3", {"swa_full": True}),
    ("olmo2", {"swa_full": False}),
    ("mamba", {}),
    ("lfm2", {}),
]


class Nothing(LlamaDraftModel):
    """Proposes no tokens: memory that cannot step back never has to."""

    def __call__(self, input_ids, /, **kwargs):
        return np.array([], np.intc)


def outcomes(llm):
    """Two answers, the second to a continuation; of a model that cannot take drafted tokens back, the errors."""
    found = []
    for tokens in (TOKENS, [*TOKENS, 5, 6, 7]):
        try:
            found.append(answer(llm, tokens, 16))
        except RuntimeError as error:
            found.append(repr(error))
    return found


@pytest.mark.parametrize("draft", [LlamaPromptLookupDecoding(num_pred_tokens=10), Nothing()], ids=["drafts", "none"])
@pytest.mark.parametrize(
    ("arch", "options", "n_batch"),
    [
        # several batches for a prompt
        pytest.param(arch, options, n, marks=() if n == 128 and arch in ("llama", "lfm2") else pytest.mark.slow)
        for arch, options in MODELS
        for n in (128, 512)
    ],
    ids=str,
)
def test_answers_with_a_draft_model_are_those_without_a_store(models, arch, options, n_batch, draft):
    llm = load(models(arch), n_ctx=1024, n_batch=n_batch, n_ubatch=8, draft_model=draft, logits_all=True, **options)
    cold = outcomes(llm)
    forget(llm)
    with PrefixStore("memory:", page_tokens=64, min_tokens=16, snapshot_interval=128) as store:
        llm.set_cache(store)
        for _ in range(3):
            assert outcomes(llm) == cold
            forget(llm)
            store.flush()
        # snapshots are taken between batches
        is_restored = isinstance(draft, Nothing) and n_batch == 128 and arch != "olmo2"
        if arch in ("llama", "gemma3") or is_restored:
            assert store.stats().tokens_restored > 0
