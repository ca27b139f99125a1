"""Rows in SQL databases, without pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import psycopg
import pytest

from prefixstore.backends.sql import open_sql, postgresql_rows
from tests.support.rows import rows_of

MIB = 1 << 20
contents = rows_of


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


@contextmanager
def before_statements(work) -> Iterator[None]:
    """Call this with each statement that is about to be sent to a PostgreSQL server in the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute", "executemany", "stream"):
            real = getattr(psycopg.Cursor, name)

            def told(cursor, statement, *arguments, real=real, **options):
                work(statement)
                return real(cursor, statement, *arguments, **options)

            patch.setattr(psycopg.Cursor, name, told)
        yield


@contextmanager
def statements() -> Iterator[list[str]]:
    """What is sent to PostgreSQL servers in the block."""
    sent: list[str] = []
    with before_statements(sent.append):
        yield sent


def change(backend, statement: str, **parameters: Any) -> None:
    """Something that no store of ours does to its tables."""
    if not backend.is_local:
        statement = re.sub(r":(\w+)", r"%(\1)s", statement)
    with backend.writing() as driver:
        driver.execute(statement, parameters)


def require_intact(backend):
    """No payload is without its row, all have their size, and what PostgreSQL counts is what there is."""
    backend.check()
    wrong = (
        "SELECT count(*) FROM prefixstore_rows AS stored WHERE coalesce(payload_bytes, 0) <> "
        "(SELECT coalesce(sum(length(data)), 0) FROM prefixstore_payloads AS pieces WHERE pieces.key = stored.key)"
    )
    orphans = "SELECT count(*) FROM prefixstore_payloads WHERE key NOT IN (SELECT key FROM prefixstore_rows)"
    with backend.connection() as driver:
        assert driver.execute(wrong).fetchone() == (0,)
        assert driver.execute(orphans).fetchone() == (0,)
        if not backend.is_local:
            counted = driver.execute("SELECT bytes FROM prefixstore_meta").fetchone()
            assert driver.execute(postgresql_rows.SUM).fetchone() == counted
