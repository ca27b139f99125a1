"""A process that is killed in the middle of an upgrade of the schema leaves the old one, or the new one."""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from prefixstore.backends.sql import migrations as migrate
from prefixstore.maintenance.archive import Archive
from tests.support.revisions import LATER, OLD, a_later_version, write_old
from tests.support.sql_rows import before_statements

CHANGES = ("INSERT", "UPDATE", "DELETE", "CREATE", "ALTER", "DROP", "COMMIT")


def upgrade_killed(location: str, at: int) -> bool:
    """Upgrade in a child that is killed before its n-th statement; whether it has so many."""
    child = os.fork()
    if child == 0:
        left = [at]

        def before(statement: Any) -> None:
            if isinstance(statement, str) and statement.lstrip().startswith(CHANGES):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        def connect(*arguments: Any, connect: Any = sqlite3.connect, **options: Any) -> sqlite3.Connection:
            made = connect(*arguments, **options)
            made.set_trace_callback(before)
            return made

        code = 1
        try:
            sqlite3.connect = connect
            with before_statements(before):
                migrate.upgrade(location)
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def sizes_of(location: str) -> list[tuple[int, int]]:
    """What `write_old` has written, past the store: the size of each payload, and the bytes of its pieces."""
    query = """
        SELECT payload_bytes, coalesce(sum(length(data)), 0) FROM prefixstore_rows
        LEFT JOIN prefixstore_payloads ON prefixstore_payloads.key = prefixstore_rows.key
        WHERE payload_bytes IS NOT NULL GROUP BY prefixstore_rows.key, payload_bytes ORDER BY payload_bytes
    """
    engine = create_engine(location)
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]
    finally:
        engine.dispose()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("scheme", ["sqlite", "postgresql"])
def test_a_kill_during_an_upgrade_leaves_the_old_schema_or_the_new_one(tmp_path, request, scheme):
    if scheme == "postgresql":
        location = request.getfixturevalue("new_database")(empty=True)
        write_old(location)
    revisions = []
    for at in itertools.count(1):
        if scheme == "sqlite":
            location = f"sqlite:///{tmp_path}/{at}.db"
            write_old(location)
        with a_later_version(tmp_path):
            is_killed = upgrade_killed(location, at)
            revisions.append(migrate.check(location).revision)
        if not is_killed:
            break
        assert sizes_of(location) == [(0, 0), (700, 700), (900, 900)]
    assert len(revisions) > 8
    assert revisions == sorted(revisions)
    assert (revisions[0], revisions[-1]) == (OLD, LATER)
    with a_later_version(tmp_path), Archive(location) as archive:
        assert archive.check() == []
        assert archive.used().entries == 3
