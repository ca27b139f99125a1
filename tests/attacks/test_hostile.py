"""Forged bytes: whatever they claim, they are refused, and nothing else happens."""

from __future__ import annotations

import io
import json
import tracemalloc
from contextlib import closing
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest

from prefixstore.counters import Counters
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pages import open_pages
from prefixstore.errors import CorruptError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.export import ENTRY, EXPORT_VERSION, HEADER, MAGIC, ExportReader
from prefixstore.format.keys import namespace_key
from prefixstore.format.record import FORMAT_VERSION, Usage
from tests.attacks import in_child
from tests.attacks.exporting import sealed_entry
from tests.support.models import TORTURE
from tests.support.pages import make_page
from tests.support.places import contents, fill, place, space

Q8 = {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}


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
    done = json.loads(in_child("forged_states", json.dumps(case), seconds=240 * TORTURE).splitlines()[-1])
    assert done["ran"] > 5
    assert done["wrong"] == []
    assert done["check"] == []
    assert done["unreadable"].keys() <= {"shape", "refused"}
    assert sum(done["unreadable"].values()) > done["ran"] / 4, done
    assert done["last"] > 128


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_a_condemned_page_that_another_process_has_replaced_stays(tmp_path, request, scheme):
    with closing(open_pages(place(scheme, tmp_path, request), max_bytes=64 << 20)) as backend:
        engine = Engine(backend, Budget(64 << 20), POLICIES["lru"](), Encoder("raw"), Counters())
        paths = fill(backend, space(), [list(range(8)), [9, 9, 9, 9]])
        path = engine.match(space().key, np.arange(8, dtype="<i4"), 4)
        engine.condemn(replace(path.pages[0], created=1))
        engine.commit([])
        assert contents(backend).keys() == {key for path in paths for key in path}
        assert engine.match(space().key, np.arange(8, dtype="<i4"), 4).n_tokens == 8
        engine.condemn(path.pages[0])
        assert engine.match(space().key, np.arange(8, dtype="<i4"), 4).n_tokens == 0
        engine.commit([])
        assert contents(backend).keys() == set(paths[1])


def test_what_an_export_file_claims_to_hold_takes_no_memory():
    key = namespace_key(b"{}")
    page, record = make_page(b"", [1, 2], parent=key, namespace=key)
    head = page + Usage(1).pack() + replace(record, stored_bytes=2**35).pack()
    whole = HEADER.pack(MAGIC, EXPORT_VERSION, FORMAT_VERSION) + sealed_entry(b"NAME", key + b"{}", 0)
    tracemalloc.start()
    for entry in (sealed_entry(b"PAGE", head, 2**35), ENTRY.pack(b"PAGE", 2**31, 0), ENTRY.pack(b"PAGE", 2**27, 0)):
        with pytest.raises(CorruptError):
            list(ExportReader(io.BytesIO(whole + entry), "forged").entries())
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
