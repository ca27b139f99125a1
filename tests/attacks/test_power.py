"""What survives a loss of power, beside what `tests/model` says of flushes: a commit, exports, a file that grew."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from prefixstore.engine.budget import Budget
from prefixstore.engine.invariants import violations
from prefixstore.engine.pages import open_pages
from tests.attacks.power import MARK, Disk, read_journal, shim
from tests.support import keys_of, python
from tests.support.places import fill, space

COMMITS = 30
WRITER = f"""
import ctypes, sys
from contextlib import closing
from prefixstore.cli import main
from prefixstore.engine.pages import open_pages
from tests.support.places import fill, space
location, below, journal, out = sys.argv[1:]
power = ctypes.CDLL(None)
power.power_start(below.encode(), journal.encode())
with closing(open_pages(location, max_bytes=1 << 24)) as backend:
    for n in range({COMMITS}):
        fill(backend, space(), [[n] * 4])
        power.power_mark(b"committed")
main(["export", location, "--out", out])
"""


def location_in(directory: Path, scheme: str) -> str:
    return f"lmdb://{directory}/new/kv" if scheme == "lmdb" else f"sqlite:///{directory}/new/kv.db"


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_without_a_flush_lmdb_loses_the_last_commit_at_most_and_an_exported_file_is_there(
    tmp_path, scheme, monkeypatch
):
    """Of SQLite the documents promise less; that it loses more shows that a loss would be noticed."""
    root, journal, left = tmp_path.resolve() / "place", tmp_path / "journal", tmp_path / "left"
    root.mkdir()
    out = root / "night.pstore"
    environment_ = os.environ | {"LD_PRELOAD": str(shim(tmp_path))}
    writer = python(WRITER, location_in(root, scheme), root, journal, out, env=environment_)
    writer.communicate()
    assert writer.returncode == 0
    disk, n_committed, most_lost = Disk(root, root.stat().st_ino), 0, 0
    for entry in read_journal(journal):
        disk.apply(entry)
        n_committed += entry.kind == MARK
        if entry.kind != MARK and 0 < n_committed < COMMITS:
            disk.after_power_loss(left, "none", random.Random(0))
            with closing(open_pages(location_in(left, scheme), max_bytes=1 << 24)) as backend:
                most_lost = max(most_lost, n_committed - len(keys_of(backend)))
    assert n_committed == COMMITS
    assert most_lost == 1 if scheme == "lmdb" else most_lost > 1
    disk.after_power_loss(left, "none", random.Random(0))
    assert (left / out.name).read_bytes() == out.read_bytes()


def test_a_store_whose_file_grew_during_a_power_loss_is_recognized(tmp_path):
    """The header, in the first page, says how long the file will be when the log was moved into it."""
    location, copy = f"sqlite:///{tmp_path}/kv.db", tmp_path / "copy.db"
    with closing(open_pages(location, max_bytes=1 << 24)) as backend:
        fill(backend, space(), [[1, 2, 3, 4]], size=100_000)
        whole = bytearray(Path(f"{tmp_path}/kv.db").read_bytes())
        log = Path(f"{tmp_path}/kv.db-wal").read_bytes()
    # all but the length of the file has come to the disk
    whole[28:32] = (int.from_bytes(whole[28:32], "big") + 3).to_bytes(4, "big")
    copy.write_bytes(whole)
    Path(f"{copy}-wal").write_bytes(log)
    with closing(open_pages(f"sqlite:///{copy}", max_bytes=1 << 24)) as backend, backend.view() as view:
        assert violations(view, Budget(1 << 24)) == []
        assert view.used.entries == 1


def ask(connection, question: str) -> list[str]:
    return [str(value) for value in connection.execute(question).fetchone()]


def test_a_session_keeps_the_durability_of_the_server(new_database):
    location = new_database()
    with (
        closing(open_pages(location, max_bytes=1 << 24)) as backend,
        psycopg.connect(location.replace("+psycopg", "")) as plain,
        backend.rows.connection() as ours,
    ):
        settings = "SELECT " + ", ".join(
            f"current_setting('{name}')"
            for name in ("fsync", "synchronous_commit", "full_page_writes", "commit_delay", "wal_sync_method")
        )
        assert ask(ours, settings) == ask(plain, settings)
        kinds = "SELECT DISTINCT relpersistence FROM pg_class WHERE relname LIKE 'prefixstore%' AND relkind = 'r'"
        # no table is left out of the server's log
        assert ask(plain, kinds) == ["p"]


def test_a_flush_is_durable_in_postgresql_where_a_commit_is_not(new_database):
    location = new_database()
    behind = []
    with psycopg.connect(location.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET synchronous_commit = off')
        with closing(open_pages(location, max_bytes=1 << 24)) as backend:
            for n in range(30):
                fill(backend, space(), [[n, 2, 3, 4]])
                written = ask(connection, "SELECT pg_current_wal_insert_lsn()")[0]
                flushed = f"SELECT pg_current_wal_flush_lsn() >= '{written}'"
                behind.append(ask(connection, flushed) == ["False"])
                backend.sync()
                assert ask(connection, flushed) == ["True"]
    # or the setting was not as it should be, and nothing was tested
    assert any(behind)
