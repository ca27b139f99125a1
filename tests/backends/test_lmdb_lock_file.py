"""Opening an LMDB store while another process holds its write lock."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing

import pytest

from prefixstore.backends import open_backend
from prefixstore.backends.lmdb import environment
from prefixstore.backends.lmdb.lock_file import writer_of
from tests.support import PATIENCE, python
from tests.support.places import MIB, refusal

HOLDING = """
import sys
from contextlib import closing
from prefixstore.backends import open_backend
with closing(open_backend(sys.argv[1], max_bytes=1 << 20)) as backend:
    with backend.update():
        print("held", flush=True)
        sys.stdin.readline()
    print("released", flush=True)
    sys.stdin.readline()
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the holder of the lock is known on Linux")


@pytest.mark.slow
def test_opening_waits_for_the_writer_for_a_while_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "OPEN_SECONDS", 0.2)
    with python(HOLDING, tmp_path) as other:
        assert other.stdout.readline() == "held\n"
        assert writer_of(tmp_path / "lock.mdb") == other.pid
        message = refusal(str(tmp_path))
        assert message.startswith("UnavailableError"), message
        assert f"process {other.pid} has held the write lock" in message
        # reading needs no lock
        with closing(open_backend(tmp_path, max_bytes=MIB, read_only=True)) as backend, backend.view() as view:
            assert view.used > 0
        other.stdin.write("go\n")
        other.stdin.flush()
        assert other.stdout.readline() == "released\n"
        assert writer_of(tmp_path / "lock.mdb") is None
        assert refusal(str(tmp_path)) == "opened"
        other.stdin.write("go\n")


def test_a_writer_whose_name_is_no_text_is_known(tmp_path):
    # as one is whose fifteenth byte is in the middle of a letter
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'prozess \\xc3', 0, 0, 0)"
    with python(rename + HOLDING, tmp_path) as other:
        assert other.stdout.readline() == "held\n"
        assert writer_of(tmp_path / "lock.mdb") == other.pid
        other.kill()


def test_a_writer_that_was_killed_does_not_delay_opening(tmp_path):
    with python(HOLDING, tmp_path) as other:
        assert other.stdout.readline() == "held\n"
        other.kill()
        other.wait(PATIENCE)
        assert writer_of(tmp_path / "lock.mdb") is None
        assert refusal(str(tmp_path)) == "opened"


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [False, True])
def test_the_writer_of_the_original_holds_nothing_in_a_copy(tmp_path, monkeypatch, is_open):
    monkeypatch.setattr(environment, "OPEN_SECONDS", 0.2)
    live, copy = tmp_path / "live", tmp_path / "copy"
    with python(HOLDING, live) as other:
        assert other.stdout.readline() == "held\n"
        shutil.copytree(live, copy)
        assert writer_of(live / "lock.mdb") == other.pid
        assert writer_of(copy / "lock.mdb") is None
        if is_open:
            with python(HOLDING, copy) as another:
                assert another.stdout.readline() == "held\n"
                assert writer_of(copy / "lock.mdb") == another.pid
                another.kill()
        assert refusal(str(copy)) == "opened"
        other.kill()


def test_of_what_is_no_lock_file_nothing_is_known(tmp_path):
    path = tmp_path / "lock.mdb"
    assert writer_of(path) is None
    for content in (b"", b"x" * 200, (0xBEEFC0DE).to_bytes(4, "little") + bytes(200)):
        path.write_bytes(content)
        assert writer_of(path) is None


def test_a_process_that_has_the_store_open_does_not_read_its_lock_file(tmp_path, monkeypatch):
    """Closing it would drop the locks by which LMDB tells that others use the file."""
    with closing(open_backend(tmp_path / "kv", max_bytes=MIB)):
        monkeypatch.setattr(environment, "writer_of", lambda path: pytest.fail("it was read"))
        with closing(open_backend(tmp_path / "kv", max_bytes=MIB)) as again, again.update() as draft:
            draft.put(b"a", b"b")
