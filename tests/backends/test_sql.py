"""SQLite and PostgreSQL: the contracts, the names of locations, and pages of the engine in them."""

import logging
from contextlib import closing, contextmanager

import pytest

from prefixstore.backends import open_backend
from prefixstore.backends.sql import open_sql
from prefixstore.errors import PrefixStoreError
from prefixstore.testing import PersistentBackendContract
from tests.support.engines import P, Store, put_snapshots
from tests.support.places import opened, refusal
from tests.support.sql_rows import opened as opened_rows
from tests.support.sql_rows import put, require_intact, row, statements

MIB = 1 << 20


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


# -- the location ------------------------------------------------------------------------------------------------------


def test_a_password_is_not_in_the_location_nor_logged(new_database, caplog):
    caplog.set_level(logging.DEBUG)
    url = new_database().replace("postgres@", "postgres:S3CRET@")
    for secret in (url, f"{url}&password=S3CRET"):
        with opened_rows(secret) as backend:
            assert "CRET" not in backend.location
            assert "***" in backend.location
            put(backend, row(1))
    with pytest.raises(PrefixStoreError) as caught:
        open_backend(new_database(empty=True).replace("postgres@", "postgres:S3CRET@"), max_bytes=MIB)
    assert "CRET" not in caplog.text + str(caught.value)


def test_a_server_that_cannot_be_reached_is_worth_a_retry():
    assert refusal("postgresql://127.0.0.1:1/x").startswith("UnavailableError: postgresql+psycopg://127.0.0.1:1/x: ")


def test_a_database_that_does_not_exist_is_not_worth_a_retry(new_database):
    url = new_database()
    name = url.split("?")[0].rsplit("/", 1)[1]
    assert refusal(url.replace(name, "nothing_of_this_name")).startswith("LocationError: ")


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
