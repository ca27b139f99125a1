"""The schema of SQL stores: its revisions, run by Alembic, and ``prefixstore migrate``."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from prefixstore.backends import refusals
from prefixstore.backends.sql import database_of, extra_needed
from prefixstore.errors import IncompatibleError, LocationError

with extra_needed("sql"):
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import Connection, inspect, select, text
    from sqlalchemy.exc import SQLAlchemyError

    from prefixstore.backends.sql import schema
    from prefixstore.backends.sql.database import translate
    from prefixstore.backends.sql.schema import MAGIC, META, VERSION_TABLE

__all__ = [
    "Status",
    "check",
    "is_head",
    "migrations_directory",
    "require_head",
    "revision_of",
    "sql_between",
    "upgrade",
    "upgrade_connection",
    "upgrade_sql",
]


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


def _config(buffer: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=buffer) if buffer is not None else Config()
    # percent signs are escapes in the configuration
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    return config


def revision_of(connection: Connection, where: str) -> str | None:
    """The revision of the schema on a connection; None if it has none of the tables.

    Raises
    ------
    IncompatibleError
        If the tables are another application's, or of a newer version.
    """
    tables = inspect(connection)
    found = [tables.has_table(name) for name in (VERSION_TABLE, META.name)]
    if not any(found):
        return None
    foreign = refusals.foreign(where, "tables")
    if not all(found):
        raise foreign
    try:
        revisions = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()  # noqa: S608 - a constant
        meta = connection.execute(select(META.c.magic, META.c.format)).all()
    except SQLAlchemyError as error:
        # an unreachable server or a lock says nothing about the tables
        if isinstance(translate(error, where), IncompatibleError):
            raise foreign from None
        raise
    if [row.magic for row in meta] != [MAGIC] or len(revisions) != 1:
        raise foreign
    if revisions[0] in schema.UNRELEASED:
        raise IncompatibleError(
            f"{where} was written by a development version of prefixstore (schema {revisions[0]}); delete it, or "
            "choose another location"
        )
    if revisions[0] not in schema.REVISIONS:
        raise IncompatibleError(
            f"{where} has schema {revisions[0]}, this prefixstore knows up to {schema.HEAD}; upgrade "
            "prefixstore, or choose another location"
        )
    schema.require_format(meta, where)
    return str(revisions[0])


def is_head(revision: str | None) -> bool:
    """Whether this is the newest revision."""
    return revision == schema.HEAD


def require_head(revision: str | None, where: str) -> None:
    """Raise the error that names the command to run, if this is not the revision that is needed.

    Raises
    ------
    LocationError
        If there is no store.
    IncompatibleError
        If its schema is older.
    """
    if revision is None:
        raise LocationError(f'{where} holds no store; create one with: prefixstore migrate "{where}"')
    if revision != schema.HEAD:
        raise IncompatibleError(
            f"{where} has schema {revision}, this prefixstore needs {schema.HEAD}; stop all writers and run: "
            f'prefixstore migrate "{where}"'
        )


def upgrade_connection(connection: Connection) -> None:
    """Bring the schema to `HEAD` within the transaction that is open on a connection."""
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def sql_between(revision: str | None, dialect: str) -> str:
    """The statements that bring a schema of this revision to `HEAD`; empty if it is there."""
    if revision == schema.HEAD:
        return ""
    buffer = io.StringIO()
    config = _config(buffer)
    config.attributes["dialect"] = dialect
    command.upgrade(config, f"{revision or 'base'}:head", sql=True)
    return buffer.getvalue()


@dataclass(frozen=True)
class Status:
    """The schema of a store.

    Attributes
    ----------
    revision
        The revision of the store; None if there is no store yet.
    head
        The revision that this version of prefixstore needs.
    """

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
        return Status(database.revision(), schema.HEAD)


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
