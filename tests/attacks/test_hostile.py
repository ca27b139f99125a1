"""Bytes that somebody else has made: whatever they say, they are refused, and nothing else happens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from tests.models import TORTURE

ROOT = Path(__file__).parent.parent.parent
Q8 = {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}


def in_child(module: str, arguments: list[str], *, seconds: int) -> str:
    """What a module of this directory prints; if it crashed, its last line names the case."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.attacks.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{done.returncode} at {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"
    return done.stdout


# -- states whose checksum is right -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("llama", Q8),
        ("gemma3", {"swa_full": True}),
        ("gemma3", {"swa_full": False, "n_ubatch": 64}),
        ("mamba", {}),
        ("lfm2", {}),
    ],
    ids=["llama", "llama q8_0", "gemma3", "gemma3 that forgets", "mamba", "lfm2"],
)
@pytest.mark.parametrize("portable", [False, True], ids=["attached", "portable"])
def test_a_state_that_lies_under_a_right_checksum_changes_no_answer(models, tmp_path, arch, options, portable):
    case = {
        "model": str(models(arch)),
        "location": f"sqlite:///{tmp_path}/kv.db",
        "portable": portable,
        "options": options,
        "first": 3,
        "step": 1 if TORTURE > 1 else 23,
    }
    done = json.loads(in_child("forging", [json.dumps(case)], seconds=60 * TORTURE).splitlines()[-1])
    assert done["ran"] > 5
    assert done["wrong"] == []
    assert done["check"] == []
    assert done["unreadable"].keys() <= {"shape", "refused"}
    assert sum(done["unreadable"].values()) > done["ran"] / 4, done
    assert done["last"] > 128
