"""The contract for SQLite and PostgreSQL; and what they have in common."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import sys
import threading
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import psycopg
import pytest
from sqlalchemy import delete, event, func, select, text, update

from prefixstore.backends import open_backend
from prefixstore.backends.sql import backend as sql_backend
from prefixstore.backends.sql import news, postgresql, sqlite
from prefixstore.backends.sql.schema import APPLICATION_ID, CHANGES, META, PAGES, PIECES
from prefixstore.buffers import BufferPool
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.invariants import violations
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import (
    CorruptError,
    FullError,
    IncompatibleError,
    InvalidParameterError,
    MissingExtraError,
    PrefixStoreError,
    UnavailableError,
)
from prefixstore.format.autocodec import FixedCodec
from prefixstore.format.keys import PAGE, page_key
from prefixstore.format.record import FORMAT_VERSION, Usage
from prefixstore.maintenance.archive import Archive
from prefixstore.stats import Counters
from prefixstore.testing import PersistentBackendContract, make_page
from tests.support import keys_of, python
from tests.support.engines import P, Store, put_snapshots
from tests.support.fragile import assert_true
from tests.support.places import opened, refusal
from tests.support.postgres import until_alone
from tests.support.worker import in_fork

MIB = 1 << 20
NAMESPACE = bytes(range(32))


class TestSQLite(PersistentBackendContract):
    def open_backend(self, tmp_path):
        return open_backend(f"sqlite:///{tmp_path}/kv.db", max_bytes=64 * MIB)


@pytest.mark.slow
class TestPostgreSQL(PersistentBackendContract):
    @pytest.fixture(autouse=True)
    def _database(self, new_database):
        self.url = new_database()

    def open_backend(self, tmp_path):
        return open_backend(self.url, max_bytes=64 * MIB)


# -- helpers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """A new store in either database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/kv.db"
    return request.getfixturevalue("new_database")()


def page(number, size=1000, parent=NAMESPACE, start=0):
    payload = np.random.default_rng(number).bytes(size)
    return *make_page(payload, [number, number], parent=parent, start=start), payload


def put(backend, *pages):
    with backend.update() as transaction:
        transaction.put_namespace(NAMESPACE, b"{}")
        for key, record, payload in pages:
            transaction.put(key, record, Usage(1), payload)
    return [key for key, _, _ in pages]


def chain(n, size):
    """Pages that follow each other."""
    pages, parent = [], NAMESPACE
    for i in range(n):
        pages.append(page(i, size, parent, 2 * i))
        parent = pages[-1][0]
    return pages


def everything(backend):
    with backend.view() as view:
        return {key: (record, usage, bytes(view.payload(key))) for key, record, usage in view.scan()}, dict(
            view.namespaces()
        )


@contextmanager
def statements(backend):
    """What is sent to the database in the block."""
    sent = []

    def note(connection, cursor, statement, parameters, context, executemany):
        sent.append(statement)

    engine = backend.database.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


def change(backend, statement):
    """Something that no store of ours does to its tables."""
    with backend.database.writing() as connection:
        connection.execute(statement)


# -- the location ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "location",
    ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/x", "sqlite:///x.db?mode=ro", "sqlite+other:///x",
     "postgresql+asyncpg://h/x", "postgresql://h:port/x"],
)  # fmt: skip
def test_a_location_that_names_no_database_is_refused(location):
    with pytest.raises(InvalidParameterError, match="location"):
        open_backend(location, max_bytes=MIB)


def test_a_sqlite_url_in_memory_is_referred_to_the_memory_backend():
    assert 'pass "memory:"' in refusal("sqlite://")


def test_a_relative_path_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened("sqlite:///kv.db") as backend:
        assert backend.location == f"sqlite:///{tmp_path}/kv.db"
    with opened(f"sqlite+pysqlite:////{tmp_path}/a%b ü?.db".replace("?", "%3F")):
        pass
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".db", ".db"]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgresql_is_known_by_three_names(new_database, scheme):
    url = new_database()
    with opened(scheme + url[url.index("://") :]) as backend:
        assert backend.location.startswith("postgresql+psycopg://")


