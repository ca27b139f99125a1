"""Rows in LMDB: what the contract promises of them, and the location that they are in."""

import os
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import lmdb
import pytest

from prefixstore.backends.lmdb.environment import FORMAT, LMDB_VERSION, Environment
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.errors import FullError, LocationError
from prefixstore.testing import PersistentBackendContract
from tests.support import PATIENCE, in_fork, python
from tests.support.places import refusal
from tests.support.rows import Writer, delete, payload_of, put, rows_of, write

MIB = 1 << 20


class TestRows(PersistentBackendContract):
    def open_backend(self, tmp_path):
        return LMDBBackend(tmp_path / "kv", 64 * MIB)


@pytest.mark.attack
class TestRowsInATinyMap(PersistentBackendContract):
    """The map grows when the second one opens the location, with updates before and after."""

    def open_backend(self, tmp_path):
        return LMDBBackend(tmp_path / "kv", 32 * MIB)

    def reopen(self, tmp_path):
        return LMDBBackend(tmp_path / "kv", 96 * MIB)


@pytest.fixture
def backend(tmp_path):
    with closing(LMDBBackend(tmp_path / "kv", 64 * MIB)) as opened:
        yield opened


def test_payloads_are_memory_of_the_file(backend):
    key = write(backend, 1, 50_000)
    with backend.view() as view:
        (_, payload), missing = view.payloads([key, b"missing"])
        assert missing is None
        assert isinstance(payload, memoryview)
        assert payload == payload_of(1, 50_000)


# -- the location ------------------------------------------------------------------------------------------------------


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
        (parent / "hidden").mkdir(mode=0o700)
        parent.chmod(0o555)

        def use():
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            assert refusal(there).startswith(f"LocationError: {there} is not writable")
            assert "read_only=True is enough" in refusal(there)
            assert refusal(parent / "hidden", read_only=True).endswith("run as its owner, or choose another location")
            assert refusal(parent / "new").startswith("LocationError: ")

        try:
            in_fork(use)
        finally:
            parent.chmod(0o700)
            there.chmod(0o700)
        assert list(there.iterdir()) == []


@pytest.mark.parametrize("size", [0, 1 << 31])
def test_a_file_with_a_page_size_that_lmdb_cannot_have_is_refused_and_untouched(tmp_path, size):
    LMDBBackend(tmp_path, MIB).close()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    data[40:44] = size.to_bytes(4, "little")
    (tmp_path / "data.mdb").write_bytes(data)
    for options in ({}, {"read_only": True}):
        # it was a store
        assert refusal(tmp_path, **options).startswith("CorruptError: ")
        assert "delete data.mdb and lock.mdb" in refusal(tmp_path, **options)
    assert (tmp_path / "data.mdb").read_bytes() == data


@pytest.mark.parametrize("keys", [(), (b"theirs",), (b"mmagic", b"mformat"), (b"a database",)])
def test_the_database_of_another_application_is_refused_and_untouched(tmp_path, keys):
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        for key in keys:
            if b" " in key:
                env.open_db(key, txn)
            else:
                txn.put(key, b"mine")
    before = (tmp_path / "data.mdb").read_bytes()
    for options in ({}, {"read_only": True}):
        assert refusal(tmp_path, **options).startswith("IncompatibleError: ")
        assert "another application" in refusal(tmp_path, **options)
    assert (tmp_path / "data.mdb").read_bytes() == before


@pytest.mark.parametrize(("step", "says"), [(1, f"up to {LMDB_VERSION}"), (-1, f"reads {LMDB_VERSION} only")])
def test_another_format_is_refused_with_both_versions(tmp_path, step, says):
    LMDBBackend(tmp_path, MIB).close()
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        txn.put(FORMAT, (LMDB_VERSION + step).to_bytes(4, "little"))
    before = (tmp_path / "data.mdb").read_bytes()
    message = refusal(tmp_path)
    assert message.startswith("IncompatibleError: ")
    assert f"format {LMDB_VERSION + step}" in message
    assert says in message
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_location_that_is_open_to_be_read_is_not_opened_to_be_written(tmp_path):
    LMDBBackend(tmp_path / "kv", MIB).close()
    with (
        closing(LMDBBackend(tmp_path / "kv", MIB, read_only=True)),
        pytest.raises(LocationError, match="read-only"),
    ):
        LMDBBackend(tmp_path / "kv", MIB)


def test_a_location_opened_twice_is_one_environment_until_both_are_closed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    one = LMDBBackend(tmp_path / "kv", MIB)
    before = len([*Path("/proc/self/fd").iterdir()])
    two = LMDBBackend(tmp_path / "link", 16 * MIB)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    key = write(two, 1)
    two.close()
    assert rows_of(one).keys() == {key}
    one.close()
    with closing(LMDBBackend(tmp_path / "kv", MIB)) as three:
        assert rows_of(three).keys() == {key}


