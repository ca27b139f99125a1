"""What a store keeps of a context, as a type that is also text; and what its statistics count."""

import inspect
import json
import re
from pathlib import Path

import pytest

import prefixstore
from prefixstore.counters import HISTOGRAMS, Counters, Kind
from prefixstore.engine.pending import DropReason, Outdated
from prefixstore.llama.lineage import Unknown
from prefixstore.llama.paged_memory import Missing
from prefixstore.results import Stats


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_reads_and_prints_as_its_value(kind):
    assert kind == kind.value == str(kind) == f"{kind}" == f"{kind:s}" == json.loads(json.dumps(kind))
    assert Kind(kind.value) is kind
    assert {kind.value: 1}[kind] == 1


def test_the_documentation_of_stats_names_every_reason_that_is_counted():
    source = "".join(path.read_text() for path in Path(prefixstore.__file__).parent.rglob("*.py"))
    documented = {}
    for field in re.findall(r"^(\w.*(?:\n    .*)*)", inspect.getdoc(Stats) or "", re.MULTILINE):
        documented[field.split("\n")[0]] = set(re.findall(r'``"(\w+)"``', field))
    counted = {name: set(re.findall(rf'"{name}:(\w+)"', source)) for name in ("dropped", "miss", "unreadable")}
    assert documented["dropped"] == counted["dropped"] | {one.value for one in (*DropReason, *Missing, *Unknown)}
    assert documented["outdated"] == {one.value for one in Outdated} | {"moved_on"}
    assert documented["misses"] >= counted["miss"] > {"not_found", "error"}
    assert documented["unreadable"] >= counted["unreadable"] > {"corrupt"}


def test_a_histogram_counts_each_value_once_and_a_time_is_one():
    counters = Counters()
    bounds = HISTOGRAMS["lookup"]
    counters.observe("lookup", [0.0, bounds[0], bounds[0] * 1.01, bounds[-1], bounds[-1] + 1, -3.0])
    counters.time("lookup", 0.3)
    taken = counters.histogram("lookup")
    assert taken.n == 7
    assert (taken.counts[0], taken.counts[1], taken.counts[-2], taken.counts[-1]) == (3, 1, 1, 1)
    assert taken.counts[bounds.index(0.5)] == 1
    assert taken.total == pytest.approx(bounds[0] * 2.01 + 2 * bounds[-1] + 1 + 0.3)
    assert counters.seconds("lookup") == 0.3
    assert bounds[0] == 50e-6
    assert bounds[-1] == 60
    assert all(list(some) == sorted(set(some)) for some in HISTOGRAMS.values())


def test_a_copy_of_the_counters_is_on_its_own():
    counters = Counters()
    counters.count("hits")
    counters.time("saved", 2.0)
    counters.time("saved", -1.0)
    counters.observe("first_reuse", [5.0])
    with counters._lock:  # as in a process that was forked meanwhile
        copied = counters.copy()
    copied.count("hits")
    copied.observe("first_reuse", [5.0, 6.0])
    assert (counters["hits"], copied["hits"]) == (1, 2)
    assert (counters.histogram("first_reuse").n, copied.histogram("first_reuse").n) == (1, 3)
    assert copied.histogram("first_reuse").total == 16
    assert (copied.seconds("saved"), copied.gained("saved")) == (1.0, 2.0)