def test_a_password_never_appears_in_a_message_or_a_location(new_database, caplog):
    caplog.set_level(logging.DEBUG)
    for url in (
        "postgresql://joe:hushhush@127.0.0.1:1/x",
        new_database(empty=True).replace("postgres@", "postgres:hushhush@"),
        "postgresql://joe:hushhush@h:port/x",
        "postgresql+asyncpg://joe:hushhush@h/x",
    ):
        with pytest.raises(PrefixStoreError) as caught:
            open_backend(url, max_bytes=MIB)
        assert "hushhush" not in str(caught.value)
    url = new_database().replace("postgres@", "postgres:hushhush@")
    with opened(url) as backend:
        assert "hushhush" not in backend.location
        assert "***" in backend.location
        put(backend, page(1))
    assert "hushhush" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://127.0.0.1:1/x?password=S3CRET",
        "postgresql://127.0.0.1:1/x?p%61ssword=S3CRET&connect_timeout=abc",
        "postgresql://127.0.0.1:1/x?passwrd=S3CRET",
        "postgresql://127.0.0.1:1/x?sslpassword=S3CRET&sslmode=nonsense",
        "postgresql://joe:S3@CRET@127.0.0.1:1/x",
        "postgresql://joe:S3@CRET@nowhere.invalid/x",
        "postgresql://joe:S3/CRET@127.0.0.1:1/x",
        "postgresql://joe:S3?CRET@127.0.0.1:1/x",
        "postgresql://joe:S3%40CRET@127.0.0.1:1/x",
        "postgresql://127.0.0.1:5432/x?password=S3@CRET",
        "postgresql://127.0.0.1:1/x?options=-c%20a.secret%3DS3CRET",
        "postgresql://joe:S3CRET@127.0.0.1:port/x",
        "postgresql+asyncpg://joe:S3CRET@h/x?password=S3CRET",
        "sqlite://joe:S3CRET@host/x.db?password=S3CRET",
        "lmdb://joe:S3CRET@host/x?password=S3CRET",
        "memory://joe:S3CRET@host",
        "nothing://joe:S3CRET@host?password=S3CRET",
    ],
)
def test_no_part_of_a_secret_in_a_url_is_in_a_message(url, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(PrefixStoreError) as caught:
        open_backend(url, max_bytes=MIB)
    shown, error = caplog.text, caught.value
    while error is not None:
        shown, error = f"{shown} {error}", error.__cause__ or error.__context__
    assert "CRET" not in shown


def test_a_secret_in_the_options_is_not_in_the_location(new_database):
    url = new_database()
    with opened(f"{url}&password=S3CRET") as backend:
        assert "CRET" not in backend.location
        assert "password=***" in backend.location


def test_a_server_that_cannot_be_reached_is_worth_a_retry():
    assert refusal("postgresql://127.0.0.1:1/x").startswith("UnavailableError: postgresql+psycopg://127.0.0.1:1/x: ")


def test_a_database_that_does_not_exist_is_not_worth_a_retry(new_database):
    url = new_database()
    name = url.split("?")[0].rsplit("/", 1)[1]
    assert refusal(url.replace(name, "nothing_of_this_name")).startswith("LocationError: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("location", "module", "extra"),
    [
        ("sqlite:///x.db", "sqlalchemy", "sql"),
        ("sqlite:///x.db", "alembic", "sql"),
        ("postgresql://h/x", "psycopg", "postgres"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(location, module, extra):
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from prefixstore.backends import open_backend\n"
        "try: open_backend(sys.argv[1], max_bytes=1 << 20)\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    with python(code, location) as process:
        printed = process.stdout.read()
    assert printed.startswith(MissingExtraError.__name__)
    assert f"prefixstore[{extra}]" in printed


@pytest.mark.parametrize(("step", "says"), [(1, f"up to {FORMAT_VERSION}"), (-1, f"reads {FORMAT_VERSION} only")])
def test_another_format_is_refused_with_both_versions(url, step, says):
    with opened(url) as backend:
        change(backend, update(META).values(format=FORMAT_VERSION + step))
    with opened(url) as backend, pytest.raises(IncompatibleError, match=f"format {FORMAT_VERSION + step}.*{says}"):
        put(backend, page(1))


def test_read_only_writes_nothing(url):
    with opened(url) as backend:
        keys = put(backend, *chain(2, 2 * MIB))
        for _ in range(2):
            with opened(url, read_only=True) as reader:
                assert keys_of(reader) == set(keys)
                with reader.view() as view:
                    assert len(list(view.fetch(keys))) == 2
                for work in (lambda: put(reader, page(9)), reader.scrub):
                    with pytest.raises(UnavailableError, match="read-only"):
                        work()
                reader.sync()
                with reader.database.connection() as connection, pytest.raises(Exception, match=r"read-?only"):
                    connection.execute(update(META).values(generation=0))
    with opened(url, read_only=True) as reader:
        assert keys_of(reader) == set(keys)


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_sqlite_file_that_is_truncated_does_not_end_the_process(tmp_path, share):
    def use():
        with opened(f"sqlite:///{tmp_path / 'kv.db'}") as backend:
            keys = put(backend, *chain(8, MIB))

            def read():
                with backend.view() as view:
                    return len(list(view.fetch(keys)))

            with backend.database.connection() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
            assert read() == len(keys)
            # it is mapped: reading beyond its end would end this process
            os.truncate(tmp_path / "kv.db", int((tmp_path / "kv.db").stat().st_size * share))
            for _ in range(2):
                with pytest.raises((CorruptError, IncompatibleError)):
                    read()

    in_fork(use)


def test_a_closed_backend_raises_a_clear_error(url):
    backend = open_backend(url, max_bytes=MIB)
    backend.close()
    for use in (backend.view, backend.update):
        with pytest.raises(UnavailableError, match="closed"), use():
            raise AssertionError("it opened")


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_payloads_are_stored_in_pieces_of_a_mebibyte(url):
    with opened(url) as backend:
        key, *_ = put(backend, page(1, 3 * MIB + 5))
        with backend.database.connection() as connection:
            sizes = connection.execute(
                select(func.length(PIECES.c.data)).where(PIECES.c.page == key).order_by(PIECES.c.number)
            )
            assert sizes.scalars().all() == [MIB, MIB, MIB, 5]


def test_a_page_exported_from_one_backend_into_another_is_equal(tmp_path, new_database):
    """Out of each into the next one, and at last into the first kind again."""
    locations = [
        "memory:",
        str(tmp_path / "lmdb"),
        f"sqlite:///{tmp_path}/a.db",
        new_database(),
        f"sqlite:///{tmp_path}/b.db",
        str(tmp_path / "again"),
    ]
    pages = [*chain(4, 1_300_000), page(9, 0), page(10, 17)]
    with closing(open_backend(locations[0], max_bytes=64 * MIB)) as backend:
        with backend.update() as transaction:
            transaction.put_namespace(NAMESPACE, b'{"label":"x"}')
            for i, (key, record, payload) in enumerate(pages):
                usage = Usage(2**62 + i, 2**32 - 1 - i, pinned=i % 2 == 0, priority=(-1) ** i * 2**14, expires=i)
                transaction.put(key, record, usage, payload)
        expected = everything(backend)
        source = backend
        for location in locations[1:]:
            copy = open_backend(location, max_bytes=64 * MIB)
            with source.view() as view, copy.update() as transaction:
                for key, settings in view.namespaces().items():
                    transaction.put_namespace(key, settings)
                for key, record, usage in view.scan():
                    transaction.put(key, record, usage, view.payload(key))
            source.close()
            source = copy
            assert everything(copy) == expected, location
            with copy.view() as view:
                keys = [key for key, _, _ in pages]
                assert [(record, bytes(payload)) for record, payload in view.fetch(keys)] == [
                    (record, payload) for _, record, payload in pages
                ]
        source.close()


WRONG = {
    "codec": 1, "start": 1, "compute_us": 7, "raw_bytes": 7, "stored_bytes": 7, "created": 7, "namespace": bytes(32),
    "parent": bytes(32), "checksum": bytes(16), "tokens": bytes(8), "seal": bytes(8), "version": 0,
}  # fmt: skip


@pytest.mark.parametrize("column", sorted(WRONG))
def test_a_row_with_a_changed_column_is_damaged(url, column):
    with opened(url) as backend:
        (key,) = put(backend, page(1))
        change(backend, update(PAGES).values({column: WRONG[column]}))
        with backend.view() as view:
            with pytest.raises(CorruptError, match=key.hex()):
                view.record(key)
            with pytest.raises(CorruptError, match=key.hex()):
                list(view.fetch([key]))
            assert isinstance(view.records([key])[key][0], CorruptError)
            assert [type(record) for _, record, _ in view.scan()] == [CorruptError]


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": "text"}, {"start": -1}, {"seal": b""}, {"namespace": b"short"}, {"codec": 256}, {"codec": None}],
)
def test_a_sqlite_row_with_an_impossible_value_is_damaged(tmp_path, wrong):
    """There any column may hold anything."""
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        (key,) = put(backend, page(1))
    with closing(sqlite3.connect(tmp_path / "kv.db")) as connection, connection:
        (name, value), *_ = wrong.items()
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')")
        connection.execute("PRAGMA writable_schema=RESET")
        connection.execute(f"UPDATE prefixstore_pages SET {name} = ?", (value,))
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend, backend.view() as view:
        with pytest.raises(CorruptError):
            view.record(key)
        assert isinstance(view.records([key])[key][0], CorruptError)


def test_a_row_under_another_key_is_damaged(url):
    with opened(url) as backend:
        put(backend, page(1, 10))
        change(backend, PIECES.delete())
        change(backend, update(PAGES).values(key=bytes(32)))
        with backend.view() as view, pytest.raises(CorruptError, match="another page"):
            view.record(bytes(32))


def test_a_row_of_a_newer_version_is_left_alone(url):
    with opened(url) as backend:
        (key,) = put(backend, page(1))
        change(backend, update(PAGES).values(version=FORMAT_VERSION + 1, seal=b"whatever"))
        with backend.view() as view:
            with pytest.raises(IncompatibleError, match="upgrade"):
                view.record(key)
            assert isinstance(view.records([key])[key][0], IncompatibleError)


def test_a_row_with_only_its_version_damaged_is_damaged(url):
    with opened(url) as backend:
        (key,) = put(backend, page(1))
        change(backend, update(PAGES).values(version=FORMAT_VERSION + 1))
        with backend.view() as view, pytest.raises(CorruptError, match="seal"):
            view.record(key)


def test_a_payload_with_missing_or_extra_pieces_is_damaged(url):
    pages = chain(3, 2 * MIB)
    with opened(url) as backend:
        keys = put(backend, *pages)
        change(backend, PIECES.delete().where(PIECES.c.page == keys[1]))
        with backend.view() as view:
            fetched = view.fetch(keys)
            assert next(fetched)[0] == pages[0][1]
            with pytest.raises(CorruptError, match="no payload"):
                next(fetched)
        change(backend, PIECES.delete().where(PIECES.c.page == keys[2], PIECES.c.number == 0))
        with backend.view() as view:
            ((_, payload),) = view.fetch([keys[2]])
            assert len(payload) == MIB  # the codec sees that it is too short
        change(backend, PIECES.insert().values(page=keys[0], number=2, data=b"more"))
        with backend.view() as view:
            with suppress(CorruptError):
                ((_, payload),) = view.fetch([keys[0]])
                assert len(payload) == 2 * MIB + 4
            assert [v.rule for v in violations(view, Budget(64 * MIB))] == ["payload"] * 3


def test_a_fetched_payload_does_not_change_while_a_memoryview_of_it_is_held(tmp_path):
    pages = chain(5, 3 * MIB + 1)
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        keys = put(backend, *pages)
        buffers = backend.database._buffers
        with backend.view() as view:
            held = [memoryview(payload)[7:] for _, payload in view.fetch(keys)]
            again = [memoryview(payload)[7:] for _, payload in view.fetch(keys)]
            for i, (_, _, payload) in enumerate(pages):
                assert held[i] == again[i] == payload[7:]
            assert buffers.in_use == 10 * len(pages[0][2])
            del held, again
            assert buffers.in_use == 0
            for _, payload in view.fetch(keys):
                # one that is used, and one that is read
                assert buffers.in_use <= 2 * len(payload)


def test_without_blob_handles_payloads_are_the_same(tmp_path, monkeypatch):
    """As on Python 3.10."""
    pages = chain(3, 3 * MIB + 1)
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        keys = put(backend, *pages)
        monkeypatch.setattr(sys, "version_info", (3, 10))
        with backend.view() as view:
            assert [bytes(payload) for _, payload in view.fetch(keys)] == [payload for _, _, payload in pages]


def test_changes_that_are_too_old_are_forgotten(url, monkeypatch):
    monkeypatch.setattr(sql_backend, "CHANGES_KEPT", 3)
    with opened(url) as backend:
        written = [put(backend, page(10 * i), page(10 * i + 1)) for i in range(6)]
        with backend.view() as view:
            known = [view.changes(since) for since in range(7)]
        assert known == [None] * 3 + [[key for keys in written[since:] for key in keys] for since in range(3, 7)]
        with backend.database.connection() as connection:
            assert connection.execute(select(func.count()).select_from(CHANGES)).scalar() == 6


@pytest.mark.slow
def test_a_walk_reads_some_rows_at_a_time_and_misses_none(url):
    n = sql_backend.ROWS + 10
    with opened(url) as backend:
        keys = put(backend, *(page(i, 4) for i in range(n)))
        with backend.view() as view:
            assert sorted(key for key, _, _ in view.scan()) == sorted(keys)
            assert sorted(view.payload_keys()) == sorted(keys)
            assert view.used.entries == n


def test_a_check_asks_for_many_payloads_at_a_time(new_database):
    with opened(new_database()) as backend:
        put(backend, *chain(60, 1000))
        with backend.view() as view, statements(backend) as sent:
            assert violations(view, Budget(1 << 30)) == []
        assert len(sent) < 12


@pytest.mark.parametrize(("size", "queries"), [(100_000, 1), (9_000, 5), (1_000, 20)])
def test_a_walk_asks_for_no_more_payload_bytes_at_a_time_than_it_may(new_database, monkeypatch, size, queries):
    monkeypatch.setattr(sql_backend, "WALK_BYTES", size)
    with opened(new_database()) as backend:
        pages = chain(20, 2000)
        put(backend, *pages)
        with backend.view() as view, statements(backend) as sent:
            found = {key: bytes(payload) for key, _, payload in view.stored()}
        assert found == {key: payload for key, _, payload in pages}
        assert sum(PIECES.name in statement for statement in sent) == queries


def test_a_walk_tells_which_payload_is_missing_and_which_record_cannot_be_read(url):
    with opened(url) as backend:
        keys = put(backend, *chain(5, 1000))
        change(backend, delete(PIECES).where(PIECES.c.page == keys[1]))
        change(backend, update(PAGES).where(PAGES.c.key == keys[3]).values(start=77))
        with backend.view() as view:
            found = {key: (record, payload) for key, record, payload in view.stored()}
        assert found[keys[1]][1] is None
        assert isinstance(found[keys[3]][0], CorruptError)
        assert found[keys[3]][1] is None
        assert all(bytes(found[keys[i]][1]) for i in (0, 2, 4))


def test_uses_are_written_together(url):
    with opened(url) as backend:
        keys = put(backend, *(page(i, 4) for i in range(50)))
        with backend.update() as transaction, statements(backend) as sent:
            for i, key in enumerate([*keys, bytes(32)]):
                transaction.touch(key, Usage(i))
            transaction.record(bytes(32))
        assert sum("UPDATE prefixstore_pages" in statement for statement in sent) == 1
        with backend.view() as view:
            assert [view.usage(key).last_used for key in keys] == list(range(50))
            assert view.usage(bytes(32)) is None


# -- round trips and plans ---------------------------------------------------------------------------------------------


def test_each_query_of_a_lookup_is_one_round_trip(new_database):
    pages = chain(40, 1000)
    with opened(new_database()) as backend:
        keys = put(backend, *pages[:30])
        every = [key for key, _, _ in pages]
        unknown = [bytes([i % 256, i // 256]) * 8 for i in range(5000)]
        asked = {
            "is anything new": lambda view: view.generation and view.changes(view.generation) == [],
            "records of thousands": lambda view: len(view.records(keys + unknown)) == 30,
            "pages": lambda view: len(list(view.fetch(keys))) == 30,
            "records": lambda view: len(view.records(every)) == 30,
            "what is used": lambda view: view.used.entries == 30,
            "leading pages": lambda view: len(view.leading(every + unknown)) == 30,
            "neighbors": lambda view: len(view.neighbors(keys[3], pages[4][1].tokens[:-4])) == 1,
            "children of many": lambda view: len(view.children([NAMESPACE, *every], PAGE)) == 30,
            "facts": lambda view: len(view.facts(b"", 100)) == 30,
        }
        for what, ask in asked.items():
            with statements(backend) as sent, backend.view() as view:
                assert ask(view), what
            assert len(sent) == 1, what


@pytest.mark.slow
@pytest.mark.parametrize("snapshots", [False, True])
def test_a_lookup_is_three_round_trips_at_most_while_others_write(new_database, snapshots):
    url = new_database()
    with (
        opened(url) as backend,
        closing(Store(backend)) as reader,
        opened(url) as other,
        closing(Store(other)) as writer,
    ):
        match = reader.match_snapshot if snapshots else reader.match
        for number in range(5):
            if snapshots:
                put_snapshots(writer, [number] * (3 * P), [3 * P])
            else:
                writer.put([number] * (3 * P), 1)
            with statements(backend) as sent:
                assert match([number] * (3 * P)) == 3 * P
            assert len(sent) <= 3
            # and some that are not there
            writer.put([100 + number] * (3 * P), 1)
            with statements(backend) as sent:
                match([number] * P + [7] * P)
            assert len(sent) <= 3
            with statements(backend) as sent:
                match([number] * P + [7] * P)
            assert len(sent) == 1


@pytest.mark.slow
def test_what_many_others_have_changed_is_read_on_its_own(new_database, monkeypatch):
    monkeypatch.setattr(news, "MOST_NEWS", 4)
    url = new_database()
    with (
        opened(url) as backend,
        closing(Store(backend)) as reader,
        opened(url) as other,
        closing(Store(other)) as writer,
    ):
        for number in range(20):
            writer.put([number] * (number % 4 * P + P), 1)
            assert reader.match([number] * (4 * P)) == number % 4 * P + P
            assert_true(reader.engine)


def test_thousands_of_keys_are_one_query_in_sqlite_too(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        keys = put(backend, *chain(10, 100))
        unknown = [i.to_bytes(32, "big") for i in range(100_000)]
        with backend.view() as view, statements(backend) as sent:
            assert len(view.records(unknown + keys)) == 10
        assert len(sent) == 1


def test_pages_beyond_what_one_answer_holds_come_with_the_next(new_database, monkeypatch):
    monkeypatch.setattr(postgresql, "ANSWER_BYTES", 10_000)
    pages = chain(9, 4000)
    with opened(new_database()) as backend:
        keys = put(backend, *pages)
        with backend.view() as view, statements(backend) as sent:
            assert [bytes(payload) for _, payload in view.fetch(keys)] == [payload for _, _, payload in pages]
        assert len(sent) == 3
        with backend.view() as view:
            assert len(list(view.fetch([*keys[:5], bytes(32), *keys[5:]]))) == 5


def explained(backend, statement, parameters):
    """The plan of a statement that was sent."""
    with backend.database.connection() as connection:
        cursor = connection.connection.cursor()
        with closing(cursor):
            is_sqlite = backend.location.startswith("sqlite")
            cursor.execute(("EXPLAIN QUERY PLAN " if is_sqlite else "EXPLAIN ") + statement, parameters)
            return "\n".join(str(row[-1]) for row in cursor.fetchall())


@pytest.mark.slow
def test_every_query_of_a_lookup_or_an_eviction_uses_an_index(url):
    with opened(url) as backend:
        # as long as pages are: a few short rows are read faster than an index
        keys = put(backend, *((*make_page(b"page", [i] * 256), b"page") for i in range(3000)))
        for i in range(3):
            put(backend, page(10_000 + i))
        with backend.database.connection() as connection:
            connection.execute(text("ANALYZE"))
        sent = []

        def note(connection, cursor, statement, parameters, context, executemany):
            sent.append((statement, parameters[0] if executemany else parameters))

        event.listen(backend.database.engine, "before_cursor_execute", note)
        with backend.view() as view:
            assert view.changes(1) is not None
            view.record(keys[0])
            view.usage(keys[0])
            view.payload(keys[0])
            view.records(keys[:20])
            list(view.fetch(keys[:20]))
            assert len(view.neighbors(NAMESPACE, page(1)[1].tokens)) == 2
            assert len(view.children([NAMESPACE, *keys[:20]], PAGE, 3)) == 3
            assert len(view.facts(keys[0], 10)) == 10
        with backend.update() as transaction:
            transaction.touch(keys[0], Usage(1))
            transaction.delete(keys[1])
        event.remove(backend.database.engine, "before_cursor_execute", note)
        plans = {
            statement: explained(backend, statement, parameters)
            for statement, parameters in sent
            if statement.split()[0] in ("SELECT", "WITH", "UPDATE", "DELETE") and "pragma" not in statement
        }
        assert len(plans) >= 11
        ordered = [plan for plan in plans.values() if "prefixstore_children" in plan]
        assert len(ordered) == 2
        for statement, plan in plans.items():
            print(statement, plan, sep="\n")
            if "prefixstore_meta" not in statement:  # one row
                assert "SCAN prefixstore" not in plan, statement
                assert "Seq Scan" not in plan, statement
        # what the cascade of a deletion looks for
        assert "ndex" in explained(backend, f"SELECT 1 FROM prefixstore_pieces WHERE page = {'?' if 'sqlite' in url else '%s'}", (keys[0],)).replace("INDEX", "Index")  # fmt: skip # noqa: E501


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def new_engine(backend, max_bytes=64 * MIB, **terms):
    counters = Counters()
    return Engine(backend, Budget(max_bytes), POLICIES["lru"](), FixedCodec("raw"), counters, **terms), counters


def new_page(buffers, number, size, parent=NAMESPACE, start=0):
    buffer = buffers.acquire(size)
    buffer.view[:] = np.random.default_rng(number).bytes(size)
    return PendingPage.of(NAMESPACE, b"{}", parent, start, number.to_bytes(4, "little") * 4, buffer)


@pytest.mark.slow
def test_a_connection_that_drops_in_mid_write_leaves_nothing_and_is_replaced(new_database):
    url = new_database()
    with opened(url) as backend, opened(url) as other:
        (first,) = put(backend, page(1))

        def kill_writer():
            with other.database.connection() as connection:
                connection.execute(
                    text(
                        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND state = 'idle in transaction'"
                    )
                ).all()

        key, record, payload = page(2, 3 * MIB)

        def write(*, then_ask):
            with backend.update() as transaction:
                transaction.put(key, record, Usage(1), payload)
                kill_writer()
                if then_ask:
                    transaction.usage(key)

        for then_ask in (True, False):  # it fails in the middle, or at the commit
            with pytest.raises(UnavailableError):
                write(then_ask=then_ask)
            assert keys_of(backend) == keys_of(other) == {first}
        assert put(backend, page(2, 3 * MIB)) == [key]
        assert keys_of(other) == {first, key}


def test_the_engine_continues_when_a_connection_drops_in_mid_write(new_database):
    url = new_database()
    with opened(url) as other:
        engine, counters = new_engine(open_backend(url, max_bytes=64 * MIB))
        buffers = BufferPool(64 * MIB)
        with closing(engine):
            new = new_page(buffers, 1, 2 * MIB)
            assert engine.announce(new)
            inner = engine._backend
            put_really = sql_backend._Change.put

            def put_and_die(change, *arguments):
                put_really(change, *arguments)
                with other.database.connection() as connection:
                    connection.execute(
                        text(
                            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                        )
                    ).all()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sql_backend._Change, "put", put_and_die)
                assert engine.commit([new]) == 0
            assert counters.group("dropped") == {"unavailable": 1}
            assert keys_of(inner) == set()
            again = new_page(buffers, 1, 2 * MIB)
            assert engine.announce(again)
            assert engine.commit([again]) == 1
            assert keys_of(inner) == {again.page.key}
            assert engine.check() == []


@pytest.mark.slow
def test_idle_connections_that_the_server_closed_are_replaced_silently(new_database):
    url = new_database()
    pages = chain(3, 1000)
    with opened(url) as backend, opened(url) as other:
        keys = put(backend, *pages)

        def kill_idle():
            with other.database.connection() as connection:
                connection.execute(
                    text(
                        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                ).all()

        for use in (
            lambda view: view.generation,
            lambda view: list(view.scan()),
            lambda view: list(view.fetch(keys)),
            lambda view: view.records(keys),
        ):
            kill_idle()
            with backend.view() as view:
                assert use(view)
        kill_idle()
        put(backend, page(9))
        kill_idle()
        backend.sync()
        assert len(keys_of(backend)) == 4


@pytest.mark.slow
def test_a_server_that_was_restarted_is_found_again(request):
    if os.environ.get("PREFIXSTORE_TEST_POSTGRES"):
        pytest.skip("the server is not ours to stop")
    server = request.getfixturevalue("postgres_server")
    url = request.getfixturevalue("new_database")()
    with opened(url) as backend:
        keys = put(backend, page(1))
        backend.sync()
        server.stop()
        for use in (backend.view, backend.update):
            with pytest.raises(UnavailableError), use() as view:
                assert view.generation
        server.start()
        assert keys_of(backend) == set(keys)
        put(backend, page(2))
        assert len(keys_of(backend)) == 2


def test_a_pause_of_this_process_is_no_silence_of_the_server(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(postgresql, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def answer():
        while not (yield "polled"):
            pass
        return "heard"

    def poll(waiting, seconds, *, ready=False):
        now[0] += seconds
        return waiting.send(ready)

    waiting = postgresql._heard(answer(), 5.0)
    next(waiting)
    # the process was stopped, or the machine had no core for it
    assert poll(waiting, 60.0) == "polled"
    with pytest.raises(StopIteration, match="heard"):
        poll(waiting, 0.1, ready=True)
    waiting = postgresql._heard(answer(), 5.05)
    next(waiting)
    for _ in range(50):
        assert poll(waiting, 0.1) == "polled"
    with pytest.raises(psycopg.OperationalError, match="has not answered for 5 s"):
        poll(waiting, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sqlite", "postgresql"])
def test_writers_give_up_when_the_lock_is_held_for_too_long(where, request, tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.2)
    monkeypatch.setattr(postgresql, "LOCK_SECONDS", 1)
    url = f"sqlite:///{tmp_path}/kv.db" if where == "sqlite" else request.getfixturevalue("new_database")()
    with opened(url) as one, opened(url) as two:
        failures = []

        def write():
            try:
                put(two, page(2))
            except UnavailableError as error:
                failures.append(error)

        with one.update() as transaction:
            key, record, payload = page(1)
            transaction.put(key, record, Usage(1), payload)
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()
        assert len(failures) == 1
        assert "lock" in str(failures[0])
        put(two, page(3))
        assert len(keys_of(one)) == 2


def test_views_are_not_blocked_by_a_writer(url):
    with opened(url) as backend, opened(url) as other:
        keys = put(backend, page(1))
        with backend.update() as transaction:
            key, record, payload = page(2, 3 * MIB)
            transaction.put(key, record, Usage(1), payload)
            assert keys_of(other) == set(keys)
        assert keys_of(other) == {*keys, key}


KILLED = """
import sys
from tests.backends.test_sql import chain, open_backend, page, put
backend = open_backend(sys.argv[1], max_bytes=64 << 20)
for number in range(10_000):
    put(backend, page(1000 * int(sys.argv[2]) + number, 300_000))
    print(number, flush=True)
"""


@pytest.mark.attack
def test_a_killed_process_leaves_an_intact_store(url):
    for attempt in range(2):
        process = python(KILLED, url, attempt)
        with process:
            for _ in range(5 + 3 * attempt):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            written = 5 + 3 * attempt + len(process.stdout.readlines())
        if url.startswith("postgresql"):
            # the last commit may be under way
            until_alone(url)
        with opened(url) as backend:
            with backend.view() as view:
                assert violations(view, Budget(64 * MIB)) == []
                assert view.used.entries in (written, written + 1)
            with backend.update() as transaction:
                for key, _, _ in list(transaction.scan()):
                    transaction.delete(key)


def test_a_full_disk_is_an_error_that_leaves_no_trace(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        keys = put(backend, page(1, MIB))
        with backend.database.connection() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count=200").all()
        with pytest.raises(FullError):
            put(backend, page(2, 4 * MIB))
        assert keys_of(backend) == set(keys)


# -- budgets -----------------------------------------------------------------------------------------------------------


EVICTING = """
import sys
from tests.backends.test_sql import BufferPool, MIB, closing, new_engine, new_page, open_backend
engine, counters = new_engine(open_backend(sys.argv[1], max_bytes=6 * MIB), 6 * MIB)
buffers = BufferPool(MIB)
with closing(engine):
    for number in range(80):
        new = new_page(buffers, 1000 * int(sys.argv[2]) + number, 50_000 + 3000 * (number % 50))
        assert engine.announce(new)
        assert engine.commit([new]) == 1
        new.buffer.release()
        assert engine.used()[0].bytes <= 6 * MIB
print("done", counters.group("dropped"))
"""


@pytest.mark.attack
def test_two_processes_keep_the_budget_together(url):
    with opened(url):
        pass
    processes = [python(EVICTING, url, number + 1) for number in range(2)]
    for process in processes:
        with process:
            assert process.stdout.read() == "done {}\n"
    engine, _ = new_engine(open_backend(url, max_bytes=6 * MIB), 6 * MIB)
    with closing(engine):
        used, *_ = engine.used()
        assert 3 * MIB < used.bytes <= 6 * MIB
        assert engine.check() == []


@pytest.mark.slow
def test_used_is_at_least_what_postgresql_reports(new_database):
    sizes = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND relname LIKE 'prefixstore%'"
    chance = np.random.default_rng(5)
    long = [(*make_page(b"x", chance.integers(0, 2**30, 256).tolist()), b"x") for _ in range(1000)]
    for pages in ([page(i, 10) for i in range(500)], [page(i, 2500) for i in range(300)], chain(6, 3 * MIB), long):
        with opened(new_database()) as backend:
            put(backend, *pages)
            with backend.view() as view, backend.database.connection() as connection:
                taken = connection.execute(text(sizes)).scalar()
                print(len(pages), "pages:", taken, "of", view.used.bytes)
                assert taken <= view.used.bytes


def test_used_is_the_size_of_the_sqlite_file(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        pages = chain(20, MIB)
        keys = put(backend, *pages)
        backend.sync()
        with backend.view() as view:
            assert 0 <= view.used.bytes - (tmp_path / "kv.db").stat().st_size < 100_000
        with backend.update() as transaction:
            for key in reversed(keys[2:]):
                transaction.delete(key)
            assert transaction.used.bytes < 3 * MIB
        # what was freed is used again: the file does not grow
        before = (tmp_path / "kv.db").stat().st_size
        for _ in range(3):
            put(backend, *pages[2:])
            backend.sync()
            with backend.update() as transaction:
                for key in reversed(keys[2:]):
                    transaction.delete(key)
        backend.sync()
        assert (tmp_path / "kv.db").stat().st_size <= before + MIB


@pytest.mark.slow
def test_many_threads_evict_and_fetch_at_once(url):
    engine, counters = new_engine(open_backend(url, max_bytes=8 * MIB), 8 * MIB)
    buffers = BufferPool(64 * MIB)
    failures = []
    with closing(engine):

        def work(number):
            try:
                for i in range(15):
                    parent, start = NAMESPACE, 0
                    for depth in range(3):
                        new = new_page(buffers, 10_000 * number + 10 * i + depth, 200_000, parent, start)
                        if not engine.announce(new):
                            break
                        engine.commit([new])
                        new.buffer.release()
                        parent, start = page_key(parent, new.page.tokens), start + 4
                    path = engine.match(NAMESPACE, np.frombuffer(new.page.tokens, np.int32), 4)
                    with engine.fetching(path.pages) as states:
                        for state in states:
                            assert len(state) == 200_000
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert engine.check() == []
    assert not counters.group("dropped").keys() - {"orphan"}


# -- scrubbing ---------------------------------------------------------------------------------------------------------


def test_after_a_scrub_nothing_of_a_deleted_page_is_in_the_files(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        secret = b"the secret of a tenant" * 2000
        key, record = make_page(secret, [123_456_789, 987_654_321])
        kept = put(backend, page(1, MIB), (key, record, secret))
        backend.sync()

        def files():
            return b"".join(path.read_bytes() for path in tmp_path.iterdir())

        assert b"secret of a tenant" in files()
        with backend.update() as transaction:
            transaction.delete(key)
        backend.scrub()
        assert b"secret of a tenant" not in files()
        assert record.tokens not in files()
        assert keys_of(backend) == {kept[0]}
        with closing(sqlite3.connect(tmp_path / "kv.db")) as connection:
            assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_scrub_waits_for_another_writer_also_on_a_connection_that_has_read(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(sqlite, "wait_for_locks", lambda _, seconds: waited.append(seconds))
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        assert keys_of(backend) == set()
        waited.clear()
        backend.scrub()
    # for writers; then for readers, for which those would wait
    assert waited == [sqlite.BUSY_SECONDS, sqlite.READ_SECONDS]


def test_a_file_that_is_gone_is_compacted_as_a_new_one(tmp_path):
    path = tmp_path / "kv.db"
    with opened(f"sqlite:///{path}") as backend:
        path.unlink()
        assert backend.compact() == 0
        assert path.exists()
    with pytest.raises(UnavailableError, match="closed"):
        backend.compact()


# -- the index of children ---------------------------------------------------------------------------------------------


def test_an_index_that_lacks_pages_is_reported_and_built_again(tmp_path):
    location = f"sqlite:///{tmp_path}/kv.db"
    with opened(location) as backend:
        keys = put(backend, *(page(i) for i in range(5)))
    with closing(sqlite3.connect(tmp_path / "kv.db", isolation_level=None)) as connection:
        (definition,) = connection.execute(
            "SELECT sql FROM sqlite_master WHERE name = 'prefixstore_children'"
        ).fetchone()
        connection.execute("DROP INDEX prefixstore_children")
        connection.execute(f"{definition} WHERE hits > 7")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'prefixstore_children'", (definition,))
    with Archive(location) as archive:
        found = archive.check()
        assert {one.rule for one in found} == {"index"}
        assert len([one for one in found if "missing from index prefixstore_children" in one.message]) == len(keys)
        with archive.backend.view() as view:
            assert view.neighbors(NAMESPACE, page(2)[1].tokens) == []
        assert archive.repair()[1].pages == 0
        assert archive.check() == []
        with archive.backend.view() as view:
            assert [each.key for each in view.neighbors(NAMESPACE, page(2)[1].tokens)] == keys[2:4]


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_children_that_cannot_be_read_do_not_count(url, damaged):
    with opened(url) as backend:
        keys = put(backend, *(page(i) for i in range(6)))
        for key in keys[2 : 2 + damaged]:
            change(backend, update(PAGES).where(PAGES.c.key == key).values(compute_us=999))
        with backend.view() as view:
            found = view.neighbors(NAMESPACE, page(2)[1].tokens)
            assert [each.key for each in found] == [keys[1], keys[2 + damaged]]
            assert [each.key for each in view.children([NAMESPACE], PAGE)] == [*keys[:2], *keys[2 + damaged :]]
