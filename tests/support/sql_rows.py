"""Rows in SQL databases, without pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from sqlalchemy import event, text

from prefixstore.backends.contract import Range
from prefixstore.backends.sql import open_sql, postgresql_rows

MIB = 1 << 20
TERMINATE = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
EVERYTHING = Range(b"", b"\xff" * 32)


def opened(url, *, read_only=False):
    """The rows of a location, closed at the end of the block."""
    return closing(open_sql(url, max_bytes=64 * MIB, read_only=read_only))


def row(number, size=1000):
    """Key, value and payload of a row."""
    return b"r%06d" % number, b"value %d" % number, np.random.default_rng(number).bytes(size)


def put(backend, *rows):
    """Write rows; their keys."""
    with backend.update() as draft:
        for each in rows:
            draft.put(*each)
    return [key for key, *_ in rows]


def delete(backend, keys):
    with backend.update() as draft:
        for key in keys:
            draft.delete(key)


def keys_of(backend):
    """The keys of all rows."""
    with backend.view() as view:
        return {found.key for found in view.ranges([EVERYTHING])[0]}


def held(view, keys):
    """Values and payloads of these rows, as bytes."""
    return [
        None if found is None else (found[0], None if found[1] is None else bytes(found[1]))
        for found in view.payloads(keys)
    ]


def contents(backend):
    """All rows: key, value and payload."""
    with backend.view() as view:
        keys = [found.key for found in view.ranges([EVERYTHING])[0]]
        return dict(zip(keys, held(view, keys), strict=True))


@contextmanager
def statements(backend) -> Iterator[list[str]]:
    """What is sent to the database in the block."""
    sent = []

    def note(connection, cursor, statement, parameters, context, executemany):
        sent.append(statement)

    event.listen(backend.engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(backend.engine, "before_cursor_execute", note)


def change(backend, statement: str, **parameters: Any) -> None:
    """Something that no store of ours does to its tables."""
    with backend.writing() as connection:
        connection.execute(text(statement), parameters)


def end_others(backend):
    """End all other sessions in a PostgreSQL database."""
    with backend.connection() as connection:
        connection.execute(text(TERMINATE)).all()


def require_intact(backend):
    """No payload is without its row, all have their size, and what PostgreSQL counts is what there is."""
    backend.check()
    wrong = (
        "SELECT count(*) FROM prefixstore_rows AS stored WHERE coalesce(payload_bytes, 0) <> "
        "(SELECT coalesce(sum(length(data)), 0) FROM prefixstore_payloads AS pieces WHERE pieces.key = stored.key)"
    )
    orphans = "SELECT count(*) FROM prefixstore_payloads WHERE key NOT IN (SELECT key FROM prefixstore_rows)"
    with backend.connection() as connection:
        assert connection.execute(text(wrong)).scalar_one() == 0
        assert connection.execute(text(orphans)).scalar_one() == 0
        if not backend.is_local:
            counted = connection.execute(text("SELECT bytes FROM prefixstore_meta")).scalar_one()
            assert connection.exec_driver_sql(postgresql_rows._SUM).scalar_one() == counted
