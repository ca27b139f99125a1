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


@pytest.mark.slow
def test_a_location_that_is_used_up_is_filled_from_the_start(tmp_path, backend):
    filled.fill(backend, SPACE, N)
    with scale.opened(backend.location) as store:
        for chain in range(20):
            store.engine.delete([lambda index, chain=chain: set(filled.last_keys([chain], SPACE.key))])
    with backend.view() as view:
        assert filled.stored_chains(view, SPACE.key, 30, 0)[1] < scale.WHOLE
    assert scale.fill(backend.location, N)[0] == N
    with backend.view() as view:
        assert filled.stored_chains(view, SPACE.key, 30, 0)[1] == 1.0


def test_only_a_lock_that_is_held_is_waited_for():
    import threading

    class Lock:
        """Notes that somebody waits for it."""

        def __init__(self):
            self.inner, self.is_waited_for = threading.RLock(), threading.Event()
            self.release = self.inner.release

        def acquire(self, *, blocking=True):
            if blocking:
                self.is_waited_for.set()
            return self.inner.acquire(blocking)

    inner = Lock()
    lock = scale.WatchedLock(inner)
    with lock, lock:
        assert lock.longest == 0.0
        waiting = threading.Thread(target=lambda: lock.__enter__() or lock.__exit__())
        waiting.start()
        assert inner.is_waited_for.wait(120)
    waiting.join()
    assert lock.longest > 0.0


def test_the_files_of_the_location_do_not_count_as_memory(tmp_path):
    import mmap

    path = tmp_path / "large"
    path.write_bytes(bytes(64 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        counted, left_out = scale.resident("memory:"), scale.resident(f"lmdb://{tmp_path}")
    assert counted - left_out >= 60 << 20
