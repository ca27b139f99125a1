"""The messages of ``prefixstore warm``: progress, problems, whether all prompts will fit, the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from prefixstore.cli.output import say
from prefixstore.store import PrefixStore
from prefixstore.units import counted, format_bytes, format_seconds, format_share
from prefixstore.warming.estimate import Estimate
from prefixstore.warming.job import Progress, WarmReport
from prefixstore.warming.prompts import Problem

__all__ = ["print_budget_note", "print_problems", "print_unstored", "progress_shown", "rows_of"]

# How many problems, and prompts that did not fit, are listed one by one.
LISTED = 10
# What a summary has only if there is any, and how it is called there.
UNUSUAL = {
    "short": "too short to store",
    "unstored": "not completely stored",
    "problems": "problems",
    "interrupted": "interrupted",
    "full": "stopped",
}
# what a summary says of them if they are true
TRUE = {"interrupted": "yes; run it again for the rest", "full": "the store is full"}
# How often a line is printed where there is no terminal.
LINE_SECONDS = 10.0


def print_budget_note(store: PrefixStore, location: str, expected: int) -> bool:
    """Say whether what is expected will find space; returns whether it can."""
    limit = store.parameters.budget.max_bytes
    free = max(0, limit - store.engine.upkeep.used()[0].bytes)
    needed = f"note: the prompts need about {format_bytes(expected)}"
    if expected > limit:
        say(
            f"{needed}, and {location} may hold {format_bytes(limit)}: "
            "not all will be stored; pass a larger --max-bytes, or fewer prompts"
        )
    elif expected > free:
        say(
            f"{needed}, and {format_bytes(free)} of {format_bytes(limit)} are free in {location}: "
            "other pages will be evicted; pass a larger --max-bytes to keep them"
        )
    return expected <= limit


def print_problems(problems: Sequence[Problem]) -> None:
    """Print problems to stderr; of many, the first ones."""
    for problem in problems[:LISTED]:
        say(str(problem))
    if len(problems) > LISTED:
        say(f"and {counted(len(problems) - LISTED, 'more problem')}; --json has all")


def print_unstored(report: WarmReport, dropped: dict[str, int]) -> None:
    """Print which prompts are not completely stored, and why."""
    unstored = report.unstored
    for where in unstored[:LISTED] if not report.full else ():
        say(f"{where}: not completely stored")
    if unstored:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "evicted since"
        are = "is" if len(unstored) == 1 else "are"
        say(
            f"{'the store is full, so this has stopped: ' if report.full else ''}"
            f"{counted(len(unstored), 'prompt')} {are} not completely stored (pages left out: {reasons}); "
            "pass a larger --max-bytes, or fewer prompts"
        )


def rows_of(found: WarmReport | Estimate) -> dict[str, object]:
    """The result of a job, or its expected cost, for the summary: by the names in JSON, without what did not happen."""
    rows: dict[str, object] = {}
    for name, value in asdict(found).items():
        n = len(value) if isinstance(value, tuple) else value
        if n or name not in UNUSUAL:
            text = format_bytes(n) if name.endswith("bytes") else f"{n:,.1f}" if isinstance(n, float) else f"{n:,}"
            rows[UNUSUAL.get(name, name.replace("_", " "))] = TRUE[name] if n is True else text
    return rows


# -- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def progress_shown() -> Iterator[Callable[[Progress], None]]:
    """A function that shows progress on stderr: in one line on a terminal, otherwise as a line from time to time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with console.status("") as status:
        yield lambda progress: status.update(Text(_text(progress), no_wrap=True, overflow="ellipsis"))


class _Lines:
    """A line on stderr at the beginning of each phase, and every `LINE_SECONDS`."""

    def __init__(self) -> None:
        self._last = (0.0, "")

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        at, phase = self._last
        if now - at >= LINE_SECONDS or progress.phase != phase:
            self._last = now, progress.phase
            typer.echo(_text(progress), err=True)


def _text(progress: Progress) -> str:
    """The progress as text."""
    if progress.phase == "reading":
        return "reading prompts"
    left = progress.seconds_left
    parts = [
        f"{format_seconds(left)} left" if left is not None else "",
        f"{progress.done_tokens:,} of {progress.missing_tokens:,} tokens",
        f"{progress.rate:,.0f} tokens/s",
        f"{format_bytes(progress.stored_bytes)} stored",
        f"{format_share(progress.hit_share)} hits",
    ]
    return f"{progress.phase}: {', '.join(filter(None, parts))}"
