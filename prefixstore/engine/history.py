"""How a location was used, read from its notes; `engine.history_keeper` writes them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from prefixstore.engine.page_view import View
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.figure_notes import ABOUT, NOTE, About, Running, parse_chunk
from prefixstore.format.figure_rows import Rows, add_rows
from prefixstore.format.figures import DAY, HOUR, LATEST, MINUTE, Described, Figures, History, Period, Request
from prefixstore.format.namespace import Namespace
from prefixstore.stats import Asked, Ledger, Purpose

__all__ = [
    "LONGEST_NAME",
    "REQUESTS_KEPT",
    "days_note",
    "described",
    "hours_note",
    "read_history",
    "request_of",
    "short",
]

log = logging.getLogger("prefixstore")

_T = TypeVar("_T")

REQUESTS_KEPT = 16
# characters of names that users have chosen
LONGEST_NAME = 200


def hours_note(day: int) -> bytes:
    """The name of the note with the hours of a day (since the epoch)."""
    return b"%s/hours/%d" % (NOTE, day)


def days_note(block: int) -> bytes:
    """The name of the note with the days of a block."""
    return b"%s/days/%d" % (NOTE, block)


def short(key: bytes) -> str:
    """The short name of a namespace in figures: the first 16 digits of its key."""
    return key.hex()[:16]


def described(namespace: Namespace, names: Mapping[str, str | None] | None = None) -> Described:
    """What a namespace is, from its settings and from what a file of the model says."""

    def text(value: object) -> str | None:
        return str(value)[:LONGEST_NAME] if value not in (None, "") else None

    settings = namespace.settings
    known = {name: text(value) for name, value in (names or {}).items()}
    return Described(
        short(namespace.key),
        text(settings.get("salt")),
        text(settings.get("label") or settings.get("server")),
        (text(settings.get("model")) or "")[:12] or None,
        **known,
    )


def request_of(asked: Asked) -> Request:
    """As figures have it."""
    return Request(
        round(asked.at, 3),
        short(asked.namespace),
        asked.purpose,
        asked.source,
        asked.prompt_tokens,
        asked.restored_tokens,
    )


def read_history(view: View, now: float, waiting: Ledger | None = None) -> History:
    """How a location was used. What cannot be read is left out, with a warning."""
    warned = False

    def parsed(parse: Callable[[bytes | None], _T], name: bytes, default: _T) -> _T:
        nonlocal warned
        try:
            return parse(view.note(name))
        except (CorruptError, IncompatibleError) as error:
            if not warned:
                log.warning("figures cannot be used: %s", error)
            warned = True
            return default

    running = parsed(Running.parse, NOTE, Running())
    about = parsed(About.parse, ABOUT, About())
    hours: dict[int, Rows] = {}
    days: dict[int, Rows] = {}
    nothing: dict[int, Rows] = {}
    for day in running.days:
        hours.update(parsed(parse_chunk, hours_note(day), nothing))
    for block in running.blocks:
        days.update(parsed(parse_chunk, days_note(block), nothing))
    fresh: dict[int, Rows] = {running.hour: running.rows} if running.rows else {}
    minutes = dict(running.minutes)
    if waiting is not None:
        for (hour, key, purpose), counts in waiting.rows.items():
            add_rows(fresh.setdefault(hour, {}), {(short(key) if key else "", purpose): counts})
        for minute, counts in waiting.minutes.items():
            minutes[minute] = Counter(minutes.get(minute, {}))
            minutes[minute].update(counts)
    for hour, rows in fresh.items():
        add_rows(hours.setdefault(hour, {}), rows)
        add_rows(days.setdefault(hour * HOUR // DAY, {}), rows)
    requests = [*running.requests, *(request_of(one) for one in (waiting.asked if waiting is not None else ()))]
    return History(
        now,
        tuple(
            Period(minute * MINUTE, MINUTE, "", Purpose.SERVING.value, Figures.of(counts))
            for minute, counts in sorted(minutes.items())
        ),
        _periods(hours, HOUR),
        _periods(days, DAY),
        about.described,
        tuple(sorted(requests, key=lambda one: one.at)[-REQUESTS_KEPT:]),
        tuple(running.writers.values()),
        about.max_bytes,
        about.max_entries,
    )


def _periods(found: Mapping[int, Rows], seconds: int) -> tuple[Period, ...]:
    # numbers that are no dates are of a note that is damaged
    return tuple(
        Period(number * seconds, seconds, namespace, purpose, Figures.of(counts))
        for number, rows in sorted(found.items())
        if 0 <= number * seconds <= LATEST
        for (namespace, purpose), counts in sorted(rows.items())
    )
