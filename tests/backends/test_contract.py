"""The contract for every backend, and the behaviour that is specific to LMDB."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import lmdb
import numpy as np
import pytest

from prefixstore.backends import forks, open_backend
from prefixstore.backends import memory as memory_module
from prefixstore.backends.lmdb import backend as lmdb_module
from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.lmdb.environment import LMDB_VERSION
from prefixstore.backends.location import cache_directory
from prefixstore.backends.memory import MemoryBackend
from prefixstore.buffers import BufferPool
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.invariants import violations
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import (
    FullError,
    InvalidParameterError,
    LocationError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.autocodec import pick
from prefixstore.format.keys import page_key
from prefixstore.format.record import Usage
from prefixstore.stats import Counters
from prefixstore.testing import (
    BackendContract,
    FaultyBackend,
    PersistentBackendContract,
    SlowBackend,
    make_page,
)
from tests.support import PATIENCE, keys_of, python

MIB = 1 << 20


class TestMemory(BackendContract):
    def open_backend(self, tmp_path):
        return MemoryBackend()


class TestLMDB(PersistentBackendContract):
    def open_backend(self, tmp_path):
        return LMDBBackend(tmp_path / "kv", 64 * MIB)


@pytest.mark.slow
class TestLMDBInATinyMap(PersistentBackendContract):
    """The map grows when the second one opens the location, with transactions before and after."""

    def open_backend(self, tmp_path):
        return LMDBBackend(tmp_path / "kv", 32 * MIB)

    def reopen(self, tmp_path):
        return LMDBBackend(tmp_path / "kv", 96 * MIB)


@pytest.mark.slow
class TestWrapped(BackendContract):
    """A wrapper keeps the contract of what it wraps."""

    def open_backend(self, tmp_path):
        return SlowBackend(FaultyBackend(LMDBBackend(tmp_path / "kv", 64 * MIB), "sync", at=10**6), 0.0)


# -- helpers ----------------------------------------------------------------------------------------------------------


def put(backend, number, size=1000):
    payload = np.random.default_rng(number).bytes(size)
    key, record = make_page(payload, [number])
    with backend.update() as transaction:
        transaction.put_namespace(record.namespace, b"{}")
        transaction.put(key, record, Usage(number), payload)
    return key


WRITER = """
import sys
from tests.backends.test_contract import LMDBBackend, put
backend = LMDBBackend(sys.argv[1], int(sys.argv[2]))
print("open", flush=True)
for line in sys.stdin:
    number, size = map(int, line.split())
    print(put(backend, number, size).hex(), flush=True)
backend.close()
"""


class Process:
    """Another process with the location open, that puts pages when it is told to."""

    def __init__(self, path, max_bytes):
        self.process = python(WRITER, path, max_bytes)
        assert self.process.stdout.readline() == "open\n"

    def put(self, number, size=1000):
        self.process.stdin.write(f"{number} {size}\n")
        self.process.stdin.flush()
        return bytes.fromhex(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with self.process:
            self.process.stdin.close()
        assert self.process.returncode == 0


def as_nobody(work):
    """Run in a child that has no privileges; what it prints."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os.write(writing, work().encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


def refusal(path, **options):
    """Class and message of the error with which a location is refused."""
    try:
        LMDBBackend(path, MIB, **options).close()
    except StorageError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


# -- which location is which backend -----------------------------------------------------------------------------------


def test_a_location_names_its_backend(tmp_path):
    with closing(open_backend("memory:", max_bytes=MIB)) as backend:
        assert isinstance(backend, MemoryBackend)
    for location in (tmp_path / "a", str(tmp_path / "b"), f"lmdb://{tmp_path}/c"):
        with closing(open_backend(location, max_bytes=MIB)) as backend:
            assert isinstance(backend, LMDBBackend)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "location", ["", " ", "http://x", "lmdb:///x?y=1", "memory:/x", b"x", "valkey://h/x", "redis+x:"]
)
def test_a_location_without_a_known_backend_is_refused(location):
    with pytest.raises(InvalidParameterError, match="location"):
        open_backend(location, max_bytes=MIB)