def test_a_store_stays_usable_when_the_same_location_is_opened_with_a_budget_that_no_memory_map_can_have(tmp_path):
    with closing(LMDBBackend(tmp_path, MIB)) as backend:
        key = write(backend, 1)
        with pytest.raises(LocationError, match="lower max_bytes"):
            LMDBBackend(tmp_path, 1 << 60)
        assert rows_of(backend).keys() == {key}


# -- LMDB: processes ---------------------------------------------------------------------------------------------------


HOLDING = """
import sys
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
with LMDBBackend(sys.argv[1], 1 << 20).update():
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_opening_does_not_wait_for_a_writer_and_a_killed_one_holds_nothing(tmp_path):
    with python(HOLDING, tmp_path) as other:
        assert other.stdout.readline() == "held\n"
        with closing(LMDBBackend(tmp_path, MIB)) as backend:
            assert rows_of(backend) == {}
            other.kill()
            other.wait(PATIENCE)
            key = write(backend, 1)
            assert rows_of(backend).keys() == {key}


def mapped(directory):
    """How much of the file of a location is mapped into this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith(str(directory / "data.mdb"))]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


@pytest.mark.slow
def test_a_map_that_another_process_made_larger_is_adopted(tmp_path):
    with closing(LMDBBackend(tmp_path, MIB)) as backend, closing(Writer(tmp_path, 64 * MIB)) as other:
        small = mapped(tmp_path)
        key = other.write(1, 8 * MIB)
        with backend.view() as view:
            assert len(next(view.payloads([key]))[1]) == 8 * MIB
        assert mapped(tmp_path) > small
        other.write(2, 30 * MIB)
        mine = write(backend, 3, 5000)  # the first to notice is an update this time
        assert mine in rows_of(backend)


@pytest.mark.slow
def test_the_map_is_not_replaced_while_a_view_is_open(tmp_path):
    with closing(LMDBBackend(tmp_path, MIB)) as backend, closing(Writer(tmp_path, 64 * MIB)) as other:
        key = write(backend, 1, 100_000)
        seen = []

        def read():
            seen.append(rows_of(backend).keys())

        with backend.view() as view:
            [(_, payload)] = view.payloads([key])
            before = bytes(payload)
            new = other.write(2, 8 * MIB)
            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            reader.join(0.1)
            # it waits for this view: nothing has moved
            assert bytes(payload) == before
            assert seen == []
        reader.join(PATIENCE)
        assert seen == [{key, new}]


def test_a_full_map_is_an_error_that_leaves_no_trace_and_deleting_helps(tmp_path):
    with closing(LMDBBackend(tmp_path, 2 * MIB)) as backend:
        key = write(backend, 1, MIB)
        with pytest.raises(FullError):
            write(backend, 2, 8 * MIB)
        with pytest.raises(FullError):
            write(backend, 3, 2 * MIB)
        assert rows_of(backend).keys() == {key}
        delete(backend, key)
        backend.reclaim()
        assert rows_of(backend).keys() == set()
        new = write(backend, 4, MIB)
        assert rows_of(backend).keys() == {new}


def test_an_update_that_does_not_fit_says_so_where_it_asks_for_the_size(tmp_path):
    """Not only at its end: whoever reads the size may not know LMDB's errors."""
    with closing(LMDBBackend(tmp_path, MIB)) as backend:
        with suppress(ZeroDivisionError), backend.update() as draft:
            put(draft, 1, 8 * MIB)
            with pytest.raises(FullError):
                _ = draft.used
            raise ZeroDivisionError
        assert rows_of(backend) == {}


def test_a_store_that_is_opened_while_the_last_one_of_its_file_is_closed_can_be_written(tmp_path, monkeypatch):
    real, inside = Environment._close, threading.Event()

    def slow(environment):
        inside.set()
        time.sleep(0.2)
        real(environment)

    last = LMDBBackend(tmp_path / "kv", 64 * MIB)
    monkeypatch.setattr(Environment, "_close", slow)
    closing_ = threading.Thread(target=last.close)
    closing_.start()
    assert inside.wait(PATIENCE)
    monkeypatch.setattr(Environment, "_close", real)
    with closing(LMDBBackend(tmp_path / "kv", 64 * MIB)) as later:
        closing_.join(PATIENCE)
        write(later, 1)
        with closing(LMDBBackend(tmp_path / "kv", 64 * MIB)) as another:
            write(another, 2)
