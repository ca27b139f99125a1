"""Answers with a draft model, with and without a store: ``python -m`` this; a crash ends only this process."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from prefixstore import PrefixStore
from tests.support.models import answer, forget, load, prompt
from tests.support.timeouts import disable_timeouts

# a prompt in which the draft model finds something to repeat, longer than the windows of the models
PART = prompt(110)
TOKENS = [*PART, *PART, *PART[:70]]


class Nothing(LlamaDraftModel):
    """Proposes no tokens: memory that cannot step back never has to."""

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        return np.array([], np.intc)


def outcomes(llm: Any) -> list[str]:
    """Two answers, the second to a continuation; of a model that cannot take drafted tokens back, the errors."""
    found = []
    for tokens in (TOKENS, [*TOKENS, 5, 6, 7]):
        try:
            found.append(answer(llm, tokens, 16))
        except RuntimeError as error:
            found.append(repr(error))
    return found


def run(model: str, n_batch: int, options: dict[str, Any]) -> dict[str, Any]:
    """What came out for each draft model."""
    results = {}
    for draft in (LlamaPromptLookupDecoding(num_pred_tokens=10), Nothing()):
        llm = load(model, n_ctx=1024, n_batch=n_batch, n_ubatch=8, draft_model=draft, logits_all=True, **options)
        cold = outcomes(llm)
        forget(llm)
        with PrefixStore("memory:", page_tokens=64, min_tokens=16, snapshot_interval=128) as store:
            llm.set_cache(store)
            found = []
            for _ in range(3):
                found.append(outcomes(llm))
                forget(llm)
                store.flush()
            results[type(draft).__name__] = (found == [cold] * 3, store.stats().tokens_restored)
    return results


if __name__ == "__main__":
    disable_timeouts()
    print(json.dumps(run(**json.loads(sys.argv[1]))))
