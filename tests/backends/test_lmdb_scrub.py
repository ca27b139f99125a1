"""Compaction of an LMDB store; after `compact(erase=True)` nothing of what was deleted can be read from its files."""

import os
import random
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from prefixstore.backends.lmdb.environment import OLD
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.errors import UnavailableError
from tests.support import PATIENCE, python, seeds
from tests.support.rows import Writer, key_of, rows_of

MIB = 1 << 20
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
    """How many eight bytes of these rows are in the files."""
    raw = b"".join(file.read_bytes() for file in sorted(Path(path).rglob("*.mdb")))
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
        data = tmp_path / "data.mdb"
        data.chmod(0o640)
        size = data.stat().st_size
        # what is overwritten is another name of the old file
        os.link(data, tmp_path.parent / f"{tmp_path.name}.old")
        freed = backend.compact(erase=True)
        assert freed == size - data.stat().st_size > MIB // 2
        assert not (tmp_path.parent / f"{tmp_path.name}.old").read_bytes().strip(b"\0")
        assert readable(tmp_path, [*older, *gone]) == 0
        assert rows_of(backend) == before
        assert {key_of(number) for number in kept} < before.keys()
        backend.check()
        assert data.stat().st_mode & 0o777 == 0o640
        assert {path.name for path in tmp_path.iterdir()} == {"data.mdb", "lock.mdb"}
        write(backend, gone)
        backend.check()
        assert len(rows_of(backend)) == 220


def test_a_store_that_another_process_has_open_is_left_as_it_is(tmp_path):
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        write(backend, range(12))
        delete(backend, range(6))
        before, data = rows_of(backend), (tmp_path / "data.mdb").read_bytes()
        with closing(Writer(tmp_path, 64 * MIB)):
            for erase in (False, True):
                with pytest.raises(UnavailableError, match="open in another process"):
                    backend.compact(erase=erase)
        assert (tmp_path / "data.mdb").read_bytes() == data
        backend.compact(erase=True)
        assert readable(tmp_path, range(6)) == 0
        assert rows_of(backend) == before


SCRUBBER = """
import sys
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
backend = LMDBBackend(sys.argv[1], 64 << 20)
print("go", flush=True)
backend.compact(erase=True)
"""


@pytest.mark.attack
def test_a_killed_scrub_damages_nothing_and_can_be_repeated(tmp_path):
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        write(backend, range(60))
        delete(backend, range(10, 60))
        before = rows_of(backend)
    for after in (0.0, 0.005, 0.02, 0.05):
        with python(SCRUBBER, tmp_path) as other:
            assert other.stdout.readline() == "go\n"
            time.sleep(after)
            other.kill()
        with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
            backend.check()
            assert rows_of(backend) == before
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        backend.compact(erase=True)
        assert readable(tmp_path, range(10, 60)) == 0


@pytest.mark.parametrize("call", ["os.link", "pathlib.Path.replace", "prefixstore.backends.lmdb.environment.sync_path"])
def test_a_scrub_that_ends_before_the_old_file_is_overwritten_is_completed_by_the_next_one(tmp_path, monkeypatch, call):
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        write(backend, range(30))
        delete(backend, range(10, 30))
        before = rows_of(backend)
        with monkeypatch.context() as patch:
            patch.setattr(call, lambda *arguments: (_ for _ in ()).throw(OSError(5, "an error")))
            with pytest.raises(UnavailableError, match="cannot be replaced"):
                backend.compact(erase=True)
        assert rows_of(backend) == before
        assert (tmp_path / OLD).exists() == (call != "os.link")
        backend.compact(erase=True)
        assert readable(tmp_path, range(10, 30)) == 0
        assert rows_of(backend) == before
        assert not (tmp_path / OLD).exists()


READER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], readonly=True, max_readers=512)
print("open", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("n_updates", [4, 5])
def test_another_program_that_has_the_file_open_does_not_make_lmdb_take_the_wrong_half_of_a_new_one(
    n_updates, tmp_path
):
    """LMDB tells by the number of the last transaction which of two first pages counts; it is kept in the lock file."""
    backend = LMDBBackend(str(tmp_path), 64 * MIB)
    for number in range(n_updates):
        write(backend, range(10 * number, 10 * number + 8))
    with python(READER, tmp_path) as reader:
        assert reader.stdout.readline() == "open\n"
        for _ in range(2):
            before = rows_of(backend)
            backend.compact(erase=True)
            assert rows_of(backend) == before
            write(backend, [1000])
            delete(backend, [1000])
            assert rows_of(backend) == before
        reader.communicate("\n")
    backend.close()
    with closing(LMDBBackend(str(tmp_path), 64 * MIB)) as backend:
        assert rows_of(backend) == before


COMPACTOR = """
import sys
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.errors import UnavailableError
backend = LMDBBackend(sys.argv[1], 64 << 20)
done = refused = 0
for turn in range(150):
    try:
        backend.compact()
        done += 1
    except UnavailableError:
        refused += 1
    with backend.update() as draft:
        draft.put(b"by " + sys.argv[2].encode(), b"%d" % turn)
    with backend.view() as view:
        assert view.get([b"by " + sys.argv[2].encode()]) == [b"%d" % turn], turn
        assert None not in view.get([b"%d" % n for n in range(50)]), turn
backend.close()
print(done, refused)
"""


@pytest.mark.slow
def test_processes_that_compact_one_location_at_the_same_time_lose_nothing(tmp_path):
    with closing(LMDBBackend(str(tmp_path), 64 * MIB)) as backend, backend.update() as draft:
        for number in range(50):
            draft.put(b"%d" % number, b"1", b"x" * 50_000)
    processes = [python(COMPACTOR, tmp_path, name) for name in ("one", "two", "three")]
    assert [process.communicate(timeout=PATIENCE) and process.returncode for process in processes] == [0, 0, 0]
    with closing(LMDBBackend(str(tmp_path), 64 * MIB)) as backend, backend.view() as view:
        assert view.get([b"by one", b"by two", b"by three"]) == [b"149"] * 3
        assert None not in list(view.payloads([b"%d" % number for number in range(50)]))
