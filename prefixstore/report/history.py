"""How a location was used: by hour and by day, as far as the location keeps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixstore.engine.figures import read_history
from prefixstore.engine.page_view import View
from prefixstore.format.figures import PASSED, Figures, Period
from prefixstore.stats import Purpose

__all__ = ["Asked", "Kept", "kept_of"]


class Asked(NamedTuple):
    """What was asked in an hour, or in a day.

    Attributes
    ----------
    began
        Seconds since the epoch.
    hits, misses
        Prompts of which something was restored, and of which nothing was.
    prompt_tokens, restored_tokens, computed_tokens
        Tokens of these prompts: all, from the store, and computed.
    evicted
        Pages that were evicted.
    """

    began: int
    hits: int
    misses: int
    prompt_tokens: int
    restored_tokens: int
    computed_tokens: int
    evicted: int = 0


@dataclass(frozen=True)
class Kept:
    """The statistics that a location keeps.

    Attributes
    ----------
    hours, days
        Those of the last week, and of the last year, in which something was asked; oldest first.
    max_bytes
        What the location may hold; None if it is not kept.
    titles
        What models are called, by the first 16 digits of the keys of their namespaces.
    """

    hours: list[Asked] = field(default_factory=list)
    days: list[Asked] = field(default_factory=list)
    max_bytes: int | None = None
    titles: Mapping[str, str] = field(default_factory=dict)


def kept_of(view: View, now: int) -> Kept:
    """The statistics in a location; empty ones if it keeps none.

    Parameters
    ----------
    view
        Of the location.
    now
        Nanoseconds since the epoch.
    """
    history = read_history(view, now / 1e9)
    titles = {name: one.title for name, one in history.described.items()}
    return Kept(_asked(history.hours), _asked(history.days), history.max_bytes, titles)


def _asked(periods: Iterable[Period]) -> list[Asked]:
    """What was asked of all namespaces while they served, by the time when it began."""
    found: defaultdict[int, list[Figures]] = defaultdict(list)
    for one in periods:
        if one.purpose == Purpose.SERVING.value:
            found[one.start].append(one.figures)
    return [_of(began, Figures.sum(some)) for began, some in sorted(found.items())]


def _of(began: int, one: Figures) -> Asked:
    misses = sum(n for reason, n in one.misses.items() if reason not in PASSED)
    return Asked(began, one.hits, misses, one.prompt_tokens, one.tokens_restored, one.tokens_computed, one.evictions)
