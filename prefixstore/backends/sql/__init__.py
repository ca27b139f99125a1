"""SQL locations: a SQLite file or a PostgreSQL database; ``prefixstore migrate``, which makes the tables of a store."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from prefixstore.backends import extra_needed
from prefixstore.backends.contract import Backend
from prefixstore.backends.location import scheme_of
from prefixstore.errors import InvalidParameterError

if TYPE_CHECKING:
    from prefixstore.backends.sql.database import Database

__all__ = ["SQL_VERSION", "Status", "check", "create", "open_sql", "require_sql", "statements"]

# of the tables; what is in the rows has versions of its own
SQL_VERSION = 5


def open_sql(location: str, *, max_bytes: int, read_only: bool) -> Backend:
    """The store in this database; its budget is the engine's to keep."""
    database = _database(location, read_only=read_only)
    try:
        database.open()
    except BaseException:
        database.close()
        raise
    return database


def _database(location: str, *, read_only: bool) -> Database[Any]:
    """The database that a location names; nothing is opened yet. Raises `InvalidParameterError` if it names none."""
    require_sql(location)
    if scheme_of(location) == "sqlite":
        from prefixstore.backends.sql.sqlite import SQLite  # noqa: PLC0415 - only where it is used

        return SQLite(location, read_only=read_only)
    with extra_needed(location):
        from prefixstore.backends.sql.postgresql import PostgreSQL  # noqa: PLC0415 - needs an extra
    return PostgreSQL(location, read_only=read_only)


def require_sql(location: str) -> None:
    """Raise `InvalidParameterError` if a location is not the URL of a known database; needs no extra."""
    if scheme_of(location) not in ("sqlite", "postgres", "postgresql"):
        raise InvalidParameterError(
            "location is not a SQL database, and other locations need no migration; "
            'pass "sqlite:////path" or "postgresql+psycopg://user@host/db"'
        )


class Status(NamedTuple):
    """The version of the tables of a store, None if there is no store yet, and the one that is needed."""

    revision: int | None
    head: int

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to do."""
        return self.revision == self.head


def check(url: str) -> Status:
    """Whether there is a store. Changes nothing.

    Raises
    ------
    StorageError
        If the database cannot be opened, or is another application's or of another version.
    """
    with closing(_database(url, read_only=True)) as database:
        return Status(SQL_VERSION if database.has_store() else None, SQL_VERSION)


def create(url: str) -> Status:
    """Create the store, unless there is one; returns the status before. Raises as `check` does."""
    before = check(url)
    if not before.is_current:
        with closing(_database(url, read_only=False)) as database:
            database.create()
    return before


def statements(url: str) -> str:
    """The statements that `create` would run, to be run by hand; empty if there is nothing to do."""
    with closing(_database(url, read_only=True)) as database:
        return "" if database.has_store() else "".join(f"{statement};\n" for statement in database.STATEMENTS)
