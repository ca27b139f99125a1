"""The schema of SQL stores and its migrations; the file of a SQLite store; ``prefixstore migrate``."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import NullPool, create_engine, inspect

from prefixstore.backends.sql import migrations as migrate
from prefixstore.backends.sql.database import APPLICATION_ID, TABLES
from prefixstore.backends.sql.migrations import HEAD, VERSION_TABLE
from prefixstore.cli import main
from prefixstore.errors import IncompatibleError, LocationError
from tests.support.places import refusal
from tests.support.rows import delete
from tests.support.sql_rows import change, contents, opened, put, require_intact, row

ROOT = Path(__file__).parents[2]
OLD, LATER = HEAD, "9001"
REVISION = f'''"""Columns, a table, and a count of what is there."""

import sqlalchemy as sa
from alembic import op

revision = "{LATER}"
down_revision = "{OLD}"


def upgrade():
    for name in ("one", "two", "three", "four"):
        op.add_column("prefixstore_rows", sa.Column(name, sa.SmallInteger(), nullable=False, server_default="0"))
    op.add_column("prefixstore_meta", sa.Column("counted", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE prefixstore_meta SET counted = (SELECT count(*) FROM prefixstore_rows)")
    op.create_table("prefixstore_later", sa.Column("name", sa.LargeBinary(), primary_key=True))
'''


@contextmanager
def a_later_version(directory):
    """In the block prefixstore is a later version, whose schema has one revision more, in this directory."""
    migrations = directory / "migrations"
    shutil.copytree(migrate.migrations_directory(), migrations)
    (migrations / "versions" / f"r{LATER}_later.py").write_text(REVISION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "migrations_directory", lambda: migrations)
        patch.setattr(migrate, "HEAD", LATER)
        yield


def write_old(url):
    """Write a store as this version does; its rows."""
    migrate.upgrade(url)
    with opened(url) as backend:
        put(backend, *(row(i, size) for i, size in enumerate((700, 900, 0))))
        return contents(backend)


def engine_of(url):
    return create_engine(url, poolclass=NullPool)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request, tmp_path):
    """Where no store is."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/kv.db"
    return request.getfixturevalue("new_database")(empty=True)


def holds(backend, rows):
    """These rows are stored, and can be changed."""
    assert contents(backend) == rows
    require_intact(backend)
    key, gone, *_ = rows
    put(backend, (key, b"another value", b"another payload"))
    delete(backend, gone)
    kept = {each: found for each, found in rows.items() if each != gone}
    assert contents(backend) == kept | {key: (b"another value", b"another payload")}
    require_intact(backend)


# -- revisions ---------------------------------------------------------------------------------------------------------


def test_the_newest_revision_in_the_code_is_that_of_the_migrations():
    assert ScriptDirectory(str(migrate.migrations_directory())).get_current_head() == HEAD


def test_the_migrations_make_our_tables_and_no_index_but_their_keys(empty_url):
    migrate.upgrade(empty_url)
    tables = inspect(engine_of(empty_url))
    assert set(tables.get_table_names()) == {*TABLES, VERSION_TABLE}
    assert [tables.get_indexes(name) for name in TABLES] == [[]] * 3


def test_a_sqlite_store_of_an_earlier_revision_is_upgraded_when_it_is_opened(tmp_path):
    url = f"sqlite:///{tmp_path}/kv.db"
    rows = write_old(url)
    with a_later_version(tmp_path):
        # a reader upgrades nothing
        message = refusal(url, read_only=True)
        assert message.startswith("IncompatibleError: ")
        assert f'prefixstore migrate "{url}"' in message
        assert migrate.check_schema(url) == OLD
        with opened(url) as backend:
            holds(backend, rows)
        assert migrate.check_schema(url) == LATER


@pytest.mark.slow
def test_a_postgresql_store_of_an_earlier_revision_says_which_command_to_run(new_database, tmp_path):
    url = new_database(empty=True)
    rows = write_old(url)
    with a_later_version(tmp_path):
        message = refusal(url)
        assert message.startswith("IncompatibleError: ")
        assert f"schema {OLD}" in message
        command = message[message.index("prefixstore migrate") :].split('"')[1]
        assert migrate.check_schema(url) == OLD
        # the URL in the message is one that can be used
        assert migrate.upgrade(command) == OLD
        with opened(url) as backend:
            holds(backend, rows)


