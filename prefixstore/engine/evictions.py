"""Which pages were evicted lately, when and why. It is kept as a note in the location, so that other processes see it.

The note is for diagnosis: an eviction that it lacks, or that cannot be read, is unknown, and nothing else depends on
it.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages
from prefixstore.errors import StorageError

__all__ = ["EVICTIONS_NOTE", "Cause", "Eviction", "EvictionLog", "EvictionNote"]

log = logging.getLogger("prefixstore")

EVICTIONS_NOTE = b"evictions"
# so many are remembered, the latest ones: 52 KiB in the location
REMEMBERED = 4096
# the note is written so often at most, and only if it takes at most this part of the budget
SAVE_SECONDS = 60.0
PART_OF_BUDGET = 1 / 256
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
        both = {**_parsed(older), **found}
        newest = sorted(both.items(), key=lambda one: -one[1].at)
        kept = islice(newest, max(min(REMEMBERED, at_most // ENTRY.size), 0))
        return b"".join(ENTRY.pack(key, int(one.at) & 0xFFFFFFFF, one.cause) for key, one in kept)


def _parsed(note: bytes | None) -> dict[bytes, Eviction]:
    """What a note says; nothing of one that is not whole."""
    if not note or len(note) % ENTRY.size:
        return {}
    known = {cause.value for cause in Cause}
    return {key: Eviction(float(at), Cause(cause)) for key, at, cause in ENTRY.iter_unpack(note) if cause in known}


class EvictionNote:
    """Keeps the log of an engine in its location.

    Parameters
    ----------
    backend
        Of the engine.
    evictions
        Its log.
    max_bytes
        What the location may hold.
    clock
        Seconds.
    """

    def __init__(
        self,
        backend: Pages,
        evictions: EvictionLog,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._log = evictions
        self._max_bytes = max_bytes
        self._clock = clock
        self._saved_at = clock()
        self._n_saved = 0

    def find(self, view: View, keys: Sequence[bytes]) -> dict[bytes, Eviction]:
        """What is known of these pages, by this process or by others. Raises `StorageError`."""
        noted = _parsed(view.note(EVICTIONS_NOTE))
        known = ((key, self._log.find(key) or noted.get(key[:KEY_PART])) for key in keys)
        return {key: one for key, one in known if one is not None}

    def save(self, *, closing: bool = False) -> None:
        """Write the note if pages were evicted since the last time; not too often, unless the engine is closing."""
        n_added, now = self._log.n_added, self._clock()
        if n_added == self._n_saved or (not closing and now < self._saved_at + SAVE_SECONDS):
            return
        self._saved_at, self._n_saved = now, n_added
        try:
            with self._backend.update() as transaction:
                old = transaction.note(EVICTIONS_NOTE)
                # a note evicts nothing: it takes what is free
                free = self._max_bytes - transaction.used.bytes + len(old or b"")
                new = self._log.pack(old, min(int(self._max_bytes * PART_OF_BUDGET), free))
                if new and new != old:
                    transaction.put_note(EVICTIONS_NOTE, new)
        except StorageError as error:
            log.info("the note of evicted pages was not written: %s", error)
