"""The note in which a location keeps how it was used: JSON, compressed, with a checksum.

Counts are kept by minute for an hour, by hour for a week, and by day for a year.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, astuple, fields
from typing import Any

from prefixstore.errors import CorruptError
from prefixstore.format.figures import DAY, HOUR, LATEST, MINUTE, OTHERS, Described, Figures, History, Period, Writer
from prefixstore.format.saved_state import MAX_STATE_BYTES, pack_state, unpack_state
from prefixstore.stats import Ledger, Request, Rows

__all__ = ["NOTE", "FigureNote"]

NOTE = b"figures"
# the name of the only part
VERSION = "2"
WRITERS_KEPT = 16
# namespaces that are described
MOST_DESCRIBED = 2048
# characters of what is not a name, and of what is
LONGEST, LONGEST_DESCRIPTION = 64, 1024

# what a value of an unexpected kind raises
UNEXPECTED = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)


class FigureNote(Ledger):
    """How a location was used: what was counted there, and by whom.

    Attributes
    ----------
    writers
        The processes that write, by their ids.
    described
        The namespaces, by the first 16 digits of their keys, those noted last at the end.
    max_bytes, max_entries
        The budget.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writers: dict[str, Writer] = {}
        self.described: dict[str, Described] = {}
        self.max_bytes: int | None = None
        self.max_entries: int | None = None

    def describe(self, one: Described) -> None:
        """Say what a namespace is."""
        self.described.pop(one.namespace, None)
        self.described[one.namespace] = one

    def forget_old(self, now: float) -> None:
        super().forget_old(now)
        writers = [one for one in self.writers.values() if abs(now - one.at) < HOUR]
        self.writers = {one.writer: one for one in writers[-WRITERS_KEPT:]}
        self.described = dict(list(self.described.items())[-MOST_DESCRIBED:])

    def history(self, now: float) -> History:
        """What it says, for readers."""
        return History(
            now,
            self._told(MINUTE),
            self._told(HOUR),
            self._told(DAY),
            self.described,
            tuple(self.requests),
            tuple(self.writers.values()),
            self.max_bytes,
            self.max_entries,
        )

    def _told(self, seconds: int) -> tuple[Period, ...]:
        """The periods of so many seconds, as readers have them."""
        return tuple(
            Period(number * seconds, seconds, namespace, purpose, Figures.of(counts))
            for (length, number), rows in sorted(self.periods.items())
            for (namespace, purpose), counts in sorted(rows.items())
            if length == seconds
        )

    # -- bytes --------------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, packed: bytes | None) -> FigureNote:
        """Raises `CorruptError` if these bytes are not such a note, or one of another version."""
        note = cls()
        if packed is None:
            return note
        parts = unpack_state(packed)
        if VERSION not in parts:
            raise CorruptError("another version of prefixstore has written these figures")
        known = {one.name for one in fields(Described)}
        try:
            found = json.loads(parts[VERSION])
            for seconds, number, rows in found["periods"]:
                _moment(number * seconds)
                note.periods[_whole(seconds), _whole(number)] = {
                    (_text(namespace), _text(purpose)): _counts(counts) for namespace, purpose, counts in rows
                }
            note.requests = [
                Request(_moment(at), _text(one), _text(purpose), _text(source), _whole(n), _whole(restored))
                for at, one, purpose, source, n, restored in found["requests"]
            ]
            for one, at, pages, queued in found["writers"]:
                note.writers[_text(one)] = Writer(one, _moment(at), _whole(pages), _whole(queued))
            for one in found["described"]:
                texts = {name: _text(text, LONGEST_DESCRIPTION) for name, text in one.items() if name in known}
                note.describe(Described(**texts))
            note.max_bytes, note.max_entries = (
                None if found[name] is None else _whole(found[name]) for name in ("max_bytes", "max_entries")
            )
        except UNEXPECTED as error:
            raise CorruptError(f"figures have an unexpected value: {error}") from error
        return note

    def pack(self, limit: int) -> bytes | None:
        """The note; None if it cannot be made as small as `limit`.

        While it is larger, half of the namespaces in each period are counted together, those that count least; then
        half of the periods is left out, the shortest and oldest first.
        """
        while (note := self._packed()) is None or len(note) > limit:
            if not self.periods:
                return None
            self._halve()
        return note

    def _packed(self) -> bytes | None:
        """The note; None if it could not be unpacked."""
        value = {
            "periods": [
                [*period, [[*row, {name: n for name, n in counts.items() if n}] for row, counts in rows.items()]]
                for period, rows in self.periods.items()
            ],
            "requests": [astuple(one) for one in self.requests],
            "writers": [astuple(one) for one in self.writers.values()],
            "described": [
                {name: text for name, text in asdict(one).items() if text is not None}
                for one in self.described.values()
            ],
            "max_bytes": self.max_bytes,
            "max_entries": self.max_entries,
        }
        raw = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        return pack_state({VERSION: raw}) if len(raw) <= MAX_STATE_BYTES - LONGEST else None

    def _halve(self) -> None:
        """Leave out what is worth least."""
        most = max(sum(name != OTHERS for name, _ in rows) for rows in self.periods.values())
        if most:
            for rows in self.periods.values():
                _reduce(rows, most // 2)
            named = {name for rows in self.periods.values() for name, _ in rows}
            self.described = {name: one for name, one in self.described.items() if name in named}
        else:
            for period in sorted(self.periods)[: (len(self.periods) + 1) // 2]:
                del self.periods[period]


def _reduce(rows: Rows, keep: int) -> None:
    """Leave the namespaces that count most, and the others as one row for each purpose."""
    named = [row for row in rows if row[0] != OTHERS]
    for row in sorted(named, key=lambda row: (-sum(map(abs, rows[row].values())), row))[keep:]:
        # not "+", which loses what is below zero
        rows.setdefault((OTHERS, row[1]), Counter()).update(rows.pop(row))


# What follows raises one of `UNEXPECTED`.


def _whole(value: Any) -> int:
    """A number of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError(value)
    return value


def _counts(counts: Any) -> Counter[str]:
    """Names with numbers of 64 bits; all at once, as a note has thousands."""
    numbers = counts.values()
    is_sound = all(type(n) is int for n in numbers) and max(map(abs, numbers), default=0) < 2**63
    if not is_sound or max(map(len, counts), default=0) > LONGEST:
        raise ValueError(counts)
    return Counter(counts)


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
