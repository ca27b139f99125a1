"""The location fails, is slow, hangs or disappears: completions continue, counters show it, and it recovers."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import lmdb
import psycopg
import pytest
import valkey
from sqlalchemy import make_url

import prefixstore.opening
from prefixstore import LocationError, PrefixStore, UnavailableError
from prefixstore.backends.lmdb import environment as lmdb_environment
from prefixstore.backends.sql.postgresql import CONNECT_SECONDS
from prefixstore.engine import breaker, engine, queue
from tests.attacks.flaky_backend import FlakyBackend
from tests.support import PATIENCE, ROOT
from tests.support.models import TORTURE, answer, prompt
from tests.support.places import LOCKING, SCHEMES, place
from tests.support.proxy import Proxy
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
        """Answer from an empty context; the seconds that it took."""
        self.llm.reset()
        started = time.monotonic()
        assert answer(self.llm, prompt(self.n, seed), 3) == self.known[seed]
        return time.monotonic() - started

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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_location_that_takes_seconds_delays_one_lookup_and_no_further_one(
    scheme, llama, flaky, slow_clock, tmp_path, request
):
    with serving(llama(), place(scheme, tmp_path, request), 0, 1) as server:
        server.ask(0)
        server.store.flush()
        assert server.hits(0)
        flaky().seconds = 0.7
        before, asked = server.store.engine.counters["miss:unavailable"], flaky().asked_by_completions()
        for _ in range(8 * TORTURE):
            server.ask(0)
        stats_before = server.store.engine.counters
        # the first one waited, and found out
        assert flaky().asked_by_completions() - asked <= 2
        assert stats_before["miss:unavailable"] - before >= 8 * TORTURE - 1
        assert stats_before["outages"] == 1
        assert 0.7 <= stats_before.seconds("lost") < slow_clock.now + 0.1
        flaky().seconds = 0.0
        server.recovers()
        stats = server.store.stats()
        assert stats.outages == 1
        assert lookups(stats) == stats.hits + sum(stats.misses.values())


def test_a_location_that_reads_slowly_ends_the_restore_and_is_not_asked_for_more(llama, flaky):
    with serving(llama(), "memory:", 0) as server:
        server.n = 2900
        server.learn(0)
        server.ask(0)
        server.store.flush()
        flaky().slow, flaky().seconds = ("payload",), 0.7
        before = flaky().asked_by_completions("payload")
        server.ask(0)
        # of twelve pages one was waited for, and some may have been read ahead: as many as threads read
        assert flaky().asked_by_completions("payload") - before <= 6
        asked = flaky().asked_by_completions()
        for _ in range(5):
            server.ask(0)
        assert flaky().asked_by_completions() == asked
        stats = server.store.stats()
        assert stats.outages == 1
        assert stats.unreadable == {"unavailable": 1}
        flaky().seconds = 0.0
        server.store._hooks.current.context.rate.page_seconds = None
        server.recovers()


def test_a_slow_write_queue_drops_pages_within_its_memory_and_no_completion_waits(llama, flaky):
    with serving(llama(), "memory:", *range(6), queue_bytes="100KB") as server:
        server.store.flush()
        server.store.clear()  # of what was stored when the answers were learned
        # so slow that a completion that waited for it would not return
        flaky().slow = ("update", "put", "delete")
        flaky().gate.clear()
        for seed in range(6):
            server.ask(seed)
            # one page of any size may be queued
            assert server.store.engine.queued_bytes <= 1_000_000
        stats = server.store.stats()
        assert stats.dropped.get("queue_full", 0) > 0, stats
        flaky().gate.set()
        server.store.flush()
        server.ask(5)
        server.recovers(5)


def test_a_location_that_fails_fast_is_asked_again_at_once(llama, flaky):
    with serving(llama(), "memory:", 0) as server:
        server.ask(0)
        server.store.flush()
        entries = server.store.stats().entries
        flaky().fails = True
        server.ask(0)
        with pytest.raises(UnavailableError):
            server.store.match(prompt(300))
        stats = server.store.stats()
        assert stats.misses["unavailable"] == 1
        assert (stats.outages, stats.entries) == (0, entries)
        flaky().fails = False
        server.recovers()


def test_a_location_that_fails_slowly_opens_the_circuit_and_counters_stay_readable(llama, flaky):
    with serving(llama(), "memory:", 0, 1) as server:
        server.ask(0)
        server.store.flush()
        flaky().fails, flaky().seconds = True, 0.3
        server.ask(0)
        asked = flaky().asked_by_completions()
        for seed in (0, 1, 0, 1):
            server.ask(seed)
        assert flaky().asked_by_completions() == asked
        assert server.store.stats().outages == 1
        flaky().fails, flaky().seconds = False, 0.0
        server.recovers()


def test_no_call_waits_forever_for_a_location_that_hangs(llama, flaky, monkeypatch):
    monkeypatch.setattr(queue, "NO_PROGRESS_SECONDS", 0.5)
    llm = llama()
    store = PrefixStore("memory:", llm)
    server = Server(llm, store)
    server.learn(0)
    flaky().slow = ("update", "sync")
    flaky().gate.clear()
    server.ask(0)
    writer = store.engine._queue._thread
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="nothing was written"):
        store.flush()
    with pytest.raises(UnavailableError, match="nothing was written"):
        store.check()
    llm.set_cache(None)
    with pytest.raises(UnavailableError, match="nothing was written"):
        store.close()
    # three times the timeout set here, not the default one
    assert time.monotonic() - started < 25
    flaky().gate.set()
    wait_for(lambda: not writer.is_alive(), "the end of the write thread")


EXIT = """
import sys
from prefixstore import PrefixStore
from prefixstore.engine import breaker, engine, queue
from tests.support.models import answer, load, prompt
queue.NO_PROGRESS_SECONDS = 1.0
llm = load(sys.argv[1])
store = PrefixStore(sys.argv[2], llm)
llm.set_cache(store)
print("open", flush=True)
sys.stdin.readline()
answer(llm, prompt(300), 2)
print("answered", flush=True)
"""


@contextmanager
def locked(scheme, location):
    """Another process or connection holds the write lock."""
    if scheme == "lmdb":
        script = (
            "import lmdb, sys; env = lmdb.open(sys.argv[1], max_dbs=8, map_size=1 << 30)\n"
            "with env.begin(write=True): print('held', flush=True); sys.stdin.read()"
        )
        path = location.removeprefix("lmdb://")
        with subprocess.Popen(
            [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout.readline() == "held\n"
            yield
            holder.communicate("", timeout=PATIENCE)
    elif scheme == "sqlite":
        with closing(sqlite3.connect(location.removeprefix("sqlite:///"), isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            yield
            holder.execute("ROLLBACK")
    elif scheme == "valkey":
        url, _, name = location.partition("?name=")
        with valkey.Valkey.from_url(url) as holder:
            holder.set(f"{{{name}}}:lock", b"somebody else")
            yield
            holder.delete(f"{{{name}}}:lock")
    else:
        url = make_url(location).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url) as holder:
            holder.execute("SELECT * FROM prefixstore_meta FOR UPDATE")
            yield
            holder.rollback()


@pytest.mark.parametrize("scheme", LOCKING)
def test_a_held_write_lock_delays_no_completion_and_lookups_find_what_is_stored(scheme, llama, tmp_path, request):
    location = place(scheme, tmp_path, request)
    with serving(llama(), location, 0, 1) as server:
        server.ask(0)
        server.store.flush()
        alone = max(server.ask(0) for _ in range(3))
        with locked(scheme, location):
            for _ in range(3):
                assert server.hits(0)
            # what is captured is queued, and found
            assert server.ask(1) < alone + 15
            assert server.hits(1)
            assert server.store.stats().outages == 0
        server.recovers(1)


@pytest.mark.parametrize("scheme", LOCKING)
def test_a_process_ends_in_time_while_another_holds_the_write_lock(scheme, models, tmp_path, request):
    location = place(scheme, tmp_path, request)
    script = [sys.executable, "-c", EXIT, str(models("llama")), location]
    with subprocess.Popen(
        script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout.readline() == "open\n", child.stderr.read()
        with locked(scheme, location):
            out, errors = child.communicate("\n", timeout=5 * PATIENCE)
    assert out == "answered\n"
    assert "nothing was written" in errors


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


def test_an_older_copy_of_a_database_is_noticed_at_the_next_write(llama, flaky, monkeypatch):
    llm = llama()
    with serving(llm, "memory:", 0, 1) as server:
        for seed in (0, 1):
            server.ask(seed)
            server.store.flush()
        memory = flaky()._backend
        empty = prefixstore.opening.open_pages("memory:", max_bytes=10 << 30)
        monkeypatch.setattr(server.store._engine._backend, "_backend", empty._backend)
        server.ask(0)
        server.store.flush()
        server.ask(0)
        server.recovers(0)
        server.ask(1)
        server.recovers(1)
        memory.close()


def test_losing_write_permission_drops_only_new_pages(llama, models, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("as another user: only root may become one")
    script = """
