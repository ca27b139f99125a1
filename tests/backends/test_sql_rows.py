"""Rows in SQLite and PostgreSQL: what is stored, in how many statements, and what goes wrong."""

import os
import sqlite3
import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import psycopg
import pytest

from prefixstore.backends import open_backend
from prefixstore.backends.contract import Range
from prefixstore.backends.sql import postgresql, postgresql_rows, sqlite_rows
from prefixstore.backends.sql.database import APPLICATION_ID
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.record import FORMAT_VERSION
from tests.support import in_fork
from tests.support.rows import delete
from tests.support.sql_rows import (
    MIB,
    change,
    contents,
    opened,
    put,
    row,
    statements,
)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """A new store in either database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/kv.db"
    return request.getfixturevalue("new_database")()


# -- the location ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "says"), [(1, f"up to {FORMAT_VERSION}"), (-1, f"reads {FORMAT_VERSION} only")])
def test_another_format_is_refused_with_both_versions(url, step, says):
    message = f"format {FORMAT_VERSION + step}.*{says}"
    with opened(url) as backend:
        change(backend, f"UPDATE prefixstore_meta SET format = {FORMAT_VERSION + step}")
        with pytest.raises(IncompatibleError, match=message):
            put(backend, row(1))
    for read_only in (False, True):
        with pytest.raises(IncompatibleError, match=message):
            opened(url, read_only=read_only)


def test_rows_that_the_index_of_a_sqlite_file_has_out_of_order_are_damage(tmp_path):
    file = tmp_path / "kv.db"
    with opened(f"sqlite:///{file}") as backend:
        put(backend, *((b"key %d" % n, b"", None) for n in range(5)))
    file.write_bytes(file.read_bytes().replace(b"key 3", b"key 0"))
    with opened(f"sqlite:///{file}") as backend, backend.view() as view:
        for wanted in (Range(b"key", b"kez"), Range(b"key", b"kez", 4, reverse=True)):
            with pytest.raises(CorruptError, match="malformed"):
                view.ranges([wanted])


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_sqlite_file_that_is_truncated_does_not_end_the_process(tmp_path, share):
    def use():
        with opened(f"sqlite:///{tmp_path / 'kv.db'}") as backend:
            keys = put(backend, *(row(i, MIB) for i in range(8)))
            with backend.connection() as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            assert len(contents(backend)) == len(keys)
            # it is mapped: reading beyond its end would end this process
            os.truncate(tmp_path / "kv.db", int((tmp_path / "kv.db").stat().st_size * share))
            for _ in range(2):
                with pytest.raises((CorruptError, IncompatibleError)):
                    contents(backend)

    in_fork(use)


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_a_payload_with_missing_or_extra_pieces_is_what_there_is_of_it(url):
    """Whoever knows what it should be verifies it; the payloads after it are read."""
    rows = [row(i, 2 * MIB) for i in range(4)]
    keys, _, payloads = zip(*rows, strict=True)
    with opened(url) as backend:
        put(backend, *rows)
        change(backend, "DELETE FROM prefixstore_payloads WHERE key = :key", key=keys[1])
        change(backend, "DELETE FROM prefixstore_payloads WHERE key = :key AND piece = 0", key=keys[2])
        change(backend, "INSERT INTO prefixstore_payloads VALUES (:key, 2, :data)", key=keys[0], data=b"more")
        change(backend, "UPDATE prefixstore_rows SET payload_bytes = 7 WHERE key = :key", key=keys[3])
        with backend.view() as view:
            found = [bytes(payload) for _, payload in view.payloads(keys)]
        assert found == [payloads[0] + b"more", b"", payloads[2][MIB:], payloads[3]]
        # and can be written again
        put(backend, *rows)
        assert contents(backend) == {key: (value, payload) for key, value, payload in rows}


def test_without_blob_handles_payloads_are_the_same(tmp_path, monkeypatch):
    """As on Python 3.10."""
    rows = [row(i, 3 * MIB + 1) for i in range(3)]
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        put(backend, *rows)
        monkeypatch.setattr(sys, "version_info", (3, 10))
        assert contents(backend) == {key: (value, payload) for key, value, payload in rows}


def test_what_was_counted_is_counted_again_by_compacting(new_database):
    with opened(new_database()) as backend:
        put(backend, *(row(i) for i in range(10)))
        for erase in (False, True):
            with backend.view() as view:
                used = view.used
            change(backend, "UPDATE prefixstore_meta SET bytes = bytes - 1")
            backend.compact(erase=erase)
            with backend.view() as view:
                assert view.used == used


@pytest.mark.parametrize("bytes_", [b"\xff", b"\xc3\x28"])
def test_names_in_a_sqlite_file_that_are_no_text_are_damage(tmp_path, bytes_):
    path = tmp_path / "kv.db"
    open_backend(f"sqlite:///{path}", max_bytes=1 << 20).close()
    name = b"prefixstore_rows"
    path.write_bytes(path.read_bytes().replace(name, bytes_ + name[len(bytes_) :]))
    with pytest.raises(CorruptError):
        open_backend(f"sqlite:///{path}", max_bytes=1 << 20)


def test_a_damaged_index_of_a_sqlite_file_is_reported(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        put(backend, *(row(i, 10) for i in range(5)))
        backend.check()
    with closing(sqlite3.connect(tmp_path / "kv.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master WHERE name = 'prefixstore_meta') "
            "WHERE name = 'sqlite_autoindex_prefixstore_rows_1'"
        )
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend, pytest.raises(CorruptError):
        backend.check()


# -- round trips and plans ---------------------------------------------------------------------------------------------


def test_a_commit_is_few_statements_however_many_rows_it_writes(new_database):
    with opened(new_database()) as backend:
        for n in (1, 300):
            with statements() as sent:
                put(backend, *(row(i) for i in range(n)))
            # its beginning, its turn, what there was, rows, pieces, the count, and its end
            assert len(sent) <= 8
        with statements() as sent:
            delete(backend, *[row(i)[0] for i in range(300)])
        assert len(sent) <= 7


def explained(backend, statement, parameters):
    """The plan of a statement."""
    with backend.connection() as connection:
        prefix = "EXPLAIN QUERY PLAN " if backend.is_local else "EXPLAIN "
        return "\n".join(str(found[-1]) for found in connection.execute(prefix + statement, parameters))


def test_every_statement_uses_an_index(url):
    with opened(url) as backend:
        keys = put(backend, *((b"r%06d" % i, bytes(1000), bytes(1000)) for i in range(3000)))
        with backend.connection() as connection:
            connection.execute("ANALYZE")
        if backend.is_local:
            ours = {
                sqlite_rows._FORWARD: (keys[5], b"s", 10),
                sqlite_rows._BACKWARD: (keys[5], b"s", 10),
                sqlite_rows._ROW: (keys[5],),
                sqlite_rows._PIECES: (keys[5],),
                sqlite_rows._PIECE_ROWS: (keys[5],),
                sqlite_rows._DELETE: (keys[5],),
                sqlite_rows._DELETE_PAYLOAD: (keys[5],),
            }
        else:
            ranges = {"starts": keys[:20], "stops": [b"s"] * 20, "limits": [3] * 20, "reverse": [False, True] * 10}
            by_keys = ("_GET", "_PAYLOADS", "_DELETE", "_DELETE_PAYLOADS")
            ours = {getattr(postgresql_rows, name): {"keys": keys[:20]} for name in by_keys}
            ours[postgresql_rows._OF_KEYS[1:-1]] = {"keys": keys[:20]}
            ours[postgresql_rows._RANGES] = ranges
        for statement, parameters in ours.items():
            plan = explained(backend, statement, parameters)
            print(statement, plan, sep="\n")
            assert "SCAN prefixstore" not in plan
            assert "Seq Scan" not in plan
            assert "index" in plan.lower()
            assert backend.is_local or statement is not postgresql_rows._RANGES or "Sort" not in plan


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_idle_connections_that_the_server_closed_are_replaced_silently(new_database):
    url = new_database()
    end_others = (
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with opened(url) as backend, opened(url) as second, second.connection() as other:
        keys = put(backend, *(row(i) for i in range(3)))
        for use in (
            lambda view: view.used,
            lambda view: view.get(keys),
            lambda view: view.ranges([Range(b"r", b"s")])[0],
            lambda view: list(view.payloads(keys)),
        ):
            other.execute(end_others)
            with backend.view() as view:
                assert use(view)
        for work in (lambda: put(backend, row(9)), backend.sync, backend.reclaim):
            other.execute(end_others)
            work()
        assert len(contents(backend)) == 4


def test_a_server_is_silent_when_nothing_has_arrived_for_as_many_polls():
    closed = []
    connection = SimpleNamespace(close=lambda: closed.append(1))

    def answer():
        while not (yield "polled"):
            pass
        return "heard"

    for n_polls in (0, 50):
        waiting = postgresql._Connection._heard(connection, answer(), 5.0)
        next(waiting)
        # however long each of them took: this process may have been stopped
        for _ in range(n_polls):
            assert waiting.send(0) == "polled"
        with pytest.raises(StopIteration, match="heard"):
            waiting.send(1)
    waiting = postgresql._Connection._heard(connection, answer(), 5.0)
    next(waiting)
    for _ in range(50):
        assert waiting.send(0) == "polled"
    assert not closed
    with pytest.raises(psycopg.OperationalError, match="has not answered for 5 s"):
        waiting.send(0)
    assert closed


# -- what is used ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_used_is_at_least_what_postgresql_reports(new_database):
    sizes = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND relname LIKE 'prefixstore%'"
    chance = np.random.default_rng(5)
    for n, n_key, n_value, n_payload in (
        (2000, 33, 60, None), (2000, 400, 33, None), (2000, 10, 1100, None), (1000, 33, 1100, 10), (5000, 511, 0, 0),
        (500, 33, 3000, 2500), (300, 33, 8200, None), (300, 33, 1100, 70_000), (6, 33, 1100, 3 * MIB),
        (300, 511, 20_000, None),
    ):  # fmt: skip
        with opened(new_database()) as backend:
            put(
                backend,
                *(
                    (chance.bytes(n_key), chance.bytes(n_value), None if n_payload is None else chance.bytes(n_payload))
                    for _ in range(n)
                ),
            )
            with backend.view() as view, backend.connection() as connection:
                taken = connection.execute(sizes).fetchone()[0]
                print(n, n_key, n_value, n_payload, "rows:", taken, "of", view.used)
                assert taken <= view.used


def test_used_is_the_size_of_the_sqlite_file(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        rows = [row(i, MIB) for i in range(20)]
        keys = put(backend, *rows)
        backend.sync()
        with backend.view() as view:
            assert 0 <= view.used - (tmp_path / "kv.db").stat().st_size < 100_000
        with backend.update() as draft:
            for key in keys[2:]:
                draft.delete(key)
            assert draft.used < 3 * MIB
        # what was freed is used again: the file does not grow
        before = (tmp_path / "kv.db").stat().st_size
        for _ in range(3):
            put(backend, *rows[2:])
            backend.sync()
            delete(backend, *keys[2:])
        backend.sync()
        assert (tmp_path / "kv.db").stat().st_size <= before + MIB


def test_after_erasing_nothing_of_a_deleted_row_is_in_the_files(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        kept = put(backend, row(1, MIB))
        secrets = [b"the secret of a tenant" * 2000, b"a prompt " * 10, b"a key of a tenant"]
        put(backend, (secrets[2], secrets[1], secrets[0]))
        backend.sync()

        def files():
            return b"".join(path.read_bytes() for path in tmp_path.iterdir())

        assert all(secret[:20] in files() for secret in secrets)
        delete(backend, *secrets[2:])
        backend.compact(erase=True)
        assert not any(secret[:20] in files() for secret in secrets)
        assert contents(backend).keys() == set(kept)
        with closing(sqlite3.connect(tmp_path / "kv.db")) as connection:
            assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
