"""SQLite and PostgreSQL: the contracts, the names of locations, and pages of the engine in them."""

from __future__ import annotations

import logging
import threading
from contextlib import closing, contextmanager

import numpy as np
import pytest

from prefixstore.backends import open_backend
from prefixstore.backends.sql import open_sql, postgresql
from prefixstore.buffers import BufferPool
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pages import open_pages
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import InvalidParameterError, MissingExtraError, PrefixStoreError
from prefixstore.format.autocodec import FixedCodec
from prefixstore.format.keys import page_key
from prefixstore.stats import Counters
from prefixstore.testing import PersistentBackendContract
from tests.support import keys_of, python
from tests.support.engines import P, Store, put_snapshots
from tests.support.places import opened, refusal
from tests.support.sql_rows import end_others, put, require_intact, row, statements
from tests.support.sql_rows import opened as opened_rows

MIB = 1 << 20
NAMESPACE = bytes(range(32))


class SQLContract(PersistentBackendContract):
    """With each test, what is in the tables is consistent at the end."""

    @contextmanager
    def opened(self, tmp_path):
        with super().opened(tmp_path) as backend:
            yield backend
            require_intact(backend)


class TestSQLite(SQLContract):
    def open_backend(self, tmp_path):
        return open_sql(f"sqlite:///{tmp_path}/kv.db", max_bytes=64 * MIB, read_only=False)


class TestPostgreSQL(SQLContract):
    @pytest.fixture(autouse=True)
    def _database(self, new_database):
        self.url = new_database()

    def open_backend(self, tmp_path):
        return open_sql(self.url, max_bytes=64 * MIB, read_only=False)


# -- helpers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """A new store in either database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/kv.db"
    return request.getfixturevalue("new_database")()


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
    with opened_rows(url) as backend:
        assert "hushhush" not in backend.location
        assert "***" in backend.location
        put(backend, row(1))
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


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("snapshots", [False, True])
def test_a_lookup_is_three_round_trips_whatever_others_write(new_database, snapshots):
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
            with statements() as sent:
                assert match([number] * (3 * P)) == 3 * P
            assert len(sent) <= 3
            # and some that are not there
            writer.put([100 + number] * (3 * P), 1)
            with statements() as sent:
                match([number] * P + [7] * P)
            assert len(sent) <= 3


def new_engine(backend, max_bytes=64 * MIB, **terms):
    counters = Counters()
    return Engine(backend, Budget(max_bytes), POLICIES["lru"](), FixedCodec("raw"), counters, **terms), counters


def new_page(buffers, number, size, parent=NAMESPACE, start=0):
    buffer = buffers.acquire(size)
    buffer.view[:] = np.random.default_rng(number).bytes(size)
    return PendingPage.of(NAMESPACE, b"{}", parent, start, number.to_bytes(4, "little") * 4, buffer)


def test_the_engine_continues_when_a_connection_drops_in_mid_write(new_database):
    url = new_database()
    with opened(url) as other:
        engine, counters = new_engine(open_pages(url, max_bytes=64 * MIB))
        buffers = BufferPool(64 * MIB)
        with closing(engine):
            new = new_page(buffers, 1, 2 * MIB)
            assert engine.announce(new)
            inner = engine._backend
            write = postgresql.write

            def write_and_end(*arguments):
                write(*arguments)
                end_others(other.rows)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(postgresql, "write", write_and_end)
                assert engine.commit([new]) == 0
            assert counters.group("dropped") == {"unavailable": 1}
            assert keys_of(inner) == set()
            again = new_page(buffers, 1, 2 * MIB)
            assert engine.announce(again)
            assert engine.commit([again]) == 1
            assert keys_of(inner) == {again.page.key}
            assert engine.check() == []


EVICTING = """
import sys
from tests.backends.test_sql import BufferPool, MIB, closing, new_engine, new_page, open_pages
engine, counters = new_engine(open_pages(sys.argv[1], max_bytes=6 * MIB), 6 * MIB)
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
    engine, _ = new_engine(open_pages(url, max_bytes=6 * MIB), 6 * MIB)
    with closing(engine):
        used, *_ = engine.used()
        assert 3 * MIB < used.bytes <= 6 * MIB
        assert engine.check() == []


@pytest.mark.slow
def test_many_threads_evict_and_fetch_at_once(url):
    engine, counters = new_engine(open_pages(url, max_bytes=8 * MIB), 8 * MIB)
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
