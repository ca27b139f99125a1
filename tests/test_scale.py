"""The benchmark of large stores: it fills a location once, and each figure is there."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

import pytest

from benchmarks import filled, scale
from prefixstore.engine.pages import open_pages
from prefixstore.format.keys import as_tokens
from tests.support import ROOT

ASKED = (
    "open_ms first_match_ms match_p50_us match_p99_us rss_bytes_per_page insert_p50_ms evicting_insert_p50_ms "
    "longest_lock_ms"
)
SPACE = filled.namespace()
N = 800


@pytest.fixture
def backend(tmp_path):
    with closing(open_pages(f"lmdb://{tmp_path}/kv", max_bytes=1 << 30)) as found:
        yield found


def used(backend):
    with backend.view() as view:
        return view.used.entries


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "n_pages", "processes"), [(["benchmarks/scale.py"], N, 0), (["-m", "benchmarks.scale"], 10 * N, 1)]
)
def test_it_prints_each_figure_as_a_file_and_as_a_module(tmp_path, how, n_pages, processes):
    command = [sys.executable, *how, "--pages", n_pages, "--location", f"lmdb://{tmp_path}/kv", "--inserts", 2]
    command += ["--processes", processes, "--json"]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, check=True, capture_output=True)
    found = json.loads(done.stdout)
    assert set(ASKED.split()) < set(found)
    assert set(scale.GOALS) < set(found)
    assert (found["pages"], found["processes"]) == (n_pages, processes)
    assert all(found[name] > 0 for name in ASKED.split() if name != "longest_lock_ms")


def test_a_location_is_filled_once_and_with_what_it_lacks(backend):
    assert filled.fill(backend, SPACE, N) == N
    assert used(backend) == N
    assert filled.fill(backend, SPACE, N) == 0
    assert filled.fill(backend, SPACE, N + 25) == 30
    assert used(backend) == N + 30


def test_what_is_filled_in_is_found_by_its_number(tmp_path, backend):
    filled.fill(backend, SPACE, N)
    assert scale.options_of(backend.location, 0, 0)["limit"] == N
    with backend.view() as view:
        chains, whole = filled.stored_chains(view, SPACE.key, 5, 0)
    assert (len(chains), whole) == (5, 1.0)
    with scale.opened(backend.location) as store:
        for chain in (*chains, filled.LONG):
            tokens = filled.tokens_of(chain)
            assert store.engine.match(SPACE.key, as_tokens(tokens), filled.PAGE_TOKENS).n_tokens == len(tokens)
            diverging = as_tokens(scale._diverging(tokens))
            path = store.engine.match(SPACE.key, diverging, filled.PAGE_TOKENS)
            assert path.n_tokens == 5 * filled.PAGE_TOKENS + 128
        assert store.check() == []
