"""What commands print, and their exit codes."""

from __future__ import annotations

import functools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer

from prefixstore.errors import IncompatibleError, LocationError, MisuseError, PrefixStoreError, UnavailableError

__all__ = ["ago", "emit", "fields", "guarded", "say", "table"]

DONE, FAILED, MISUSED, UNUSABLE = 0, 1, 2, 3
WIDE = 250


def guarded(command: Callable[..., int | None]) -> Callable[..., None]:
    """Wrap a command so that it ends with an exit code, and reports our errors as messages."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            code = command(*arguments, **options) or DONE
        except PrefixStoreError as error:
            say(f"prefixstore: {error}")
            code = _code_of(error)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        raise typer.Exit(code)

    return run


def _code_of(error: PrefixStoreError) -> int:
    if isinstance(error, MisuseError):
        return MISUSED
    return UNUSABLE if isinstance(error, (LocationError, IncompatibleError, UnavailableError)) else FAILED


def say(text: str) -> None:
    """Print a line to stderr."""
    typer.echo(text, err=True)


def emit(result: object) -> None:
    """Print a result to stdout, as JSON."""
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False))


def fields(values: dict[str, object]) -> None:
    """Print names and values to stdout, one pair a line."""
    table(["", ""], ([name, str(value)] for name, value in values.items()), header=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, header: bool = True) -> None:
    """Print a table to stdout; columns whose name ends in ``>`` are aligned to the right."""
    from rich import box  # noqa: PLC0415 - costs a quarter of the start
    from rich.console import Console  # noqa: PLC0415 - only for tables
    from rich.table import Table  # noqa: PLC0415 - as above

    shown = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False)
    for column in columns:
        shown.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    # outside a terminal, lines are not wrapped
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDE, markup=False, highlight=False).print(shown)


def ago(nanoseconds: int) -> str:
    """The time since then, as text: ``3 h ago``."""
    if not nanoseconds:
        return "never"
    seconds = time.time() - nanoseconds / 1e9
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
