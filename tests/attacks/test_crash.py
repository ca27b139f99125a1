"""Processes killed at every point where they write and at any other, and a server killed."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from prefixstore.backends.sql import migrations as migrate
from prefixstore.engine.pages import open_pages
from prefixstore.errors import UnavailableError
from prefixstore.maintenance.archive import Archive
from tests.attacks.after_kill import contents_of_old, look_at, look_without_writing, pack
from tests.attacks.kill_workload import BUDGET
from tests.attacks.killed_process import KillableProcess, allowed
from tests.attacks.power import shim
from tests.support.models import TORTURE
from tests.support.places import SCHEMES, place
from tests.support.postgres import database, until_alone
from tests.support.revisions import LATER, OLD, a_later_version, write_old
from tests.support.sql_rows import TERMINATE, before_statements
from tests.support.timeouts import wait_for
from tests.support.valkey import forget_lock

EACH = TORTURE > 1


@pytest.fixture(scope="module")
def killable(tmp_path_factory) -> Iterator[KillableProcess]:
    """Children that are killed at operations, at statements, or at any moment."""
    with closing(KillableProcess(tmp_path_factory.mktemp("killable"))) as started:
        yield started


@pytest.fixture
def others(tmp_path_factory) -> Iterator[KillableProcess]:
    """Children that survive; for one test each, because after a failure the child is still at work."""
    with closing(KillableProcess(tmp_path_factory.mktemp("others"))) as started:
        yield started


@pytest.fixture(scope="module")
def shimmed(tmp_path_factory) -> Iterator[KillableProcess]:
    """Children that are killed at system calls."""
    directory = tmp_path_factory.mktemp("killable")
    with closing(KillableProcess(directory, shim=shim(directory))) as started:
        yield started


def empty(location: str) -> str:
    with Archive(location, max_bytes=BUDGET.max_bytes, create=True):
        pass
    return look_at(location)


def lines(report: Path) -> list[str]:
    return report.read_text().splitlines() if report.exists() else []


# where a process is killed, in the test that kills it at each step
LEVELS = {"lmdb": "operations", "valkey": "commands", "s3": "requests"}


def _credentials() -> dict[str, str]:
    """Those of the object store, which a process that was started before it does not have."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


