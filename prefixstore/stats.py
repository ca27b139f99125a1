"""What is counted: counters, times and histograms; for whom, and what a store keeps of a context."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

__all__ = [
    "AGE_BUCKETS",
    "HISTOGRAMS",
    "SECONDS_BUCKETS",
    "Counters",
    "Histogram",
    "Kind",
    "Ledger",
    "Purpose",
    "Request",
    "Rows",
    "short",
]

_NONE = "none: "

# Upper bounds, in seconds. A lookup takes about 100 us, a restore between one and a few hundred milliseconds.
SECONDS_BUCKETS = (
    *(50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Of pages, in seconds: from a second over a minute, an hour, a day and a week to 30 days.
AGE_BUCKETS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0, 2592000.0)

HISTOGRAMS = {
    "lookup": SECONDS_BUCKETS,
    "restore": SECONDS_BUCKETS,
    "eviction_age": AGE_BUCKETS,
    "first_reuse": AGE_BUCKETS,
}


class Kind(str, Enum):
    """What a store keeps of the context it is used with.

    A member is a string, equal to its value: ``Kind.PAGES == "pages"``, and it prints and serializes as ``pages``.
    """

    UNBOUND = "unbound"
    """No Llama is attached: no completion has used the store yet."""
    PAGES = "pages"
    """Full attention: a state can be cut at any token."""
    SNAPSHOTS = "snapshots"
    """Recurrent memory: a state can be resumed only at the exact position where it was taken."""
    PAGES_AND_SNAPSHOTS = "pages and snapshots"
    """Hybrid memory: pages of the attention layers, snapshots of the recurrent ones."""
    STREAMS = "none: streams"
    """Each sequence has rows of its own (``n_seq_max > 1`` without ``kv_unified``), which cannot be cut."""

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    @property
    def has_pages(self) -> bool:
        """Whether states are stored in pages."""
        return self in (Kind.PAGES, Kind.PAGES_AND_SNAPSHOTS)

    @property
    def has_snapshots(self) -> bool:
        """Whether snapshots are stored: states that can be resumed only at an exact position."""
        return self in (Kind.SNAPSHOTS, Kind.PAGES_AND_SNAPSHOTS)

    @property
    def is_stored(self) -> bool:
        """Whether states of this context can be stored."""
        return self is not Kind.UNBOUND and self.reason is None

    @property
    def reason(self) -> str | None:
        """Why nothing can be stored; None if something can."""
        return self.value.removeprefix(_NONE) if self.value.startswith(_NONE) else None


class Purpose(str, Enum):
    """What a store is used for. A member is a string: ``Purpose.SERVING == "serving"``."""

    SERVING = "serving"
    """To answer prompts."""
    WARMING = "warming"
    """To be filled by a job, which restores what is stored to go on from there."""
    MAINTENANCE = "maintenance"
    """To be checked, or made smaller, by a command."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Request:
    """A prompt that was looked up.

    Attributes
    ----------
    at
        When, in seconds since the epoch.
    namespace
        The `short` name of its namespace.
    purpose
        ``"serving"``, ``"warming"`` or ``"maintenance"``.
    source
        ``"store"``, ``"live"``, or why nothing came from the store: a name in ``Stats.misses``.
    prompt_tokens, restored_tokens
        Tokens of the prompt, and those that were restored.
    """

    at: float
    namespace: str
    purpose: str
    source: str
    prompt_tokens: int
    restored_tokens: int


