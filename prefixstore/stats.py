"""The statistics of a store: what it has done, and what it keeps of a context."""

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

from prefixstore.units import counted, format_bytes, format_seconds

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
    "SessionCounts",
    "Shortage",
    "Stats",
    "TierStats",
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
class Shortage:
    """A captured page that found no space.

    Attributes
    ----------
    reason
        Its name in ``Stats.dropped``: ``"budget"``, ``"quota"``, ``"admission"`` or ``"full"``.
    pages
        How many pages were dropped together for this reason.
    asked_bytes
        What the last of them would have taken; of ``"full"``, what all of them would.
    available_bytes
        What there was for it: free bytes, and those that could have been evicted for it. Of ``"admission"``, only the
        free ones: what is stored was worth more. Of ``"full"``, what the disk or the file has left, as far as known.
    """

    reason: str
    pages: int
    asked_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        asked, available = format_bytes(self.asked_bytes), format_bytes(self.available_bytes)
        pages = f"{self.pages} page{'s' * (self.pages != 1)}"
        return f"{pages} dropped ({self.reason}): {asked} asked for, {available} available"


@dataclass(frozen=True)
class SessionCounts:
    """What the sessions of a store have done since it was opened.

    Attributes
    ----------
    cold, live, store
        Admissions by their source: nothing was reused; what the context held; what was restored from the store.
    forks
        Sessions that were forked.
    tails_copied
        Tails that a fork, or what it was forked from, has copied by continuing in the middle of a shared page.
    evicted
        Sessions that were evicted: by name, or as the least recently used.
    discarded
        Sessions that were discarded: their block ended with an exception, or the contents of the context were unknown.
    stale_leases
        Calls that were refused, because the lease of their session had ended.
    timeouts
        Admissions that were given up with `BusyError`.
    sessions
        How many there are now in this process.
    waiting
        How many admissions wait for the ``Llama``, or have it.
    """

    cold: int
    live: int
    store: int
    forks: int
    tails_copied: int
    evicted: int
    discarded: int
    stale_leases: int
    timeouts: int
    sessions: int
    waiting: int

    def __str__(self) -> str:
        source = f"{self.live} live, {self.store} restored, {self.cold} cold"
        ends = f"{self.discarded} discarded, {self.evicted} evicted"
        refused = f"{counted(self.timeouts, 'timeout')}, {counted(self.stale_leases, 'stale call')}"
        there, forks = counted(self.sessions, "session"), counted(self.forks, "fork")
        return f"{there}; admitted: {source}; {forks}, {ends}, {refused}"


@dataclass(frozen=True)
class TierStats:
    """What one of several locations has done since the store was opened.

    Attributes
    ----------
    location
        Its URL.
    is_available
        Whether it is queried: not while its circuit breaker is open.
    pages, bytes
        Pages restored from it, and the size of their states.
    kept
        Pages of the far location that were kept in the nearer one.
    late
        Lookups and restores that gave up waiting for it.
    entries, bytes_used
        Pages in it, and its size; the last known values. Of the far location they are those of this process's last
        commit, and 0 before the first one.
    queued_bytes
        Bytes of captured pages that wait to be written to it.
    dropped
        Captured pages that are not stored there, by reason, as in `Stats`.
    unreadable
        Pages that were found there and could not be restored, by reason, as in `Stats`.
    outages
        How often its circuit breaker opened.
    """

    location: str
    is_available: bool
    pages: int
    bytes: int
    kept: int
    late: int
    entries: int
    bytes_used: int
    queued_bytes: int
    dropped: dict[str, int]
    unreadable: dict[str, int]
    outages: int

    def __str__(self) -> str:
        state = "" if self.is_available else ", not available"
        given = f"{counted(self.pages, 'page')} given ({format_bytes(self.bytes)}), {self.kept} kept, {self.late} late"
        waiting = f"{format_bytes(self.queued_bytes)} waiting, dropped: {_reasons(self.dropped)}"
        return f"{self.location}{state}: {given}, {waiting}"


