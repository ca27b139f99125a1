"""How a location was used, as a note of it: what was counted on each day, for each namespace."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixstore.counters import DAY, OTHERS, Kept
from prefixstore.errors import CorruptError
from prefixstore.format.saved_state import pack_state, unpack_state

log = logging.getLogger("prefixstore")

# the name of the note
NOTE = b"figures"
DAYS_KEPT = 31
# names of models that are kept, and their length
MOST_MODELS, LONGEST_NAME = 64, 200
# no store has counted as much
LARGEST = 2**62

# Parts of the note. Rows are a day since the epoch (UTC), the beginning of the key of a namespace (zeros for several
# together), and `Figures`; the budget is in bytes and in pages, 0 if that is not known, or there is no limit.
ROWS, BUDGET, MODEL = "days", "budget", "model "
ROW = struct.Struct("<I8s12q")
LIMITS = struct.Struct("<QQ")


class Figures(NamedTuple):
    """What was counted. The names are those of `Stats`.

    Attributes
    ----------
    hits, misses
        Lookups that restored something, and those for which the store had nothing.
    prompt_tokens, tokens_restored, tokens_computed
        Tokens of prompts that were looked up, those that were restored, and those that were computed, those of the
        answers too.
    saved_microseconds
        Time by which restoring was faster than computing.
    allocations, bytes_written
        Pages that were written, and the size of their payloads.
    evictions
        Pages that were evicted for space.
    misses_not_found, misses_diverged, misses_evicted
        Misses by reason, as far as it is one of these.
    """

    hits: int = 0
    misses: int = 0
    prompt_tokens: int = 0
    tokens_restored: int = 0
    tokens_computed: int = 0
    saved_microseconds: int = 0
    allocations: int = 0
    bytes_written: int = 0
    evictions: int = 0
    misses_not_found: int = 0
    misses_diverged: int = 0
    misses_evicted: int = 0

    @classmethod
    def sum(cls, figures: Iterable[Figures]) -> Figures:
        """All of these together."""
        return cls(*map(sum, zip(*figures, strict=True)))

    @property
    def lookups(self) -> int:
        """How many prompts were looked up, without those of which the context held as much as the store."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float | None:
        """The share of lookups that restored something, from 0 to 1; None without any."""
        return self.hits / self.lookups if self.lookups else None

    @property
    def seconds_saved(self) -> float:
        """Time by which restoring was faster than computing."""
        return self.saved_microseconds / 1e6

    def as_dict(self) -> dict[str, object]:
        """All of it, for JSON."""
        counts = self._asdict()
        del counts["saved_microseconds"]
        rate = self.hit_rate
        return counts | {
            "hit_rate": round(rate, 4) if rate is not None else None,
            "seconds_saved": round(self.seconds_saved, 3),
        }


@dataclass
class History:
    """What a location tells of how it was used, by all processes.

    Attributes
    ----------
    days
        Of the last 31 days, today included: what was counted, by the number of the day since the epoch (UTC), and by
        the first 16 digits of the key of the namespace; empty digits stand for several namespaces together.
    models
        The names of models, by the first 12 digits of the digest of their file.
    max_bytes, max_entries
        The budget of the store that was the last to write; None if that is not known, or there is no limit.
    at
        When it was read, in seconds since the epoch.
    """

    days: dict[tuple[int, str], Figures] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    max_bytes: int | None = None
    max_entries: int | None = None
    at: float = field(default_factory=time.time)

    @property
    def since(self) -> int | None:
        """When the first of the days began, in seconds since the epoch; None if nothing was counted."""
        return min((day for day, _ in self.days), default=0) * DAY or None

    def total(self, days: int | None = None, *, namespaces: Collection[str] | None = None) -> Figures:
        """What was counted on the last days, today included (None: on all), in some namespaces, or in all."""
        first = self.at // DAY - days + 1 if days is not None else 0
        return Figures.sum(
            figures
            for (day, name), figures in self.days.items()
            if day >= first and (namespaces is None or name in namespaces)
        )

    def add(self, kept: Kept) -> None:
        """Add what a process has counted."""
        for (day, name, what), n in kept.items():
            figures = self.days.get((day, name), Figures())
            self.days[day, name] = figures._replace(**{what: getattr(figures, what) + n})

    # -- bytes --------------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, note: bytes | None) -> History:
        """What a note says; nothing, with a warning, if it is damaged, or of another version."""
        try:
            return cls() if note is None else cls._parse(unpack_state(note))
        except CorruptError as error:
            log.warning("figures cannot be used, and are counted anew: %s", error)
        return cls()

    @classmethod
    def _parse(cls, parts: dict[str, bytes]) -> History:
        found = cls()
        try:
            for day, name, *counts in ROW.iter_unpack(parts[ROWS]):
                if max(map(abs, counts)) >= LARGEST:
                    raise CorruptError("a figure is too large")
                found.days[day, name.hex() if any(name) else OTHERS] = Figures(*counts)
            limits = LIMITS.unpack(parts[BUDGET])
        except (KeyError, struct.error):
            raise CorruptError("another version of prefixstore has written them") from None
        found.max_bytes, found.max_entries = (limit or None for limit in limits)
        names = ((name.removeprefix(MODEL), text) for name, text in parts.items() if name.startswith(MODEL))
        found.models = {digest: text.decode("utf-8", "replace") for digest, text in names}
        found._forget_old()
        return found

    def pack(self, most_rows: int) -> bytes:
        """The note, with rows for at most this many namespaces of a day; the others of that day are one row.

        The days that lose rows are the first ones, and the namespaces those with the fewest tokens in prompts.
        """
        self._forget_old()
        named = [row for row in self.days if row[1] != OTHERS]
        named.sort(key=lambda row: (row[0], self.days[row].prompt_tokens))
        for day, name in named[: max(len(named) - most_rows, 0)]:
            both = self.days.pop((day, name)), self.days.get((day, OTHERS), Figures())
            self.days[day, OTHERS] = Figures.sum(both)
        rows = (
            ROW.pack(day, bytes.fromhex(name), *(max(1 - LARGEST, min(n, LARGEST - 1)) for n in figures))
            for (day, name), figures in self.days.items()
        )
        models = list(self.models.items())[-MOST_MODELS:]
        names = {MODEL + digest: text[:LONGEST_NAME].encode("utf-8", "replace") for digest, text in models}
        budget = LIMITS.pack(self.max_bytes or 0, self.max_entries or 0)
        return pack_state({ROWS: b"".join(rows), BUDGET: budget, **names})

    def _forget_old(self) -> None:
        """Leave out what is too old; what a clock that jumped has counted is as far away."""
        today = self.at // DAY
        self.days = {row: figures for row, figures in self.days.items() if abs(today - row[0]) < DAYS_KEPT}