@dataclass(frozen=True)
class Histogram:
    """How many values there were up to each of some bounds.

    Attributes
    ----------
    bounds
        The upper bounds, rising.
    counts
        How many values lie between each bound and the one before it; the last count is of those above all bounds.
    total
        The sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def n(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class _Tally:
    """A histogram that grows."""

    __slots__ = ("counts", "total")

    def __init__(self, counts: Iterable[int], total: float = 0.0) -> None:
        self.counts = list(counts)
        self.total = total

    def add(self, bounds: tuple[float, ...], value: float) -> None:
        self.counts[bisect_left(bounds, value)] += 1
        # a clock that was set back must not make the sum fall
        self.total += max(value, 0.0)


# what is kept in a location, beside the misses
KEPT = frozenset(
    {"hits", "live_hits", "prompt_tokens", "tokens_restored", "tokens_computed", "evictions", "saved_microseconds"}
)
# seconds
MINUTE, HOUR, DAY = 60, 3600, 86_400
# how many periods of each length are kept
MINUTES_KEPT = 60
PERIODS_KEPT = {MINUTE: MINUTES_KEPT, HOUR: 169, DAY: 385}
# namespaces in one period; those beyond are counted together, under no namespace
MOST_ROWS = 1024
# rows that may wait to be written
MOST_WAITING = 4096
REQUESTS_KEPT = 16

Rows: TypeAlias = dict[tuple[str, str], "Counter[str]"]
"""Counts by namespace (see `short`; empty for several together) and purpose."""


def short(key: bytes) -> str:
    """The short name of a namespace in figures: the first 16 digits of its key."""
    return key.hex()[:16]


class Ledger:
    """Counts by period. The caller holds a lock.

    Attributes
    ----------
    periods
        What was counted, by the length of a period in seconds, and its number since the epoch: in days, in hours, and
        in minutes, which have serving only, of all namespaces together.
    requests
        The last prompts.
    """

    def __init__(self) -> None:
        self.periods: dict[tuple[int, int], Rows] = {}
        self.requests: list[Request] = []

    def count(self, name: str, by: int, namespace: bytes, purpose: Purpose) -> None:
        """Raise a count, if it is one that is kept."""
        if not by or (name not in KEPT and not name.startswith("miss:")):
            return
        now, counts = time.time(), Counter({name: by})
        row = short(namespace), purpose.value
        if row not in self.periods.get((HOUR, int(now // HOUR)), {}):
            self.forget_old(now)
            if sum(map(len, self.periods.values())) >= MOST_WAITING:
                row = "", purpose.value
        for seconds in (DAY, HOUR):
            self._add((seconds, int(now // seconds)), row, counts)
        if purpose is Purpose.SERVING:
            self._add((MINUTE, int(now // MINUTE)), ("", purpose.value), counts)

    def add(self, other: Ledger) -> None:
        """Add what another ledger has."""
        for period, rows in other.periods.items():
            for row, counts in rows.items():
                self._add(period, row, counts)
        self.requests = sorted([*self.requests, *other.requests], key=lambda one: one.at)[-REQUESTS_KEPT:]

    def _add(self, period: tuple[int, int], row: tuple[str, str], counts: Counter[str]) -> None:
        rows = self.periods.setdefault(period, {})
        kept = row if row in rows or len(rows) < MOST_ROWS else ("", row[1])
        rows.setdefault(kept, Counter()).update(counts)

    def forget_old(self, now: float) -> None:
        """Leave out what is too old; what a clock that jumped has counted is as far away."""
        self.periods = {
            (seconds, number): rows
            for (seconds, number), rows in self.periods.items()
            if abs(now // seconds - number) < PERIODS_KEPT.get(seconds, 0)
        }

    def __bool__(self) -> bool:
        return bool(self.periods)


class Counters:
    """Counts, times and histograms by name, safe to raise from many threads.

    What is counted with the key of a namespace is also collected for the location: see `Ledger`.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._purpose = Purpose.SERVING
        self._counts: Counter[str] = Counter()
        # how many pages were dropped, for any reason
        self.n_dropped = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._gained: defaultdict[str, float] = defaultdict(float)
        self._tallies = {name: _Tally([0] * (len(bounds) + 1)) for name, bounds in HISTOGRAMS.items()}
        # a signal handler that asks the store may interrupt its own thread while that counts
        self._lock = threading.RLock()

    def copy(self) -> Counters:
        """The same counts with a new lock: for a forked child, where the old lock may be held forever.

        What the parent has collected for the location, the parent writes.
        """
        copied = Counters()
        copied._purpose = self._purpose
        copied._counts |= self._counts
        copied._seconds |= self._seconds
        copied._gained |= self._gained
        copied._tallies = {name: _Tally(one.counts, one.total) for name, one in self._tallies.items()}
        return copied

    def count(self, name: str, by: int = 1, *, namespace: bytes | None = None) -> None:
        """Raise a count. A name such as ``"miss:not_found"`` belongs to the group before the colon.

        With the key of a namespace, it is kept in the location as well.
        """
        with self._lock:
            self._counts[name] += by
            self.n_dropped += by * name.startswith("dropped:")
            if namespace is not None:
                self._ledger.count(name, by, namespace, self._purpose)

    def asked(self, namespace: bytes | None, n_tokens: int, n_restored: int, source: str) -> None:
        """Note that a prompt of so many tokens was looked up; for `source`, see `Request`."""
        with self._lock:
            self._counts["prompt_tokens"] += n_tokens
            if namespace is None:
                return
            self._ledger.count("prompt_tokens", n_tokens, namespace, self._purpose)
            at = round(time.time(), 3)
            one = Request(at, short(namespace), self._purpose.value, source, n_tokens, n_restored)
            self._ledger.requests = [*self._ledger.requests[-REQUESTS_KEPT + 1 :], one]

    @contextmanager
    def counting(self, purpose: Purpose) -> Iterator[None]:
        """In this block, counts are kept in the location under this purpose."""
        before, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = before

    @property
    def has_unwritten(self) -> bool:
        """Whether something was counted that is not in the location yet."""
        return bool(self._ledger)

    def unwritten(self) -> Ledger:
        """A copy of what was counted and is not in the location yet."""
        copied = Ledger()
        with self._lock:
            copied.add(self._ledger)
        return copied

    def take(self) -> Ledger:
        """What was counted since the last call, to be written into the location."""
        with self._lock:
            taken, self._ledger = self._ledger, Ledger()
        return taken

    def give_back(self, taken: Ledger) -> None:
        """What `take` returned was not written."""
        with self._lock:
            taken.add(self._ledger)
            self._ledger = taken

    def time(self, name: str, seconds: float, *, namespace: bytes | None = None) -> None:
        """Add to a time, and to the histogram of this name, if there is one.

        With the key of a namespace, it is kept in the location as well, in microseconds.
        """
        with self._lock:
            if namespace is not None:
                self._ledger.count(f"{name}_microseconds", round(seconds * 1e6), namespace, self._purpose)
            self._seconds[name] += seconds
            if seconds > 0:
                self._gained[name] += seconds
            if name in self._tallies:
                self._tallies[name].add(HISTOGRAMS[name], seconds)

    def restored(
        self,
        n_tokens: int,
        seconds: float,
        saved: float | None = None,
        *,
        namespace: bytes | None = None,
        name: str = "hits",
    ) -> None:
        """Count a hit, as `name`: tokens restored, the seconds that this took, and saved, if that is known."""
        self.count(name, namespace=namespace)
        self.count("tokens_restored", n_tokens, namespace=namespace)
        self.time("restore", seconds)
        if saved is not None:
            self.time("saved", saved, namespace=namespace)

    def observe(self, name: str, values: Iterable[float]) -> None:
        """Add values to a histogram; its name is in `HISTOGRAMS`."""
        with self._lock:
            for value in values:
                self._tallies[name].add(HISTOGRAMS[name], value)

    def histogram(self, name: str) -> Histogram:
        """A histogram as it is now."""
        tally = self._tallies[name]
        with self._lock:
            return Histogram(HISTOGRAMS[name], tuple(tally.counts), tally.total)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def seconds(self, name: str) -> float:
        """A time, in seconds."""
        return self._seconds.get(name, 0.0)

    def gained(self, name: str) -> float:
        """What was added to a time, in seconds, without what was subtracted: it never falls."""
        return self._gained.get(name, 0.0)

    def group(self, prefix: str) -> dict[str, int]:
        """The counts of a group, by the part of their names after the colon."""
        with self._lock:
            return {name.split(":", 1)[1]: n for name, n in self._counts.items() if name.startswith(prefix + ":")}
