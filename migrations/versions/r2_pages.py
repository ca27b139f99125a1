"""Pages, their order below each parent, payloads in pieces, namespaces, notes, and what each generation changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "prefixstore_meta",
        sa.Column("id", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("magic", sa.String(16), nullable=False),
        sa.Column("format", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("raw_bytes", sa.BigInteger(), nullable=False),
    )
    op.execute(
        "INSERT INTO prefixstore_meta (id, magic, format, generation, entries, bytes, stored_bytes, raw_bytes) "
        "VALUES (1, 'prefixstore', 2, 0, 0, 0, 0, 0)"
    )
    op.create_table(
        "prefixstore_namespaces",
        sa.Column("key", sa.LargeBinary(), primary_key=True),
        sa.Column("settings", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "prefixstore_pages",
        sa.Column("key", sa.LargeBinary(), primary_key=True),
        sa.Column("version", sa.SmallInteger(), nullable=False),
        sa.Column("codec", sa.SmallInteger(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("compute_us", sa.BigInteger(), nullable=False),
        sa.Column("raw_bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("namespace", sa.LargeBinary(), nullable=False),
        sa.Column("parent", sa.LargeBinary(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("form", sa.SmallInteger(), nullable=False),
        sa.Column("seal", sa.LargeBinary(), nullable=False),
        sa.Column("last_used", sa.BigInteger(), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("expires", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "prefixstore_pieces",
        sa.Column("page", sa.LargeBinary(), sa.ForeignKey("prefixstore_pages.key", ondelete="CASCADE"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("page", "number"),
    )
    op.create_table(
        "prefixstore_changes",
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("generation", "number"),
    )
    op.create_table(
        "prefixstore_notes",
        sa.Column("name", sa.LargeBinary(), primary_key=True),
        sa.Column("value", sa.LargeBinary(), nullable=False),
    )
    is_postgresql = op.get_context().dialect.name == "postgresql"
    # an entry of an index of PostgreSQL cannot hold all tokens of a long page
    tokens = "substr(tokens, 1, 1024)" if is_postgresql else "tokens"
    op.execute(f"CREATE INDEX prefixstore_children ON prefixstore_pages (parent, form, {tokens})")
    if is_postgresql:
        # payloads are compressed already: the server need not try
        op.execute("ALTER TABLE prefixstore_pieces ALTER COLUMN data SET STORAGE EXTERNAL")
        # by default the server cleans up only when a fifth of the table are dead rows
        op.execute(
            "ALTER TABLE prefixstore_pieces SET "
            "(autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02)"
        )
