"""After `compact(erase=True)` nothing of what was deleted can be read from the file of an LMDB store."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from prefixstore.backends.lmdb import backend as lmdb_module
from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.errors import UnavailableError
from tests.support import seeds
from tests.support.rows import key_of, rows_of

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
# inside of a leaf, on a page of its own, just over a page, on many
SIZES = (100, 1500, 3000, 5000, 20_000, 50_000)


def secrets(number):
    """What occurs nowhere else: a value and a payload, and the key and the value of a row without one."""
    rng = np.random.default_rng(number)
    size = (12, 1024, 2800)[number % 3]
    return rng.bytes(size), rng.bytes(SIZES[number % len(SIZES)]), rng.bytes(40 + 10 * (number % 48)), rng.bytes(size)


def write(backend, numbers):
    for some in range(0, len(numbers), 8):
        with backend.update() as draft:
            for number in numbers[some : some + 8]:
                value, payload, key, more = secrets(number)
                draft.put(key_of(number), value, payload)
                draft.put(key, more)


def delete(backend, numbers):
    with backend.update() as draft:
        for number in numbers:
            assert draft.get([key_of(number)]) != [None]
            draft.delete(key_of(number))
            draft.delete(secrets(number)[2])


def windows_of(numbers):
    """Every eight bytes of the secrets, at every second offset."""
    windows = [
        np.frombuffer(text[offset : offset + (len(text) - offset) // 8 * 8], "<u8")
        for number in numbers
        for text in secrets(number)
        for offset in (0, 2, 4, 6)
    ]
    return np.unique(np.concatenate(windows))


def readable(path, numbers):
    """How many eight bytes of these rows are in the file."""
    raw = (Path(path) / "data.mdb").read_bytes()
    secret = windows_of(numbers)
    count = 0
    # a key may begin anywhere
    for offset in range(8):
        windows = np.frombuffer(raw[offset : offset + (len(raw) - offset) // 8 * 8], "<u8")
        windows = windows[windows != 0]
        count += int((secret[np.searchsorted(secret, windows) % len(secret)] == windows).sum())
    return count


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_a_scrub_leaves_nothing_of_deleted_rows_and_all_others_unchanged(tmp_path, seed):
    rng = random.Random(seed)
    numbers = rng.sample(range(10_000), 120)
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        write(backend, numbers)
        rng.shuffle(numbers)
        older, gone, kept = numbers[:20], numbers[20:70], numbers[70:]
        delete(backend, older)
        write(backend, [number + 20_000 for number in range(10)])  # into the space of the older ones
        delete(backend, gone)
        before = rows_of(backend)
        assert readable(tmp_path, gone) > 1000
        backend.compact(erase=True)
        assert readable(tmp_path, [*older, *gone]) == 0
        assert rows_of(backend) == before
        assert {key_of(number) for number in kept} < before.keys()
        backend.check()
        # every byte that LMDB does not use is zero
        raw = (tmp_path / "data.mdb").read_bytes()
        with backend._environment.begin(write=False) as txn:
            layout = lmdb_module._layout(backend._environment, txn)
        assert sum(end - start for start, end in layout.free) > MIB // 2
        assert not any(raw[start:end].strip(b"\0") for start, end in layout.free)
        write(backend, gone)
        backend.check()
        assert len(rows_of(backend)) == 220


SERVER = """
import sys
from prefixstore.backends.lmdb.backend import LMDBBackend
from tests.backends.test_lmdb_scrub import MIB, rows_of, write
backend = LMDBBackend(sys.argv[1], 64 * MIB)
write(backend, range(60))
print("written", flush=True)
sys.stdin.readline()
# its buffers have seen all of it
for number in range(200, 260):
    write(backend, [number])
print(len(rows_of(backend)), flush=True)
"""


def server(path):
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


@pytest.mark.attack
def test_a_server_that_wrote_deleted_rows_and_keeps_writing_does_not_restore_them(tmp_path):
    with server(tmp_path) as other:
        assert other.stdout.readline() == "written\n"
        with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
            delete(backend, range(10, 60))
            assert readable(tmp_path, range(10, 60)) > 1000
            backend.compact(erase=True)
            assert readable(tmp_path, range(10, 60)) == 0
            before = rows_of(backend)
            assert other.communicate("\n")[0] == "140\n"
            assert readable(tmp_path, range(10, 60)) == 0
            assert before.items() <= rows_of(backend).items()
            backend.check()


SCRUBBER = """
import sys
from prefixstore.backends.lmdb import backend as lmdb
from tests.backends.test_lmdb_scrub import MIB
lmdb.CLEARED_AT_ONCE = 50_000
backend = lmdb.LMDBBackend(sys.argv[1], 64 * MIB)
print("go", flush=True)
backend.compact(erase=True)
"""


@pytest.mark.attack
def test_a_killed_scrub_damages_nothing_and_can_be_repeated(tmp_path):
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        write(backend, range(60))
        delete(backend, range(10, 60))
        before = rows_of(backend)
        for after in (0.0, 0.005, 0.02):
            command = [sys.executable, "-c", SCRUBBER, str(tmp_path)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
                assert other.stdout.readline() == "go\n"
                time.sleep(after)
                other.kill()
            backend.check()
            assert rows_of(backend) == before
        backend.compact(erase=True)
        assert readable(tmp_path, range(10, 60)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="files with holes in the middle")
def test_compaction_gives_the_disk_back_what_is_free(tmp_path):
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        write(backend, range(120))
        delete(backend, range(10, 120))
        before, taken = rows_of(backend), (tmp_path / "data.mdb").stat().st_blocks * 512
        try:
            given = backend.compact()
        except UnavailableError as error:
            pytest.skip(str(error))
        assert given > MIB
        assert (tmp_path / "data.mdb").stat().st_blocks * 512 < taken - given * 0.9
        assert rows_of(backend) == before
        backend.check()
        write(backend, range(10, 120))
        backend.check()
