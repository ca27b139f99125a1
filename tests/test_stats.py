"""What a store keeps of a context, as a type that is also text; and what its statistics count."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import prefixstore
from prefixstore.engine.contents import DropReason
from prefixstore.llama.lineage import Unknown
from prefixstore.llama.paged_memory import Missing
from prefixstore.stats import Kind, Stats


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_reads_and_prints_as_its_value(kind):
    assert kind == kind.value == str(kind) == f"{kind}" == f"{kind:s}" == json.loads(json.dumps(kind))
    assert Kind(kind.value) is kind
    assert {kind.value: 1}[kind] == 1


def test_a_kind_tells_what_is_stored():
    assert [kind.value for kind in Kind if kind.has_pages] == ["pages", "pages and snapshots", "portable: pages"]
    assert [kind.value for kind in Kind if kind.has_snapshots] == ["snapshots", "pages and snapshots"]
    assert {kind.value: kind.reason for kind in Kind if not kind.is_stored} == {
        "unbound": None,
        "none: encoder": "encoder",
        "none: no_memory": "no_memory",
        "none: streams": "streams",
    }


def test_the_documentation_of_stats_names_every_reason_for_a_dropped_page():
    source = "".join(path.read_text() for path in Path(prefixstore.__file__).parent.rglob("*.py"))
    counted = set(re.findall(r'"dropped:(\w+)"', source)) | {
        reason.value for reason in (*DropReason, *Missing, *Unknown)
    }
    text = (Stats.__doc__ or "").split("    dropped\n")[1].split("    evictions")[0]
    assert set(re.findall(r'``"(\w+)"``', text)) == counted
