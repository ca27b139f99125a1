"""The location fails, is slow, hangs or disappears: completions continue, counters show it, and it recovers."""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

import prefixstore.opening
from prefixstore import LocationError, PrefixStore, UnavailableError
from prefixstore.backends.lmdb import environment as lmdb_environment
from prefixstore.engine import breaker, engine
from tests.support import python
from tests.support.faults import FlakyBackend
from tests.support.models import TORTURE, answer, prompt
from tests.support.places import place
from tests.support.timeouts import wait_for


class SlowClock:
    """The time of a circuit breaker, which passes only while a location takes it: no other thing makes it slow."""

    def __init__(self):
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self):
        return self.now

    def passes(self, seconds):
        with self._lock:
            self.now += seconds


@pytest.fixture
def slow_clock():
    return SlowClock()


@pytest.fixture
def flaky(monkeypatch, slow_clock):
    """The location of the store that is opened next, which can be made to fail, or to take time of the clock."""
    made = []
    real, breaker_of = prefixstore.opening.open_pages, engine.CircuitBreaker

    def opened(*arguments, **options):
        made.append(FlakyBackend(real(*arguments, **options)))
        made[-1].sleep = slow_clock.passes
        return made[-1]

    def with_clock(*arguments, **options):
        return breaker_of(*arguments, **{**options, "clock": slow_clock})

    monkeypatch.setattr(prefixstore.opening, "open_pages", opened)
    monkeypatch.setattr(engine, "CircuitBreaker", with_clock)
    return lambda: made[-1]


@pytest.fixture(autouse=True)
def patient(request, monkeypatch):
    """By the clock of everybody nothing is slow: it passes while a test waits for a core. Failures may be."""
    if "flaky" not in request.fixturenames:
        monkeypatch.setattr(breaker, "SLOW_SECONDS", 1000.0)


class Server:
    """A model that answers prompts through a store, and knows its answers without one."""

    def __init__(self, llm, store, n=300):
        self.llm, self.store, self.n = llm, store, n
        self.known = {}

    def learn(self, *seeds):
        for seed in seeds:
            self.llm.reset()
            self.known[seed] = answer(self.llm, prompt(self.n, seed), 3)
        self.llm.set_cache(self.store)

    def ask(self, seed):
        """Answer from an empty context."""
        self.llm.reset()
        assert answer(self.llm, prompt(self.n, seed), 3) == self.known[seed]

    def hits(self, seed):
        before = self.store.stats().hits
        self.ask(seed)
        return self.store.stats().hits > before

    def recovers(self, seed=0):
        """Until the location is used again, and what is captured then is stored."""
        wait_for(lambda: self.hits(seed), "a hit")
        wait_for(self.is_flushed, "a flush", seconds=150)
        assert self.store.check() == []

    def is_flushed(self):
        """Whether all is written. A write under way when a network went silent may hold the others up for a minute."""
        try:
            self.store.flush()
        except UnavailableError:
            return False
        return True


@contextmanager
def serving(llm, location, *seeds, **options):
    with PrefixStore(location, llm, **options) as store:
        server = Server(llm, store)
        server.learn(*seeds)
        yield server
        llm.set_cache(None)


def lookups(stats):
    return stats.hits + stats.live_hits + sum(stats.misses.values())


# -- slow, failing, hanging --------------------------------------------------------------------------------------------


def test_a_location_that_takes_seconds_delays_one_lookup_and_no_further_one(llama, flaky, slow_clock):
    with serving(llama(), "memory:", 0, 1) as server:
        server.ask(0)
        server.store.flush()
        assert server.hits(0)
        flaky().seconds = 0.7
        before, asked = server.store.engine.counters["miss:unavailable"], flaky().asked_by_completions()
        for _ in range(8 * TORTURE):
            server.ask(0)
        stats_before = server.store.engine.counters
        # the first one waited, in the three steps of a lookup, and found out
        assert 0 < flaky().asked_by_completions() - asked <= 3
        assert stats_before["miss:unavailable"] - before >= 8 * TORTURE - 1
        assert stats_before["outages"] == 1
        assert 0.7 <= stats_before.seconds("lost") < slow_clock.now + 0.1
        flaky().seconds = 0.0
        server.recovers()
        stats = server.store.stats()
        assert stats.outages == 1
        assert lookups(stats) == stats.hits + sum(stats.misses.values())


