"""Opening an LMDB file walks it, unless it was found sound before and only LMDB has written to it since."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress

import pytest

from prefixstore.backends.lmdb import environment as environment_module
from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.lmdb.checked import NOTE, SEAL, STATE, STEP, _seal
from prefixstore.errors import CorruptError
from tests.support import ROOT
from tests.support.rows import delete, key_of, rows_of
from tests.support.rows import put as put_row

MIB = 1 << 20


def write(backend, *numbers):
    for number in numbers:
        with backend.update() as draft:
            put_row(draft, number, 3000)


@contextmanager
def walks(monkeypatch):
    """The transactions at which a file is walked in the block."""
    found = []
    walk = environment_module.check_trees

    def counted(path, transaction):
        found.append(transaction)
        return walk(path, transaction)

    with monkeypatch.context() as patch:
        patch.setattr(environment_module, "check_trees", counted)
        yield found


def n_walks(monkeypatch, path, **options):
    """How often opening a store walks its file."""
    with walks(monkeypatch) as found, closing(LMDBBackend(path, 16 * MIB, **options)) as backend:
        assert len(rows_of(backend)) >= 30
        return len(found)


@pytest.fixture
def kv(tmp_path):
    """A store with some pages, closed."""
    with closing(LMDBBackend(tmp_path / "kv", 16 * MIB)) as backend:
        write(backend, *range(30))
    return tmp_path / "kv"


def break_leaf(path):
    """Damage leaves of the trees that are in use, past LMDB."""
    data = path / "data.mdb"
    raw = bytearray(data.read_bytes())
    for at in range(2 * 4096, len(raw), 4096):
        if raw[at + 10 : at + 12] == b"\2\0":
            raw[at + 16 : at + 18] = b"\xfe\xff"
    with data.open("r+b") as file:
        file.write(raw)


def test_a_file_that_was_closed_is_not_walked_again(kv, monkeypatch):
    assert n_walks(monkeypatch, kv) == 0
    assert n_walks(monkeypatch, kv, read_only=True) == 0
    with closing(LMDBBackend(kv, 16 * MIB)) as backend:
        write(backend, 100)
        with backend.update() as draft:
            draft.put(b"name", b"value")
        backend.reclaim()
    assert n_walks(monkeypatch, kv) == 0


def test_compactions_are_writes_of_ours(kv, monkeypatch):
    with closing(LMDBBackend(kv, 16 * MIB)) as backend:
        delete(backend, *map(key_of, range(10)))
        backend.compact(erase=True)
        backend.compact()
        write(backend, *range(10))
    assert n_walks(monkeypatch, kv) == 0


def test_a_transaction_that_fails_is_a_write_of_ours(kv, monkeypatch):
    with closing(LMDBBackend(kv, 16 * MIB)) as backend, suppress(ZeroDivisionError), backend.update() as draft:
        put_row(draft, 5, MIB)
        draft.flush()
        raise ZeroDivisionError
    assert n_walks(monkeypatch, kv) == 0


def test_a_file_that_something_else_has_changed_is_walked_and_refused(kv):
    break_leaf(kv)
    with pytest.raises(CorruptError, match="and delete data"):
        LMDBBackend(kv, 16 * MIB)


def test_times_that_were_set_back_do_not_hide_a_change(kv):
    before = (kv / "data.mdb").stat()
    break_leaf(kv)
    os.utime(kv / "data.mdb", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptError, match="and delete data"):
        LMDBBackend(kv, 16 * MIB)


def test_a_change_from_outside_is_not_taken_for_one_of_ours(kv, tmp_path, monkeypatch):
    """Even if the store that was open meanwhile has written after it."""
    with closing(LMDBBackend(kv, 16 * MIB)) as backend:
        write(backend, 200)
        wait_for_a_step()
        with (kv / "data.mdb").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(last)
        write(backend, 201)
    assert n_walks(monkeypatch, kv) == 1
    # what was walked is known from then on
    assert n_walks(monkeypatch, kv) == 0


def wait_for_a_step():
    """Until the clock of the file system has another time."""
    until = time.time_ns() + STEP
    while time.time_ns() < until:
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["copy of the files", "copy with all times", "moved there and back"])
def test_a_copy_is_walked(kv, tmp_path, monkeypatch, how):
    if how == "copy of the files":
        shutil.copytree(kv, tmp_path / "copy", copy_function=shutil.copy)
    elif how == "copy with all times":
        subprocess.run(["cp", "-a", kv, tmp_path / "copy"], check=True)
    else:
        # the same file in another directory is the same file
        kv.rename(tmp_path / "copy")
    expected = 0 if how == "moved there and back" else 1
    assert n_walks(monkeypatch, tmp_path / "copy") == expected
    assert n_walks(monkeypatch, tmp_path / "copy") == 0


def test_a_backup_that_was_restored_in_place_is_walked(kv, tmp_path, monkeypatch):
    backup = tmp_path / "backup"
    shutil.copy2(kv / "data.mdb", backup)
    with closing(LMDBBackend(kv, 16 * MIB)) as backend:
        write(backend, 300)
    (kv / "data.mdb").write_bytes(backup.read_bytes())
    (kv / "lock.mdb").unlink()
    assert n_walks(monkeypatch, kv) == 1


def test_any_other_note_is_none(kv, monkeypatch):
    """One that is damaged anywhere, truncated, too long, of another state, or no file."""
    note = kv / NOTE
    sound = note.read_bytes()
    assert len(sound) == STATE.size + SEAL.size
    for at in range(len(sound)):
        note.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        assert n_walks(monkeypatch, kv, read_only=True) == 1
    for other in (b"", sound[:-1], sound + b"x", bytes(len(sound)), sound[: STATE.size]):
        note.write_bytes(other)
        assert n_walks(monkeypatch, kv, read_only=True) == 1
    note.unlink()
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")):
        make(note)
        assert n_walks(monkeypatch, kv) == 1
        # what is no directory is replaced
        assert n_walks(monkeypatch, kv) == (1 if note.is_dir() else 0)
        note.rmdir() if note.is_dir() else note.unlink()
    (kv / "elsewhere").write_bytes(sound)
    note.symlink_to("elsewhere")
    assert n_walks(monkeypatch, kv, read_only=True) == 1
    note.unlink()
    note.write_bytes(sound)
    note.chmod(0o666)
    assert n_walks(monkeypatch, kv, read_only=True) == 1
    note.chmod(0o600)
    assert n_walks(monkeypatch, kv, read_only=True) == 0


def test_the_note_has_the_mode_of_the_data_and_a_reader_writes_none(kv, monkeypatch):
    assert (kv / NOTE).stat().st_mode & 0o777 == 0o600
    (kv / NOTE).unlink()
    assert n_walks(monkeypatch, kv, read_only=True) == 1
    assert not (kv / NOTE).exists()
    (kv / "data.mdb").chmod(0o660)
    assert n_walks(monkeypatch, kv) == 1
    assert (kv / NOTE).stat().st_mode & 0o777 == 0o640
    assert {path.name for path in kv.iterdir()} == {"data.mdb", "lock.mdb", NOTE}


WRITER = """
import sys
from tests.backends.test_lmdb_checked import LMDBBackend, MIB, wait_for_a_step, write
backend = LMDBBackend(sys.argv[1], 16 * MIB)
write(backend, 500)
if sys.argv[2] == "idle":
    wait_for_a_step()
    with backend.view():
        pass
