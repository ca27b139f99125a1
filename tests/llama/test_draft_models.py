"""Speculative decoding: logits are asked for by their place in a batch, which a store must not split."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("gemma3", {"swa_full": False}),
        ("gemma3", {"swa_full": True}),
        ("olmo2", {"swa_full": False}),
        ("mamba", {}),
        ("lfm2", {}),
    ],
    ids=str,
)
def test_answers_with_a_draft_model_are_those_without_a_store(models, arch, options):
    # one process for both, as its start costs more than what it does
    arguments = {"model": str(models(arch)), "n_batches": [128, 512], "options": options}
    done = subprocess.run(
        [sys.executable, "-m", "tests.llama.draft_models", json.dumps(arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-1000:]}"
    for n_batch, results in json.loads(done.stdout.splitlines()[-1]).items():
        assert {name: same for name, (same, _) in results.items()} == dict.fromkeys(results, True), n_batch
        restored = {name: n for name, (_, n) in results.items()}
        if arch in ("llama", "gemma3"):
            assert min(restored.values()) > 0, n_batch
        elif n_batch == "128" and arch != "olmo2":
            # snapshots are taken between batches
            assert restored["Nothing, portable=False"] > 0
