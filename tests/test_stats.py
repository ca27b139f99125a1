"""What a store keeps of a context, as a type that is also text."""

from __future__ import annotations

import json

import pytest

from prefixstore.stats import Kind


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
    }
