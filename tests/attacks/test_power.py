"""A loss of power at each system call that changes a file: what the backends promise is there afterwards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from prefixstore.backends.lmdb import checked, environment, walk
from prefixstore.engine.budget import Budget
from prefixstore.engine.invariants import violations
from prefixstore.engine.pages import open_pages
from tests.attacks.after_kill import look_at, look_without_writing, pack
from tests.attacks.killed_process import KillableProcess
from tests.attacks.power import MARK, MODES, SYNC, Disk, Entry, is_mapped, read_journal, shim
from tests.support.models import TORTURE
from tests.support.places import fill, space

FILES = ("lmdb", "sqlite")
EACH = TORTURE > 1


def location_in(directory: Path, scheme: str) -> str:
    return f"lmdb://{directory}/new/kv" if scheme == "lmdb" else f"sqlite:///{directory}/new/kv.db"


@pytest.fixture(autouse=True)
def _walked_here(monkeypatch):
    """LMDB files are walked in this process when they are opened: there are thousands, and a child each takes 0.2 s."""

    def require_sound(path, databases):
        if why := walk._main(str(path.parent), [name.decode() for name in databases]):
            raise checked.damaged(path, why)

    monkeypatch.setattr(checked, "require_sound", require_sound)
    # a check has opened the file just before
    monkeypatch.setattr(environment, "require_sound", lambda path, databases: None)


@dataclass(frozen=True)
class Run:
    """What one process did to the files below a directory that was empty before."""

    scheme: str
    root: Path
    root_inode: int
    journal: list[Entry]


@pytest.fixture
def run(tmp_path) -> Iterator[Callable[..., Run]]:
    """Runs a task in a process; what it did to the files."""
    (tmp_path / "killable").mkdir()
    numbers = itertools.count()
    with closing(KillableProcess(tmp_path / "killable", shim=shim(tmp_path))) as killable:

        def work(scheme: str, task: str = "work", **order) -> Run:
            number = next(numbers)
            root, journal = tmp_path.resolve() / f"place-{number}", tmp_path / f"journal-{number}"
            root.mkdir()
            location, report = location_in(root, scheme), str(tmp_path / "report")
            assert not killable.run(
                task, location=location, report=report, journal=str(journal), below=str(root), **order
            )
            return Run(scheme, root, root.stat().st_ino, read_journal(journal))

        yield work


class Promise:
    """What must survive, as far as a report goes: one of the last states, within the bounds that are promised."""

    def __init__(self, scheme: str) -> None:
        self._late = 1 if scheme == "lmdb" else None
        self.states: list[str] = []
        self._committed = self._durable = 0

    def hear(self, mark: str) -> None:
        word, *rest = mark.split()
        # a transaction that changed nothing has written nothing
        if word in ("found", "about") and rest != self.states[-1:]:
            self.states += rest
        elif word == "committed":
            self._committed = len(self.states) - 1
        elif word == "durable":
            self._durable = self._committed

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def kept(self) -> list[str]:
        """The states of which one has to be found, oldest first."""
        oldest = self._durable
        if self._late is not None:
            oldest = max(oldest, self._committed - self._late)
        return self.states[oldest:]


def losses(run: Run, target: Path, step: int, modes: tuple[str, ...], seed: int = 0) -> Iterator[tuple[str, Promise]]:
    """Lose the power after entries of the journal; each time what is left is in `target`, with what was promised."""
    rng = random.Random(seed)
    disk, promise = Disk(run.root, run.root_inode), Promise(run.scheme)
    for n, entry in enumerate(run.journal):
        disk.apply(entry)
        if entry.kind == MARK:
            promise.hear(entry.data.decode())
        elif (n + seed) % step == 0:
            for mode in modes:
                disk.after_power_loss(target, mode, rng)
                yield f"{mode}, after entry {n}", promise


def lost(run: Run, target: Path, modes: tuple[str, ...], *, step: int = 1, seed: int = 0) -> list[str]:
    """The promises that were broken; all else that must hold of a store is asserted."""
    location, broken, rng = location_in(target, run.scheme), [], random.Random(seed)
    nothing = look_at(location_in(target.with_name("nothing"), run.scheme))
    for when, promise in losses(run, target, step, modes, seed):
        if promise.states and rng.random() < 0.3:
            look_without_writing(location)
        found = look_at(location)
        if found not in (promise.kept or [nothing]):
            broken.append(when)
    return broken


def names_of(directory: Path) -> dict[str, bytes]:
    """What is in a directory, but for what is mapped for writing."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not is_mapped(path)
    }