class Life:
    """One location through many kills."""

    def __init__(self, killable: KillableProcess, location: str, directory: Path) -> None:
        self.location = location
        self._killable = killable
        self._report = directory / "report"
        self._pack = pack()
        # digests of the states of which it is in one
        self._holds = {empty(location)}
        self._is_killed_at_any_moment = False
        self.deaths = 0
        # whether what a killed process leaves needs no mending by the next one that writes
        self.is_whole_unwritten = True

    def goes_on(self, task: str, **order) -> bool:
        """Another process works there; whether it was killed. What it left is verified."""
        self.begins(task, **order)
        return self.ends()

    def begins(self, task: str, **order) -> None:
        self._report.unlink(missing_ok=True)
        self._is_killed_at_any_moment = "kill_after" in order
        order |= {"location": self.location, "pack": self._pack, "report": str(self._report)}
        order["environment"] = _credentials()
        self._killable.begin(task, **order)

    def ends(self) -> bool:
        killed = self._killable.end()
        self.deaths += killed
        if self.location.startswith("postgresql"):
            # its last statement may be under way
            until_alone(self.location)
        if self.deaths % 4 == 0 and self.is_whole_unwritten:
            look_without_writing(self.location)
        if self.location.startswith("unix"):
            forget_lock(self.location)
        found = look_at(self.location)
        possible = allowed(self.report, self._holds)
        assert found in possible, self.report[-3:]
        # a request to an object store that was under way when it was killed may arrive only now
        is_late = self.location.startswith("s3") and self._is_killed_at_any_moment
        self._holds = possible if is_late else {found}
        return killed

    @property
    def report(self) -> list[str]:
        return lines(self._report)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_is_sound_after_a_kill_at_each_write(killable, tmp_path, request, scheme):
    life = Life(killable, place(scheme, tmp_path, request), tmp_path)
    level = LEVELS.get(scheme, "statements")
    # at length, each statement
    step = 1 if EACH else {"lmdb": 1, "sqlite": 8, "postgresql": 8, "valkey": 40, "s3": 1000}[scheme]
    for seed, die_at in enumerate(itertools.count(1, step)):
        if not life.goes_on("work", seed=seed, die_at=die_at, level=level):
            break
    assert life.deaths > 40 / step


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_is_sound_after_a_kill_while_tables_and_indexes_are_built(killable, tmp_path, request, scheme):
    life = Life(killable, place(scheme, tmp_path, request), tmp_path)
    # the index of children is built in several transactions
    life.is_whole_unwritten = scheme != "lmdb"
    level = LEVELS.get(scheme, "statements")
    step = 1 if EACH else {"lmdb": 7, "sqlite": 23, "postgresql": 23, "valkey": 60, "s3": 2000}[scheme]
    for seed, die_at in enumerate(itertools.count(1, step)):
        if not life.goes_on("maintain", seed=seed, die_at=die_at, level=level):
            break
    assert life.deaths > 25 / step


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_a_store_is_sound_after_a_kill_at_each_system_call(shimmed, tmp_path, request, scheme):
    life = Life(shimmed, place(scheme, tmp_path.resolve(), request), tmp_path)
    journal = tmp_path / "journal"
    for seed, die_at in enumerate(itertools.count(1, 1 if EACH else 8)):
        journal.unlink(missing_ok=True)
        order = {"journal": str(journal), "below": str(tmp_path.resolve()), "level": "calls"}
        if not life.goes_on("work", seed=seed, die_at=die_at, **order):
            break
    assert life.deaths > (80 if EACH else 10)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_is_sound_after_a_kill_at_any_moment(killable, tmp_path, request, scheme):
    life = Life(killable, place(scheme, tmp_path, request), tmp_path)
    rng = random.Random(scheme)
    for seed in range(10 * TORTURE if EACH else 4):
        assert life.goes_on("work_forever", seed=10 * seed, kill_after=rng.uniform(0.02, 0.3))
    # and the next process can do everything
    assert not life.goes_on("work", seed=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_others_continue_when_one_process_is_killed(killable, others, tmp_path, request, scheme):
    location, rng = place(scheme, tmp_path, request), random.Random(scheme)
    empty(location)
    survivor, victim, enough = tmp_path / "survivor", tmp_path / "victim", tmp_path / "enough"
    deaths = 3 * TORTURE if EACH else 2
    order = {"location": location, "pack": pack(), "environment": _credentials()}
    others.begin("work_forever", seed=1, report=str(survivor), kill_when=str(enough), **order)
    for n in range(deaths):
        assert killable.run("work_forever", seed=n, report=str(victim), kill_after=rng.uniform(0.05, 0.3), **order)
        before = lines(survivor).count("committed")

        def goes_on() -> bool:
            assert not others.has_ended(), others.errors()
            return lines(survivor).count("committed") >= before + 3  # noqa: B023 - called at once

        wait_for(goes_on, "the survivor, which waits for the killed one")
    enough.touch()
    assert others.end()
    look_at(location)


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_a_kill_while_a_store_is_created_leaves_none_or_a_sound_one(shimmed, tmp_path, scheme):
    for die_at in itertools.count(1, 1 if EACH or scheme == "lmdb" else 4):
        root = tmp_path.resolve() / str(die_at)
        root.mkdir()
        location = f"lmdb://{root}/new/kv" if scheme == "lmdb" else f"sqlite:///{root}/new/kv.db"
        order = {"location": location, "journal": str(tmp_path / "journal"), "below": str(root), "level": "calls"}
        killed = shimmed.run("create", report=str(tmp_path / "report"), die_at=die_at, **order)
        assert empty(location)
        if not killed:
            break
    assert die_at > 10


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql"])
def test_a_kill_during_an_upgrade_leaves_the_old_schema_or_the_new_one(killable, tmp_path, request, scheme):
    if scheme == "postgresql":
        location = request.getfixturevalue("new_database")(empty=True)
        write_old(location)
    revisions = []
    for die_at in itertools.count(1):
        if scheme == "sqlite":
            location = f"sqlite:///{tmp_path}/{die_at}.db"
            write_old(location)
        order = {"location": location, "later": str(tmp_path), "report": str(tmp_path / "report")}
        with a_later_version(tmp_path):
            killed = killable.run("upgrade", die_at=die_at, level="statements", **order)
            revisions.append(migrate.check(location).revision)
        if not killed:
            break
        assert contents_of_old(location) == [(0, 0), (700, 700), (900, 900)]
    assert len(revisions) > 8
    assert revisions == sorted(revisions)
    assert revisions[0] == OLD
    assert revisions[-1] == LATER
    with a_later_version(tmp_path), Archive(location) as archive:
        assert archive.check() == []
        assert archive.used().entries == 3


def test_a_killed_server_has_all_it_committed_and_its_clients_reconnect(killable, tmp_path, postgres_server):
    rng = random.Random(3)
    with database(postgres_server.url, None) as location:
        migrate.upgrade(location)
        life = Life(killable, location, tmp_path)
        enough = tmp_path / "enough"
        life.begins("work_forever", seed=0, kill_when=str(enough))
        committed = 0
        for _ in range(5 * TORTURE if EACH else 2):
            time.sleep(rng.uniform(0.05, 0.4))
            postgres_server.kill()
            postgres_server.start()
            wait_for(lambda: life.report.count("committed") > committed, "the work of the client")  # noqa: B023
            committed = life.report.count("committed")
        enough.touch()
        # the report shows whether each transaction found what the previous one left
        assert life.ends()


def test_a_server_that_fails_during_opening_is_not_taken_for_another_application(new_database):
    location = new_database()

    def cut(statement: str) -> None:
        if "version_num" in statement:
            with psycopg.connect(location.replace("+psycopg", ""), autocommit=True) as other:
                other.execute(TERMINATE)

    with before_statements(cut), pytest.raises(UnavailableError):
        open_pages(location, max_bytes=1 << 24)
    open_pages(location, max_bytes=1 << 24).close()