print("ready", flush=True)
sys.stdin.readline()
backend.close()
"""


def writer(path, mode):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.slow
def test_a_process_that_was_killed_when_it_was_idle_has_noted_what_it_wrote(kv, monkeypatch):
    with writer(kv, "idle") as process:
        process.send_signal(signal.SIGKILL)
    assert n_walks(monkeypatch, kv) == 0


@pytest.mark.slow
def test_a_file_that_was_written_after_the_last_note_is_walked(kv, monkeypatch):
    with closing(LMDBBackend(kv, 16 * MIB)) as backend:
        write(backend, 600)
        with writer(kv, "busy") as process:
            process.send_signal(signal.SIGKILL)
        with walks(monkeypatch) as found:
            pid = os.fork()
            if pid == 0:
                # a handle of its own, and nothing noted
                backend.after_fork()
                with backend.view():
                    os._exit(len(found))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.mark.slow
def test_processes_that_write_in_turn_leave_a_note_of_the_last_state(kv, monkeypatch):
    with closing(LMDBBackend(kv, 16 * MIB)) as backend:
        with writer(kv, "idle") as process:
            write(backend, 700)
            process.stdin.close()
        write(backend, 701)
    assert n_walks(monkeypatch, kv) == 0
    with writer(kv, "busy") as process:
        with closing(LMDBBackend(kv, 16 * MIB)) as backend:
            write(backend, 702)
        process.stdin.close()
    assert n_walks(monkeypatch, kv) == 0


def damage_unnoticed(path):
    """Break leaves as a disk might: without a write that the file system knows of. Here the note is made to match."""
    break_leaf(path)
    found = (path / "data.mdb").stat()
    note = path / NOTE
    magic, _, _, _, _, transaction = STATE.unpack(note.read_bytes()[: STATE.size])
    body = STATE.pack(magic, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, transaction)
    note.write_bytes(body + _seal(body))


@pytest.mark.parametrize("read_only", [False, True])
def test_damage_that_a_check_finds_is_found_by_the_next_opening_too(kv, read_only):
    with closing(LMDBBackend(kv, 16 * MIB, read_only=read_only)) as backend:
        damage_unnoticed(kv)
        with pytest.raises(CorruptError, match="and delete data"):
            backend.check()
    assert not (kv / NOTE).exists()
    with pytest.raises(CorruptError, match="and delete data"):
        LMDBBackend(kv, 16 * MIB)


def test_a_damaged_value_has_the_file_walked_at_the_next_opening(kv, monkeypatch):
    """Whoever reads the rows finds it out, and says so before the view closes."""
    with closing(LMDBBackend(kv, 16 * MIB)) as backend, pytest.raises(CorruptError), backend.view():
        raise CorruptError("a checksum")
    with walks(monkeypatch) as found:
        LMDBBackend(kv, 16 * MIB).close()
    assert len(found) == 1
