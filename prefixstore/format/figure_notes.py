"""The bytes of the notes in which a location keeps figures: JSON, compressed, with a checksum."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.figure_rows import (
    LONGEST,
    Rows,
    add_rows,
    fitted,
    moment,
    of_counts,
    of_rows,
    text,
    to_counts,
    to_rows,
    whole,
)
from prefixstore.format.figures import Described, Request, Writer
from prefixstore.format.saved_state import MAX_STATE_BYTES, pack_state, unpack_state

__all__ = ["ABOUT", "NOTE", "About", "Chunk", "Running", "parse_chunk"]

# names of the notes; a chunk of hours or days has its number after that
NOTE = b"figures"
ABOUT = b"figures/about"
VERSION = "1"
NEWER = "a newer version of prefixstore has written these figures"
MOST_DESCRIBED = 2048


@dataclass
class Running:
    """The note that is written with commits.

    Attributes
    ----------
    hour
        The hour that runs, since the epoch; 0 before the first.
    rows
        What was counted in it.
    minutes
        What was counted in the last minutes, by minute since the epoch.
    requests, writers
        The last prompts; the processes that write.
    days, blocks
        For which days there are chunks of hours, and for which blocks of days there are chunks of days.
    """

    hour: int = 0
    rows: Rows = field(default_factory=dict)
    minutes: dict[int, Counter[str]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    writers: dict[str, Writer] = field(default_factory=dict)
    days: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def pack(self, limit: int) -> bytes | None:
        """The note; if it would be larger than `limit`, rows are added up. None if even that is not enough."""

        def packed(rows: Rows) -> bytes | None:
            return _pack(
                {
                    "hour": self.hour,
                    "rows": of_rows(rows),
                    "minutes": {str(minute): of_counts(counts) for minute, counts in self.minutes.items()},
                    "requests": [astuple(one) for one in self.requests],
                    "writers": [astuple(one) for one in self.writers.values()],
                    "days": self.days,
                    "blocks": self.blocks,
                },
                limit,
            )

        return fitted(packed, [self.rows])

    @classmethod
    def parse(cls, note: bytes | None) -> Running:
        """Raises `CorruptError`, or `IncompatibleError` if a newer version wrote it."""
        if note is None:
            return cls()
        found = _parse(note)
        with _Validated():
            return cls(
                whole(found["hour"]),
                to_rows(found["rows"]),
                {int(minute): to_counts(counts) for minute, counts in found["minutes"].items()},
                [
                    Request(moment(at), text(one), text(purpose), text(source), whole(n), whole(restored))
                    for at, one, purpose, source, n, restored in found["requests"]
                ],
                {
                    text(one): Writer(one, moment(at), whole(pages), whole(queued))
                    for one, at, pages, queued in found["writers"]
                },
                [whole(day) for day in found["days"]],
                [whole(block) for block in found["blocks"]],
            )


@dataclass
class About:
    """The note that says what the rows are about.

    Attributes
    ----------
    max_bytes, max_entries
        The budget.
    described
        The namespaces, by the first 16 digits of their keys, those noted last at the end.
    """

    max_bytes: int | None = None
    max_entries: int | None = None
    described: dict[str, Described] = field(default_factory=dict)

    def pack(self, limit: int) -> bytes | None:
        """The note, with as many of the last namespaces as it may have; None if that is not enough."""
        kept = list(self.described.values())[-MOST_DESCRIBED:]
        while True:
            value = {
                "max_bytes": self.max_bytes,
                "max_entries": self.max_entries,
                "namespaces": [
                    {name: value for name, value in asdict(one).items() if value is not None} for one in kept
                ],
            }
            note = _pack(value, limit)
            if note is not None or not kept:
                return note
            kept = kept[len(kept) // 2 + 1 :]

    @classmethod
    def parse(cls, note: bytes | None) -> About:
        """Raises as `Running.parse` does."""
        if note is None:
            return cls()
        found = _parse(note)
        names = {one.name for one in fields(Described)}
        with _Validated():
            described = [
                Described(**{name: text(value, 1024) for name, value in one.items() if name in names})
                for one in found["namespaces"]
            ]
            return cls(
                None if found["max_bytes"] is None else whole(found["max_bytes"]),
                None if found["max_entries"] is None else whole(found["max_entries"]),
                {one.namespace: one for one in described},
            )


class Chunk:
    """A note of several hours or days, of which only those are read that something is added to.

    Parameters
    ----------
    note
        The note; None for a new one.

    Raises
    ------
    CorruptError
        If it is damaged.
    IncompatibleError
        If a newer version wrote it.
    """

    def __init__(self, note: bytes | None = None) -> None:
        # the rows of each period, as they are stored
        self._periods = {
            _number_of(name): rows for name, rows in (unpack_state(note) if note is not None else {}).items()
        }

    def add(self, number: int, rows: Rows) -> None:
        """Add what was counted in an hour, or day (since the epoch). Raises `CorruptError`."""
        known = self._rows(number) if number in self._periods else {}
        add_rows(known, rows)
        self._periods[number] = _dumped(of_rows(known))

    def rows(self) -> dict[int, Rows]:
        """All of it, by hour or day. Raises `CorruptError`."""
        return {number: self._rows(number) for number in sorted(self._periods)}

    def _rows(self, number: int) -> Rows:
        with _Validated():
            return to_rows(_loaded(self._periods[number]))

    def pack(self, limit: int) -> bytes | None:
        """The note; None if there is nothing to note.

        If it would be larger than `limit`, rows are added up, and if it still is, the first periods are left out.
        """
        note = _pack_parts({_name_of(number): rows for number, rows in self._periods.items()}, limit)
        if note is not None and self._periods:
            return note
        periods = self.rows()
        numbers = sorted(periods)

        def packed(*rows: Rows) -> bytes | None:
            parts = {_name_of(number): _dumped(of_rows(one)) for number, one in zip(numbers, rows, strict=True)}
            return _pack_parts(parts, limit)

        while numbers:
            note = fitted(packed, [periods[number] for number in numbers])
            if note is not None:
                return note
            numbers = numbers[1:]
        return None


def parse_chunk(note: bytes | None) -> dict[int, Rows]:
    """Rows by hour, or day, since the epoch. Raises as `Running.parse` does."""
    return Chunk(note).rows()


def _name_of(number: int) -> str:
    return f"{VERSION}:{number}"


def _number_of(name: str) -> int:
    version, _, number = name.partition(":")
    if version != VERSION:
        raise IncompatibleError(NEWER)
    with _Validated():
        return int(number)


# -- JSON -------------------------------------------------------------------------------------------------------------


class _Validated:
    """Turns whatever a value of an unexpected kind raises into `CorruptError`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (TypeError, ValueError, KeyError, AttributeError, OverflowError)):
            raise CorruptError(f"figures have an unexpected value: {error}") from error


def _pack(value: object, limit: int) -> bytes | None:
    return _pack_parts({VERSION: _dumped(value)}, limit)


def _pack_parts(parts: Mapping[str, bytes], limit: int) -> bytes | None:
    """A note of parts; None if it is larger than `limit`, or could not be unpacked."""
    if sum(len(raw) + LONGEST for raw in parts.values()) > MAX_STATE_BYTES:
        return None
    note = pack_state(parts)
    return note if len(note) <= limit else None


def _parse(note: bytes) -> dict[str, Any]:
    parts = unpack_state(note)
    if VERSION not in parts:
        raise IncompatibleError(NEWER)
    with _Validated():
        found = _loaded(parts[VERSION])
    if not isinstance(found, dict):
        raise CorruptError("figures are not a JSON object")
    return found


def _dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _loaded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise CorruptError(f"figures are not valid JSON: {error}") from None
