"""The progress of a warming job on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from prefixstore.units import format_bytes
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
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}")]
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None, text="")

        def show(progress: Progress) -> None:
            total = progress.missing_tokens if progress.phase != "reading" else None
            bar.update(
                task, description=progress.phase, total=total, completed=progress.done_tokens, text=_text(progress)
            )

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


def _text(progress: Progress) -> str:
    """The progress as text."""
    left = progress.seconds_left
    parts = [
        f"{progress.done_tokens:,} of {progress.missing_tokens:,} tokens",
        f"{progress.rate:,.0f} tokens/s",
        f"{_duration(left)} left" if left is not None else "",
        f"{format_bytes(progress.stored_bytes)} stored",
        f"{progress.hit_share:.0%} hits",
    ]
    return ", ".join(part for part in parts if part)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
