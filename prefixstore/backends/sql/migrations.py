"""``prefixstore migrate``: the schema of the store behind a URL."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from prefixstore.backends.sql import database_of

__all__ = ["Status", "check", "upgrade", "upgrade_sql"]


@dataclass(frozen=True)
class Status:
    """The schema of a store.

    Attributes
    ----------
    revision
        What it has; None if there is no store yet.
    head
        What this version of prefixstore needs.
    """

    revision: str | None
    head: str

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to do."""
        return self.revision == self.head


def check(url: str) -> Status:
    """Which revision the store has, and which one is needed. Changes nothing.

    Raises
    ------
    StorageError
        If the database cannot be opened, or is another application's or of a newer version.
    """
    with closing(database_of(url, read_only=True)) as database:
        from prefixstore.backends.sql.schema import HEAD  # noqa: PLC0415 - needs an extra

        return Status(database.revision(), HEAD)


def upgrade(url: str) -> Status:
    """Create the store, or bring its schema up to date; what it had before. Raises as `check` does."""
    before = check(url)
    if not before.is_current:
        with closing(database_of(url, read_only=False)) as database:
            database.upgrade()
    return before


def upgrade_sql(url: str) -> str:
    """The statements that `upgrade` would run, for somebody who runs them by hand; empty if there is nothing to do."""
    with closing(database_of(url, read_only=True)) as database:
        return database.statements(database.revision())
