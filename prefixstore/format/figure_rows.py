"""Rows of counts, by namespace and purpose: added up, reduced if a note is too small for them, and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

from prefixstore.format.figures import LATEST, OTHERS

__all__ = [
    "LONGEST",
    "MOST_ROWS",
    "Rows",
    "add_rows",
    "fitted",
    "moment",
    "of_counts",
    "of_rows",
    "text",
    "to_counts",
    "to_rows",
    "whole",
]

# rows of one period; what is counted of further namespaces is one row
MOST_ROWS = 1024
LONGEST = 64
# names of counts, as they are stored
SHORT = {
    "h": "hits",
    "l": "live_hits",
    "p": "prompt_tokens",
    "r": "tokens_restored",
    "c": "tokens_computed",
    "s": "saved_microseconds",
    "e": "evictions",
}
LONG = {name: short for short, name in SHORT.items()}

# by namespace (16 digits) and purpose
Rows: TypeAlias = dict[tuple[str, str], "Counter[str]"]


def add_rows(rows: Rows, more: Rows) -> None:
    """Add counts; those of namespaces that are too many are added to one row."""
    for row, counts in more.items():
        kept = row if row in rows or len(rows) < MOST_ROWS else (OTHERS, row[1])
        rows.setdefault(kept, Counter()).update(counts)


def fitted(packed: Any, periods: list[Rows]) -> bytes | None:
    """What `packed` makes of these rows, or of fewer: in each period, those that count least are added up."""
    keep = max((len(rows) for rows in periods), default=0)
    while True:
        note: bytes | None = packed(*(_reduced(rows, keep) for rows in periods))
        if note is not None or keep == 0:
            return note
        keep //= 2


def _reduced(rows: Rows, keep: int) -> Rows:
    """The rows that count most, and the others as one for each purpose."""
    if len(rows) <= keep:
        return rows
    order = sorted(rows, key=lambda row: (-sum(map(abs, rows[row].values())), row))
    kept = {row: rows[row] for row in order[:keep] if row[0] != OTHERS}
    reduced: Rows = dict(kept)
    for row in order:
        if row not in kept:
            # not "+", which loses what is below zero
            reduced.setdefault((OTHERS, row[1]), Counter()).update(rows[row])
    return reduced


def of_rows(rows: Rows) -> list[object]:
    """Rows as JSON has them."""
    return [[namespace, purpose, of_counts(counts)] for (namespace, purpose), counts in rows.items()]


def to_rows(rows: Any) -> Rows:
    """Rows from JSON; raises what a value of an unexpected kind raises."""
    found: Rows = {}
    for namespace, purpose, counts in rows:
        found.setdefault((text(namespace), text(purpose)), Counter()).update(to_counts(counts))
    return found


def of_counts(counts: Counter[str]) -> dict[str, int]:
    """Counts as JSON has them, without zeros."""
    return {LONG.get(name, name): n for name, n in counts.items() if n}


def to_counts(counts: Any) -> Counter[str]:
    """Counts from JSON, as `to_rows`."""
    return Counter({SHORT.get(name, name): whole(n) for name, n in counts.items() if len(name) <= LONGEST})


def whole(value: Any) -> int:
    """A number of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError(value)
    return value


def moment(value: Any) -> float:
    """A time in seconds since the epoch that is a date."""
    found = float(value)
    # not a NaN either
    if not 0 <= found <= LATEST:
        raise ValueError(value)
    return found


def text(value: Any, longest: int = LONGEST) -> str:
    """A text that is not too long."""
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(value)
    return value
