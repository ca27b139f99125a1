"""Chooses how the pages of each namespace are stored: as the user says, or by what is measured."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prefixstore.buffers import BufferPool
from prefixstore.errors import InvalidParameterError
from prefixstore.format.codec import CODECS, DEFAULT_LEVEL, PACKINGS
from prefixstore.format.record import Buffer

__all__ = ["UNPACKERS", "AutoCodec", "Encoder", "Figures", "FixedCodec", "ReadPace", "choose", "encode", "pick"]

# a codec must save this share of the bytes
LEAST = 0.02
# and restores must keep this share of the speed of raw ones, by an estimate that is high by 0.05-0.1
SLOWEST = 0.8
# seconds a byte as long as nothing was read: a local file, in memory already
FASTEST = 3e-11
# of two that save about the same, the faster one
CLOSE = 0.01
# threads that unpack for one restore
UNPACKERS = min(4, os.cpu_count() or 1)


def encode(raw: Buffer, codec: str, level: int = DEFAULT_LEVEL) -> tuple[int, Buffer]:
    """The number of the codec and the stored form of a page; a page that does not shrink is stored raw."""
    packed = PACKINGS[codec].pack(raw, level)
    if len(packed) < len(raw):
        return PACKINGS[codec].number, packed
    return PACKINGS["raw"].number, raw


class ReadPace:
    """How fast stored bytes of a location are read and verified, by one thread: the best of the last few times.

    A busy machine makes a read slower, and nothing makes it faster.
    """

    # what is shorter measures calls, not bytes
    SHORTEST = 1 << 16
    LAST = 16

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=self.LAST)

    def note(self, n_bytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        if n_bytes >= self.SHORTEST:
            self._seconds_per_byte.append(seconds / n_bytes)

    @property
    def seconds_per_byte(self) -> float | None:
        """None as long as it is not known."""
        return min(self._seconds_per_byte.copy(), default=None)


@dataclass(frozen=True)
class Figures:
    """What a codec made of some pages: their size before and after, and the seconds that unpacking takes one thread."""

    raw_bytes: int
    stored_bytes: int
    seconds: float

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.raw_bytes + other.raw_bytes, self.stored_bytes + other.stored_bytes, self.seconds + other.seconds
        )

    @property
    def saves(self) -> float:
        """The share of the bytes that need not be stored."""
        return 1 - self.stored_bytes / max(self.raw_bytes, 1)

    def speed(self, pace: float) -> float:
        """How fast a restore is, relative to that of raw pages, if a stored byte is read in `pace` seconds.

        Reading and unpacking add up: pages that are read at the same time wait for the same disk, and for the same
        cores. Measured with a cold file on 2 cores: 0.81 by this estimate, 0.70-0.74 by the clock.
        """
        return self.raw_bytes * pace / max(self.stored_bytes * pace + self.seconds / UNPACKERS, 1e-12)


def choose(figures: Mapping[str, Figures], pace: float | None) -> str:
    """The codec for pages like those measured, in a location where a stored byte is read in `pace` seconds.

    Parameters
    ----------
    figures
        What each candidate made of the same pages.
    pace
        None if nothing was read yet.
    """
    pace = FASTEST if pace is None else pace
    good = {name: figure for name, figure in figures.items() if figure.saves >= LEAST and figure.speed(pace) >= SLOWEST}
    most = max((figure.saves for figure in good.values()), default=0.0)
    close = [name for name, figure in good.items() if figure.saves >= most - CLOSE]
    return min(close, key=lambda name: good[name].seconds, default="raw")


class Encoder(ABC):
    """Packs pages.

    Attributes
    ----------
    pace
        Of the location; whoever reads notes it.
    """

    def __init__(self) -> None:
        self.pace = ReadPace()

    @abstractmethod
    def __call__(self, namespace: bytes, raw: Buffer) -> tuple[int, Buffer]:
        """The number of the codec and the stored form of a page."""


class FixedCodec(Encoder):
    """One codec for all pages."""

    def __init__(self, codec: str, level: int = DEFAULT_LEVEL) -> None:
        super().__init__()
        self._codec = codec
        self._level = level

    def __call__(self, namespace: bytes, raw: Buffer) -> tuple[int, Buffer]:
        return encode(raw, self._codec, self._level)


class AutoCodec(Encoder):
    """Looks at the first pages of each namespace, and again now and then, and takes the codec that is worth it.

    It compresses where restores from this location are hardly slower for it: not where pages lie in a local file that
    the system keeps in memory. The pace of the location may change between two looks: it counts for every page.
    """

    LOOK = 2
    LOOK_AGAIN = 64

    def __init__(self) -> None:
        super().__init__()
        # written by several threads without a lock: at worst there is a look more, or less
        self._known: dict[bytes, dict[str, Figures]] = {}
        self._seen: dict[bytes, int] = {}

    def __call__(self, namespace: bytes, raw: Buffer) -> tuple[int, Buffer]:
        turn = self._seen.get(namespace, 0) % (self.LOOK + self.LOOK_AGAIN)
        self._seen[namespace] = turn + 1
        known = self._known.get(namespace, {})
        if known and turn >= self.LOOK:
            return encode(raw, choose(known, self.pace.seconds_per_byte))
        packed = {name: encode(raw, name) for name in PACKINGS}
        figures = {name: _measure(*packed[name], len(raw)) for name in PACKINGS if name != "raw"}
        if known and turn:
            figures = {name: known[name] + figure for name, figure in figures.items()}
        self._known[namespace] = figures
        return packed[choose(figures, self.pace.seconds_per_byte)]


def _measure(number: int, stored: Buffer, raw_bytes: int) -> Figures:
    packing = next(packing for packing in PACKINGS.values() if packing.number == number)
    out = np.empty(raw_bytes, np.uint8)
    out.fill(0)  # a restore has its buffers already: their page faults do not count
    buffers = BufferPool(raw_bytes)
    started = time.perf_counter()
    packing.unpack(memoryview(stored), out.data, buffers)
    return Figures(raw_bytes, len(stored), time.perf_counter() - started)


def pick(codec: str) -> Encoder:
    """The encoder with this name: ``"auto"``, or one of `CODECS`, with a level behind a colon if it has levels.

    Raises
    ------
    InvalidParameterError
        If there is none.
    """
    if codec == "auto":
        return AutoCodec()
    name, colon, level = str(codec).partition(":")
    if name not in CODECS:
        known = ", ".join(map(repr, ["auto", *CODECS]))
        raise InvalidParameterError(f"codec={codec!r} is unknown; choose one of {known}, or one with a level: 'zstd:9'")
    if not colon:
        return FixedCodec(name)
    levels = PACKINGS[name].levels
    if not levels:
        raise InvalidParameterError(f"codec={codec!r}: {name!r} has no levels")
    if not level.isdecimal() or int(level) not in levels:
        raise InvalidParameterError(f"codec={codec!r}: the level is a number from {levels[0]} to {levels[-1]}")
    return FixedCodec(name, int(level))