# -- the location disappears -------------------------------------------------------------------------------------------


def files_of(scheme, location):
    path = Path(location.removeprefix("lmdb://").removeprefix("sqlite:///"))
    return sorted(path.parent.glob(path.name + "*"))


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_a_location_that_is_deleted_under_a_running_store_is_created_again(scheme, llama, tmp_path, request):
    location = place(scheme, tmp_path / "below", request)
    with serving(llama(), location, 0, 1) as server:
        server.ask(0)
        server.store.flush()
        shutil.rmtree(tmp_path / "below")
        server.ask(0)
        server.ask(1)
        server.store.flush()
        server.recovers(0)
        server.recovers(1)
        assert files_of(scheme, location)
    # another process finds it
    with serving(llama(), location, 0, 1) as server:
        assert server.hits(0)
        assert server.hits(1)


def test_with_a_file_in_the_place_of_a_folder_above_pages_are_dropped_until_the_folder_is_back(llama, tmp_path):
    above = tmp_path / "d" / "e"
    with serving(llama(), f"lmdb://{above}/kv", 0, 1) as server:
        server.llm.reset()
        server.store.clear()  # of what was stored when the answers were learned
        server.ask(0)
        server.store.flush()
        shutil.rmtree(above)
        above.write_bytes(b"not a folder")
        server.ask(1)
        with pytest.raises(LocationError):
            server.store.flush()
        # not lost in the file that no name leads to any longer
        counters = server.store.engine.counters
        assert counters.group("dropped")["unavailable"] > 0
        assert counters.group("miss")["unavailable"] > 0
        assert above.read_bytes() == b"not a folder"
        above.unlink()
        above.mkdir()
        server.recovers(1)
    with serving(llama(), f"lmdb://{above}/kv", 1) as server:
        assert server.hits(1)


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_another_store_put_in_place_is_used_from_then_on(scheme, llama, tmp_path, request):
    other, location = (place(scheme, tmp_path, request, name) for name in ("other", "kv"))
    llm = llama()
    with serving(llm, other, 1) as server:
        server.ask(1)
    with serving(llm, location, 0, 1, 2) as server:
        for seed in (0, 2):
            server.ask(seed)
            server.store.flush()
        for mine in files_of(scheme, location):
            shutil.rmtree(mine) if mine.is_dir() else mine.unlink()
        for theirs in files_of(scheme, other):
            theirs.rename(theirs.with_name(theirs.name.replace("other", "kv")))
        server.ask(1)
        server.recovers(1)
        # it counts fewer changes than were seen: what is missing is stored again
        server.ask(0)
        server.recovers(0)
        server.ask(2)
        server.recovers(2)


# -- LMDB --------------------------------------------------------------------------------------------------------------


READERS = """
import lmdb, sys
env = lmdb.open(sys.argv[1], map_size=1 << 30, readonly=True)
held = []
try:
    while True: held.append(env.begin())
except lmdb.ReadersFullError: print("full", flush=True)
sys.stdin.read()
"""


def test_readers_that_take_all_slots_cause_misses_and_dead_ones_free_them(llama, tmp_path):
    with serving(llama(), tmp_path / "kv", 0) as server:
        server.ask(0)
        server.store.flush()
        with python(READERS, tmp_path / "kv") as other:
            assert other.stdout.readline() == "full\n"
            server.ask(0)
            assert server.store.stats().misses["unavailable"] == 1
            other.kill()
            other.wait()
        server.recovers()
        assert server.hits(0)


def test_an_environment_that_has_failed_permanently_is_opened_again(llama, tmp_path):
    with serving(llama(), tmp_path / "kv", 0, 1) as server:
        server.ask(0)
        server.store.flush()
        environment = lmdb_environment._environments[(tmp_path / "kv").resolve()]
        real = environment.env

        class Panicked:
            """As LMDB is once it could not write which state is the newest."""

            def begin(self, **_):
                raise lmdb.PanicError("MDB_PANIC")

            def __getattr__(self, name):
                return getattr(real, name)

        environment.env = Panicked()
        assert server.hits(0)
        assert environment.env is not real
        server.ask(1)
        server.recovers(1)
