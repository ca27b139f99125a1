"""An LMDB file that is opened is verified, unless it was closed by us and nothing has changed since."""

import os
import subprocess
from contextlib import closing, contextmanager, suppress

import lmdb
import pytest

from prefixstore.backends.lmdb import checked
from prefixstore.backends.lmdb.checked import NOTE
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.errors import CorruptError
from tests.support import PATIENCE, in_thread, python
from tests.support.rows import Writer, delete, key_of, rows_of
from tests.support.rows import put as put_row

MIB = 1 << 20


def write(backend, *numbers):
    for number in numbers:
        with backend.update() as draft:
            put_row(draft, number, 3000)


@contextmanager
def verified(monkeypatch):
    """The files that are verified in the block when stores are opened."""
    found = []
    verify = checked.require_sound

    def counted(path):
        found.append(path)
        return verify(path)

    with monkeypatch.context() as patch:
        patch.setattr(checked, "require_sound", counted)
        yield found


def n_verified(monkeypatch, path, **options):
    """How often opening a store has its file verified."""
    with verified(monkeypatch) as found, closing(LMDBBackend(path, 16 * MIB, **options)) as backend:
        assert len(rows_of(backend)) >= 30
        return len(found)


@pytest.fixture
def kv(tmp_path, monkeypatch):
    """A store with some pages, closed."""
    with verified(monkeypatch) as found, closing(LMDBBackend(tmp_path / "kv", 16 * MIB)) as backend:
        write(backend, *range(30))
    # a new one is not verified either
    assert found == []
    return tmp_path / "kv"


def break_leaf(path, at_byte=16, other=b"\xfe\xff"):
    """Damage leaves of the trees that are in use, past LMDB: the place of their first node, or other bytes."""
    data = path / "data.mdb"
    raw = bytearray(data.read_bytes())
    for at in range(2 * 4096, len(raw), 4096):
        if raw[at + 10 : at + 12] == b"\2\0":
            where = at + (at_byte or int.from_bytes(raw[at + 16 : at + 18], "little"))
            raw[where : where + len(other)] = other
    with data.open("r+b") as file:
        file.write(raw)


def test_a_file_that_was_closed_is_not_verified_again(kv, monkeypatch):
    assert n_verified(monkeypatch, kv) == 0
    assert n_verified(monkeypatch, kv, read_only=True) == 0
    with closing(LMDBBackend(kv, 16 * MIB)) as backend:
        write(backend, 100)
        with suppress(ZeroDivisionError), backend.update() as draft:
            put_row(draft, 5, MIB)
            draft.flush()
            raise ZeroDivisionError
        delete(backend, *map(key_of, range(10)))
        backend.compact(erase=True)
        backend.compact()
        write(backend, *range(10))
    assert n_verified(monkeypatch, kv) == 0


# also flags of a page, the size of its first value, which LMDB reads, and goes wrong when it writes, and all rows
@pytest.mark.parametrize(("at_byte", "other"), [(16, b"\xfe\xff"), (11, b"\x80"), (0, b"\5"), (16, bytes(4080))])
@pytest.mark.parametrize("is_set_back", [False, True])
def test_a_file_that_something_else_has_changed_is_verified_and_refused(kv, is_set_back, at_byte, other):
    before = (kv / "data.mdb").stat()
    break_leaf(kv, at_byte, other)
    if is_set_back:
        os.utime(kv / "data.mdb", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptError, match="and delete data"):
        LMDBBackend(kv, 16 * MIB)


def test_a_copy_is_verified_and_the_same_file_in_another_directory_is_not(kv, tmp_path, monkeypatch):
    # with all times
    subprocess.run(["cp", "-a", kv, tmp_path / "copy"], check=True)
    assert n_verified(monkeypatch, tmp_path / "copy") == 1
    assert n_verified(monkeypatch, tmp_path / "copy") == 0
    kv.rename(tmp_path / "moved")
    assert n_verified(monkeypatch, tmp_path / "moved") == 0
    # as mdb_copy -n -c does: it notes in the tree of free pages that the file is in no directory of its own
    (tmp_path / "compact").mkdir()
    env = lmdb.open(str(tmp_path / "moved" / "data.mdb"), subdir=False, lock=False, readonly=True)
    with env, (tmp_path / "compact" / "data.mdb").open("wb") as file:
        env.copyfd(file.fileno(), compact=True)
    assert n_verified(monkeypatch, tmp_path / "compact") == 1


def test_any_other_note_is_none(kv, monkeypatch):
    """One that is truncated, too long, of another state, older than the data, or no file."""
    note = kv / NOTE
    sound = note.read_bytes()
    for other in (b"", sound[:-2], sound + b"x", b"1" + sound):
        note.write_bytes(other)
        assert n_verified(monkeypatch, kv, read_only=True) == 1
    note.write_bytes(sound)
    assert n_verified(monkeypatch, kv, read_only=True) == 0
    data = (kv / "data.mdb").stat()
    os.utime(note, ns=(data.st_atime_ns, data.st_mtime_ns))
    assert n_verified(monkeypatch, kv, read_only=True) == 1
    for make in (lambda path: path.symlink_to("elsewhere"), os.mkdir):
        note.unlink()
        make(note)
        assert n_verified(monkeypatch, kv) == 1
        assert n_verified(monkeypatch, kv) == note.is_dir()
    assert {path.name for path in kv.iterdir()} == {"data.mdb", "lock.mdb", NOTE}


def test_a_file_that_another_process_has_open_is_not_verified_and_after_a_kill_it_is(kv, monkeypatch):
    other = Writer(kv, 16 * MIB)
    other.write(500)
    for options in ({}, {"read_only": True}):
        assert n_verified(monkeypatch, kv, **options) == 0
    other.process.kill()
    other.process.communicate()
    # it has written after the last one who closed the file
    (kv / NOTE).write_bytes(b"")
    assert n_verified(monkeypatch, kv) == 1
    assert n_verified(monkeypatch, kv) == 0


def test_a_file_that_another_process_has_read_is_waited_for(kv, monkeypatch):
    lock = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
    with python(f"{lock}; sys.stdin.readline()", kv / "data.mdb") as process:
        assert process.stdout.readline() == "held\n"
        opened = []
        thread = in_thread(lambda: opened.append(n_verified(monkeypatch, kv)))
        thread.join(0.1)
        assert opened == []
        process.stdin.close()
        thread.join(PATIENCE)
        assert opened == [0]


@pytest.mark.parametrize("read_only", [False, True])
def test_damage_that_a_check_finds_is_found_by_the_next_opening_too(kv, read_only):
    with closing(LMDBBackend(kv, 16 * MIB, read_only=read_only)) as backend:
        break_leaf(kv)
        with pytest.raises(CorruptError, match="and delete data"):
            backend.check()
    assert not (kv / NOTE).exists()
    with pytest.raises(CorruptError, match="and delete data"):
        LMDBBackend(kv, 16 * MIB)
