"""Payloads of a PostgreSQL store as they arrive: given up, asked for in between, cut, and their memory."""

import logging
from contextlib import closing
from itertools import islice

import pytest

from prefixstore.backends.sql import postgresql_rows
from tests.support.postgres import database
from tests.support.sql_rows import MIB, opened, put, row, statements

# more than the sockets and their buffers hold
LONG = 3 * MIB + 1


@pytest.fixture(scope="module")
def stored(postgres_template):
    """A location, its rows and their keys."""
    with database(*postgres_template) as url:
        rows = [row(i, LONG) for i in range(5)]
        with opened(url) as backend:
            keys = put(backend, *rows)
        yield url, rows, keys


def as_bytes(fetched):
    return [None if each is None else bytes(each[1]) for each in fetched]


def test_payloads_are_received_piece_by_piece(stored, monkeypatch):
    url, rows, keys = stored
    received = []
    arriving = postgresql_rows.PostgreSQLView._received

    def counted(self, *arguments):
        for line in arriving(self, *arguments):
            received.append(line)
            yield line

    monkeypatch.setattr(postgresql_rows.PostgreSQLView, "_received", counted)
    with opened(url) as backend, backend.view() as view, statements() as sent:
        for number, (value, payload) in enumerate(view.payloads(keys), 1):
            assert (value, bytes(payload)) == (rows[number - 1][1], rows[number - 1][2])
            # four pieces each
            assert len(received) == 4 * number
        assert len(sent) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_payloads_may_be_given_up_at_any_time(stored, caplog, n):
    url, rows, keys = stored
    with opened(url) as backend, caplog.at_level(logging.WARNING):
        for _ in range(3):
            with backend.view() as view:
                with closing(view.payloads(keys)) as fetched:
                    assert as_bytes(islice(fetched, n)) == [payload for _, _, payload in rows[:n]]
                    # the same view goes on, on another connection
                    assert view.get(keys[:1]) == [rows[0][1]]
                    assert as_bytes(view.payloads(keys[::-1])) == [payload for _, _, payload in rows[::-1]]
                assert as_bytes(view.payloads(keys)) == [payload for _, _, payload in rows]
    assert not caplog.records
