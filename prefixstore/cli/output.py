"""What commands print, and their exit codes."""

from __future__ import annotations

import csv
import enum
import errno
import functools
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from prefixstore.backends.location import without_passwords
from prefixstore.cli.terminal import WIDE, terminal_width, wrapped
from prefixstore.errors import (
    IncompatibleError,
    InvalidParameterError,
    LocationError,
    MisuseError,
    PrefixStoreError,
    ServerBusyError,
    ServerUnreachableError,
    UnavailableError,
)
from prefixstore.report.labels import visible
from prefixstore.units import format_seconds

__all__ = [
    "Form",
    "Limit",
    "OutputForm",
    "ago",
    "emit",
    "fields",
    "form_of",
    "guarded",
    "iso",
    "rows_of",
    "say",
    "table",
    "tell",
    "visible_lines",
]

DONE, FAILED, MISUSED, UNUSABLE = 0, 1, 2, 3
# what `Path.is_file` raises for a path given by the user
HIDDEN = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
# a spreadsheet takes a cell that begins with one of these for a formula, and runs it
FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Form(str, enum.Enum):
    """How a list is printed."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    TSV = "tsv"


OutputForm = Annotated[
    Form | None, typer.Option("--format", help="Output format; --json is the same as --format json.")
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Show at most N.")]


def guarded(command: Callable[..., int | None]) -> Callable[..., None]:
    """Wrap a command so that it ends with an exit code, and reports errors of prefixstore as messages."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            code = command(*arguments, **options) or DONE
        except PrefixStoreError as error:
            # it may repeat an argument that was not where a location is expected
            say(f"prefixstore: {without_passwords(str(error))}")
            code = _code_of(error)
        except OSError as error:
            if error.errno not in HIDDEN or error.filename is None:
                raise
            say(f"prefixstore: {visible(os.fsdecode(error.filename))}: {error.strerror}")
            code = MISUSED
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        raise typer.Exit(code)

    return run


def _code_of(error: PrefixStoreError) -> int:
    if isinstance(error, MisuseError):
        return MISUSED
    unusable = (LocationError, IncompatibleError, UnavailableError, ServerUnreachableError, ServerBusyError)
    return UNUSABLE if isinstance(error, unusable) else FAILED


def say(text: str) -> None:
    """Print a line to stderr, broken between words on a terminal."""
    typer.echo(wrapped(text, sys.stderr), err=True)


def tell(text: str) -> None:
    """Print a line of text to stdout, broken between words on a terminal."""
    typer.echo(wrapped(text))


def visible_lines(text: str) -> str:
    """A text with its lines, and without what a terminal would obey."""
    return "\n".join(map(visible, text.split("\n")))


def emit(result: object) -> None:
    """Print a result to stdout, as JSON."""
    text = json.dumps(result, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # a name that is not valid UTF-8, or a terminal with few characters
        text = json.dumps(result, indent=2)
    typer.echo(text)


def form_of(form: Form | None, *, as_json: bool) -> Form:
    """The form that ``--format`` and ``--json`` ask for."""
    if as_json and form not in (None, Form.JSON):
        raise InvalidParameterError("--json and --format cannot be combined; pass one of them")
    return Form.JSON if as_json else form or Form.TEXT


def rows_of(rows: Iterable[Mapping[str, object]], form: Form) -> None:
    """Print rows with the same columns to stdout, as CSV or TSV, with a header."""
    written = io.StringIO()
    writer: Any = None
    for row in rows:
        if writer is None:
            delimiter = "\t" if form is Form.TSV else ","
            writer = csv.DictWriter(written, list(row), delimiter=delimiter, lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: _cell(value, form) for name, value in row.items()})
    typer.echo(written.getvalue(), nl=False)


def _cell(value: object, form: Form) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    if value.startswith(FORMULA):
        # prompts and names of tenants may come from anyone
        value = f"'{value}"
    if form is Form.TSV:
        # one line per row
        return value.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    return value


def fields(values: dict[str, object]) -> None:
    """Print names and values to stdout, one pair a line."""
    table(["", ""], ([name, str(value)] for name, value in values.items()), header=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, header: bool = True) -> None:
    """Print a table to stdout; columns whose name ends in ``>`` are aligned to the right, empty ones are left out.

    Where the terminal is too narrow for a table with these columns, each row is a list of names and values.
    """
    from rich import box  # noqa: PLC0415 - costs a quarter of the start
    from rich.console import Console  # noqa: PLC0415 - only for tables
    from rich.table import Table  # noqa: PLC0415 - as above

    rows = [list(row) for row in rows]
    if header:
        kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
        columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    shown = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False)
    for column in columns:
        shown.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    # outside a terminal, lines are not wrapped
    console = Console(file=sys.stdout, width=terminal_width(sys.stdout) or WIDE, markup=False, highlight=False)
    if header and Console(width=WIDE).measure(shown).maximum > console.width:
        for row in rows:
            console.print()
            fields({column.rstrip(">"): value for column, value in zip(columns, row, strict=True) if value})
        return
    with console.capture() as captured:
        console.print(shown)
    # it fills each line up to the width of the table
    typer.echo("\n".join(line.rstrip() for line in captured.get().split("\n")), nl=False)


def iso(nanoseconds: int) -> str | None:
    """A time as in JSON; None for none."""
    return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).isoformat() if nanoseconds else None


def ago(nanoseconds: int) -> str:
    """The time since then, as text: ``3 h ago``."""
    return f"{format_seconds(max(round(time.time() - nanoseconds / 1e9), 0))} ago" if nanoseconds else "never"
