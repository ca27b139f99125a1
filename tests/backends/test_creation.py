"""Locations that are made: by several processes at once, by one that is killed, and not by who only reads."""

import os

import pytest

from prefixstore.errors import UnavailableError
from tests.support import PATIENCE, python
from tests.support.places import SCHEMES, contents, fill, opened, place, refusal, space

MAKE = """
import sys
from prefixstore.engine.pages import retried
from tests.support.places import fill, opened, space
sys.stdin.read()  # until all are ready
with opened(sys.argv[1]) as backend:
    retried(fill)(backend, space(), [[int(sys.argv[2])] * 4])
"""
THREADS = """
import sys
from prefixstore.testing.together import together
from tests.support.places import fill, opened, space
def make(number):
    with opened(sys.argv[1].format(number)) as backend:
        fill(backend, space(), [[number] * 4])
together(lambda: make(1), lambda: make(2), lambda: make(3))
"""
CUT = """
import importlib, os, sys
from prefixstore.backends import open_backend
importlib.import_module(sys.argv[2]).publish = lambda *_: os._exit(3)
open_backend(sys.argv[1], max_bytes=1 << 20)
"""


@pytest.mark.parametrize("name", ["kv", "kv{}"], ids=["one store", "each its own"])
@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_threads_of_a_new_process_that_make_stores_at_once_get_them(scheme, name, tmp_path):
    # what a process does only once is done by all of them at a time
    with python(THREADS, f"{scheme}:///{tmp_path}/{name}") as process:
        assert process.wait(PATIENCE) == 0


@pytest.mark.attack
@pytest.mark.parametrize("scheme", ["lmdb", "sqlite", "valkey", "s3"])
def test_processes_that_make_a_store_at_once_all_get_it(scheme, tmp_path, request):
    location = place(scheme, tmp_path, request)
    processes = [python(MAKE, location, number) for number in range(4)]
    for process in processes:
        process.stdin.close()
    for process in processes:
        with process:
            assert process.wait(PATIENCE) == 0
    with opened(location) as backend:
        assert len(contents(backend)) == 4


@pytest.mark.parametrize(
    ("scheme", "module"),
    [("lmdb", "prefixstore.backends.lmdb.environment"), ("sqlite", "prefixstore.backends.sql.sqlite")],
)
def test_a_crash_while_a_store_is_made_leaves_a_location_that_can_be_used(scheme, module, tmp_path, request):
    location = place(scheme, tmp_path, request)
    with python(CUT, location, module) as process:
        assert process.wait(PATIENCE) == 3
    with opened(location) as backend:
        assert contents(backend) == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_only_reads_makes_nothing_and_writes_nothing(scheme, tmp_path, request):
    location = place(scheme, tmp_path, request)
    for _ in range(2 if scheme != "postgresql" else 0):
        assert refusal(location, read_only=True).startswith("LocationError: ")
    with opened(location) as backend:
        ((key,),) = fill(backend, space(), [[1, 2, 3, 4]])
        with opened(location, read_only=True) as reader:
            assert set(contents(reader)) == {key}
    with opened(location, read_only=True) as reader:
        assert set(contents(reader)) == {key}
        uses = [lambda: reader.update().__enter__(), reader.reindex]
        if scheme != "valkey":  # which has nothing to compact
            uses += [reader.rows.compact, lambda: reader.rows.compact(erase=True)]
        for use in uses:
            with pytest.raises(UnavailableError, match="read-only"):
                use()
        assert set(contents(reader)) == {key}


@pytest.mark.parametrize("location", ["lmdb://{}/new/kv", "sqlite:///{}/new/kv/kv.db"])
def test_files_and_directory_are_for_their_owner_only(tmp_path, location):
    def look():
        return {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "kv").iterdir()}

    before = os.umask(0)
    try:
        with opened(location.format(tmp_path)) as backend:
            fill(backend, space(), [[1, 2, 3, 4]], size=3 << 20)
            modes = look()
        modes |= look()
    finally:
        os.umask(before)
    lmdb = location.startswith("lmdb")
    expected = ("data.mdb", "lock.mdb", "checked") if lmdb else ("kv.db", "kv.db-wal", "kv.db-shm")
    assert modes == dict.fromkeys(expected, 0o600)
    assert (tmp_path / "new" / "kv").stat().st_mode & 0o777 == 0o700
