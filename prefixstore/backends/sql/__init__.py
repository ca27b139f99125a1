"""SQL locations: a SQLite file or a PostgreSQL database. Their packages are imported when such a location is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixstore.backends import extra_needed
from prefixstore.backends.contract import Backend
from prefixstore.backends.location import scheme_of, without_password
from prefixstore.errors import InvalidParameterError

if TYPE_CHECKING:
    from prefixstore.backends.sql.database import Database

__all__ = ["database_of", "open_sql", "require_sql"]


def open_sql(location: str, *, max_bytes: int, read_only: bool) -> Backend:
    """The store in this database; its budget is the engine's to keep."""
    database = database_of(location, read_only=read_only)
    try:
        database.open()
    except BaseException:
        database.close()
        raise
    return database


def database_of(location: str, *, read_only: bool) -> Database:
    """The database that a location names; nothing is opened yet. Raises `InvalidParameterError` if it names none."""
    require_sql(location)
    with extra_needed(location):
        if scheme_of(location) == "sqlite":
            from prefixstore.backends.sql.sqlite import SQLite  # noqa: PLC0415 - needs an extra

            return SQLite(location, read_only=read_only)
        from prefixstore.backends.sql.postgresql import PostgreSQL  # noqa: PLC0415 - needs an extra

        return PostgreSQL(location, read_only=read_only)


def require_sql(location: str) -> None:
    """Raise `InvalidParameterError` if a location is not the URL of a known database; needs no extra."""
    if scheme_of(location) not in ("sqlite", "postgres", "postgresql"):
        raise InvalidParameterError(
            f"{without_password(location)} is not a SQL database, and other locations need no migration; "
            'pass "sqlite:////path" or "postgresql+psycopg://user@host/db"'
        )