@pytest.mark.parametrize("scheme", FILES)
def test_what_is_promised_survives_a_power_loss_at_any_moment(run, tmp_path, scheme):
    # SQLite makes more system calls, and takes longer to open
    seeds, step = {"lmdb": (TORTURE, 6), "sqlite": (-(-TORTURE // 8), 10)}[scheme]
    for seed in range(seeds):
        done = run(scheme, seed=2 * seed, pack=pack())
        assert lost(done, tmp_path / "left", MODES, step=1 if EACH else step, seed=seed) == []


def test_a_scrub_among_writers_survives_a_power_loss(run, tmp_path):
    for seed in range(TORTURE):
        done = run("lmdb", "scrub_among_writers", seed=seed, pack="")
        assert lost(done, tmp_path / "left", ("some", "torn"), step=1 if EACH else 2, seed=seed) == []


@pytest.mark.parametrize("scheme", FILES)
def test_the_journal_records_every_change_to_the_files(run, tmp_path, scheme):
    done = run(scheme, seed=0, pack=pack())
    disk = Disk(done.root, done.root_inode)
    for entry in done.journal:
        disk.apply(entry)
    disk.after_power_loss(tmp_path / "left", "all", random.Random(0))
    there = names_of(done.root)
    assert names_of(tmp_path / "left") == there
    assert max(map(len, there.values())) > 100_000
    assert sum(entry.kind == SYNC for entry in done.journal) > 20


@pytest.mark.parametrize("scheme", FILES)
def test_a_flush_without_a_sync_would_be_noticed(run, tmp_path, scheme):
    """A control of the test itself: the child leaves out what makes a flush durable, and says that it is."""
    done = run(scheme, seed=1, pack=pack(), durable=False)
    assert len(lost(done, tmp_path / "left", ("none",), step=1 if scheme == "lmdb" else 8)) > 8


@pytest.mark.parametrize("scheme", FILES)
def test_only_sqlite_loses_more_than_the_last_transaction_without_a_flush(run, tmp_path, scheme):
    """What a plain commit promises: the table of promises claims no more than there is, and no less."""
    done = run(scheme, seed=1, pack=pack())
    location, most = location_in(tmp_path / "left", scheme), 0
    for _, promise in losses(done, tmp_path / "left", 1 if EACH else 3, ("none",)):
        if promise.states:
            found = look_at(location)
            newest = max(i for i, state in enumerate(promise.states[: promise.committed + 1]) if state == found)
            most = max(most, promise.committed - newest)
    assert most == 1 if scheme == "lmdb" else most > 1


def test_an_exported_file_survives_a_later_power_loss(run, tmp_path):
    out = tmp_path.resolve() / "place-0" / "night.pstore"
    done = run("lmdb", "export", out=str(out))
    disk = Disk(done.root, done.root_inode)
    for entry in done.journal:
        disk.apply(entry)
    disk.after_power_loss(tmp_path / "left", "none", random.Random(0))
    assert (tmp_path / "left" / out.name).read_bytes() == out.read_bytes()


def test_a_store_whose_file_grew_during_a_power_loss_is_recognized(tmp_path):
    """The header, in the first page, says how long the file will be when the log was moved into it."""
    location, copy = f"sqlite:///{tmp_path}/kv.db", tmp_path / "copy.db"
    with closing(open_pages(location, max_bytes=1 << 24)) as backend:
        fill(backend, space(), [[1, 2, 3, 4]], size=100_000)
        whole = bytearray(Path(f"{tmp_path}/kv.db").read_bytes())
        log = Path(f"{tmp_path}/kv.db-wal").read_bytes()
    # all but the length of the file has come to the disk
    whole[28:32] = (int.from_bytes(whole[28:32], "big") + 3).to_bytes(4, "big")
    copy.write_bytes(whole)
    Path(f"{copy}-wal").write_bytes(log)
    with closing(open_pages(f"sqlite:///{copy}", max_bytes=1 << 24)) as backend, backend.view() as view:
        assert violations(view, Budget(1 << 24)) == []
        assert view.used.entries == 1


def test_opening_a_store_read_only_does_not_grow_its_file(tmp_path):
    with closing(open_pages(str(tmp_path), max_bytes=1 << 24)) as backend:
        before = backend.rows._environment.env.info()["map_size"]
        open_pages(str(tmp_path), max_bytes=1 << 30, read_only=True).close()
        assert backend.rows._environment.env.info()["map_size"] == before


def ask(connection, question: str) -> list[str]:
    return [str(value) for value in connection.execute(question).fetchone()]


def test_a_session_keeps_the_durability_of_the_server(new_database):
    location = new_database()
    with (
        closing(open_pages(location, max_bytes=1 << 24)) as backend,
        psycopg.connect(location.replace("+psycopg", "")) as plain,
        backend.rows.connection() as ours,
    ):
        settings = "SELECT " + ", ".join(
            f"current_setting('{name}')"
            for name in ("fsync", "synchronous_commit", "full_page_writes", "commit_delay", "wal_sync_method")
        )
        assert ask(ours, settings) == ask(plain, settings)
        kinds = "SELECT DISTINCT relpersistence FROM pg_class WHERE relname LIKE 'prefixstore%' AND relkind = 'r'"
        # no table is left out of the server's log
        assert ask(plain, kinds) == ["p"]


def test_a_flush_is_durable_in_postgresql_where_a_commit_is_not(new_database):
    location = new_database()
    behind = []
    with psycopg.connect(location.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET synchronous_commit = off')
        with closing(open_pages(location, max_bytes=1 << 24)) as backend:
            for n in range(30):
                fill(backend, space(), [[n, 2, 3, 4]])
                written = ask(connection, "SELECT pg_current_wal_insert_lsn()")[0]
                flushed = f"SELECT pg_current_wal_flush_lsn() >= '{written}'"
                behind.append(ask(connection, flushed) == ["False"])
                backend.sync()
                assert ask(connection, flushed) == ["True"]
    # or the setting was not as it should be, and nothing was tested
    assert any(behind)
