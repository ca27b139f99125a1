"""The schema of SQL stores: the statements of its revisions, which Alembic prints, and ``prefixstore migrate``."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from prefixstore.backends.forks import adding
from prefixstore.backends.sql import database_of
from prefixstore.errors import IncompatibleError, LocationError

# the newest revision; a test compares it with the files in migrations/versions
HEAD = "4"
VERSION_TABLE = "prefixstore_schema"


def migrations_directory() -> Path:
    """Where the migrations are: in the installed package, or beside it in a working copy.

    Raises `LocationError` if they are in neither place.
    """
    package = Path(__file__).parents[2]
    for directory in (package / "migrations", package.parent / "migrations"):
        if (directory / "env.py").is_file():
            return directory
    raise LocationError(f"{package / 'migrations'} is missing: reinstall prefixstore")


def statements(revision: str | None, dialect: str, where: str) -> list[str]:
    """What brings the schema of a store from this revision to `HEAD`, None for no store; nothing if it is there.

    Raises `IncompatibleError` if the revision is that of another version, from which there is no way to this one.
    """
    if revision == HEAD:
        return []
    output = io.StringIO()
    config = Config(output_buffer=output, attributes={"dialect": dialect})
    # percent signs are escapes in the configuration
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    try:
        # Alembic's context is one for the process: two threads would get statements of each other
        with adding():
            command.upgrade(config, f"{revision or 'base'}:head", sql=True)
    except CommandError:
        raise IncompatibleError(
            f"{where} has schema {revision}, this prefixstore knows up to {HEAD}; upgrade prefixstore, or choose "
            "another location"
        ) from None
    return [text.strip() for text in output.getvalue().split(";\n") if text.strip()]


def check_schema(url: str) -> str | None:
    """The revision of the store, None if there is no store yet; the current one is `HEAD`. Changes nothing.

    Raises `StorageError` if the database cannot be opened, or is another application's or of a newer version.
    """
    with closing(database_of(url, read_only=True)) as database:
        return database.revision()


def upgrade(url: str) -> str | None:
    """Create the store, or bring its schema up to date; returns what `check_schema` did before, and raises as that."""
    before = check_schema(url)
    if before != HEAD:
        with closing(database_of(url, read_only=False)) as database:
            database.upgrade()
    return before
