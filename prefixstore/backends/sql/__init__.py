"""SQL locations: a SQLite file or a PostgreSQL database. Their packages are imported when such a location is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prefixstore.backends.contract import Backend
from prefixstore.backends.location import scheme_of
from prefixstore.errors import InvalidParameterError, MissingExtraError

if TYPE_CHECKING:
    from prefixstore.backends.sql.database import Database

__all__ = ["database_of", "extra_needed", "open_sql", "require_sql"]


def open_sql(location: str, *, max_bytes: int, read_only: bool) -> Backend:
    """The store in this database; its budget is the engine's to keep.

    Raises
    ------
    MissingExtraError
        If SQLAlchemy, Alembic or psycopg is not installed.
    """
    database = database_of(location, read_only=read_only)
    try:
        database.open()
    except BaseException:
        database.close()
        raise
    return database


def database_of(location: str, *, read_only: bool) -> Database[Any]:
    """The database that a location names; nothing is opened yet.

    Raises
    ------
    InvalidParameterError
        If the location is not the URL of a known database.
    MissingExtraError
        If SQLAlchemy, Alembic or psycopg is not installed.
    """
    require_sql(location)
    if scheme_of(location) == "sqlite":
        with extra_needed("sql"):
            from prefixstore.backends.sql.sqlite import SQLite  # noqa: PLC0415 - needs an extra
        return SQLite(location, read_only=read_only)
    with extra_needed("postgres"):
        from prefixstore.backends.sql.postgresql import PostgreSQL  # noqa: PLC0415 - needs an extra
    return PostgreSQL(location, read_only=read_only)


def require_sql(location: str) -> None:
    """Raise `InvalidParameterError` if a location is not the URL of a known database; needs no extra."""
    if scheme_of(location) not in ("sqlite", "postgres", "postgresql"):
        raise InvalidParameterError(
            "location is not a SQL database, and other locations need no migration; "
            'pass "sqlite:////path" or "postgresql+psycopg://user@host/db"'
        )


@contextmanager
def extra_needed(extra: str) -> Iterator[None]:
    """Report a package that cannot be imported in the block as a missing extra; the outermost block names it."""
    try:
        yield
    except ImportError as error:
        cause = error.__cause__ if isinstance(error, MissingExtraError) else error
        raise MissingExtraError.of_location(cause, extra) from cause
