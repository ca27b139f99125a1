"""Rows with sorted keys, their payloads in pieces, and one row about the whole store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "prefixstore_meta",
        sa.Column("id", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("magic", sa.String(16), nullable=False),
        sa.Column("format", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
    )
    op.execute("INSERT INTO prefixstore_meta (id, magic, format, bytes) VALUES (1, 'prefixstore', 2, 0)")
    op.create_table(
        "prefixstore_rows",
        sa.Column("key", sa.LargeBinary(), primary_key=True),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=True),
    )
    op.create_table(
        "prefixstore_payloads",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("piece", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("key", "piece"),
    )
    if op.get_context().dialect.name == "postgresql":
        # payloads are compressed already: the server need not try
        op.execute("ALTER TABLE prefixstore_payloads ALTER COLUMN data SET STORAGE EXTERNAL")
        # by default the server cleans up only when a fifth of the table are dead rows
        op.execute(
            "ALTER TABLE prefixstore_payloads SET "
            "(autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02)"
        )
