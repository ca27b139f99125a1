"""Which pages were evicted lately, when and why. It is kept as a note in the location, so that other processes see it.

The note is for diagnosis: an eviction that it lacks, or that cannot be read, is unknown, and nothing else depends on
it.
"""

from __future__ import annotations

import struct
import threading
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

__all__ = ["EVICTIONS_NOTE", "Cause", "Eviction", "EvictionLog", "parsed"]

EVICTIONS_NOTE = b"evictions"
# so many are remembered, the latest ones: 52 KiB in the location
REMEMBERED = 4096
# the first bytes of a page key, seconds since the epoch, and the cause
KEY_PART = 8
ENTRY = struct.Struct(f"<{KEY_PART}sIB")


class Cause(IntEnum):
    """Why a page left the location."""

    SPACE = 1
    """The location was full."""
    QUOTA = 2
    """The tenant held as much as it may."""
    ASKED = 3
    """``PrefixStore.evict`` or ``prefixstore evict``."""
    EXPIRED = 4
    """Its time to live had passed."""


class Eviction(NamedTuple):
    """When a page was evicted, in seconds since the epoch, and why."""

    at: float
    cause: Cause


class EvictionLog:
    """The latest evictions, in memory; each page once. May be used from many threads."""

    def __init__(self) -> None:
        self._found: dict[bytes, Eviction] = {}
        self._lock = threading.Lock()
        # how many were added since the start
        self.n_added = 0

    def add(self, key: bytes, cause: Cause, at: float) -> None:
        """Add an evicted page; beyond `REMEMBERED`, the oldest one is forgotten."""
        with self._lock:
            self._found.pop(key[:KEY_PART], None)
            self._found[key[:KEY_PART]] = Eviction(at, cause)
            if len(self._found) > REMEMBERED:
                del self._found[next(iter(self._found))]
            self.n_added += 1

    def find(self, key: bytes) -> Eviction | None:
        """What is known of a page."""
        return self._found.get(key[:KEY_PART])

    def pack(self, older: bytes | None, at_most: int) -> bytes:
        """The latest of these evictions and of those in an older note, in at most so many bytes."""
        with self._lock:
            found = dict(self._found)
        both = {**parsed(older), **found}
        newest = sorted(both.items(), key=lambda one: -one[1].at)
        kept = islice(newest, max(min(REMEMBERED, at_most // ENTRY.size), 0))
        return b"".join(ENTRY.pack(key, int(one.at) & 0xFFFFFFFF, one.cause) for key, one in kept)


def parsed(note: bytes | None) -> dict[bytes, Eviction]:
    """What a note says; nothing of one that is not whole."""
    if not note or len(note) % ENTRY.size:
        return {}
    known = {cause.value for cause in Cause}
    return {key: Eviction(float(at), Cause(cause)) for key, at, cause in ENTRY.iter_unpack(note) if cause in known}
