"""``prefixstore migrate``: the schema of SQL stores."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixstore.backends.location import without_password
from prefixstore.backends.sql import require_sql
from prefixstore.cli.arguments import AsJson, Location
from prefixstore.cli.output import FAILED, emit, say, tell
from prefixstore.errors import InvalidParameterError

__all__ = ["migrate"]


def migrate(
    location: Location,
    *,
    check: Annotated[bool, typer.Option("--check", help="Only report whether the schema is up to date.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Only print the SQL statements.")] = False,
    as_json: AsJson = False,
) -> int:
    """Create a SQL store, or bring its schema up to date.

    Exit code 1 with --check: the schema is not up to date.

    Example: prefixstore migrate postgresql+psycopg://user@host/db --check
    """
    require_sql(location)
    from prefixstore.backends.sql import migrations as schema  # noqa: PLC0415 - the extras for SQL

    if check and sql:
        raise InvalidParameterError("--check and --sql cannot be combined")
    if sql:
        statements = schema.upgrade_sql(location)
        if as_json:
            emit({"sql": statements})
        elif statements:
            typer.echo(statements, nl=False)
        else:
            say(f"{without_password(location)}: the schema is up to date, so there are no statements")
        return 0
    before = schema.check(location) if check else schema.upgrade(location)
    where = without_password(location)
    if as_json:
        emit(
            {
                "location": where,
                "revision": before.revision,
                "head": before.head,
                "current": before.is_current or not check,
            }
        )
    elif before.is_current:
        tell(f"{where}: schema {before.revision} is up to date")
    else:
        change = f"schema {before.revision or 'none'} -> {before.head}"
        tell(f"{where}: {change} {'needed' if check else 'done'}")
    return FAILED if check and not before.is_current else 0
