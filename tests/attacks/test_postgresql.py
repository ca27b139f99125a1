"""A PostgreSQL server whose disk is full, or that allows less: lookups are misses, pages are dropped."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError
from tests.attacks.server_work import WORK, is_intact, lookup, stored
from tests.support.engines import MIB, A, B, C
from tests.support.places import refusal
from tests.support.postgres import libpq, role, server_program, small_disk_server, store_on
from tests.support.timeouts import wait_for


@pytest.fixture
def administrator(new_database):
    """The location of an empty store, and a session of the superuser beside it."""
    url = new_database()
    with psycopg.connect(libpq(url), autocommit=True) as session:
        yield url, session


def test_a_server_with_a_full_disk_is_read_and_used_again_when_there_is_space():
    if server_program("initdb") is None:
        pytest.skip("PostgreSQL is not installed")
    with small_disk_server() as server:
        url = store_on(server)
        with stored(url, A) as store:
            store.engine.flush()
            # the tables cannot grow, the log can; then neither can, and the server stops and recovers
            for left in (600_000, 100_000, 0):
                server.fill(left)
                for i in range(30):
                    put_large(store, i)
                    assert lookup(store, A) in (0, 3)
                server.empty()
                # nothing was evicted for pages that could not be written
                wait_for(lambda: server.keep_running() or lookup(store, A) == 3, "a hit")
                wait_for(lambda left=left: server.keep_running() or recovered(store, left), "a put")
                assert store.engine.upkeep.check() == []
            assert store.counters.group("dropped").keys() <= {"full", "unavailable", "orphan"}
            assert sum(store.counters.group("dropped").values()) > 0
        is_intact(url, A)


def put_large(store, i):
    with suppress(StorageError):
        store.put([50 + i] * 4, 300_000)


def recovered(store, left):
    with suppress(StorageError):
        return store.put([1000 + left] * 12) == 3 or store.match([1000 + left] * 12) == 12
    return False


# -- what the server allows --------------------------------------------------------------------------------------------


@pytest.fixture
def user(administrator):
    """A role without rights, which connects to the store with the URL."""
    with role(administrator[0], "pfxs_user") as theirs:
        yield theirs


def test_a_role_that_may_only_read_finds_pages_and_drops_its_own(administrator, user):
    url, session = administrator
    with stored(url, A):
        pass
    # none at all: it cannot even be opened
    assert refusal(user).startswith("LocationError: ")
    session.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO pfxs_user")
    with stored(user) as store:
        assert store.fetch(A) == 3
        assert store.put(B) == 0
        assert store.counters.group("dropped") == {"unavailable": 3}
        session.execute("GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO pfxs_user")
        assert store.put(B) == 3
        session.execute("REVOKE ALL ON prefixstore_payloads FROM pfxs_user")
        assert lookup(store, A) == 0
        assert store.put(C) == 0
        session.execute("REVOKE ALL ON prefixstore_meta FROM pfxs_user")
        assert lookup(store, A) == 0
        session.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO pfxs_user")
        assert store.fetch(A) == 3
        assert store.put(C) == 3
    is_intact(url, A, B, C)


def test_a_server_without_free_connections_causes_misses_only(administrator, user):
    url, session = administrator
    session.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO pfxs_user")
    with stored(user, A) as store:
        session.execute("ALTER ROLE pfxs_user CONNECTION LIMIT 0")
        session.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert lookup(store, A) == 0
        WORK["put"](store)
        with pytest.raises(StorageError, match="too many connections"):
            open_pages(user, max_bytes=MIB)
        session.execute("ALTER ROLE pfxs_user CONNECTION LIMIT -1")
        assert store.fetch(A) == 3
        assert store.put(B) == 3
    is_intact(url, A, B)
