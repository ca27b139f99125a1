"""The tables of a SQL store. ``migrations/`` creates the same tables.

The names begin with ``prefixstore_``, because a PostgreSQL database may hold the tables of others as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
)

from prefixstore.backends import refusals
from prefixstore.backends.contract import Change
from prefixstore.errors import IncompatibleError
from prefixstore.format.record import FORMAT_VERSION

__all__ = [
    "APPLICATION_ID",
    "HEAD",
    "MAGIC",
    "META",
    "METADATA",
    "PAYLOADS",
    "PIECE_BYTES",
    "REVISIONS",
    "ROWS",
    "UNRELEASED",
    "VERSION_TABLE",
    "pieces_of",
    "require_format",
]

MAGIC = "prefixstore"
# of a SQLite file, in its header: "pfxs"
APPLICATION_ID = 0x70667873
# revisions of the schema, oldest first; a test compares them with the files in migrations/versions
REVISIONS = ("3",)
# of development versions, whose stores were never released
UNRELEASED = ("0001", "0002", "1", "2")
HEAD = REVISIONS[-1]
VERSION_TABLE = "prefixstore_schema"
# a payload is stored in pieces of this size: no row is huge, and a piece stays in the CPU's cache while it is copied
PIECE_BYTES = 1 << 20

METADATA = MetaData()

META = Table(
    "prefixstore_meta",
    METADATA,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("magic", String(16), nullable=False),
    Column("format", Integer, nullable=False),
    # what all rows weigh; a SQLite file knows its own size
    Column("bytes", BigInteger, nullable=False),
)
ROWS = Table(
    "prefixstore_rows",
    METADATA,
    Column("key", LargeBinary, primary_key=True),
    Column("value", LargeBinary, nullable=False),
    # NULL for a row without a payload
    Column("payload_bytes", BigInteger, nullable=True),
)
PAYLOADS = Table(
    "prefixstore_payloads",
    METADATA,
    Column("key", LargeBinary, nullable=False),
    Column("piece", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("key", "piece"),
)


def require_format(rows: Sequence[Any], where: str) -> None:
    """The ``format`` in the row about the whole store, which must exist, has to be that of this version.

    Raises
    ------
    IncompatibleError
        If it is not.
    """
    if len(rows) != 1:
        raise IncompatibleError(f"{where} has {len(rows)} rows in {META.name}; it is not a store of prefixstore")
    if rows[0].format != FORMAT_VERSION:
        raise refusals.other_format(where, rows[0].format, FORMAT_VERSION)


def pieces_of(changes: Sequence[Change]) -> Iterator[tuple[bytes, int, memoryview]]:
    """Key, number and bytes of each piece of the payloads that are written; an empty payload has none."""
    for change in changes:
        if change.payload is not None:
            view = memoryview(change.payload).cast("B")
            for piece, start in enumerate(range(0, len(view), PIECE_BYTES)):
                yield change.key, piece, view[start : start + PIECE_BYTES]
