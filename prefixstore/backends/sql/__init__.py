"""SQL locations: a SQLite file or a PostgreSQL database. What they need is imported when one is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixstore.backends.base import Backend
from prefixstore.backends.location import scheme_of
from prefixstore.errors import InvalidParameterError, MissingExtraError

if TYPE_CHECKING:
    from prefixstore.backends.sql.database import Database

__all__ = ["database_of", "open_sql"]


def open_sql(location: str, *, max_bytes: int, read_only: bool) -> Backend:
    """The store in this database; its budget is the engine's to keep.

    Raises
    ------
    MissingExtraError
        If SQLAlchemy, Alembic or psycopg is not installed.
    """
    database = database_of(location, read_only=read_only)
    from prefixstore.backends.sql.backend import SQLBackend  # noqa: PLC0415 - needs an extra

    database.open()
    return SQLBackend(database)


def database_of(location: str, *, read_only: bool) -> Database:
    """The connections to this database; nothing is opened yet.

    Raises
    ------
    InvalidParameterError
        If the location is no URL of a database that is known.
    MissingExtraError
        If SQLAlchemy, Alembic or psycopg is not installed.
    """
    scheme = scheme_of(location)
    try:
        if scheme == "sqlite":
            from prefixstore.backends.sql.sqlite import SQLite  # noqa: PLC0415 - needs an extra

            return SQLite(location, read_only=read_only)
        if scheme in ("postgres", "postgresql"):
            from prefixstore.backends.sql.postgresql import PostgreSQL  # noqa: PLC0415 - needs an extra

            return PostgreSQL(location, read_only=read_only)
    except ImportError as error:
        extra = "sql" if scheme == "sqlite" else "postgres"
        raise MissingExtraError(f"{error}; install it with: pip install 'prefixstore[{extra}]'") from error
    raise InvalidParameterError(
        'the location is no SQL database; write "sqlite:////path" or "postgresql+psycopg://user@host/db"'
    )