def test_a_newer_schema_is_refused_and_untouched(empty_url):
    migrate.upgrade(empty_url)
    with opened(empty_url) as backend:
        change(backend, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    for use in (refusal, lambda url: refusal(url, read_only=True)):
        message = use(empty_url)
        assert message.startswith("IncompatibleError: ")
        assert f"schema 9999, this prefixstore knows up to {HEAD}" in message
    for use in (migrate.check_schema, migrate.upgrade):
        with pytest.raises(IncompatibleError, match="9999"):
            use(empty_url)


def test_the_migrations_are_found_beside_the_package_or_in_it(tmp_path, monkeypatch):
    assert migrate.migrations_directory() == ROOT / "migrations"
    module = tmp_path / "prefixstore" / "backends" / "sql" / "migrations.py"
    monkeypatch.setattr(migrate, "__file__", str(module))
    with pytest.raises(LocationError, match="install"):
        migrate.migrations_directory()
    shutil.copytree(ROOT / "migrations", tmp_path / "prefixstore" / "migrations")
    assert migrate.migrations_directory() == tmp_path / "prefixstore" / "migrations"


# -- PostgreSQL: the location ------------------------------------------------------------------------------------------


def test_a_postgresql_database_without_a_store_says_which_command_to_run(new_database):
    url = new_database(empty=True)
    for options in ({}, {"read_only": True}):
        message = refusal(url, **options)
        assert message.startswith("LocationError: ")
        assert "prefixstore migrate" in message
    assert migrate.check_schema(url) is None
    assert inspect(engine_of(url)).get_table_names() == []


@pytest.mark.parametrize(
    "tables",
    [
        "CREATE TABLE prefixstore_meta (mine text)",
        "CREATE TABLE prefixstore_schema (mine text)",
        (
            "CREATE TABLE prefixstore_meta (magic text); CREATE TABLE prefixstore_schema (version_num text); "
            "INSERT INTO prefixstore_schema VALUES ('1'); INSERT INTO prefixstore_meta VALUES ('mine')"
        ),
        (
            "CREATE TABLE prefixstore_schema AS SELECT '4' AS version_num; "
            "CREATE TABLE prefixstore_meta AS SELECT 'prefixstore' AS magic, 'text' AS format"
        ),
        "CREATE TABLE prefixstore_meta (other text); CREATE TABLE prefixstore_schema (version_num text)",
    ],
)
def test_tables_of_another_application_with_our_names_are_refused_and_untouched(new_database, tables):
    url = new_database(empty=True)
    with engine_of(url).begin() as connection:
        connection.connection.cursor().execute(tables)
    before = inspect(engine_of(url)).get_table_names()
    assert refusal(url).startswith("IncompatibleError: ")
    assert "another application" in refusal(url)
    with pytest.raises(IncompatibleError, match="another application"):
        migrate.upgrade(url)
    assert inspect(engine_of(url)).get_table_names() == before


def test_a_store_may_share_its_database_with_others(new_database):
    url = new_database(empty=True)
    migrate.upgrade(url)
    with opened(url) as backend:
        change(backend, "CREATE TABLE pages AS SELECT 'still here' AS mine")
        put(backend, row(1))
        backend.compact(erase=True)
        backend.reclaim()
        with backend.connection() as connection:
            assert connection.execute("SELECT mine FROM pages").fetchall() == [("still here",)]


# -- SQLite: the file --------------------------------------------------------------------------------------------------


def test_a_connection_has_the_settings_that_are_documented(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend, backend.connection() as connection:
        pragmas = ("journal_mode", "synchronous", "busy_timeout", "secure_delete", "page_size")
        found = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas}
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert found == {
        "journal_mode": "wal",
        "synchronous": 1,
        "busy_timeout": 60_000,
        "secure_delete": 0,
        "page_size": 16_384,
    }


def not_ours(path, kind):
    if kind == "text":
        path.write_bytes(b"something else " * 1000)
    elif kind == "empty":
        path.touch()
    elif kind == "header":
        path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    elif kind == "cut":
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE mine (a)")
        path.write_bytes(path.read_bytes()[:50])
    else:
        # a log that is not in the file yet, as a killed process leaves it
        script = (
            "import os, sqlite3, sys\n"
            "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
            f"connection.execute('PRAGMA journal_mode={kind}')\n"
            "connection.execute('CREATE TABLE mine (a)')\n"
            "connection.execute('BEGIN')\n"
            "connection.execute('INSERT INTO mine VALUES (zeroblob(5000000))')\n"
            "if sys.argv[2] == 'WAL': connection.execute('COMMIT')\n"
            "os._exit(0)\n"
        )
        subprocess.run([sys.executable, "-c", script, path, kind], check=True)


@pytest.mark.parametrize("kind", ["text", "empty", "header", "cut", "WAL", "DELETE"])
def test_a_file_that_is_not_ours_is_refused_and_untouched(tmp_path, kind):
    path = tmp_path / "theirs.db"
    not_ours(path, kind)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert kind not in ("WAL", "DELETE") or len(before) > 1
    for options in ({}, {"read_only": True}):
        message = refusal(f"sqlite:///{path}", **options)
        assert message.startswith("IncompatibleError: "), message
        assert "not a store of prefixstore" in message
    with pytest.raises(IncompatibleError):
        migrate.upgrade(f"sqlite:///{path}")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_location_that_cannot_be_a_file_is_refused(tmp_path):
    assert refusal(f"sqlite:///{tmp_path}").startswith(f"LocationError: {tmp_path} is not a regular file")
    (tmp_path / "file").write_text("x")
    assert refusal(f"sqlite:///{tmp_path}/file/kv.db").startswith("LocationError: ")
    assert refusal(f"sqlite:///{tmp_path}/new/kv.db", read_only=True).startswith("LocationError: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_file_system_without_links_can_be_used(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        put(backend, row(1))
    assert [path.name for path in tmp_path.iterdir()] == ["kv.db"]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_creates_checks_and_upgrades(empty_url, capsys):
    assert main(["migrate", empty_url, "--check"]) == 1
    assert HEAD in capsys.readouterr().out
    assert main(["migrate", empty_url, "--check"]) == 1
    assert main(["migrate", empty_url]) == 0
    assert main(["migrate", empty_url, "--check"]) == 0
    assert main(["migrate", empty_url]) == 0


@pytest.mark.parametrize("url", ["memory:", "/a/path", "lmdb:///x", "postgresql://joe:hushhush@127.0.0.1:1/x"])
def test_the_command_refuses_other_locations_without_showing_passwords(url, capsys):
    assert main(["migrate", url]) != 0
    printed = capsys.readouterr()
    assert "hushhush" not in printed.out + printed.err
