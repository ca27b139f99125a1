"""A later version of prefixstore, whose schema has one revision more; and a store that this version has written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from prefixstore.backends.sql import migrations as migrate
from prefixstore.engine.pages import open_pages
from prefixstore.format.record import Usage
from tests.support.pages import make_page
from tests.support.sql_rows import contents, opened

NAMESPACE = bytes(range(32))
# what the pages of `write_old` weigh
SIZES = (700, 900, 0)
OLD, LATER = migrate.HEAD, "9001"
REVISION = f'''"""Columns, a table, and a count of what is there."""

import sqlalchemy as sa
from alembic import op

revision = "{LATER}"
down_revision = "{OLD}"


def upgrade():
    for name in ("one", "two", "three", "four"):
        op.add_column("prefixstore_rows", sa.Column(name, sa.SmallInteger(), nullable=False, server_default="0"))
    op.add_column("prefixstore_meta", sa.Column("counted", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE prefixstore_meta SET counted = (SELECT count(*) FROM prefixstore_rows)")
    op.create_table("prefixstore_later", sa.Column("name", sa.LargeBinary(), primary_key=True))
'''


@contextmanager
def a_later_version(directory: Path) -> Iterator[None]:
    """In the block prefixstore is the later version; its migrations are in this directory."""
    migrations = directory / "migrations"
    if not migrations.exists():
        shutil.copytree(migrate.migrations_directory(), migrations)
        (migrations / "versions" / f"r{LATER}_later.py").write_text(REVISION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "migrations_directory", lambda: migrations)
        patch.setattr(migrate, "HEAD", LATER)
        yield


def write_old(url: str) -> dict[bytes, tuple[bytes, bytes | None]]:
    """Write a store with three pages, as this version does; value and payload of each row."""
    migrate.upgrade(url)
    parent = NAMESPACE
    with closing(open_pages(url, max_bytes=1 << 26)) as backend:
        for i, size in enumerate(SIZES):
            payload = np.random.default_rng(i).bytes(size)
            key, record = make_page(payload, [i, i + 1, i + 2, i + 3], parent=parent, start=4 * i)
            with backend.update() as transaction:
                transaction.put_namespace(NAMESPACE, b'{"label":"contract"}')
                transaction.put(key, record, Usage(1000 + i, i, pinned=i == 1), payload)
            parent = key
    with opened(url) as rows:
        return contents(rows)