@dataclass(frozen=True)
class Stats:
    """What a store has done since it was opened, and what its location holds.

    Attributes
    ----------
    hits
        Lookups that restored pages.
    live_hits
        Lookups for which the context already held as many tokens as the store had to offer.
    misses
        Lookups that reused nothing from the store, by reason: ``"not_found"``, ``"diverged"`` (fewer than `min_tokens`
        tokens begin as something stored does), ``"evicted"`` (the first page was, by this process), ``"short"`` (the
        prompt has fewer than `min_tokens` tokens), ``"not_asked"`` (a server's slot held less of a chat than expected),
        ``"slow"`` (computing is faster), ``"unreadable"`` (see there; late), ``"unavailable"`` (the location failed),
        ``"bypassed"`` (inside `PrefixStore.bypass`), ``"logprobs"`` (the request needs the logits of the prompt),
        ``"multimodal"`` (images are not in the tokens), ``"streams"`` (states of this context cannot be stored),
        ``"loaded_state"``, ``"changed"`` (the context held more of the prompt
        than the store, through a state or a change with unknown tokens; it was used, and nothing is stored after it),
        ``"sequence_in_use"`` (sequence 1 of the context, which the store needs, is in use), ``"context_replaced"`` (the
        ``Llama`` has a different context from when the store was attached), ``"session"`` (admitted with
        ``reuse="live"`` or ``"none"``), ``"closed"`` (the ``Llama`` is), ``"not_attached"`` (the ``Llama`` could not be
        attached when it asked: the log says why), ``"error"``.
    unreadable
        Pages that were found but could not be restored, by reason: ``"corrupt"``, ``"vanished"`` (evicted meanwhile),
        ``"undecryptable"`` (rows and payloads that were changed, or whose key is missing),
        ``"incompatible"`` (written or packed by a newer version; it is kept), ``"unavailable"``,
        ``"shape"`` (the checksum matches, but the bytes are not a state of this context), ``"refused"`` (by llama.cpp).
    prompt_tokens
        Tokens of the prompts that were looked up.
    tokens_restored, tokens_computed
        Tokens restored from the store, and tokens computed by ``eval``.
    pages_captured, snapshots_captured
        Pages and snapshots copied out of the context.
    dropped
        Pages that were captured, or should have been, but are not stored, by reason: ``"queue_full"``, ``"budget"``,
        ``"quota"`` (the tenant's), ``"admission"`` (worth less than what would be evicted for them), ``"full"`` (the
        disk or the map), ``"orphan"`` (the parent was evicted), ``"incomplete"`` (a sliding window has moved past it),
        ``"moved_on"`` (the context left the position of a snapshot before its rows were copied), ``"uncut"`` (a state
        of unknown layout: from then on whole states are stored), ``"version"`` (a llama-server writes slot files of an
        unknown version), ``"unavailable"`` (the location failed), ``"closed"`` (the store is, and a completion saves to
        it), ``"error"`` (a fault of the store). While the contents of the context are unknown: ``"attached_late"``
        (something was evaluated before the store was attached), ``"loaded_state"`` (``load_state`` with a state that
        was not saved here), ``"changed"`` (something other than the store used the context), ``"bypassed"`` (something
        was evaluated inside `PrefixStore.bypass`), ``"stepped_back"`` (rewound to where it cannot continue),
        ``"shifted"`` (a session streams beyond the context), ``"interrupted"``. This ends with the next lookup,
        `PrefixStore.restore` or ``llm.reset()``.
    shortage
        What the last page dropped for lack of space needed, and what was available; None if there was none.
    outdated
        Captured pages and snapshots that were given up before they were written, since the context or the store had
        moved on to something newer, by reason: ``"superseded"`` (a longer page has the same tokens), ``"thinned"``
        (there are enough snapshots along the conversation), ``"deleted"`` (by `PrefixStore.clear`, or with their
        ancestor). Nothing is lost by that. Other captured pages that are not stored are in `dropped`;
        snapshots that the context left behind are there as ``"moved_on"``.
    evictions, expired, corrupt
        Pages that this store evicted for space, removed as expired, and deleted as damaged.
    packed
        Pages that this store has written packed; see `codec`.
    restore_seconds, capture_seconds
        Foreground time spent on restoring and on capturing pages.
    lost_seconds
        Foreground time spent on requests to a location that failed or was slow.
    outages
        How often the circuit breaker opened because of that. A thread probes the location and closes it again.
    late
        Restores that were given up in the middle, since computing the rest was faster, and lookups that did not wait
        for a far location: see `max_delay`.
    seconds_saved
        Time that computing the restored tokens would have taken, at the rate measured here, less `restore_seconds`.
    entries, bytes_used
        Pages in the location, and its size in bytes, index included; the last known values while it is unreachable.
    bytes_stored, bytes_raw
        Size of the payloads as stored, and of the states they decode to.
    bytes_in_ram
        Size of the states kept in RAM.
    queued_bytes
        Bytes captured but not yet written.
    pending_pages, pending_snapshots
        Pages and snapshots captured but not yet written: they are found by lookups of this process already.
    capacity_bytes, capacity_entries
        What the location may hold: `max_bytes` and `max_entries`, None for no limit.
    peak_bytes
        The largest size of the location since the store was opened, as far as this store has seen.
    allocations, frees
        Pages that this store has written, and pages that it has deleted, for whatever reason: evicted, expired,
        damaged, thinned, cleared, or replaced by a longer one.
    free_bytes, utilization
        The unused part of `capacity_bytes`; and the used share of `capacity_bytes` or `capacity_entries`, whichever is
        higher: from 0 to 1, and above if the capacity was larger before.
    tiers
        With several locations, what each has done, the nearest first. Other values about the contents and drops of a
        location are those of the nearest one.
    kind
        What is stored of the context of `PrefixStore.llm`; ``unbound`` if no Llama is attached.
    sessions
        What its sessions have done; None without `PrefixStore.sessions`.
    """

    hits: int
    live_hits: int
    misses: dict[str, int]
    unreadable: dict[str, int]
    prompt_tokens: int
    tokens_restored: int
    tokens_computed: int
    pages_captured: int
    snapshots_captured: int
    dropped: dict[str, int]
    shortage: Shortage | None
    outdated: dict[str, int]
    evictions: int
    expired: int
    corrupt: int
    packed: int
    restore_seconds: float
    capture_seconds: float
    lost_seconds: float
    outages: int
    seconds_saved: float
    entries: int
    bytes_used: int
    bytes_stored: int
    bytes_raw: int
    bytes_in_ram: int
    queued_bytes: int
    pending_pages: int
    pending_snapshots: int
    capacity_bytes: int
    capacity_entries: int | None
    peak_bytes: int
    allocations: int
    frees: int
    kind: str
    sessions: SessionCounts | None = None
    late: int = 0
    tiers: tuple[TierStats, ...] = ()

    @property
    def free_bytes(self) -> int:
        """What is left of the capacity."""
        return max(self.capacity_bytes - self.bytes_used, 0)

    @property
    def utilization(self) -> float:
        """Which share of the capacity is in use."""
        shares = [self.bytes_used / self.capacity_bytes if self.capacity_bytes else 0.0]
        if self.capacity_entries:
            shares.append(self.entries / self.capacity_entries)
        return max(shares)

    def __str__(self) -> str:
        saved = f"{format_seconds(self.seconds_saved)} saved"
        packed = f"{format_bytes(self.bytes_stored)} for {format_bytes(self.bytes_raw)} of state"
        taken = f"{self.pages_captured} and {self.snapshots_captured} snapshots"
        free, capacity = format_bytes(self.free_bytes), format_bytes(self.capacity_bytes)
        pool = f"{free} of {capacity} free, {self.utilization:.0%} in use"
        peak = (
            f"peak {format_bytes(self.peak_bytes)}, {counted(self.allocations, 'page')} written, {self.frees} deleted"
        )
        waiting = f"{counted(self.pending_pages, 'page')}, {counted(self.pending_snapshots, 'snapshot')}"
        gone = f"{self.packed} packed, {self.evictions} evicted, {self.expired} expired"
        lines = {
            "kind": self.kind,
            "lookups": f"{counted(self.hits, 'hit')}, {self.live_hits} live, misses: {_reasons(self.misses)}",
            "outages": f"{self.outages}, {self.lost_seconds:.1f} s lost, {self.late} lookups and restores late",
            "tokens": f"{self.tokens_restored} restored, {self.tokens_computed} computed, {saved}",
            "stored": f"{counted(self.entries, 'page')}, {format_bytes(self.bytes_used)} used, {packed}",
            "pool": f"{pool}, {peak}",
            "pages": f"{taken} captured, {gone}, dropped: {_reasons(self.dropped)}",
            "waiting": f"{waiting}, {format_bytes(self.queued_bytes)}, given up as outdated: {_reasons(self.outdated)}",
        }
        if self.shortage is not None:
            lines["no space"] = str(self.shortage)
        if self.sessions is not None:
            lines["sessions"] = str(self.sessions)
        lines |= {f"tier {n}": str(tier) for n, tier in enumerate(self.tiers, 1)}
        return "\n".join(f"{name:8} {line}" for name, line in lines.items())


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "none"


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
