"""What a store keeps of a context, and counters of what it has done."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import Enum

from prefixstore.units import format_bytes

__all__ = ["Counters", "Kind", "Stats"]

_NONE = "none: "


class Kind(str, Enum):
    """What a store keeps of the context it is used with.

    A member is a string, equal to its value: ``Kind.PAGES == "pages"``, and it prints and serializes as ``pages``.
    """

    UNBOUND = "unbound"
    """No Llama is attached, and no completion has asked for anything yet."""
    PAGES = "pages"
    """Full attention: a state can be cut at any token."""
    SNAPSHOTS = "snapshots"
    """Recurrent memory: a state can be resumed only at the exact position where it was taken."""
    PAGES_AND_SNAPSHOTS = "pages and snapshots"
    """Hybrid memory: pages of the attention layers, snapshots of the recurrent ones."""
    ENCODER = "none: encoder"
    """The model has an encoder, whose state cannot be stored."""
    NO_MEMORY = "none: no_memory"
    """The model keeps no state between tokens."""
    STREAMS = "none: streams"
    """Each sequence has rows of its own (``n_seq_max > 1`` without ``kv_unified``), which cannot be cut."""
    PORTABLE = "portable"
    """No Llama is attached: states travel as whole ``LlamaState`` objects."""
    PORTABLE_PAGES = "portable: pages"
    """As `PORTABLE`, and the states are cut into pages."""
    PORTABLE_WHOLE = "portable: whole states"
    """As `PORTABLE`, and each state is stored whole, since its layout is unknown."""

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    @property
    def has_pages(self) -> bool:
        """Whether states are stored in pages."""
        return self in (Kind.PAGES, Kind.PAGES_AND_SNAPSHOTS, Kind.PORTABLE_PAGES)

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
class Stats:
    """What a store has done since it was opened, and what its location holds.

    Attributes
    ----------
    hits
        Lookups that restored pages.
    live_hits
        Lookups for which the context already held as many tokens as the store had to offer.
    misses
        Lookups that reused nothing from the store, by reason: ``"not_found"``, ``"short"`` (less than `min_tokens`),
        ``"slow"`` (computing is faster), ``"unreadable"`` (see there), ``"unavailable"`` (the location failed),
        ``"logprobs"`` (the request needs the logits of the prompt), ``"multimodal"`` (images are not in the tokens),
        ``"encoder"``, ``"no_memory"``, ``"streams"`` (states of this model, or context, cannot be stored),
        ``"loaded_state"``, ``"changed"`` (the context held more of the prompt than the store, by a state or a change of
        the caller's whose tokens are not known; it was used, and nothing is stored after it), ``"sequence_in_use"``
        (sequence 1 of the context, which the store needs, is in use), ``"context_replaced"`` (the ``Llama`` has
        another context than when the store was attached), ``"closed"`` (the ``Llama`` is), ``"error"``.
    unreadable
        Pages that were found but could not be restored, by reason: ``"corrupt"``, ``"vanished"`` (evicted meanwhile),
        ``"incompatible"`` (written or packed by a newer version; it is kept), ``"unavailable"``,
        ``"shape"`` (the checksum matches, but the bytes are not a state of this context), ``"refused"`` (by llama.cpp).
    tokens_restored, tokens_computed
        Tokens restored from the store, and tokens computed by ``eval``.
    pages_captured, snapshots_captured
        Pages and snapshots copied out of the context.
    dropped
        Pages that were captured, or should have been, but are not stored, by reason: ``"queue_full"``, ``"budget"``,
        ``"quota"`` (the tenant's), ``"admission"`` (worth less than what would be evicted for them),
        ``"full"`` (the disk or the map), ``"orphan"`` (the parent was evicted),
        ``"incomplete"`` (a sliding window has moved past it), ``"moved_on"`` (the context left the position of a
        snapshot before its rows were copied), ``"uncut"`` (a state of unknown layout: from then on whole states are
        stored), ``"unavailable"`` (the location failed), ``"closed"`` (the store is, and a completion saves to it),
        ``"error"`` (a fault of the store). While it is not known what the context holds: ``"attached_late"`` (something
        was evaluated before the store was attached), ``"loaded_state"`` (``load_state`` with a state that was not saved
        here), ``"changed"`` (something other than the store reached the context), ``"stepped_back"`` (rewound to where
        it cannot continue), ``"interrupted"``. This ends with the next lookup, `PrefixStore.restore` or
        ``llm.reset()``.
    evictions, expired, corrupt
        Pages that this store evicted for space, removed as expired, and deleted as damaged.
    packed, unpacked
        Stored pages that this store packed because the location was full, and that it made raw again because they were
        restored and there was room; see `codec`.
    restore_seconds, capture_seconds
        Foreground time spent on restoring and on capturing pages.
    lost_seconds
        Foreground time spent on requests to a location that failed or was slow.
    outages
        How often the circuit breaker opened because of that. A thread probes the location and closes it again.
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
    kind
        What is stored of this context. Without an attached Llama ``unbound``, and once a completion has used the store
        ``portable: pages`` or ``portable: whole states``.
    """

    hits: int
    live_hits: int
    misses: dict[str, int]
    unreadable: dict[str, int]
    tokens_restored: int
    tokens_computed: int
    pages_captured: int
    snapshots_captured: int
    dropped: dict[str, int]
    evictions: int
    expired: int
    corrupt: int
    packed: int
    unpacked: int
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
    kind: str

    def __str__(self) -> str:
        saved = f"{self.seconds_saved:.1f} s saved"
        packed = f"{format_bytes(self.bytes_stored)} for {format_bytes(self.bytes_raw)} of state"
        taken = f"{self.pages_captured} and {self.snapshots_captured} snapshots"
        gone = f"{self.packed} packed, {self.unpacked} unpacked, {self.evictions} evicted, {self.expired} expired"
        lines = {
            "kind": self.kind,
            "lookups": f"{self.hits} hits, {self.live_hits} live, misses: {_reasons(self.misses)}",
            "outages": f"{self.outages}, {self.lost_seconds:.1f} s lost",
            "tokens": f"{self.tokens_restored} restored, {self.tokens_computed} computed, {saved}",
            "stored": f"{self.entries} pages, {format_bytes(self.bytes_used)} used, {packed}",
            "pages": f"{taken} captured, {gone}, dropped: {_reasons(self.dropped)}",
        }
        return "\n".join(f"{name:8} {line}" for name, line in lines.items())


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "none"


class Counters:
    """Counts and times by name, safe to raise from many threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def copy(self) -> Counters:
        """The same counts, with a lock of its own: for a forked child, where the lock may be held for ever."""
        copied = Counters()
        copied._counts |= self._counts
        copied._seconds |= self._seconds
        return copied

    def count(self, name: str, by: int = 1) -> None:
        """Raise a count. A name such as ``"miss:not_found"`` belongs to the group before the colon."""
        with self._lock:
            self._counts[name] += by

    def time(self, name: str, seconds: float) -> None:
        """Add to a time."""
        with self._lock:
            self._seconds[name] += seconds

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def seconds(self, name: str) -> float:
        """A time, in seconds."""
        return self._seconds.get(name, 0.0)

    def group(self, prefix: str) -> dict[str, int]:
        """The counts of a group, by the part of their names after the colon."""
        with self._lock:
            return {name.split(":", 1)[1]: n for name, n in self._counts.items() if name.startswith(prefix + ":")}
