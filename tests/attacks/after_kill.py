"""What is verified after each kill."""

from __future__ import annotations

import io
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import create_engine, text

from prefixstore.engine.invariants import violations
from prefixstore.engine.pages import open_pages
from prefixstore.format.codec import decode
from prefixstore.format.record import Usage
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import export_store
from tests.attacks.kill_workload import BUDGET, SPACES, digest, pages_of, state_of
from tests.support.pages import make_page
from tests.support.sql_rows import require_intact


def look_at(location: str) -> str:
    """Open a store, verify all that must hold after any attack, and return a digest of what it holds.

    If there is none, one is created, as for any user.
    """
    with closing(open_pages(location, max_bytes=BUDGET.max_bytes)) as backend:
        with backend.view() as view:
            problems = violations(view, BUDGET)
            assert problems == [], problems
            pages = 0
            for key, record, _ in view.scan():
                # read past the store: the bytes follow from the key, whatever the record says
                assert bytes(decode(record, view.payload(key))) == state_of(key)
                pages += 1
            assert view.used.entries == pages
            found = digest(view)
        if location.startswith("lmdb"):
            data = Path(location.removeprefix("lmdb://")) / "data.mdb"
            # each page of the file is in use or free
            backend.rows.check()
            assert data.stat().st_size <= 1.25 * BUDGET.max_bytes + (1 << 20)
        elif location.startswith(("sqlite", "postgresql")):
            require_intact(backend.rows)
    if location.startswith("sqlite"):
        with closing(sqlite3.connect(location.removeprefix("sqlite:///"))) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    return found


def look_without_writing(location: str) -> None:
    """Verify a store that no process has opened for writing since the attack."""
    with (
        closing(open_pages(location, max_bytes=BUDGET.max_bytes, read_only=True)) as backend,
        backend.view() as view,
    ):
        problems = violations(view, BUDGET)
        assert problems == [], problems


def pack() -> str:
    """A file of pages to import, as hexadecimal digits."""
    from prefixstore.buffers import BufferPool

    file = io.BytesIO()
    with Archive("memory:") as archive:
        with archive.backend.update() as transaction:
            for settings, tokens in ((SPACES[0], [2, 2, 2, 2, 1, 1, 1, 1, 0]), (SPACES[1], [2, 2, 1, 0, 0, 0])):
                transaction.put_namespace(settings.key, settings.canonical)
                for new in pages_of(settings, tokens, BufferPool(1 << 24).acquire):
                    page, state = new.page, bytes(new.buffer.view)
                    some = memoryview(page.tokens).cast("i").tolist()
                    key, record = make_page(state, some, parent=page.parent, start=page.start, namespace=page.namespace)
                    transaction.put(key, record, Usage(page.last_used), state)
        export_store(archive, file)
    return file.getvalue().hex()


def contents_of_old(location: str) -> list[tuple[int, int]]:
    """What `write_old` has put into a store, past the store: the size of each payload, and the bytes of its pieces."""
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
