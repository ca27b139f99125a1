"""The note in which a location keeps how it was used: parts in JSON, compressed, with a checksum.

Counts are kept by hour for a week and by day for a year. A day of which hours are kept is the sum of its hours, and of
what is left of hours that are too old.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, TypeAlias

from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.figures import (
    DAY,
    HOUR,
    LATEST,
    MINUTE,
    OTHERS,
    Described,
    Figures,
    History,
    Period,
    Writer,
)
from prefixstore.format.saved_state import MAX_STATE_BYTES, pack_state, unpack_state
from prefixstore.stats import MINUTES_KEPT, REQUESTS_KEPT, Ledger, Purpose, Request

__all__ = ["NOTE", "FigureNote", "Periods", "Rows"]

NOTE = b"figures"
VERSION = "1"
HOURS_KEPT, DAYS_KEPT, WRITERS_KEPT = 168, 384, 16
# the clocks of other machines may be a little ahead
MINUTES_AHEAD = 2
# namespaces with rows of their own in one period, and those that are described
MOST_ROWS, MOST_DESCRIBED = 1024, 2048
# characters of what is not a name, and of what is
LONGEST, LONGEST_DESCRIPTION = 64, 1024

# what a value of an unexpected kind raises
UNEXPECTED = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)

Rows: TypeAlias = dict[tuple[str, str], "Counter[str]"]
"""Counts by namespace (16 digits) and purpose."""


class Periods:
    """Rows by hour, or by day, since the epoch. Each period is parsed when it is used first: mostly it is not.

    Parameters
    ----------
    found
        The periods, as rows or as they are stored.
    """

    def __init__(self, found: Mapping[int, Rows | bytes] | None = None) -> None:
        self._found = dict(found or {})

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._found))

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, number: int) -> Rows:
        """The rows of a period: none if they are damaged, or if there is no such period."""
        rows = self._found.get(number, {})
        if isinstance(rows, bytes):
            try:
                rows = _to_rows(json.loads(rows))
            except UNEXPECTED:
                rows = {}
            self._found[number] = rows
        return rows

    def add(self, number: int, more: Rows) -> None:
        """Add counts to a period; those of namespaces that are too many are added to one row."""
        rows = self._found[number] = self[number]
        for row, counts in more.items():
            kept = row if row in rows or len(rows) < MOST_ROWS else (OTHERS, row[1])
            rows.setdefault(kept, Counter()).update(counts)

    def pop(self, number: int) -> Rows:
        """Take a period out."""
        rows = self[number]
        self._found.pop(number, None)
        return rows

    def told(self, seconds: int) -> tuple[Period, ...]:
        """As readers have them: periods of so many seconds."""
        return tuple(
            Period(number * seconds, seconds, namespace, purpose, Figures.of(counts))
            for number in self
            for (namespace, purpose), counts in sorted(self[number].items())
        )

    def parts(self, seconds: int) -> dict[str, bytes]:
        """As they are stored."""
        return {
            f"{seconds}:{number}": rows if isinstance(rows, bytes) else _dumped(_of_rows(rows))
            for number, rows in self._found.items()
        }

    @classmethod
    def of(cls, parts: Mapping[str, bytes], seconds: int) -> Periods:
        """From parts of a note. Raises `ValueError`."""
        named = [(int(name.partition(":")[2]), raw) for name, raw in parts.items() if name.startswith(f"{seconds}:")]
        return cls({int(_moment(number * seconds)) // seconds: raw for number, raw in named})


@dataclass
class FigureNote:
    """How a location was used.

    Attributes
    ----------
    hours, days
        What was counted, by hour and by day since the epoch; of a day, what is in none of the hours.
    minutes
        What was counted in the last minutes, by minute since the epoch.
    requests, writers
        The last prompts; the processes that write, by their ids.
    described
        The namespaces, by the first 16 digits of their keys, those noted last at the end.
    max_bytes, max_entries
        The budget.
    """

    hours: Periods = field(default_factory=Periods)
    days: Periods = field(default_factory=Periods)
    minutes: dict[int, Counter[str]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    writers: dict[str, Writer] = field(default_factory=dict)
    described: dict[str, Described] = field(default_factory=dict)
    max_bytes: int | None = None
    max_entries: int | None = None

    # -- adding -------------------------------------------------------------------------------------------------------

    def add(self, ledger: Ledger) -> None:
        """Add what was counted."""
        for (hour, namespace, purpose), counts in ledger.rows.items():
            self.hours.add(hour, {(namespace, purpose): counts})
        for minute, counts in ledger.minutes.items():
            self.minutes.setdefault(minute, Counter()).update(counts)
        self.requests = sorted([*self.requests, *ledger.requests], key=lambda one: one.at)[-REQUESTS_KEPT:]

    def describe(self, one: Described) -> None:
        """Say what a namespace is."""
        self.described.pop(one.namespace, None)
        self.described[one.namespace] = one

    def forget_old(self, now: float) -> None:
        """Leave out what is too old; what a clock that jumped has counted is as far away."""
        hour, today, minute = int(now // HOUR), int(now // DAY), int(now // MINUTE)
        for one in [one for one in self.hours if abs(one - hour) > HOURS_KEPT]:
            self._forget_hour(one)
        for day in sorted(self.days, key=lambda day: abs(day - today))[DAYS_KEPT:]:
            self.days.pop(day)
        recent = sorted(one for one in self.minutes if -MINUTES_AHEAD <= minute - one < MINUTES_KEPT)
        self.minutes = {one: self.minutes[one] for one in recent}
        writers = [one for one in self.writers.values() if abs(now - one.at) < HOUR]
        self.writers = {one.writer: one for one in writers[-WRITERS_KEPT:]}
        self.described = dict(list(self.described.items())[-MOST_DESCRIBED:])

    def _forget_hour(self, hour: int) -> None:
        self.days.add(hour * HOUR // DAY, self.hours.pop(hour))

    # -- reading ------------------------------------------------------------------------------------------------------

    def history(self, now: float) -> History:
        """What it says, for readers."""
        days = Periods()
        for day in self.days:
            days.add(day, self.days[day])
        for hour in self.hours:
            days.add(hour * HOUR // DAY, self.hours[hour])
        served = (OTHERS, Purpose.SERVING.value)
        return History(
            now,
            Periods({minute: {served: counts} for minute, counts in self.minutes.items()}).told(MINUTE),
            self.hours.told(HOUR),
            days.told(DAY),
            self.described,
            tuple(self.requests),
            tuple(self.writers.values()),
            self.max_bytes,
            self.max_entries,
        )

    # -- bytes --------------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, note: bytes | None) -> FigureNote:
        """Raises `CorruptError`, or `IncompatibleError` if a newer version wrote it."""
        if note is None:
            return cls()
        parts = unpack_state(note)
        if VERSION not in parts:
            raise IncompatibleError("a newer version of prefixstore has written these figures")
        known = {one.name for one in fields(Described)}
        try:
            found = json.loads(parts[VERSION])
            described = [
                Described(**{name: _text(value, LONGEST_DESCRIPTION) for name, value in one.items() if name in known})
                for one in found["described"]
            ]
            return cls(
                Periods.of(parts, HOUR),
                Periods.of(parts, DAY),
                {int(minute): _to_counts(counts) for minute, counts in found["minutes"].items()},
                [
                    Request(_moment(at), _text(one), _text(purpose), _text(source), _whole(n), _whole(restored))
                    for at, one, purpose, source, n, restored in found["requests"]
                ],
                {
                    _text(one): Writer(one, _moment(at), _whole(pages), _whole(queued))
                    for one, at, pages, queued in found["writers"]
                },
                {one.namespace: one for one in described},
                None if found["max_bytes"] is None else _whole(found["max_bytes"]),
                None if found["max_entries"] is None else _whole(found["max_entries"]),
            )
        except UNEXPECTED as error:
            raise CorruptError(f"figures have an unexpected value: {error}") from error

    def pack(self, limit: int) -> bytes | None:
        """The note; None if it cannot be made as small as `limit`.

        While it is larger, half of the namespaces in each period are counted together, those that count least; then
        the older half of the periods is left out.
        """
        while (note := self._packed()) is None or len(note) > limit:
            if not self._halve():
                return None
        return note

    def _packed(self) -> bytes | None:
        """The note; None if it could not be unpacked."""
        value = {
            "minutes": {str(minute): _of_counts(counts) for minute, counts in self.minutes.items()},
            "requests": [astuple(one) for one in self.requests],
            "writers": [astuple(one) for one in self.writers.values()],
            "described": [
                {name: text for name, text in asdict(one).items() if text is not None}
                for one in self.described.values()
            ],
            "max_bytes": self.max_bytes,
            "max_entries": self.max_entries,
        }
        parts = {VERSION: _dumped(value), **self.hours.parts(HOUR), **self.days.parts(DAY)}
        size = sum(len(raw) + LONGEST for raw in parts.values())
        return pack_state(parts) if size <= MAX_STATE_BYTES else None

    def _halve(self) -> bool:
        """Leave out what is worth least; whether there was anything."""
        periods = [some[number] for some in (self.hours, self.days) for number in some]
        most = max((sum(name != OTHERS for name, _ in rows) for rows in periods), default=0)
        if most:
            for rows in periods:
                _reduce(rows, most // 2)
            named = {name for rows in periods for name, _ in rows}
            self.described = {name: one for name, one in self.described.items() if name in named}
        elif self.hours:
            for hour in list(self.hours)[: (len(self.hours) + 1) // 2]:
                self._forget_hour(hour)
        else:
            for day in list(self.days)[: (len(self.days) + 1) // 2]:
                self.days.pop(day)
        return bool(periods)


# -- rows -------------------------------------------------------------------------------------------------------------


def _reduce(rows: Rows, keep: int) -> None:
    """Leave the namespaces that count most, and the others as one row for each purpose."""
    named = [row for row in rows if row[0] != OTHERS]
    for row in sorted(named, key=lambda row: (-sum(map(abs, rows[row].values())), row))[keep:]:
        # not "+", which loses what is below zero
        rows.setdefault((OTHERS, row[1]), Counter()).update(rows.pop(row))


def _of_rows(rows: Rows) -> list[object]:
    return [[namespace, purpose, _of_counts(counts)] for (namespace, purpose), counts in rows.items()]


def _of_counts(counts: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if n}


def _dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


# What follows raises one of `UNEXPECTED`.


def _to_rows(rows: Any) -> Rows:
    return {(_text(namespace), _text(purpose)): _to_counts(counts) for namespace, purpose, counts in rows}


def _to_counts(counts: Any) -> Counter[str]:
    return Counter({_text(name): _whole(n) for name, n in counts.items()})


def _whole(value: Any) -> int:
    """A number of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError(value)
    return value


def _moment(value: Any) -> float:
    """A time in seconds since the epoch that is a date."""
    found = float(value)
    # not a NaN either
    if not 0 <= found <= LATEST:
        raise ValueError(value)
    return found


def _text(value: Any, longest: int = LONGEST) -> str:
    """A text that is not too long."""
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(value)
    return value
