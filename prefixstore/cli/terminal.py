"""Text that fits the terminal: how wide that is, lines that break between words, tables of numbers."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from prefixstore.report.labels import visible

__all__ = ["WIDE", "grid", "listed", "terminal_width", "width", "wrapped"]

GAP = "  "
NARROWEST_LABEL = 12
# where output goes to a file or a pipe
WIDE = 250


def width() -> int:
    """How many characters of a line can be shown on standard output; elsewhere as COLUMNS says, or many."""
    asked = os.environ.get("COLUMNS", "")
    return terminal_width(sys.stdout) or (int(asked) if asked.isdecimal() and int(asked) > 0 else WIDE)


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


def listed(parts: Sequence[str], columns: int, indent: str = "") -> Iterator[str]:
    """Parts, separated by commas, in lines that break between them; the first line after the indent, others further."""
    line = ""
    for i, part in enumerate(parts):
        text = part + "," * (i < len(parts) - 1)
        if line and len(line) + 1 + len(text) > columns:
            yield line
            line = f"{indent}  {text}"
        else:
            line = f"{line} {text}" if line else indent + text
    yield line


def grid(
    rows: Sequence[Sequence[str]], columns: int, header: Sequence[str] = (), *, keeps_all: bool = False
) -> list[str]:
    """The lines of a table whose first column is text, and whose others are numbers.

    Columns without any value are left out, unless it `keeps_all`. If it is wider than `columns`, the texts are
    shortened, and then the last numbers left out; nothing is broken in two.
    """
    n = max(map(len, rows), default=0)
    kept = [0, *(i for i in range(1, n) if keeps_all or any(row[i] not in ("", "-", "0") for row in rows))]
    names = [header[i] for i in kept] if header else []
    cells = [[visible(row[i]) for i in kept] for row in rows]
    while True:
        sizes = [max(map(len, column)) for column in zip(*([names] if names else []), *cells, strict=True)]
        room = columns - sum(len(GAP) + size for size in sizes[1:])
        if room >= min(sizes[0], NARROWEST_LABEL) or len(sizes) < 3:
            break
        names, cells = names[:-1], [row[:-1] for row in cells]
    sizes[0] = max(min(sizes[0], room), 1)
    lines = []
    for row in [*([names] if names else []), *cells]:
        first = row[0] if len(row[0]) <= sizes[0] else f"{row[0][: sizes[0] - 1]}…"
        numbers = [cell.rjust(size) for cell, size in zip(row[1:], sizes[1:], strict=True)]
        lines.append(GAP.join([first.ljust(sizes[0]), *numbers]).rstrip())
    return lines
