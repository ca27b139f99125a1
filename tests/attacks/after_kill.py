"""What is verified after each kill."""

from __future__ import annotations

import io
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import create_engine, text

from prefixstore.backends import open_backend
from prefixstore.backends.lmdb.file import read_layout
from prefixstore.engine.invariants import violations
from prefixstore.format.codec import decode
from prefixstore.format.record import Usage
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import export_store
from prefixstore.testing import make_page
from tests.attacks.kill_workload import BUDGET, SPACES, digest, pages_of, state_of

COUNTED = """
    SELECT entries, bytes, (SELECT count(*) FROM prefixstore_pages),
           (SELECT coalesce(sum(stored_bytes + length(tokens)), 0) FROM prefixstore_pages),
           (SELECT count(*) FROM prefixstore_pieces WHERE page NOT IN (SELECT key FROM prefixstore_pages))
    FROM prefixstore_meta
"""


def look_at(location: str) -> str:
    """Open a store, verify all that must hold after any attack, and return a digest of what it holds.

    If there is none, one is created, as for any user.
    """
    with closing(open_backend(location, max_bytes=BUDGET.max_bytes)) as backend:
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
            read_layout(data)
            assert data.stat().st_size <= 1.25 * BUDGET.max_bytes + (1 << 20)
        elif location.startswith(("sqlite", "postgresql")):
            with backend.database.connection() as connection:
                entries, n_bytes, counted, summed, orphans = connection.execute(text(COUNTED)).one()
            assert (entries, n_bytes, orphans) == (counted, summed, 0)
            assert counted == pages
    if location.startswith("sqlite"):
        with closing(sqlite3.connect(location.removeprefix("sqlite:///"))) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    return found


def look_without_writing(location: str) -> None:
    """Verify a store that no process has opened for writing since the attack."""
    with (
        closing(open_backend(location, max_bytes=BUDGET.max_bytes, read_only=True)) as backend,
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


def contents_of_old(location: str) -> list[tuple[int, int, int]]:
    """What `write_old` has put into a store, past the store: hits, bytes and start of each page with its payload."""
    query = """
        SELECT hits, sum(length(data)), start FROM prefixstore_pages JOIN prefixstore_pieces ON page = key
        GROUP BY hits, start ORDER BY start
    """
    engine = create_engine(location)
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]
    finally:
        engine.dispose()
