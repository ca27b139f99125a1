"""What commands print, what they ask, and how text fits the terminal."""

from __future__ import annotations

import csv
import enum
import io
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TextIO, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixstore.report.labels import visible
from prefixstore.units import format_seconds

__all__ = [
    "Form",
    "ago",
    "columns_shown",
    "confirmed",
    "emit",
    "fields",
    "grid",
    "has_terminal",
    "iso",
    "listed",
    "may_replace",
    "rows_of",
    "say",
    "table",
    "tell",
    "terminal_width",
    "visible_lines",
    "wrapped",
]

DONE, FAILED = 0, 1
# where output goes to a file or a pipe
WIDE = 250
# a column of texts is not made narrower than this: columns of numbers are left out instead
NARROWEST_LABEL = 12
# a spreadsheet takes a cell that begins with one of these for a formula, and runs it
FORMULA = ("=", "+", "-", "@", "\t", "\r")

_T = TypeVar("_T")


# -- lines ------------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a line to stderr, broken between words on a terminal."""
    typer.echo(wrapped(text, sys.stderr), err=True)


def tell(text: str) -> None:
    """Print a line of text to stdout, broken between words on a terminal."""
    typer.echo(wrapped(text))


def visible_lines(text: str) -> str:
    """A text with its lines, and without what a terminal would obey."""
    return "\n".join(map(visible, text.split("\n")))


def columns_shown() -> int:
    """How many characters of a line of standard output can be shown."""
    return terminal_width(sys.stdout) or WIDE


def terminal_width(stream: TextIO) -> int | None:
    """How wide the terminal is; None if it is none, whatever COLUMNS says: readline sets that for child processes."""
    if not stream.isatty():
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 0
    return columns or shutil.get_terminal_size().columns


def wrapped(text: str, stream: TextIO | None = None, *, label: str = "") -> str:
    """A text with its lines broken between words where they are too long for standard output, or another stream.

    In a file or a pipe each line stays one. So does a word, such as a path, that is longer than the terminal is wide.

    Parameters
    ----------
    text
        The text.
    stream
        Where it is printed; standard output by default.
    label
        The text before it. All further lines are indented by its width, or else by two spaces.
    """
    columns = terminal_width(stream or sys.stdout)
    lines = []
    for i, line in enumerate(text.split("\n")):
        words = line.lstrip(" ")
        start = (label if i == 0 else " " * len(label)) + line[: len(line) - len(words)]
        indent = " " * (len(start) + 2 * (not label))
        lines.append(start + words if columns is None else _folded(words, columns, start, indent))
    return "\n".join(lines)


