"""What commands print, and what they ask."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from typing import TypeVar

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from prefixstore.report.labels import visible
from prefixstore.units import format_bytes, format_seconds

DONE, FAILED = 0, 1
# columns of a file or a pipe, where no table is too wide
WIDE = 10_000
# a column of texts is not made narrower than this
NARROWEST = 12

_T = TypeVar("_T")


# -- lines ------------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a line to stderr, without what a terminal would obey."""
    typer.echo(visible_lines(text), err=True)


def tell(text: str) -> None:
    """Print a line to stdout, without what a terminal would obey."""
    typer.echo(visible_lines(text))


def visible_lines(text: str) -> str:
    """A text with its lines, and without what a terminal would obey."""
    return "\n".join(map(visible, text.split("\n")))


# -- data -------------------------------------------------------------------------------------------------------------


def emit(result: object) -> None:
    """Print a result to stdout, as JSON."""
    text = json.dumps(result, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # a name that is not valid UTF-8, or a terminal with few characters
        text = json.dumps(result, indent=2)
    typer.echo(text)


def iso(nanoseconds: int) -> str | None:
    """A time as in JSON; None for none."""
    return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).isoformat() if nanoseconds else None


def ago(nanoseconds: int) -> str:
    """The time since then, as text: ``3 h ago``."""
    return f"{format_seconds(max(round(time.time() - nanoseconds / 1e9), 0))} ago" if nanoseconds else "never"


# -- tables -----------------------------------------------------------------------------------------------------------


def fields(values: Mapping[str, object]) -> None:
    """Print names and values to stdout, one pair a line."""
    table(["", ""], ([name, str(value)] for name, value in values.items()))


def listed(columns: Mapping[str, str], facts: Iterable[Mapping[str, object]]) -> None:
    """Print a table of facts to stdout: by the name of a column, see `table_of`, that of the fact in it."""
    table(list(columns), ([in_words(name, one.get(name)) for name in columns.values()] for one in facts))


def in_words(name: str, value: object) -> str:
    """A fact as people read it; empty for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_bytes(value) if name.endswith("bytes") else f"{value:,}"
    return f"{value:.2g}" if isinstance(value, float) else str(value or "")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout; see `table_of`."""
    print_all(table_of(columns, rows))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; columns whose name ends in ``>`` are aligned to the right, and empty ones are left out.

    Where the terminal is too narrow, texts take several lines; if that is not enough, rows are names and values.
    """
    cells = [list(map(visible, row)) for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    titles = [name.rstrip(">") for name in columns]
    has_header = any(titles)
    sizes = {i: max(len(row[i]) for row in [titles, *cells]) for i in kept}
    least = sum(size if columns[i].endswith(">") else min(size, NARROWEST) for i, size in sizes.items())
    if has_header and least + 2 * len(kept) > (terminal_width() or WIDE):
        facts = [[[titles[i], row[i]] for i in kept if row[i]] + [["", ""]] for row in cells]
        return table_of(["", ""], chain.from_iterable(facts))
    shown = Table(box=None, show_header=has_header, pad_edge=False)
    for i in kept:
        if columns[i].endswith(">"):
            shown.add_column(Text(titles[i]), justify="right", no_wrap=True)
        else:
            shown.add_column(Text(titles[i]), overflow="fold")
    for row in cells:
        shown.add_row(*(Text(row[i]) for i in kept))
    return shown


def terminal_width() -> int | None:
    """How wide the terminal is to which stdout goes; None if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_all(*parts: RenderableType) -> None:
    """Print tables, and texts as lines, to stdout."""
    console = Console(file=sys.stdout, width=terminal_width() or WIDE, color_system=None, markup=False)
    for part in parts:
        if isinstance(part, str):
            tell(part)
            continue
        with console.capture() as captured:
            console.print(part)
        # it fills each line up to the width of the table
        tell("\n".join(line.rstrip() for line in captured.get().removesuffix("\n").split("\n")))


# -- questions --------------------------------------------------------------------------------------------------------


def has_terminal() -> bool:
    """Whether there is someone to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def is_confirmed(question: str) -> bool:
    """Ask on a terminal whether to go on; a no is reported."""
    typer.echo(f"{visible_lines(question)} [y/N] ", nl=False, err=True)
    answer = ""
    try:
        answer = sys.stdin.readline()
    finally:
        if not answer.endswith("\n"):
            # Ctrl-C and Ctrl-D leave the cursor in the line
            typer.echo(err=True)
    if answer.strip().lower() in ("y", "yes"):
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

    `delete` finds out with ``dry_run=True`` what that would be; `question` says what to ask about that, or None.
    """
    if dry_run:
        return delete(dry_run=True)
    if not yes and has_terminal():
        text = question(delete(dry_run=True))
        if text is not None and not is_confirmed(text):
            return None
    return delete(dry_run=False)
