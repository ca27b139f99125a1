"""Forged bytes: whatever they claim, they are refused, and nothing else happens."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

import llama_cpp
import numpy as np
import pytest

from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pages import open_pages
from prefixstore.format.autocodec import pick
from prefixstore.stats import Counters
from tests.support import ROOT
from tests.support.models import TORTURE
from tests.support.places import contents, fill, place, space

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
def test_a_forged_state_with_a_right_checksum_changes_no_answer(models, tmp_path, arch, options):
    case = {
        "model": str(models(arch)),
        "location": f"sqlite:///{tmp_path}/kv.db",
        "options": options,
        "first": 3,
        "step": 1 if TORTURE > 1 else 23,
    }
    done = json.loads(in_child("forged_states", [json.dumps(case)], seconds=240 * TORTURE).splitlines()[-1])
    assert done["ran"] > 5
    assert done["wrong"] == []
    assert done["check"] == []
    assert done["unreadable"].keys() <= {"shape", "refused"}
    assert sum(done["unreadable"].values()) > done["ran"] / 4, done
    assert done["last"] > 128


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_a_condemned_page_that_another_process_has_replaced_stays(tmp_path, request, scheme):
    with closing(open_pages(place(scheme, tmp_path, request), max_bytes=64 << 20)) as backend:
        engine = Engine(backend, Budget(64 << 20), POLICIES["lru"](), pick("raw"), Counters())
        paths = fill(backend, space(), [list(range(8)), [9, 9, 9, 9]])
        path = engine.match(space().key, np.arange(8, dtype="<i4"), 4)
        asked = []
        engine.condemn(path.pages[0], lambda state, start, n: asked.append((len(state), start, n)) is None)
        assert engine.match(space().key, np.arange(8, dtype="<i4"), 4).n_tokens == 0
        engine.commit([])
        assert asked == [(1000, 0, 4)]
        assert contents(backend).keys() == {key for path in paths for key in path}
        assert engine.match(space().key, np.arange(8, dtype="<i4"), 4).n_tokens == 8
        engine.condemn(path.pages[0], lambda state, start, n: False)
        engine.commit([])
        assert contents(backend).keys() == set(paths[1])
