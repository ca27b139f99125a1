"""A server of PostgreSQL or Valkey that is killed, or whose line is cut or stalls in an answer: no more than a miss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import pytest
from sqlalchemy import make_url

from prefixstore.backends.sql import postgresql
from prefixstore.backends.valkey import connections
from prefixstore.engine.pages import open_pages
from tests.attacks.server_work import WORK, is_intact, lookup, stored, tried
from tests.support import in_thread
from tests.support.engines import MIB, NS, A, B, C, Store
from tests.support.models import TORTURE
from tests.support.postgres import private_server, server_program, store_on
from tests.support.proxy import Line
from tests.support.timeouts import wait_for
from tests.support.valkey import forget_lock, private_valkey


class Way(NamedTuple):
    """A line to a server, the location at its end, and the location without it."""

    line: Line
    url: str
    direct: str

    def forget_the_dead(self) -> None:
        """A transaction that has lost its last answer is not waited for."""
        if self.direct.startswith("unix"):
            forget_lock(self.direct)


@pytest.fixture(params=["postgresql", "valkey"])
def way(request) -> Iterator[Way]:
    if os.environ.get(f"PREFIXSTORE_TEST_{'POSTGRES' if request.param == 'postgresql' else 'VALKEY'}"):
        pytest.skip("the server is not ours")
    if request.param == "postgresql":
        direct = request.getfixturevalue("new_database")()
        socket = request.getfixturevalue("postgres_server").sockets / ".s.PGSQL.5432"
        through = f"postgresql+psycopg://postgres@127.0.0.1:%d/{make_url(direct).database}"
    else:
        direct = request.getfixturevalue("new_valkey")()
        socket = request.getfixturevalue("valkey_server").socket
        through = f"valkey://127.0.0.1:%d/0?name={direct.rpartition('?name=')[2]}"
    with closing(Line(str(socket))) as line:
        yield Way(line, through % line.port, direct)


@pytest.mark.parametrize("name", WORK)
def test_a_line_that_is_cut_anywhere_in_an_answer_costs_no_more_than_a_miss(way, name):
    with stored(way.url, A) as store:
        before = way.line.passed
        WORK[name](store)
        n_bytes = way.line.passed - before
    # every boundary of a message at length, a sample otherwise
    for k in range(0, n_bytes, 1 + n_bytes // (8 * TORTURE)):
        with closing(Store(open_pages(way.url, max_bytes=64 * MIB))) as store:
            assert store.match(A) == 12
            way.line.left = k
            WORK[name](store)
            way.line.left = None
            way.forget_the_dead()
            assert store.fetch(A) == 3
            store.put(C)
            assert store.fetch(C) == 3
            assert store.engine.upkeep.check() == []
        is_intact(way.direct, A, C)
        with stored(way.direct) as other:
            other.engine.upkeep.clear(NS)
            other.put(A)


@contextmanager
def impatient(store: Store) -> Iterator[None]:
    """In the block a server that is silent is waited for only shortly: before and after it may be slow."""
    pool = getattr(getattr(store.backend.rows, "_connections", None), "_pool", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgresql._Connection, "silence", 0.5)
        patch.setattr(postgresql, "SILENT_READING", 0.5)
        patch.setattr(postgresql, "SILENT_WRITING", 0.5)
        patch.setattr(connections, "SILENT_SECONDS", 0.5)
        if store.backend.location.startswith("valkey"):
            patch.setitem(pool.connection_kwargs, "socket_timeout", 0.5)
            for one in pool._available_connections:
                if one._sock is not None:
                    one._sock.settimeout(0.5)
        yield
    if store.backend.location.startswith("valkey"):
        # those that were made in the block
        store.backend.rows._connections._pool._available_connections.clear()


def test_a_line_that_stalls_in_an_answer_delays_one_lookup(way):
    with stored(way.url, A) as store:
        way.line.stalls = True
        for left in (3, 700):
            with impatient(store):
                way.line.left = left
                assert lookup(store, A) < 3
                WORK["put"](store)
            way.line.left = None
            way.forget_the_dead()
            wait_for(lambda: lookup(store, A) == 3, "a hit")
        store.put(B)
        assert store.fetch(B) == 3
    is_intact(way.direct, A, B)


@contextmanager
def own_server(kind: str) -> Iterator[tuple[Any, str]]:
    """A server of this test, and a location in it."""
    if kind == "valkey":
        with private_valkey(appendonly="yes", appendfsync="everysec") as server:
            yield server, server.url
        return
    if server_program("initdb") is None:
        pytest.skip("PostgreSQL is not installed")
    with private_server() as server:
        yield server, store_on(server)


@pytest.mark.parametrize("kind", ["postgresql", "valkey"])
def test_a_server_that_is_killed_while_pages_are_written_loses_none_that_was_flushed(kind):
    with own_server(kind) as (server, url):
        flushed: list[list[int]] = []
        with stored(url) as store:
            for k in range(3 * TORTURE):
                flushed.append([100 + k] * 12)
                assert store.put(flushed[-1]) == 3
                store.engine.flush()
                others = [[10_000 + 1000 * k + i] * 12 for i in range(50)]
                doomed = in_thread(lambda others=others: [tried(lambda one, n=n: one.put(n))(store) for n in others])
                server.kill()
                assert lookup(store, flushed[-1]) in (0, 3)
                server.start()
                if kind == "valkey":
                    # its log has the lock of a transaction that has ended with it
                    forget_lock(url)
                doomed.join()
                wait_for(lambda: lookup(store, flushed[-1]) == 3, "a hit")
            assert store.engine.upkeep.check() == []
            for tokens in flushed:
                assert store.fetch(tokens) == 3
        is_intact(url, *flushed)
