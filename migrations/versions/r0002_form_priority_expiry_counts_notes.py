"""Form, priority and expiry of pages; how many there are and what they weigh, so that nobody counts them; and notes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add columns and a table, and count what is there."""
    op.add_column("prefixstore_pages", sa.Column("form", sa.SmallInteger(), nullable=False, server_default="0"))
    op.add_column("prefixstore_pages", sa.Column("priority", sa.SmallInteger(), nullable=False, server_default="0"))
    op.add_column("prefixstore_pages", sa.Column("expires", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("prefixstore_meta", sa.Column("entries", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("prefixstore_meta", sa.Column("bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE prefixstore_meta SET entries = (SELECT count(*) FROM prefixstore_pages), "
        "bytes = (SELECT coalesce(sum(stored_bytes + length(tokens)), 0) FROM prefixstore_pages)"
    )
    op.create_table(
        "prefixstore_notes",
        sa.Column("name", sa.LargeBinary(), primary_key=True),
        sa.Column("value", sa.LargeBinary(), nullable=False),
    )
