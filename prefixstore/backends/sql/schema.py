"""The tables of a SQL store, and a page as rows of them. ``migrations/`` creates the same tables, step by step.

The names begin with ``prefixstore_``, because a PostgreSQL database may hold the tables of others as well.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Row,
    SmallInteger,
    String,
    Table,
)

from prefixstore.backends import refusals
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.record import FORMAT_VERSION, RECORD_SEAL, Buffer, Record, Usage

__all__ = [
    "APPLICATION_ID",
    "CHANGES",
    "CHILDREN",
    "HEAD",
    "MAGIC",
    "META",
    "METADATA",
    "NAMESPACES",
    "NOTES",
    "ORDERED_BYTES",
    "PAGES",
    "PIECES",
    "PIECE_BYTES",
    "RECORD_COLUMNS",
    "REVISIONS",
    "UNRELEASED",
    "USAGE_COLUMNS",
    "VERSION_TABLE",
    "pieces_of",
    "readable",
    "record_of",
    "require_format",
    "row_of",
    "usage_of",
    "usage_row",
]

MAGIC = "prefixstore"
# of a SQLite file, in its header: "pfxs"
APPLICATION_ID = 0x70667873
# revisions of the schema, oldest first; a test compares them with the files in migrations/versions
REVISIONS = ("2",)
# of development versions, whose stores were never released
UNRELEASED = ("0001", "0002", "1")
HEAD = REVISIONS[-1]
VERSION_TABLE = "prefixstore_schema"
# the index of children by parent, form and tokens; how many bytes of the tokens it has in PostgreSQL
CHILDREN = "prefixstore_children"
ORDERED_BYTES = 1024
# a payload is stored in pieces of this size: no row is huge, and a piece stays in the CPU's cache while it is copied
PIECE_BYTES = 1 << 20

METADATA = MetaData()

META = Table(
    "prefixstore_meta",
    METADATA,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("magic", String(16), nullable=False),
    Column("format", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("entries", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("raw_bytes", BigInteger, nullable=False),
)
NAMESPACES = Table(
    "prefixstore_namespaces",
    METADATA,
    Column("key", LargeBinary, primary_key=True),
    Column("settings", LargeBinary, nullable=False),
)
PAGES = Table(
    "prefixstore_pages",
    METADATA,
    Column("key", LargeBinary, primary_key=True),
    Column("version", SmallInteger, nullable=False),
    Column("codec", SmallInteger, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("compute_us", BigInteger, nullable=False),
    Column("raw_bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("created", BigInteger, nullable=False),
    Column("namespace", LargeBinary, nullable=False),
    Column("parent", LargeBinary, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
    Column("tokens", LargeBinary, nullable=False),
    Column("form", SmallInteger, nullable=False),
    Column("seal", LargeBinary, nullable=False),
    Column("last_used", BigInteger, nullable=False),
    Column("hits", BigInteger, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("expires", BigInteger, nullable=False),
)
PIECES = Table(
    "prefixstore_pieces",
    METADATA,
    Column("page", LargeBinary, ForeignKey(PAGES.c.key, ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("page", "number"),
)
NOTES = Table(
    "prefixstore_notes",
    METADATA,
    Column("name", LargeBinary, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
CHANGES = Table(
    "prefixstore_changes",
    METADATA,
    Column("generation", BigInteger, nullable=False),
    Column("number", Integer, nullable=False),
    Column("key", LargeBinary, nullable=False),
    PrimaryKeyConstraint("generation", "number"),
)

_RECORD_NAMES = (
    "version codec start compute_us raw_bytes stored_bytes created namespace parent checksum tokens form seal"
)
USAGE_COLUMNS = tuple(PAGES.c[name] for name in ("last_used", "hits", "pinned", "priority", "expires"))
RECORD_COLUMNS = (PAGES.c.key, *(PAGES.c[name] for name in _RECORD_NAMES.split()), *USAGE_COLUMNS)


def usage_row(usage: Usage) -> dict[str, Any]:
    """The columns that hold a usage, within the bounds of its stored form."""
    usage = Usage.unpack(usage.pack())
    return {column.name: getattr(usage, column.name) for column in USAGE_COLUMNS}


def row_of(key: bytes, record: Record, usage: Usage) -> dict[str, Any]:
    """The row of a page. Its seal is that of the packed record: a column that is changed later no longer matches it."""
    packed = record.pack()
    record = Record.unpack(key, packed)
    return {
        "key": key,
        "version": FORMAT_VERSION,
        **{name: getattr(record, name) for name in _RECORD_NAMES.split() if name not in ("version", "seal")},
        "seal": packed[-RECORD_SEAL.size :],
        **usage_row(usage),
    }


def require_format(rows: Sequence[Row[Any]], where: str) -> Row[Any]:
    """The row about the whole store, which must exist and have the format of this version.

    Raises
    ------
    IncompatibleError
        If it is not.
    """
    if len(rows) != 1:
        raise IncompatibleError(f"{where} has {len(rows)} rows in {META.name}; it is not a store of prefixstore")
    if rows[0].format != FORMAT_VERSION:
        raise refusals.other_format(where, rows[0].format, FORMAT_VERSION)
    return rows[0]


def usage_of(row: Row[Any]) -> Usage:
    """The usage in a row that has its columns.

    Raises
    ------
    CorruptError
        If a column holds a value that a usage cannot have.
    """
    usage = Usage(row.last_used, row.hits, bool(row.pinned), row.priority, row.expires)
    try:
        return Usage.unpack(usage.pack())
    except (struct.error, TypeError) as error:
        raise CorruptError(f"usage of a page: {error}") from None


def record_of(row: Row[Any]) -> Record:
    """The record in a row that has its columns: packed again, it has to match the seal it was written with.

    Raises
    ------
    CorruptError
        If a column is not what was written, or the row has another key.
    IncompatibleError
        If a newer version wrote it.
    """
    key = bytes(row.key)
    try:
        claimed = Record(
            row.namespace,
            row.parent,
            row.start,
            row.tokens,
            row.codec,
            row.raw_bytes,
            row.stored_bytes,
            row.checksum,
            row.compute_us,
            row.created,
            row.form,
        )
        packed = claimed.pack()[: -RECORD_SEAL.size] + row.seal
        record = Record.unpack(key, packed)
    except (struct.error, TypeError, CorruptError) as error:
        # what this version cannot verify may be sound for the version that wrote it
        if isinstance(row.version, int) and row.version > FORMAT_VERSION:
            raise IncompatibleError(
                f"record {key.hex()} has format {row.version}, this prefixstore reads up to {FORMAT_VERSION}; "
                "upgrade it"
            ) from None
        raise CorruptError(f"record {key.hex()}: {error}") from None
    if row.version != FORMAT_VERSION:
        raise CorruptError(f"record {key.hex()}: format {row.version!r} does not match its seal")
    return record


def readable(row: Row[Any]) -> tuple[Record | StorageError, Usage]:
    """Record (or why it cannot be read) and usage of a row."""
    try:
        return record_of(row), usage_of(row)
    except StorageError as error:
        return error, Usage(0)


def pieces_of(key: bytes, payload: Buffer) -> list[dict[str, Any]]:
    """The rows that a payload is stored in; an empty one has an empty piece."""
    view = memoryview(payload).cast("B")
    starts = range(0, max(len(view), 1), PIECE_BYTES)
    return [
        {"page": key, "number": number, "data": view[start : start + PIECE_BYTES]}
        for number, start in enumerate(starts)
    ]
