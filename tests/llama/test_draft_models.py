"""Speculative decoding: logits are asked for by their place in a batch, which a store must not split."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import ROOT

MODELS = [
    ("llama", {}),
    ("gemma3", {"swa_full": False}),
    ("gemma3", {"swa_full": True}),
    ("olmo2", {"swa_full": False}),
    ("mamba", {}),
    ("lfm2", {}),
]


@pytest.mark.parametrize(
    ("arch", "options", "n_batch"),
    [
        # several batches for a prompt; each process takes a second
        pytest.param(arch, options, n, marks=() if n == 128 and arch == "llama" else pytest.mark.slow)
        for arch, options in MODELS
        for n in (128, 512)
    ],
    ids=str,
)
def test_answers_with_a_draft_model_are_those_without_a_store(models, arch, options, n_batch):
    arguments = {"model": str(models(arch)), "n_batch": n_batch, "options": options}
    done = subprocess.run(
        [sys.executable, "-m", "tests.llama.draft_models", json.dumps(arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-1000:]}"
    results = json.loads(done.stdout.splitlines()[-1])
    assert {name: same for name, (same, _) in results.items()} == dict.fromkeys(results, True)
    restored = {name: n for name, (_, n) in results.items()}
    if arch in ("llama", "gemma3"):
        assert min(restored.values()) > 0
    elif n_batch == 128 and arch != "olmo2":
        # snapshots are taken between batches
        assert restored["Nothing"] > 0
