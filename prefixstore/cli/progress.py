"""The progress of a warming job on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from prefixstore.units import format_bytes, format_seconds, format_share
from prefixstore.warming.report import Progress

__all__ = ["shown"]

# How often a line is printed where there is no terminal.
LINE_SECONDS = 10.0


@contextmanager
def shown() -> Iterator[Callable[[Progress], None]]:
    """A function that shows progress on stderr: as a bar on a terminal, otherwise as a line from time to time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    room = console.width
    width = max(8, min(40, room // 4))
    columns = [TextColumn("{task.description}"), BarColumn(width), TaskProgressColumn()]
    # what the other columns leave
    left = room - len("evaluating") - width - len("100%") - len(columns)
    with Bar(*columns, TextColumn("{task.fields[text]}"), console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None, text="")

        def show(progress: Progress) -> None:
            total = progress.missing_tokens if progress.phase != "reading" else None
            text = _text(progress, left) if progress.phase != "reading" else ""
            bar.update(task, description=progress.phase, total=total, completed=progress.done_tokens, text=text)

        yield show


class _Lines:
    """A line on stderr at the beginning of each phase, and every `LINE_SECONDS`."""

    def __init__(self) -> None:
        self._last = (0.0, "")

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        at, phase = self._last
        if now - at >= LINE_SECONDS or progress.phase != phase:
            self._last = now, progress.phase
            text = f"{progress.phase}: {_text(progress)}" if progress.phase != "reading" else "reading prompts"
            typer.echo(text, err=True)


def _text(progress: Progress, room: int | None = None) -> str:
    """The progress as text, as much of it as there is room for: what is left first."""
    left = progress.seconds_left
    parts = [
        f"{progress.done_tokens:,} of {progress.missing_tokens:,} tokens",
        f"{progress.rate:,.0f} tokens/s",
        f"{format_seconds(left)} left" if left is not None else "",
        f"{format_bytes(progress.stored_bytes)} stored",
        f"{format_share(progress.hit_share)} hits",
    ]
    if room is not None:
        shown: list[str] = []
        for i in (2, 0, 1, 3, 4):
            if parts[i] and len(", ".join([*shown, parts[i]])) <= room:
                shown.append(parts[i])
        parts = [part for part in parts if part in shown]
    return ", ".join(part for part in parts if part)
