"""Compaction of a PostgreSQL store: it gives space back while others read and write. And walks in bounded memory."""

from __future__ import annotations

from contextlib import closing

import pytest
from sqlalchemy import text

from prefixstore.backends.sql import backend as sql_backend
from prefixstore.backends.sql import compaction
from prefixstore.backends.sql.database import Database
from prefixstore.errors import LocationError, UnavailableError
from prefixstore.maintenance.archive import Archive
from tests.support.places import MIB, contents, fill, opened, space
from tests.support.postgres import database, name_of

SIZE = 200_000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few bytes are worth the effort, and few are rewritten at a time."""
    monkeypatch.setattr(compaction, "LEAST_BYTES", 256 << 10)
    monkeypatch.setattr(compaction, "AT_ONCE", 1)


@pytest.fixture(scope="module")
def half_deleted(postgres_template):
    """A server with a store of 40 pages of which every second one is deleted, and what is in it."""
    server, template = postgres_template
    with database(server, template) as url:
        with opened(url) as backend:
            fill(backend, space(), [[number, 1, 2, 3] for number in range(40)], size=SIZE)
            with backend.update() as transaction:
                for key in sorted(key for key, _, _ in transaction.scan())[::2]:
                    transaction.delete(key)
            kept = contents(backend)
        yield server, url, kept


@pytest.fixture
def churned(half_deleted):
    """A copy of the store, and what is in it."""
    server, url, kept = half_deleted
    with database(server, name_of(url)) as copy:
        yield copy, dict(kept)


def between_steps(monkeypatch, work):
    """Call this in each transaction of a compaction before it commits, and after it."""
    step, rows = compaction.Compaction._step, Database.rows

    def rows_and_work(self, connection, statement, *arguments, **options):
        found = rows(self, connection, statement, *arguments, **options)
        if statement is compaction._REWRITE:
            work("before")
        return found

    def step_and_work(self, after):
        found = step(self, after)
        work("after")
        return found

    monkeypatch.setattr(Database, "rows", rows_and_work)
    monkeypatch.setattr(compaction.Compaction, "_step", step_and_work)


@pytest.mark.slow
def test_most_of_the_free_space_is_given_back_and_nothing_else_changes(churned):
    url, kept = churned
    with opened(url) as backend:
        before = backend.database.disk_bytes()
        with backend.view() as view:
            generation, used = view.generation, view.used
        freed = backend.compact()
        after = backend.database.disk_bytes()
        assert freed == before - after
        assert contents(backend) == kept
        with backend.view() as view:
            assert (view.generation, view.used) == (generation, used)
        backend.scrub()
        smallest = backend.database.disk_bytes()
        assert freed > 0.6 * (before - smallest)
        # there is nothing to do any more
        assert backend.compact() >= 0
        with Archive(url) as archive:
            assert archive.check() == []


@pytest.mark.slow
def test_others_read_in_each_transaction_and_write_between_two(churned, monkeypatch):
    url, kept = churned
    with opened(url) as backend, opened(url) as other:
        numbers = iter(range(1000, 9999))
        steps = []

        def work(when):
            steps.append(when)
            if when == "before":
                with other.view() as view:
                    key = next(iter(kept))
                    ((record, payload),) = view.fetch([key])
                    assert (record, bytes(payload)) == (kept[key][0], kept[key][2])
            elif len(steps) < 20:
                ((key,),) = fill(other, space("more"), [[next(numbers), 1, 2, 3]], size=1000)
                with other.update() as transaction:
                    transaction.delete(key)

        between_steps(monkeypatch, work)
        assert backend.compact() > 0
        assert len(steps) >= 10
        monkeypatch.undo()
        assert contents(backend) == kept
        with Archive(url) as archive:
            assert archive.check() == []


def test_what_others_delete_meanwhile_stays_deleted(churned, monkeypatch):
    url, kept = churned
    with opened(url) as backend, opened(url) as other:
        left = sorted(kept, reverse=True)

        def work(when):
            if when == "after" and len(left) > 10:
                with other.update() as transaction:
                    assert transaction.delete(left.pop())

        between_steps(monkeypatch, work)
        backend.compact()
        assert contents(other) == {key: kept[key] for key in left}
        with Archive(url) as archive:
            assert archive.check() == []


def test_while_somebody_reads_an_older_state_the_table_hardly_grows(churned):
    url, _ = churned
    with opened(url) as backend:
        # a quarter of it is free then
        fill(backend, space(), [[number, 1, 2, 3] for number in range(100, 110)], size=SIZE)
        kept = contents(backend)
    with opened(url) as backend, opened(url) as other, other.view() as view:
        walk = view.scan()
        next(walk)
        before = backend.database.disk_bytes()
        assert backend.compact() == 0
        # by what is written between two or three vacuums, and not by all payloads
        assert backend.database.disk_bytes() < before + 1.5 * MIB
        walk.close()
    with opened(url) as backend:
        assert backend.compact() > 0
        assert contents(backend) == kept


def test_only_the_owner_of_the_tables_can(churned):
    url, kept = churned
    with opened(url) as backend:
        with backend.database.connection() as connection:
            connection.exec_driver_sql("DROP ROLE IF EXISTS compaction_guest")
            connection.exec_driver_sql("CREATE ROLE compaction_guest LOGIN")
            names = connection.exec_driver_sql(
                "SELECT string_agg(tablename, ', ') FROM pg_tables WHERE tablename LIKE 'prefixstore_%%'"
            ).scalar_one()
            connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {names} TO compaction_guest"))
        try:
            with (
                opened(url.replace("postgres@", "compaction_guest@")) as guest,
                pytest.raises(LocationError, match="compact as the owner"),
            ):
                guest.compact()
        finally:
            with backend.database.connection() as connection:
                connection.exec_driver_sql("DROP OWNED BY compaction_guest")
                connection.exec_driver_sql("DROP ROLE compaction_guest")
        assert contents(backend) == kept


def test_a_read_only_store_is_not_compacted(churned):
    url, _ = churned
    with opened(url, read_only=True) as backend, pytest.raises(UnavailableError, match="read-only"):
        backend.compact()


# -- walks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql"])
def test_a_walk_holds_a_few_rows_and_payloads_at_once(scheme, tmp_path, request, monkeypatch):
    url = f"sqlite:///{tmp_path}/kv.db" if scheme == "sqlite" else request.getfixturevalue("new_database")()
    statements = ("_SCAN", "_PAYLOAD_KEYS")
    for name in statements:
        monkeypatch.setattr(sql_backend, name, getattr(sql_backend, name).limit(7))
    monkeypatch.setattr(sql_backend, "WALK_BYTES", 100_000)
    rows = Database.rows
    held = []

    def counted(*arguments, **options):
        found = rows(*arguments, **options)
        held.append((len(found), sum(len(row.data) for row in found if "data" in row._fields)))
        return found

    with opened(url) as backend:
        # with one that is larger than what is read at a time
        fill(backend, space(), [[number, 1, 2, 3] for number in range(60)], size=20_000)
        fill(backend, space(), [[99, 1, 2, 3]], size=300_000)
        monkeypatch.setattr(Database, "rows", counted)
        with backend.view() as view:
            assert sum(1 for _ in view.scan()) == 61
            assert sum(len(payload) for _, _, payload in view.stored()) == 60 * 20_000 + 300_000
            assert sum(1 for _ in view.payload_keys()) == 61
        with closing(Archive(url)) as archive:
            assert archive.check() == []
    n_rows, n_bytes = (max(column) for column in zip(*held, strict=True))
    assert n_rows <= 7
    assert n_bytes <= 300_000
