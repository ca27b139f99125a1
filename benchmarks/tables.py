"""Helpers for the sections of the report."""

from __future__ import annotations

import textwrap


def milliseconds(seconds: float) -> str:
    """Seconds, as ms or µs."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"


def megabytes(size: float) -> str:
    """Bytes in MB."""
    return f"{size / 1e6:,.1f} MB"


def met(value: float, target: float, *, at_most: bool = False) -> str:
    """A figure, and whether it reached its goal."""
    reached = value <= target if at_most else value >= target
    return f"{value:.2f} ({'reached' if reached else 'missed'}: {'at most' if at_most else 'at least'} {target:g})"


def paragraph(text: str) -> list[str]:
    """The text, wrapped to 118 characters, and an empty line."""
    return [*textwrap.wrap(" ".join(text.split()), 118), ""]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]
