"""Counters, times and histograms; and `Kind`, what a store keeps of a context."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

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


@dataclass(frozen=True)
class Histogram:
    """How many values there were up to each of some bounds, and their sum."""

    # the upper ones, rising
    bounds: tuple[float, ...]
    # how many values are between each bound and the one before it; the last number is of those above all bounds
    counts: tuple[int, ...]
    total: float = 0.0

    @property
    def n(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def plus(self, value: float) -> Histogram:
        """With one more value."""
        at = bisect_left(self.bounds, value)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        # a clock that was set back must not make the sum fall
        return Histogram(self.bounds, counts, self.total + max(value, 0.0))


# What is kept in a location by day and namespace: counts of prompts (all misses, and the most frequent reasons), and of
# pages.
OF_PROMPTS = frozenset({"hits", "misses", "prompt_tokens", "tokens_restored", "tokens_computed", "saved_microseconds"})
OF_PROMPTS |= {"misses_not_found", "misses_diverged", "misses_evicted"}
OF_PAGES = frozenset({"allocations", "bytes_written", "evictions"})
# seconds
DAY = 86_400
# how many figures may wait to be written; further namespaces are counted together, under the name `OTHERS`
MOST_WAITING = 32_768
OTHERS = ""

Kept: TypeAlias = "Counter[tuple[int, str, str]]"
"""Counts by the number of a day since the epoch (UTC), the `short` name of a namespace, and their name."""


def short(key: bytes) -> str:
    """The short name of a namespace in figures: the first 16 digits of its key."""
    return key.hex()[:16]


class Counters:
    """Counts, times and histograms by name. Any number of threads may use it.

    What is counted with the key of a namespace is also collected for the location, if its name is in `collected`.
    """

    def __init__(self) -> None:
        self.collected = OF_PROMPTS | OF_PAGES
        self._kept: Kept = Counter()
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._gained: defaultdict[str, float] = defaultdict(float)
        self._histograms = {name: Histogram(bounds, (0,) * (len(bounds) + 1)) for name, bounds in HISTOGRAMS.items()}
        # a signal handler that asks the store may interrupt its own thread while that counts
        self._lock = threading.RLock()

    def copy(self) -> Counters:
        """The same counts with a new lock: for a forked child, where the old lock may be held forever.

        What the parent has collected for the location, the parent writes.
        """
        copied = Counters()
        copied.collected = self.collected
        copied._counts |= self._counts
        copied._seconds |= self._seconds
        copied._gained |= self._gained
        copied._histograms |= self._histograms
        return copied

    def count(self, name: str, by: int = 1, *, namespace: bytes | None = None) -> None:
        """Raise a count. A name such as ``"miss:not_found"`` belongs to the group before the colon.

        With the key of a namespace, it is kept in the location as well.
        """
        with self._lock:
            self._counts[name] += by
            if namespace is not None:
                self._keep(name, by, namespace)

    def add(self, counts: Mapping[str, int], namespace: bytes | None = None) -> None:
        """Raise several counts; see `count`."""
        for name, by in counts.items():
            self.count(name, by, namespace=namespace)

    def _keep(self, name: str, by: int, namespace: bytes) -> None:
        """Collect a count for the location, if it is one that is kept."""
        group, _, reason = name.partition(":")
        # a bypassed prompt says nothing about the store
        names = {"misses", f"misses_{reason}"} if group == "miss" and reason != "bypassed" else {name}
        for one in names & self.collected if by else ():
            whose = short(namespace) if len(self._kept) < MOST_WAITING else OTHERS
            self._kept[int(time.time() // DAY), whose, one] += by

    @contextmanager
    def not_serving(self) -> Iterator[None]:
        """A block whose prompts are those of a job or a check, and not kept in the location."""
        before, self.collected = self.collected, self.collected - OF_PROMPTS
        try:
            yield
        finally:
            self.collected = before

    def unwritten(self) -> Kept:
        """What was counted for the location, and is not there yet."""
        with self._lock:
            return self._kept.copy()

    def written(self, kept: Kept) -> None:
        """Note that these figures are in the location now."""
        with self._lock:
            self._kept.subtract(kept)
            self._kept = Counter({row: n for row, n in self._kept.items() if n})

    def time(self, name: str, seconds: float, *, namespace: bytes | None = None) -> None:
        """Add to a time, and to the histogram of this name, if there is one.

        With the key of a namespace, it is kept in the location as well, in microseconds.
        """
        with self._lock:
            if namespace is not None:
                self._keep(f"{name}_microseconds", round(seconds * 1e6), namespace)
            self._seconds[name] += seconds
            if seconds > 0:
                self._gained[name] += seconds
            if name in self._histograms:
                self._histograms[name] = self._histograms[name].plus(seconds)

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
        self.add({name: 1, "tokens_restored": n_tokens}, namespace)
        self.time("restore", seconds)
        if saved is not None:
            self.time("saved", saved, namespace=namespace)

    def observe(self, name: str, values: Iterable[float]) -> None:
        """Add values to a histogram; its name is in `HISTOGRAMS`."""
        with self._lock:
            for value in values:
                self._histograms[name] = self._histograms[name].plus(value)

    def histogram(self, name: str) -> Histogram:
        """A histogram as it is now."""
        return self._histograms[name]

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def seconds(self, name: str) -> float:
        """A time, in seconds."""
        return self._seconds.get(name, 0.0)

    def gained(self, name: str) -> float:
        """A time without negative additions, in seconds: it never falls."""
        return self._gained.get(name, 0.0)

    def group(self, prefix: str) -> dict[str, int]:
        """The counts of a group, by the part of their names after the colon."""
        with self._lock:
            return {name.split(":", 1)[1]: n for name, n in self._counts.items() if name.startswith(prefix + ":")}
