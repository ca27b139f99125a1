"""The messages of ``prefixstore warm``: problems, whether all prompts will fit, the result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixstore.cli.output import say
from prefixstore.store import PrefixStore
from prefixstore.units import counted, format_bytes
from prefixstore.warming.estimate import Estimate
from prefixstore.warming.prompts import Problem
from prefixstore.warming.report import WarmReport

__all__ = [
    "budget_of",
    "expected_rows",
    "print_budget_note",
    "print_problems",
    "print_unstored",
    "report_rows",
]

# How many prompts that did not fit are listed one by one.
LISTED = 10
# More equal problems than this are one line.
ALIKE = 3


@dataclass(frozen=True)
class Budget:
    """What a store may hold, what of that is free, and where it is."""

    location: str
    max_bytes: int
    free: int


def budget_of(store: PrefixStore, location: str) -> Budget:
    """The budget of a store for this location, and what of it is free."""
    max_bytes = store.parameters.budget.max_bytes
    return Budget(location, max_bytes, max(0, max_bytes - store.engine.used()[0].bytes))


def print_budget_note(budget: Budget, expected: int) -> bool:
    """Say whether what is expected will find space; returns whether it can."""
    needed = f"the prompts need about {format_bytes(expected)}"
    if expected > budget.max_bytes:
        say(
            f"note: {needed}, and {budget.location} may hold {format_bytes(budget.max_bytes)}: "
            "not all will be stored; pass a larger --max-bytes, or fewer prompts"
        )
        return False
    if expected > budget.free:
        say(
            f"note: {needed}, and {format_bytes(budget.free)} of {format_bytes(budget.max_bytes)} are free in "
            f"{budget.location}: other pages will be evicted; pass a larger --max-bytes to keep them"
        )
    return True


def print_problems(problems: Sequence[Problem]) -> None:
    """Print problems to stderr; many that are alike are one line."""
    for line in _grouped(problems):
        say(line)


def _grouped(problems: Sequence[Problem]) -> Iterator[str]:
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(re.sub(r"[0-9][0-9,]*", "#", problem.reason), []).append(problem)
    for group in groups.values():
        if len(group) <= ALIKE:
            yield from map(str, group)
            continue
        where = f"{group[0].where} … {group[-1].where}"
        if all(problem.tokens is not None for problem in group):
            longest = max(group, key=lambda problem: problem.tokens or 0)
            needed = f"{len(group):,} prompts need up to {longest.tokens:,} tokens ({where})"
            yield f"{needed}; the longest: {longest.reason}"
        else:
            yield f"{len(group):,} times, {where}: {group[0].reason}"


def print_unstored(unstored: tuple[str, ...], dropped: dict[str, int]) -> None:
    """Print which prompts are not completely stored, and why."""
    for where in unstored[:LISTED]:
        say(f"{where}: not completely stored")
    if unstored:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "evicted since"
        are = "is" if len(unstored) == 1 else "are"
        say(
            f"{counted(len(unstored), 'prompt')} {are} not completely stored (pages left out: {reasons}); "
            "consider a larger --max-bytes"
        )


def report_rows(report: WarmReport) -> dict[str, object]:
    """The result of a job, for the summary."""
    rows: dict[str, object] = {
        "prompts": f"{report.prompts:,}",
        "tokens in them": f"{report.prompt_tokens:,}",
        "unique tokens": f"{report.unique_tokens:,}",
        "not stored before": f"{report.missing_tokens:,}",
        "evaluated": f"{report.evaluated_tokens:,}",
        "stored": format_bytes(report.stored_bytes),
        "seconds": f"{report.seconds:,.1f}",
    }
    if report.short:
        rows["too short to store"] = f"{report.short:,}"
    if report.problems:
        rows["problems"] = f"{len(report.problems):,}"
    if report.interrupted:
        rows["interrupted"] = "yes; run it again for the rest"
    return rows


def expected_rows(expected: Estimate) -> dict[str, object]:
    """The expected cost of a job, for the summary."""
    return {
        "prompts": f"{expected.prompts:,}",
        "tokens in them": f"{expected.prompt_tokens:,}",
        "unique tokens": f"{expected.unique_tokens:,}",
        "to evaluate": f"{expected.missing_tokens:,}",
        "bytes": format_bytes(expected.bytes),
        "seconds": f"{expected.seconds:,.1f}",
        **({"problems": f"{len(expected.problems):,}"} if expected.problems else {}),
    }