def test_a_url_without_a_path_is_refused():
    with pytest.raises(LocationError, match="no path"):
        open_backend("lmdb://", max_bytes=MIB)


def test_the_default_location_is_in_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    with closing(open_backend(None, max_bytes=MIB)) as backend:
        assert backend.location == f"lmdb://{cache_directory()}/kv"
    assert (tmp_path / "prefixstore" / "kv" / "data.mdb").exists()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_forgets_changes_that_are_too_old_and_never_half_of_a_transaction(monkeypatch):
    monkeypatch.setattr(memory_module, "CHANGES_KEPT", 3)
    forgets_old_changes(MemoryBackend())


def test_two_threads_that_fork_at_once_both_get_a_child():
    with closing(MemoryBackend()) as backend:
        started = threading.Barrier(3)
        statuses = []

        def fork():
            started.wait()
            pid = os.fork()
            if pid == 0:
                put(backend, 1)
                os._exit(7)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        threads = [threading.Thread(target=fork, daemon=True) for _ in range(2)]
        with backend.update():
            for thread in threads:
                thread.start()
            started.wait()  # both are about to fork, and have to wait for this transaction
            while not forks._forking._alone:
                time.sleep(0.001)
        for thread in threads:
            thread.join(PATIENCE)
        assert statuses == [7, 7]
        put(backend, 2)


def forgets_old_changes(backend):
    with closing(backend):
        written = []
        for i in range(6):
            with backend.update() as transaction:
                changed = []
                for number in (10 * i, 10 * i + 1):
                    key, record = make_page(b"x", [number])
                    transaction.put(key, record, Usage(1), b"x")
                    changed.append(key)
                written.append(changed)
        with backend.view() as view:
            known = [view.changes(since) for since in range(7)]
        expected = [[key for keys in written[since:] for key in keys] for since in range(7)]
        assert known == [None, None, None, *expected[3:]]


# -- LMDB: the location ------------------------------------------------------------------------------------------------


def test_lmdb_forgets_changes_that_are_too_old(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_module, "CHANGES_KEPT", 3)
    forgets_old_changes(LMDBBackend(tmp_path / "kv", MIB))


def test_files_and_directory_are_for_their_owner_only(tmp_path):
    before = os.umask(0)
    try:
        with closing(LMDBBackend(tmp_path / "new" / "kv", MIB)):
            modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "kv").iterdir()}
    finally:
        os.umask(before)
    assert modes == {"data.mdb": 0o600, "lock.mdb": 0o600}
    assert (tmp_path / "new" / "kv").stat().st_mode & 0o777 == 0o700


