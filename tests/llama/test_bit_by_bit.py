"""What another process restores is what this one computed, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.models import load, logits, prompt
from tests.support.worker import in_process

# what the matrix of tests/models does not have: a window cache, and batches that end within its cells
CONTEXTS = {
    "llama": ("llama", {}),
    "gemma3, window cache": ("gemma3", {"swa_full": False}),
    "gemma3, window cache, large batches": ("gemma3", {"swa_full": False, "n_batch": 1024, "n_ubatch": 128}),
}
CUTS = [200, 256, 700, 1000, 1024, 1500, 1801, 2047]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_second_process_restores_the_same_bytes_and_answers_the_same(name, models, tmp_path):
    arch, options = CONTEXTS[name]
    model, location, tokens = str(models(arch)), str(tmp_path / "kv"), prompt(2048, seed=1)
    shared = {"model": model, "location": location, "tokens": tokens, "cuts": CUTS, "options": options}

    a = in_process("evaluate_and_store", **shared)
    b = in_process("restore_and_report", **shared)

    assert a["check"] == []
    assert b["restored"] == {str(cut): cut for cut in CUTS}
    assert b["text"] == a["text"]
    assert b["evaluated"] == 1
    assert b["misses"] == {}
    assert b["states"] == a["states"]
    llm = load(model, **options)
    for cut in CUTS:
        llm.reset()
        llm.eval(tokens[:cut])
        llm.eval([7])
        cold = logits(llm)
        assert np.array_equal(cold, np.array(b["logits"][str(cut)], np.float32)), f"cut at {cut}"
