"""The disk begins with a large commit before its flush, and nothing is left of the thread that asks for it."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from prefixstore.backends.lmdb import write_back
from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.lmdb.write_back import WriteBack
from tests.support import PATIENCE
from tests.support.ctrl_c import interrupted, places_in
from tests.support.rows import payload_of, put, rows_of
from tests.support.timeouts import wait_for

LARGE = 4000


def threads():
    return [one.name for one in threading.enumerate() if one.name == "prefixstore-write-back" and one.is_alive()]


@pytest.fixture
def asked(monkeypatch):
    """The handles with which the system was asked, and an event that is set when it was."""

    class Asked(list):
        event = threading.Event()

    found = Asked()

    def ask(handle):
        found.append(handle)
        found.event.set()

    monkeypatch.setattr(write_back, "begin_writing", ask)
    monkeypatch.setattr(write_back, "LARGE_BYTES", LARGE)
    return found


def test_a_large_commit_begins_before_its_flush(tmp_path, asked, monkeypatch):
    started = []
    start = WriteBack.start

    def watched(self, n_bytes):
        start(self, n_bytes)
        started.append((n_bytes, threads()))
        # the commit comes after this
        assert n_bytes < LARGE or asked.event.wait(PATIENCE)

    monkeypatch.setattr(WriteBack, "start", watched)
    with closing(LMDBBackend(tmp_path, 64 << 20)) as backend:
        with backend.update() as draft:
            small = put(draft, 1, 100)
        assert asked == []
        with backend.update() as draft:
            large = put(draft, 2, LARGE)
        assert asked
        assert threads() == []
        assert started == [(100, []), (LARGE, ["prefixstore-write-back"])]
        found = rows_of(backend)
        assert found[large][1] == payload_of(2, LARGE)
        assert found[small][1] == payload_of(1, 100)


def test_a_commit_that_fails_leaves_no_thread(tmp_path, asked, monkeypatch):
    class FaultError(Exception):
        """Raised on purpose."""

    def failing(self, n_bytes):
        start(self, n_bytes)
        assert asked.event.wait(PATIENCE)
        raise FaultError

    start = WriteBack.start
    monkeypatch.setattr(WriteBack, "start", failing)
    with closing(LMDBBackend(tmp_path, 64 << 20)) as backend:
        with pytest.raises(FaultError), backend.update() as draft:
            put(draft, 1, LARGE)
        assert threads() == []
        assert rows_of(backend) == {}


@pytest.mark.parametrize("absent", ["function", "thread", "file"])
def test_what_cannot_help_does_not_harm(tmp_path, asked, monkeypatch, absent):
    if absent == "function":
        monkeypatch.setattr(write_back, "begin_writing", None)
    elif absent == "thread":

        def refused(self):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refused)
    else:
        monkeypatch.setattr(write_back.os, "open", lambda *_: (_ for _ in ()).throw(OSError("no such file")))
    with closing(WriteBack(str(tmp_path / "data.mdb"))) as early:
        early.start(LARGE)
    assert asked == []
    assert threads() == []


def test_a_ctrl_c_at_any_place_leaves_no_thread_and_no_other_error(tmp_path, asked):
    file = tmp_path / "data.mdb"
    file.touch()

    def work():
        with closing(WriteBack(str(file))) as early:
            early.start(LARGE)

    for at in range(1, places_in(work) + 1):
        interrupted(work, at)
    wait_for(lambda: not threads(), "the threads have ended")