def test_a_location_that_is_a_file_is_refused_and_untouched(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    assert refusal(file).startswith("LocationError: ")
    assert "is a file" in refusal(file)
    assert "is a file" in refusal(file / "kv")
    assert "directory" in refusal(file, read_only=True)
    assert file.read_bytes() == b"mine"


def test_a_location_that_cannot_be_written_is_refused():
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        there = parent / "there"
        there.mkdir()
        there.chmod(0o555)
        parent.chmod(0o555)
        try:
            assert as_nobody(lambda: refusal(there)).startswith(f"LocationError: {there} is not writable")
            assert as_nobody(lambda: refusal(parent / "new")).startswith("LocationError: ")
        finally:
            parent.chmod(0o700)
            there.chmod(0o700)
        assert list(there.iterdir()) == []


def test_a_directory_in_which_nothing_can_be_created_is_refused(tmp_path):
    # not even root can create a file here: whatever the check of permissions says, LMDB says no
    (tmp_path / "data.mdb").symlink_to(tmp_path / "nowhere" / "data.mdb")
    assert refusal(tmp_path).startswith("LocationError: ")


def test_a_file_that_is_not_lmdb_is_refused_and_untouched(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"something else " * 1000)
    assert refusal(tmp_path).startswith("IncompatibleError: ")
    assert (tmp_path / "data.mdb").read_bytes() == b"something else " * 1000


@pytest.mark.parametrize("names", [(b"theirs",), (b"meta", b"records"), lmdb_module.DATABASES])
def test_the_database_of_another_application_is_refused_and_untouched(tmp_path, names):
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        for name in names:
            txn.put(b"format", b"mine", db=env.open_db(name, txn))
    before = (tmp_path / "data.mdb").read_bytes()
    for options in ({}, {"read_only": True}):
        assert refusal(tmp_path, **options).startswith("IncompatibleError: ")
        assert "another application" in refusal(tmp_path, **options)
    assert (tmp_path / "data.mdb").read_bytes() == before


@pytest.mark.parametrize(("step", "says"), [(1, f"up to {LMDB_VERSION}"), (-1, f"reads {LMDB_VERSION} only")])
def test_another_format_is_refused_with_both_versions(tmp_path, step, says):
    LMDBBackend(tmp_path, MIB).close()
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(b"format", (LMDB_VERSION + step).to_bytes(4, "little"), db=env.open_db(b"meta", txn))
    before = (tmp_path / "data.mdb").read_bytes()
    message = refusal(tmp_path)
    assert message.startswith("IncompatibleError: ")
    assert f"format {LMDB_VERSION + step}" in message
    assert says in message
    assert (tmp_path / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_without_the_order_of_children_is_refused_as_an_older_one(tmp_path, read_only):
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        for name in lmdb_module.DATABASES:
            if name != b"children":
                env.open_db(name, txn)
        txn.put(b"magic", b"prefixstore", db=env.open_db(b"meta", txn))
        txn.put(b"format", (2).to_bytes(4, "little"), db=env.open_db(b"meta", txn))
    before = (tmp_path / "data.mdb").read_bytes()
    message = refusal(tmp_path, read_only=read_only)
    assert message.startswith("IncompatibleError: ")
    assert f"has format 2, this prefixstore reads {LMDB_VERSION} only" in message
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_read_only_creates_nothing_and_writes_nothing(tmp_path):
    assert refusal(tmp_path / "kv", read_only=True).startswith("LocationError: ")
    assert list(tmp_path.iterdir()) == []
    with closing(LMDBBackend(tmp_path / "kv", MIB)) as backend:
        key = put(backend, 1)
        # both ways: with handles of its own, and with those of one who writes
        for reader in (LMDBBackend(tmp_path / "kv", MIB, read_only=True),):
            assert keys_of(reader) == {key}
            with pytest.raises(UnavailableError, match="read-only"):
                put(reader, 2)
            reader.close()
    with closing(LMDBBackend(tmp_path / "kv", MIB, read_only=True)) as reader:
        assert keys_of(reader) == {key}
        with pytest.raises(UnavailableError, match="read-only"):
            put(reader, 2)
        with pytest.raises(LocationError, match="read-only"):
            LMDBBackend(tmp_path / "kv", MIB)


def test_a_closed_backend_raises_a_clear_error(tmp_path):
    backend = LMDBBackend(tmp_path / "kv", MIB)
    backend.close()
    for use in (backend.view, backend.update):
        with pytest.raises(UnavailableError, match="closed"), use():
            raise AssertionError("it opened")


def test_a_location_opened_twice_is_one_environment_until_both_are_closed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    one = LMDBBackend(tmp_path / "kv", MIB)
    two = LMDBBackend(tmp_path / "link", 16 * MIB)
    assert one._environment is two._environment
    key = put(two, 1)
    two.close()
    assert keys_of(one) == {key}
    one.close()
    with closing(LMDBBackend(tmp_path / "kv", MIB)) as three:
        assert keys_of(three) == {key}


@pytest.mark.attack
def test_processes_that_create_a_store_at_once_all_get_it(tmp_path):
    code = """
import sys
from tests.backends.test_contract import LMDBBackend, put
sys.stdin.read()  # until all are ready
backend = LMDBBackend(sys.argv[1], 1 << 24)
print(put(backend, int(sys.argv[2])).hex())
backend.close()
"""
    for attempt in range(2):
        path = tmp_path / str(attempt)
        processes = [python(code, path, number) for number in range(4)]
        for process in processes:
            process.stdin.close()
        keys = set()
        for process in processes:
            with process:
                keys.add(bytes.fromhex(process.stdout.read()))
            assert process.returncode == 0
        with closing(LMDBBackend(path, 16 * MIB)) as backend:
            assert keys_of(backend) == keys
            assert len(keys) == 4


def test_a_crash_while_a_store_is_created_leaves_a_location_that_can_be_used(tmp_path):
    code = """
import sys
from prefixstore.backends.lmdb import backend as lmdb
from prefixstore.backends.lmdb import environment as lmdb_environment
lmdb_environment.MAGIC = "text"  # no value that LMDB could write: the end, in the middle of it
lmdb.LMDBBackend(sys.argv[1], 1 << 24)
"""
    with python(code, tmp_path, stderr=subprocess.DEVNULL) as process:
        process.communicate()
    assert process.returncode == 1
    with closing(LMDBBackend(tmp_path, 16 * MIB)) as backend:
        assert keys_of(backend) == set()


# -- LMDB: processes ---------------------------------------------------------------------------------------------------


def test_a_second_process_writes_while_this_one_reads(tmp_path):
    with closing(LMDBBackend(tmp_path, 8 * MIB)) as backend, Process(tmp_path, 8 * MIB) as other:
        with backend.view() as old:
            first = other.put(1)
            assert old.record(first) is None
            assert old.changes(0) == []
        assert keys_of(backend) == {first}
        second = put(backend, 2)
        third = other.put(3)
        with backend.view() as view:
            assert view.changes(0) == [first, second, third]


@pytest.mark.slow
def test_a_map_that_another_process_made_larger_is_adopted(tmp_path):
    with closing(LMDBBackend(tmp_path, MIB)) as backend, Process(tmp_path, 64 * MIB) as other:
        small = backend._environment.env.info()["map_size"]
        key = other.put(1, 8 * MIB)
        with backend.view() as view:
            assert len(view.payload(key)) == 8 * MIB
        assert backend._environment.env.info()["map_size"] > small
        other.put(2, 30 * MIB)
        mine = put(backend, 3, 5000)  # the first to notice is a transaction this time
        assert mine in keys_of(backend)


@pytest.mark.slow
def test_the_map_is_not_replaced_while_a_view_is_open(tmp_path):
    with closing(LMDBBackend(tmp_path, MIB)) as backend, Process(tmp_path, 64 * MIB) as other:
        key = put(backend, 1, 100_000)
        seen = []

        def read():
            seen.append(keys_of(backend))

        with backend.view() as view:
            payload = view.payload(key)
            before = bytes(payload)
            new = other.put(2, 8 * MIB)
            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            reader.join(0.1)
            # it waits for this view: nothing has moved
            assert bytes(payload) == before
            assert seen == []
        reader.join(PATIENCE)
        assert seen == [{key, new}]


@pytest.mark.parametrize("work", ["reclaim", "compact", "scrub", "sync"])
def test_what_frees_space_opens_a_handle_again_that_could_not_be_opened(tmp_path, work):
    path, aside = tmp_path / "kv", tmp_path / "aside"
    with closing(LMDBBackend(path, 64 * MIB)) as backend:
        key = put(backend, 1)
        path.rename(aside)
        path.write_text("not a directory")
        with pytest.raises(LocationError):
            keys_of(backend)
        path.unlink()
        aside.rename(path)
        # nothing else has used it since
        getattr(backend, work)()
        assert keys_of(backend) == {key}


def test_a_full_map_is_an_error_that_leaves_no_trace_and_deleting_helps(tmp_path):
    with closing(LMDBBackend(tmp_path, 2 * MIB)) as backend:
        key = put(backend, 1, MIB)
        with pytest.raises(FullError):
            put(backend, 2, 8 * MIB)
        with pytest.raises(FullError):
            put(backend, 3, 2 * MIB)
        assert keys_of(backend) == {key}
        with backend.update() as transaction:
            transaction.delete(key)
        backend.reclaim()
        assert keys_of(backend) == set()
        new = put(backend, 4, MIB)
        assert keys_of(backend) == {new}


KILLED = """
import sys, random
from tests.backends.test_contract import LMDBBackend, put
backend = LMDBBackend(sys.argv[1], 64 << 20)
chance = random.Random(int(sys.argv[2]))
base = int(sys.argv[2]) * 100_000
keys = []
for number in range(base, base + 10_000):
    key = put(backend, number, chance.choice([10, 5_000, 300_000]))
    keys.append(key)
    if len(keys) > 40:
        with backend.update() as transaction:
            transaction.delete(keys.pop(0))
            transaction.delete(keys.pop(0))
    if number % 5 == 0:
        backend.sync()
        print(*(key.hex() for key in keys), flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_an_intact_store(tmp_path):
    for attempt in range(3):
        process = python(KILLED, tmp_path, attempt + 1)
        lines = [process.stdout.readline() for _ in range(4 + 7 * attempt)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        assert process.returncode == -signal.SIGKILL
        synced = {bytes.fromhex(word) for word in next(line for line in reversed(lines) if line.endswith("\n")).split()}
        with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
            with backend.view() as view:
                assert violations(view, Budget(64 * MIB)) == []
                kept = {key for key, _, _ in view.scan()} & synced
                # it may have deleted some after it told us, a few and the oldest only
                assert len(kept) >= len(synced) - 12
                assert len(kept) >= 5
            with backend.update() as transaction:
                for key, _, _ in list(transaction.scan()):
                    transaction.delete(key)


# -- LMDB: room --------------------------------------------------------------------------------------------------------


@pytest.mark.attack
def test_under_churn_the_file_stays_within_its_bound_and_uses_the_budget(tmp_path, record_property):
    max_bytes = 8 * MIB
    counters = Counters()
    engine = Engine(LMDBBackend(tmp_path, max_bytes), Budget(max_bytes), POLICIES["lru"](), pick("raw"), counters)
    chance, buffers = random.Random(1), BufferPool(MIB)
    noise = np.random.default_rng(1).bytes(400_000)
    fills = []
    parent, start = bytes(32), 0
    with closing(engine):
        for number in range(3000):
            if number % 7 == 0:
                parent, start = bytes(32), 0
            size = chance.randint(1_000, 300_000)
            tokens = number.to_bytes(4, "little") * 4
            buffer = buffers.acquire(size)
            at = chance.randrange(100_000)
            buffer.view[:] = noise[at : at + size]
            new = PendingPage.of(bytes(32), b"{}", parent, start, tokens, buffer)
            assert engine.announce(new)
            assert engine.commit([new]) == 1
            buffer.release()
            parent, start = page_key(parent, tokens), start + 4
            if number > 200:
                fills.append(engine.used()[0].bytes / max_bytes)
                assert fills[-1] <= 1
        assert engine.check() == []
    assert (tmp_path / "data.mdb").stat().st_size <= 1.25 * max_bytes + (1 << 20)
    print(f"fill level: least {min(fills):.3f}, mean {sum(fills) / len(fills):.3f}, at the end {fills[-1]:.3f}")
    record_property("fill", fills[-1])
    assert fills[-1] > 0.7
    assert counters.group("dropped") == {}
