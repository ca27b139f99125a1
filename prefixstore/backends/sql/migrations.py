"""The schema of SQL stores: its revisions, run by Alembic, and ``prefixstore migrate``."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prefixstore.backends.sql import database_of, extra_needed
from prefixstore.errors import IncompatibleError, LocationError

with extra_needed("sql"):
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError
    from sqlalchemy import Connection, create_engine
    from sqlalchemy.pool import StaticPool

__all__ = [
    "HEAD",
    "VERSION_TABLE",
    "Status",
    "check",
    "migrations_directory",
    "require_known",
    "sql_between",
    "transaction",
    "upgrade",
    "upgrade_connection",
    "upgrade_sql",
]

# the newest revision; a test compares it with the files in migrations/versions
HEAD = "4"
# of development versions
UNRELEASED = ("0001", "0002", "1", "2", "3")
VERSION_TABLE = "prefixstore_schema"


def migrations_directory() -> Path:
    """Where the migrations are: in the installed package, or beside it in a working copy.

    Raises
    ------
    LocationError
        If they are in neither place.
    """
    package = Path(__file__).parents[2]
    for directory in (package / "migrations", package.parent / "migrations"):
        if (directory / "env.py").is_file():
            return directory
    raise LocationError(f"{package / 'migrations'} is missing: reinstall prefixstore")


def _config(output: io.StringIO | None = None, **attributes: Any) -> Config:
    config = Config(output_buffer=output, attributes=attributes)
    # percent signs are escapes in the configuration
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    return config


def require_known(revision: str, where: str) -> None:
    """Refuse a revision that cannot be read, nor upgraded: that of a development version, or of a newer one.

    Raises
    ------
    IncompatibleError
        If it is.
    """
    if revision == HEAD:
        return
    if revision in UNRELEASED:
        raise IncompatibleError(
            f"{where} was written by a development version of prefixstore (schema {revision}); delete it, or choose "
            "another location"
        )
    try:
        ScriptDirectory.from_config(_config()).get_revision(revision)
    except CommandError:
        raise IncompatibleError(
            f"{where} has schema {revision}, this prefixstore knows up to {HEAD}; upgrade prefixstore, or choose "
            "another location"
        ) from None


@contextmanager
def transaction(driver: Any, dialect: str, begin: str, **options: Any) -> Iterator[Connection]:
    """A transaction on a connection of a driver, for `upgrade_connection`. Alembic leaves it to us to commit it."""
    engine = create_engine(f"{dialect}://", creator=lambda: driver, poolclass=StaticPool, **options)
    with engine.connect() as connection:
        connection.exec_driver_sql(begin)
        yield connection
        connection.exec_driver_sql("COMMIT")


def upgrade_connection(connection: Connection) -> None:
    """Bring the schema to `HEAD` within the transaction that is open on a connection."""
    command.upgrade(_config(connection=connection), "head")


def sql_between(revision: str | None, dialect: str) -> str:
    """The statements that bring a schema of this revision to `HEAD`; empty if it is there."""
    if revision == HEAD:
        return ""
    output = io.StringIO()
    command.upgrade(_config(output, dialect=dialect), f"{revision or 'base'}:head", sql=True)
    return output.getvalue()


class Status(NamedTuple):
    """The revision that a store has, None if there is no store yet, and the one that this version needs."""

    revision: str | None
    head: str

    @property
    def is_current(self) -> bool:
        """Whether the schema is up to date."""
        return self.revision == self.head


def check(url: str) -> Status:
    """The revision that the store has, and the one that is needed. Changes nothing.

    Raises
    ------
    StorageError
        If the database cannot be opened, or is another application's or of a newer version.
    """
    with closing(database_of(url, read_only=True)) as database:
        return Status(database.revision(), HEAD)


def upgrade(url: str) -> Status:
    """Create the store, or bring its schema up to date; returns the status before. Raises as `check` does."""
    before = check(url)
    if not before.is_current:
        with closing(database_of(url, read_only=False)) as database:
            database.upgrade()
    return before


def upgrade_sql(url: str) -> str:
    """The statements that `upgrade` would run, to be run by hand; empty if there is nothing to do."""
    with closing(database_of(url, read_only=True)) as database:
        return database.statements(database.revision())
