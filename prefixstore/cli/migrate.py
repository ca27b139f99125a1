"""``prefixstore migrate``: the schema of SQL stores."""

from __future__ import annotations

import typer

from prefixstore.backends.location import without_password
from prefixstore.backends.sql import require_sql
from prefixstore.cli.command import Result
from prefixstore.cli.output import DONE, FAILED, say
from prefixstore.errors import InvalidParameterError

__all__ = ["migrate"]


def migrate(location: str, *, check: bool = False, sql: bool = False) -> Result:
    """Create a SQL store, or bring its schema up to date.

    Exit code 1 with --check: the schema is not up to date.

    Example: prefixstore migrate postgresql+psycopg://user@host/db --check
    """
    require_sql(location)
    from prefixstore.backends.sql import migrations as schema  # noqa: PLC0415 - the extras for SQL

    if check and sql:
        raise InvalidParameterError("--check and --sql cannot be combined")
    where = without_password(location)
    if sql:
        statements = schema.upgrade_sql(location)
        if not statements:
            say(f"{where}: the schema is up to date, so there are no statements")
        return Result({"sql": statements}, lambda: typer.echo(statements, nl=False))
    before = schema.check(location) if check else schema.upgrade(location)
    is_current = before.is_current or not check
    change = f"schema {before.revision or 'none'} -> {before.head} {'needed' if check else 'done'}"
    return Result(
        {"location": where, "revision": before.revision, "head": before.head, "current": is_current},
        f"{where}: schema {before.revision} is up to date" if before.is_current else f"{where}: {change}",
        DONE if is_current else FAILED,
    )