import os, sys, tempfile
from pathlib import Path
from prefixstore import PrefixStore
from prefixstore.backends.lmdb import checked, environment
from tests.support.models import answer, load, prompt
from tests.support.timeouts import disable_timeouts
disable_timeouts()
# the user that this becomes may not start the interpreter of the tests, which walks the file
checked.require_sound = environment.require_sound = lambda path, databases: None
llm = load(sys.argv[1])
cold = [answer(llm, prompt(300, seed), 3) for seed in range(3)]
def at(place):
    return f"sqlite:///{place}/kv.db" if sys.argv[3] == "sqlite" else f"{place}/kv"
with tempfile.TemporaryDirectory() as elsewhere, PrefixStore(at(elsewhere), llm) as store:
    store.flush()  # all modules are there: where they lie only root may read
os.setgroups([]), os.setgid(65534), os.setuid(65534)
location = at(sys.argv[2])
with PrefixStore(location, llm) as store:
    llm.set_cache(store)
    def ask(seed):
        llm.reset()
        assert answer(llm, prompt(300, seed), 3) == cold[seed]
    ask(0); store.flush(); ask(0)
    assert store.stats().hits == 1
    print("go", flush=True); sys.stdin.readline()
    for seed in (0, 1, 2): ask(seed)
    store.engine.drain()
    print("go", flush=True); sys.stdin.readline()
    ask(0); ask(1); store.flush(); ask(1)
    assert store.stats().hits >= 3, store.stats()
    assert store.check() == []