def _folded(text: str, columns: int, start: str, indent: str) -> str:
    return textwrap.fill(
        text, columns, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def listed(parts: Iterable[str], columns: int, start: str = "") -> list[str]:
    """Parts that are not empty, with commas, in lines that break between them; no line without any.

    The first line begins with `start`, and all others are indented two spaces more than that is.
    """
    # of the spaces within a part, none is a place to break at
    text = ", ".join(part.replace(" ", "\xa0") for part in parts if part)
    indent = " " * (len(start) - len(start.lstrip(" ")) + 2)
    lines = _folded(text, columns, start, indent).split("\n") if text else []
    return [line.replace("\xa0", " ") for line in lines]


# -- data -------------------------------------------------------------------------------------------------------------


class Form(str, enum.Enum):
    """How a list is printed."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    TSV = "tsv"


def emit(result: object) -> None:
    """Print a result to stdout, as JSON."""
    text = json.dumps(result, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # a name that is not valid UTF-8, or a terminal with few characters
        text = json.dumps(result, indent=2)
    typer.echo(text)


def rows_of(rows: Sequence[Mapping[str, object]], form: Form) -> None:
    """Print rows with the same columns to stdout, as JSON, or as CSV or TSV with a header."""
    if form is Form.JSON:
        emit(rows)
        return
    written = io.StringIO()
    if rows:
        delimiter = "\t" if form is Form.TSV else ","
        writer: Any = csv.DictWriter(written, list(rows[0]), delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value, form) for name, value in row.items()} for row in rows)
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


def iso(nanoseconds: int) -> str | None:
    """A time as in JSON; None for none."""
    return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).isoformat() if nanoseconds else None


def ago(nanoseconds: int) -> str:
    """The time since then, as text: ``3 h ago``."""
    return f"{format_seconds(max(round(time.time() - nanoseconds / 1e9), 0))} ago" if nanoseconds else "never"


# -- tables -----------------------------------------------------------------------------------------------------------


def fields(values: Mapping[str, object]) -> None:
    """Print names and values to stdout, one pair a line."""
    rows = [[name, str(value)] for name, value in values.items()]
    _print_lines(_rendered(_table(["", ""], rows), columns_shown()))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout; columns whose name ends in ``>`` are aligned to the right, empty ones are left out.

    Where the terminal is too narrow for a table with these columns, each row is a list of names and values.
    """
    rows = [list(row) for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    shown, room = _table(columns, rows, box.SIMPLE_HEAD), columns_shown()
    if Console(width=WIDE).measure(shown).maximum <= room:
        _print_lines(_rendered(shown, room))
        return
    for row in rows:
        typer.echo()
        fields({column.rstrip(">"): value for column, value in zip(columns, row, strict=True) if value})


def grid(rows: Sequence[Sequence[str]], columns: int, header: Sequence[str]) -> list[str]:
    """The lines of a table whose first column is text, and whose others are numbers.

    If it is wider than `columns`, the texts are shortened, and then the last numbers left out; nothing is broken in
    two.
    """
    label = max(len(row[0]) for row in [header, *rows])
    for n in range(len(header), 0, -1):
        cells = [[visible(cell) for cell in row[:n]] for row in rows]
        shown = _table([header[0], *(f"{name}>" for name in header[1:n])], cells, is_one_line=True)
        shown.columns[0].min_width = min(label, NARROWEST_LABEL)
        if n < 3 or Console(width=WIDE).measure(shown).minimum <= columns:
            break
    return _rendered(shown, columns)


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], lines: box.Box | None = None, *, is_one_line: bool = False
) -> Table:
    """A table; if each row `is_one_line`, a first column that is too wide is shortened."""
    shown = Table(box=lines, show_header=any(name.rstrip(">") for name in columns), pad_edge=False)
    for i, column in enumerate(columns):
        is_number = column.endswith(">")
        shown.add_column(
            Text(column.rstrip(">")),
            justify="right" if is_number else "left",
            overflow="ellipsis" if is_one_line else "fold",
            no_wrap=is_one_line and i > 0,
        )
    for row in rows:
        shown.add_row(
            *(Text(cell, no_wrap=is_one_line, overflow="ellipsis" if is_one_line else "fold") for cell in row)
        )
    return shown


def _rendered(shown: Table, room: int) -> list[str]:
    console = Console(file=sys.stdout, width=room, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    # it fills each line up to the width of the table
    return [line.rstrip() for line in captured.get().removesuffix("\n").split("\n")]


def _print_lines(lines: Iterable[str]) -> None:
    typer.echo("\n".join(lines))


# -- questions --------------------------------------------------------------------------------------------------------


def has_terminal() -> bool:
    """Whether there is someone to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def is_confirmed(question: str) -> bool:
    """Ask on a terminal whether to go on; a no is reported."""
    if typer.confirm(wrapped(question, sys.stderr), err=True):
        return True
    say("nothing was changed")
    return False


def may_replace(path: object, *, yes: bool) -> bool:
    """Whether a file that exists may be replaced: with ``--yes``, or by the answer on a terminal; a no is reported."""
    question = f"{path} exists; replace it?"
    if yes or has_terminal():
        return yes or is_confirmed(question)
    say(f"{question} Without a terminal to ask on, that needs --yes")
    return False


def confirmed(
    delete: Callable[..., _T], question: Callable[[_T], str | None], *, dry_run: bool, yes: bool
) -> _T | None:
    """Delete, after asking on a terminal; None if the answer was no.

    Parameters
    ----------
    delete
        Deletes, or with ``dry_run=True`` finds out what that would be.
    question
        What to ask about that; None if it is nothing to ask about.
    dry_run, yes
        Whether these options were given.
    """
    if dry_run:
        return delete(dry_run=True)
    if not yes and has_terminal():
        text = question(delete(dry_run=True))
        if text is not None and not is_confirmed(text):
            return None
    return delete(dry_run=False)
