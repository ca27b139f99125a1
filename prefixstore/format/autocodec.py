"""Packs pages: by the codec that the user has chosen, or by measurement."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prefixstore.buffers import BufferPool
from prefixstore.errors import InvalidParameterError
from prefixstore.format.codec import DEFAULT_LEVEL, PACKINGS
from prefixstore.format.record import Buffer

# a codec must save this share of the bytes
MIN_SAVING = 0.02
# restores must keep this share of the speed of raw pages, by an estimate that is too high by 0.05-0.1
MIN_SPEED = 0.8
# assumed until something was read: a local file that is in memory already
ASSUMED_SECONDS_PER_BYTE = 3e-11
# of codecs whose savings differ by no more than this, the fastest is chosen
SAVING_TOLERANCE = 0.01
# where space is short, any saving pays: as if reading a byte took a second
SHORT_OF_SPACE = 1.0
# threads that unpack for one restore
UNPACKERS = min(4, os.cpu_count() or 1)


def encode(raw: Buffer, codec: str, level: int = DEFAULT_LEVEL) -> tuple[int, Buffer]:
    """The number of the codec and the stored form of a page; a page that does not shrink is stored raw."""
    packed = PACKINGS[codec].pack(raw, level)
    if len(packed) < len(raw):
        return PACKINGS[codec].number, packed
    return PACKINGS["raw"].number, raw


class ReadRate:
    """How fast one thread reads and verifies stored bytes of a location: the best of the last few reads.

    The best, because a busy machine makes reads slower, and nothing makes them faster.
    """

    # the time of a shorter read is that of the call, not of the bytes
    MIN_BYTES = 1 << 16
    READS_KEPT = 16

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=self.READS_KEPT)

    def observe(self, n_bytes: int, seconds: float) -> None:
        """Record how long a read of `n_bytes` took."""
        if n_bytes >= self.MIN_BYTES:
            self._seconds_per_byte.append(seconds / n_bytes)

    @property
    def seconds_per_byte(self) -> float | None:
        """The best of the last reads; None until there is one."""
        return min(self._seconds_per_byte.copy(), default=None)


@dataclass(frozen=True)
class Trial:
    """A page packed by a codec on trial: its sizes before and after, and the seconds to unpack it in one thread."""

    raw_bytes: int
    stored_bytes: int
    seconds: float

    @property
    def saving(self) -> float:
        """The share of the bytes that need not be stored."""
        return 1 - self.stored_bytes / max(self.raw_bytes, 1)

    def speed(self, seconds_per_byte: float) -> float:
        """The speed of a restore relative to that of raw pages, if reading a stored byte takes `seconds_per_byte`.

        Reading and unpacking add up: pages that are read at the same time wait for the same disk, and for the same
        cores. Measured with a cold file on 2 cores: 0.81 by this estimate, 0.70-0.74 by the clock.
        """
        reading = self.stored_bytes * seconds_per_byte
        return self.raw_bytes * seconds_per_byte / max(reading + self.seconds / UNPACKERS, 1e-12)


def choose(trials: Mapping[str, Trial], seconds_per_byte: float | None) -> str:
    """The codec for pages like the one on which the candidates were tried.

    `seconds_per_byte` is what reading a stored byte of the location takes; None if nothing was read yet.
    """
    rate = ASSUMED_SECONDS_PER_BYTE if seconds_per_byte is None else seconds_per_byte
    good = {
        name: trial for name, trial in trials.items() if trial.saving >= MIN_SAVING and trial.speed(rate) >= MIN_SPEED
    }
    most = max((trial.saving for trial in good.values()), default=0.0)
    close = [name for name, trial in good.items() if trial.saving >= most - SAVING_TOLERANCE]
    return min(close, key=lambda name: good[name].seconds, default="raw")


class Encoder:
    """Packs pages: by one codec, or as measured.

    With ``"auto"`` it measures all codecs on the first page of each namespace, and on each 64th one after it, and uses
    the best one. It compresses only where that hardly slows down restores from this location: not where pages are in a
    local file that the system keeps in memory. While space is short it uses the codec that saves most. The read rate is
    not bound to those intervals: it is considered for every page.

    Parameters
    ----------
    codec
        ``"auto"``, or one of `PACKINGS`, with a level after a colon if it has levels.

    Attributes
    ----------
    is_short_of_space
        Whether ``"auto"`` is to pack pages however long it takes to unpack them.
    read_rate
        Of the location; readers update it.

    Raises
    ------
    InvalidParameterError
        If the codec or level does not exist.
    """

    MEASURED_EVERY = 64

    def __init__(self, codec: str = "auto") -> None:
        self.is_short_of_space = False
        self.read_rate = ReadRate()
        self._codec = None if codec == "auto" else _parsed(codec)
        # written by several threads without a lock: at worst a page more, or one less, is measured
        self._known: dict[bytes, dict[str, Trial]] = {}
        self._seen: dict[bytes, int] = {}

    def __call__(self, namespace: bytes, raw: Buffer) -> tuple[int, Buffer]:
        """The number of the codec and the stored form of a page."""
        if self._codec is not None:
            return encode(raw, *self._codec)
        n_seen = self._seen.get(namespace, 0)
        self._seen[namespace] = n_seen + 1
        seconds_per_byte = SHORT_OF_SPACE if self.is_short_of_space else self.read_rate.seconds_per_byte
        known = self._known.get(namespace)
        if known is not None and n_seen % self.MEASURED_EVERY:
            return encode(raw, choose(known, seconds_per_byte))
        packed = {name: encode(raw, name) for name in PACKINGS}
        trials = {name: _measure(*packed[name], len(raw)) for name in PACKINGS if name != "raw"}
        self._known[namespace] = trials
        return packed[choose(trials, seconds_per_byte)]


def _measure(number: int, stored: Buffer, raw_bytes: int) -> Trial:
    packing = next(packing for packing in PACKINGS.values() if packing.number == number)
    out = np.empty(raw_bytes, np.uint8)
    out.fill(0)  # a restore reuses its buffers, so page faults must not count
    buffers = BufferPool(raw_bytes)
    started = time.perf_counter()
    packing.unpack(memoryview(stored), out.data, buffers)
    return Trial(raw_bytes, len(stored), time.perf_counter() - started)


def _parsed(codec: str) -> tuple[str, int]:
    name, colon, level = str(codec).partition(":")
    if name not in PACKINGS:
        known = ", ".join(map(repr, ["auto", *PACKINGS]))
        raise InvalidParameterError(f"codec={codec!r} is unknown; choose one of {known}, or one with a level: 'zstd:9'")
    levels = PACKINGS[name].levels
    if colon and not levels:
        raise InvalidParameterError(f"codec={codec!r} is not valid: {name!r} has no levels")
    if colon and not (level.isdecimal() and int(level) in levels):
        raise InvalidParameterError(
            f"codec={codec!r} is not valid: the level must be a number from {levels[0]} to {levels[-1]}"
        )
    return name, int(level) if colon else DEFAULT_LEVEL