print("done", flush=True)
"""
    for scheme in ("lmdb", "sqlite"):
        home = tmp_path / scheme
        home.mkdir()
        for path in (tmp_path.parent.parent, tmp_path.parent, tmp_path, home):
            path.chmod(0o755)
        os.chown(home, 65534, 65534)
        model = tmp_path / "model.gguf"
        shutil.copy(models("llama"), model)
        with subprocess.Popen(
            [sys.executable, "-c", script, str(model), str(home), scheme],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home)},
        ) as child:
            assert child.stdout.readline() == "go\n", child.stderr.read()
            os.chown(home, 0, 0)
            home.chmod(0)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "go\n", child.stderr.read()
            home.chmod(0o755)
            os.chown(home, 65534, 65534)
            out, errors = child.communicate("\n", timeout=5 * PATIENCE)
            assert out == "done\n", errors


# -- LMDB --------------------------------------------------------------------------------------------------------------


READERS = """
import lmdb, sys
env = lmdb.open(sys.argv[1], max_dbs=8, map_size=1 << 30, readonly=True)
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
        with subprocess.Popen(
            [sys.executable, "-c", READERS, str(tmp_path / "kv")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout.readline() == b"full\n"
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
        environment = lmdb_environment._open[(tmp_path / "kv").resolve()]
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


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


def own_server(request):
    if os.environ.get("PREFIXSTORE_TEST_POSTGRES"):
        pytest.skip("the server is not ours to stop")
    return request.getfixturevalue("postgres_server")


def test_a_server_that_was_down_is_used_again(llama, request):
    server = own_server(request)
    location = request.getfixturevalue("new_database")()
    with serving(llama(), location, 0, 1, 2) as one:
        one.ask(0)
        one.store.flush()
        assert one.hits(0)
        server.stop()
        try:
            seconds = sorted(one.ask(seed) for seed in (0, 1, 2, 0, 1, 2))
            stats = one.store.stats()
            assert stats.misses["unavailable"] >= 6
            # a connection is refused at once; one or the other may have waited for a core
            assert seconds[2] < CONNECT_SECONDS
            with pytest.raises(UnavailableError):
                one.store.flush()
        finally:
            server.start()
        one.recovers(0)
        one.ask(1)
        one.recovers(1)


class Network(Proxy):
    """Passes everything, until it swallows everything."""

    swallows = False

    def forward(self, source, target, answers):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.swallows:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_a_network_that_drops_everything_delays_one_lookup(llama, request):
    server = own_server(request)
    url = make_url(request.getfixturevalue("new_database")())
    with closing(Network(str(server.sockets / ".s.PGSQL.5432"))) as proxy:
        location = f"postgresql+psycopg://postgres@127.0.0.1:{proxy.port}/{url.database}"
        with serving(llama(), location, 0, 1) as one:
            one.ask(0)
            one.store.flush()
            assert one.hits(0)
            proxy.swallows = True
            # not as long as TCP would wait
            assert one.ask(0) < 240
            lost = one.store.engine.counters.seconds("lost")
            for seed in (0, 1, 0, 1):
                one.ask(seed)
            # nothing was asked
            assert one.store.engine.counters.seconds("lost") == lost
            assert one.store.engine.counters["outages"] == 1
            assert one.store.engine.counters["miss:unavailable"] == 5
            proxy.swallows = False
            # a connection that has sent something waits for an answer that never comes, and times out
            wait_for(lambda: one.hits(0), "a hit")
            one.recovers(0)


# -- clocks ------------------------------------------------------------------------------------------------------------


DAY = 86400.0


@pytest.fixture
def clock(monkeypatch):
    """Moves the clock of this process."""
    real, real_ns = time.time, time.time_ns
    by = [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + by[0])
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + round(by[0] * 1e9))
    return lambda seconds: by.__setitem__(0, seconds)


@pytest.mark.parametrize("policy", ["lru", "adaptive", "lfu"])
def test_a_clock_that_was_set_back_does_not_make_new_pages_the_first_victims(llama, clock, tmp_path, policy):
    # room for six prompts
    with serving(llama(), tmp_path / "kv", *range(12), policy=policy, max_entries=12) as server:
        clock(DAY)
        for seed in range(6):
            server.ask(seed)
            server.store.flush()
        clock(-DAY)
        for seed in range(6, 12):
            server.ask(seed)
            server.store.flush()
        if policy == "lru":
            assert [server.hits(seed) for seed in range(6, 12)] == [True] * 6
        else:
            assert sum(server.hits(seed) for seed in range(6, 12)) >= 3
        server.recovers(11)


def test_a_clock_that_jumps_does_not_keep_expired_pages_forever(llama, clock, tmp_path):
    with serving(llama(), tmp_path / "kv", 0, 1, ttl="1h") as server:
        for by in (0, DAY, -DAY, 0):
            clock(by)
            # what has expired is deleted before it is stored again
            for _ in range(2):
                server.ask(0)
                server.store.flush()
            assert server.hits(0)
        # nothing was used after the jump forward
        clock(3 * DAY)
        assert not server.hits(0)
        server.ask(1)
        server.recovers(1)
        assert server.store.stats().expired > 0
