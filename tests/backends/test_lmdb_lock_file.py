"""Opening an LMDB store while another process holds its write lock."""

from __future__ import annotations

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


def test_a_writer_that_was_killed_does_not_delay_opening(tmp_path):
    with python(HOLDING, tmp_path) as other:
        assert other.stdout.readline() == "held\n"
        other.kill()
        other.wait(PATIENCE)
        assert writer_of(tmp_path / "lock.mdb") is None
        assert refusal(str(tmp_path)) == "opened"
