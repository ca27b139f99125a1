"""Pages of a PostgreSQL store as they arrive: given up, asked for in between, cut, and the memory that they are in."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import closing, suppress
from itertools import islice

import psycopg
import pytest
from sqlalchemy import make_url

from prefixstore.backends.sql import postgresql
from prefixstore.backends.sql.schema import PIECES
from prefixstore.errors import UnavailableError
from prefixstore.format.record import Usage
from tests.backends.test_sql import chain, change, page, put, statements
from tests.support.places import MIB, opened
from tests.support.postgres import database, name_of
from tests.support.proxy import Proxy

# more than the sockets and their buffers hold
LONG = 3 * MIB + 1


@pytest.fixture(scope="module")
def filled(postgres_template):
    """A server with a location, its pages and their keys."""
    server, template = postgres_template
    with database(server, template) as url:
        pages = chain(5, LONG)
        with opened(url) as backend:
            keys = put(backend, *pages)
        yield server, url, pages, keys


@pytest.fixture
def stored(filled):
    """A copy of the location, its pages and their keys."""
    server, url, pages, keys = filled
    with database(server, name_of(url)) as copy:
        yield copy, list(pages), list(keys)


def as_bytes(fetched):
    return [bytes(payload) for _, payload in fetched]


def session_of(backend):
    """The process of the server that answers this one."""
    with backend.database.connection() as connection:
        return connection.connection.driver_connection.info.backend_pid


def test_pages_that_are_fetched_are_received_piece_by_piece(stored, monkeypatch):
    url, pages, keys = stored
    received = []
    fetchone = postgresql.StreamedCursor.fetchone

    def counted(self):
        row = fetchone(self)
        received.append(row)
        return row

    monkeypatch.setattr(postgresql.StreamedCursor, "fetchone", counted)
    with opened(url) as backend, backend.view() as view, statements(backend) as sent:
        for number, (record, payload) in enumerate(view.fetch(keys), 1):
            assert (record, bytes(payload)) == (pages[number - 1][1], pages[number - 1][2])
            # four pieces each, and with the last page the end of the answer
            assert len(received) == 4 * number + (number == len(keys))
        assert len(sent) == 1


def test_pages_of_any_size_arrive_whole(new_database):
    pages = [page(i, size) for i, size in enumerate((0, 1, MIB - 1, MIB, MIB + 1, 0, 2 * MIB, 100))]
    with opened(new_database()) as backend:
        keys = put(backend, *pages)
        with backend.view() as view:
            assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]
            assert as_bytes(view.fetch(keys[::-1])) == [payload for _, _, payload in pages][::-1]
        # a piece too many is not a page too many
        change(backend, PIECES.insert().values(page=keys[6], number=2, data=b""))
        with backend.view() as view:
            assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]


@pytest.mark.parametrize("n", [1, 3])
def test_pages_may_be_given_up_at_any_time(stored, caplog, n):
    url, pages, keys = stored
    with opened(url) as backend, caplog.at_level(logging.WARNING):
        for _ in range(3):
            with backend.view() as view:
                with closing(view.fetch(keys)) as fetched:
                    assert as_bytes(islice(fetched, n)) == [payload for _, _, payload in pages[:n]]
                # the same view goes on, on another connection
                assert view.record(keys[0]) == pages[0][1]
                assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]
    assert not caplog.records


def test_whoever_asks_for_one_page_keeps_the_connection(stored):
    url, pages, keys = stored
    with opened(url) as backend:
        before = session_of(backend)
        for key, (_, _, payload) in zip(keys, pages, strict=True):
            with backend.view() as view:
                assert bytes(next(iter(view.fetch([key])))[1]) == payload
        assert session_of(backend) == before


def test_pages_may_be_given_up_in_a_transaction_and_in_a_walk(stored):
    url, pages, keys = stored
    new = page(100)
    with opened(url) as backend:
        before = session_of(backend)
        with backend.update() as transaction:
            with closing(transaction.fetch(keys)) as fetched:
                assert bytes(next(fetched)[1]) == pages[0][2]
            transaction.put(*new[:2], Usage(1), new[2])
        with backend.view() as view:
            walk = view.scan()
            next(walk)
            with closing(view.fetch(keys)) as fetched:
                next(fetched)
            assert len(list(walk)) == len(keys)
            assert as_bytes(view.fetch([new[0]])) == [new[2]]
        assert session_of(backend) == before


def test_a_view_may_be_asked_for_something_else_while_pages_arrive(stored):
    url, pages, keys = stored
    with opened(url) as backend:
        before = session_of(backend)
        with backend.view() as view:
            found, others = [], []
            for (_, payload), (_, other) in zip(view.fetch(keys), view.fetch(keys[::-1]), strict=True):
                found.append(bytes(payload))
                others.append(bytes(other))
                assert view.record(keys[2]) == pages[2][1]
            assert found == others[::-1] == [payload for _, _, payload in pages]
        with backend.update() as transaction:
            fetched = transaction.fetch(keys)
            next(fetched)
            assert transaction.delete(keys[4])
            # as they were when they were asked for
            assert as_bytes(fetched) == [payload for _, _, payload in pages[1:]]
        assert session_of(backend) == before


def test_pages_that_nobody_waits_for_do_not_spoil_the_connection(stored, caplog):
    url, pages, keys = stored
    with opened(url) as backend, caplog.at_level(logging.WARNING):
        left = []
        for _ in range(3):
            with backend.view() as view:
                left.append(view.fetch(keys))
                next(left[-1])
            with backend.update() as transaction:
                left.append(transaction.fetch(keys))
                next(left[-1])
                transaction.touch(keys[0], Usage(2))
        with backend.view() as view:
            assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]
        del left
        with backend.view() as view:
            assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]
    assert not caplog.records


def test_a_connection_that_is_given_back_while_rows_arrive_is_replaced(stored):
    """As after an interrupt at the end of a view."""
    url, pages, keys = stored
    with opened(url) as backend:
        for _ in range(3):
            with backend.database.engine.connect() as connection:
                given = backend.database.keys(keys) | {"limit": 1 << 40}
                result = connection.execute(postgresql._FETCH, given, execution_options=postgresql._STREAMED)
                assert result.fetchone() is not None
            with backend.view() as view:
                assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]
            put(backend, page(7))


def test_a_payload_does_not_change_while_it_is_held_and_its_memory_is_used_again(stored):
    url, pages, keys = stored
    with opened(url) as backend:
        buffers = backend.database._buffers
        with backend.view() as view:
            held = [memoryview(payload)[7:] for _, payload in view.fetch(keys)]
            again = [memoryview(payload)[7:] for _, payload in view.fetch(keys)]
            for i, (_, _, payload) in enumerate(pages):
                assert held[i] == again[i] == payload[7:]
            assert buffers.in_use == 10 * LONG
            del held, again
            assert buffers.in_use == 0
            for _, payload in view.fetch(keys):
                # one that is used, and one that is received
                assert buffers.in_use <= 2 * len(payload)


def test_no_memory_for_a_payload_is_an_error_that_leaves_a_usable_view(stored, monkeypatch):
    url, pages, keys = stored

    def refuse(*_, **__):
        raise MemoryError

    with opened(url) as backend, backend.view() as view:
        with monkeypatch.context() as patched:
            patched.setattr(backend.database._buffers, "acquire", refuse)
            with pytest.raises(UnavailableError, match="no memory"):
                list(view.fetch(keys))
        assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]


def test_a_session_that_ends_while_pages_arrive_ends_them_with_an_error(stored):
    url, pages, keys = stored
    libpq = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with opened(url) as backend:
        pid = session_of(backend)
        with backend.view() as view:
            fetched, found = view.fetch(keys), []
            found.append(bytes(next(fetched)[1]))
            with psycopg.connect(libpq, autocommit=True) as session:
                session.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
            with pytest.raises(UnavailableError):
                found += [bytes(payload) for _, payload in fetched]
            assert found == [payload for _, _, payload in pages[: len(found)]]
        with backend.view() as view:
            assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]


def test_a_session_that_ends_before_another_statement_ends_the_pages_with_an_error(stored):
    url, _, keys = stored
    libpq = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with opened(url) as backend:
        pid = session_of(backend)
        with backend.view() as view:
            fetched = view.fetch(keys)
            next(fetched)
            with psycopg.connect(libpq, autocommit=True) as session:
                session.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
            # it is sent again on another connection; the pages cannot be
            assert view.record(keys[0]) is not None
            with pytest.raises(UnavailableError):
                # some may have arrived
                list(fetched)


def test_pages_that_are_not_there_cost_no_connection(stored):
    url, pages, keys = stored
    with opened(url) as backend:
        before = session_of(backend)
        for wanted in ([bytes(32)], [bytes(32), *keys], [*keys[:2], bytes(32)]):
            with backend.view() as view:
                expected = [payload for key, _, payload in pages if key in wanted[: wanted.index(bytes(32))]]
                assert as_bytes(view.fetch(wanted)) == expected
                assert view.payload(bytes(32)) is None
        assert session_of(backend) == before


class Stalling(Proxy):
    """Passes on so many bytes of answers, and then swallows them."""

    def __init__(self, path):
        self.left = 1 << 40
        self.n_connections = 0
        super().__init__(path)

    def forward(self, source, target, answers):
        self.n_connections += answers
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers:
                    data = data[: max(self.left, 0)]
                    self.left -= len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_what_is_given_up_on_a_line_that_stalls_asks_the_server_for_nothing(stored, request, monkeypatch):
    if os.environ.get("PREFIXSTORE_TEST_POSTGRES"):
        pytest.skip("the server is not ours")
    url, pages, keys = stored
    server = request.getfixturevalue("postgres_server")
    monkeypatch.setattr(postgresql, "SILENT_READING", 60)
    with closing(Stalling(str(server.sockets / ".s.PGSQL.5432"))) as line:
        through = f"postgresql+psycopg://postgres@127.0.0.1:{line.port}/{make_url(url).database}"
        with opened(through) as backend:
            # neither does it wait for what is still on its way, nor does it connect to have the query cancelled
            with backend.view() as view, closing(view.fetch(keys)) as fetched:
                assert bytes(next(fetched)[1]) == pages[0][2]
                line.left, before = 0, line.n_connections
            assert line.n_connections == before
            line.left = 1 << 40
            with backend.view() as view:
                assert as_bytes(view.fetch(keys)) == [payload for _, _, payload in pages]
