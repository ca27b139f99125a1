"""Compaction of a PostgreSQL store: it gives space back while others read and write."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from prefixstore.backends.sql import compaction
from prefixstore.backends.sql.postgresql import PostgreSQL
from prefixstore.errors import LocationError
from tests.support.postgres import database, name_of
from tests.support.sql_rows import contents, delete, held, keys_of, opened, put, require_intact, row

SIZE = 200_000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few bytes are worth the effort, and few are rewritten at a time."""
    monkeypatch.setattr(compaction, "LEAST_BYTES", 256 << 10)
    monkeypatch.setattr(compaction, "AT_ONCE", 1)


@pytest.fixture(scope="module")
def half_deleted(postgres_template):
    """A server with a store of 40 rows of which every second one is deleted, and what is in it."""
    server, template = postgres_template
    with database(server, template) as url:
        with opened(url) as backend:
            put(backend, *(row(number, SIZE) for number in range(40)))
            delete(backend, sorted(keys_of(backend))[::2])
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
    step, writing = compaction._step, PostgreSQL.writing

    @contextmanager
    def writing_and_work(self):
        with writing(self) as connection:
            yield connection
            monkeypatch.setattr(PostgreSQL, "writing", writing)
            work("before")

    def step_and_work(*arguments):
        monkeypatch.setattr(PostgreSQL, "writing", writing_and_work)
        found = step(*arguments)
        work("after")
        return found

    monkeypatch.setattr(compaction, "_step", step_and_work)


@pytest.mark.slow
def test_most_of_the_free_space_is_given_back_and_nothing_else_changes(churned):
    url, kept = churned
    with opened(url) as backend:
        before = backend.disk_bytes()
        with backend.view() as view:
            used = view.used
        freed = backend.compact()
        after = backend.disk_bytes()
        assert freed == before - after
        assert contents(backend) == kept
        with backend.view() as view:
            assert view.used == used
        backend.compact(erase=True)
        smallest = backend.disk_bytes()
        assert freed > 0.6 * (before - smallest)
        # there is nothing to do any more
        assert backend.compact() >= 0
        require_intact(backend)


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
                    assert held(view, [key]) == [kept[key]]
            elif len(steps) < 20:
                delete(other, put(other, row(next(numbers))))

        between_steps(monkeypatch, work)
        assert backend.compact() > 0
        assert len(steps) >= 10
        monkeypatch.undo()
        assert contents(backend) == kept
        require_intact(backend)


def test_only_the_owner_of_the_tables_can(churned):
    url, kept = churned
    with opened(url) as backend:
        with backend.connection() as connection:
            connection.execute("DROP ROLE IF EXISTS compaction_guest")
            connection.execute("CREATE ROLE compaction_guest LOGIN")
            names = connection.execute(
                "SELECT string_agg(tablename, ', ') FROM pg_tables WHERE tablename LIKE 'prefixstore_%'"
            ).fetchone()[0]
            connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {names} TO compaction_guest")
        try:
            with (
                opened(url.replace("postgres@", "compaction_guest@")) as guest,
                pytest.raises(LocationError, match="compact as the owner"),
            ):
                guest.compact()
        finally:
            with backend.connection() as connection:
                connection.execute("DROP OWNED BY compaction_guest")
                connection.execute("DROP ROLE compaction_guest")
        assert contents(backend) == kept
