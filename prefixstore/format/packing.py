"""Ways to store a state: as it is, packed by zstd, and packed by zstd after its 16-bit values were split into bytes.

States are made of 16-bit floats (or of blocks of 8-bit integers with a 16-bit scale), whose mantissas nothing
compresses: what can be saved is in their sign and exponent, which are the upper byte of each value.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import zstandard

from prefixstore.buffers import Buffers
from prefixstore.errors import CorruptError
from prefixstore.format.record import Buffer

__all__ = ["DEFAULT_LEVEL", "PACKINGS", "PLANES_HEADER", "Packing"]

Bytes = npt.NDArray[np.uint8]

# zstd makes a table of symbols for each of its blocks, which are as large as the window at most. With 64 KiB, a block
# is of one layer's K or V in small models too: 1.235 instead of 1.205 on the trained one, no less on the large one.
WINDOW_LOG = 16
LEVELS = range(1, 23)
DEFAULT_LEVEL = 1

# Values that are put together at a time: they stay in the cache of a core, and there are few calls (with 1 << 12 of
# them the calls cost more than the bytes: 2.2 GB/s instead of 9).
BLOCK = 1 << 17

# bytes of the frame with the upper plane; the frame with the lower plane follows it
PLANES_HEADER = struct.Struct("<Q")


class Packing(ABC):
    """One way to store a state.

    Attributes
    ----------
    number
        Stands for it in the record. Numbers are given once and for all.
    levels
        Those that `pack` knows; none if there is no choice.
    """

    number: ClassVar[int]
    levels: ClassVar[range] = LEVELS

    @abstractmethod
    def pack(self, raw: Buffer, level: int = DEFAULT_LEVEL) -> Buffer:
        """The stored form of a state; not a copy, if there is nothing to do."""

    @abstractmethod
    def claimed(self, stored: memoryview) -> int:
        """The size of the state that stored bytes claim to hold; -1 if they do not say. Nothing is allocated for it."""

    @abstractmethod
    def unpack(self, stored: memoryview, out: memoryview, buffers: Buffers) -> None:
        """Write the state to `out`, which has the claimed size; lends what it needs besides from `buffers`.

        Raises
        ------
        CorruptError
            If the bytes cannot be unpacked to exactly this size.
        """


class Raw(Packing):
    """The state itself. A restore reads it where it lies."""

    number = 0
    levels = range(0)

    def pack(self, raw: Buffer, level: int = DEFAULT_LEVEL) -> Buffer:
        return raw

    def claimed(self, stored: memoryview) -> int:
        return len(stored)

    def unpack(self, stored: memoryview, out: memoryview, buffers: Buffers) -> None:
        out[:] = stored


class Zstd(Packing):
    """One zstd frame, which says its content size."""

    number = 1

    def pack(self, raw: Buffer, level: int = DEFAULT_LEVEL) -> Buffer:
        return _compress(raw, level)

    def claimed(self, stored: memoryview) -> int:
        return _content_size(stored)

    def unpack(self, stored: memoryview, out: memoryview, buffers: Buffers) -> None:
        _decompress(stored, out)


class Planes(Packing):
    """Two zstd frames: the bytes at odd places, which are the upper ones of 16-bit values, and those at even places."""

    number = 2

    def pack(self, raw: Buffer, level: int = DEFAULT_LEVEL) -> Buffer:
        plain = np.frombuffer(raw, np.uint8)
        upper = _compress(np.ascontiguousarray(plain[1::2]).data, level)
        lower = _compress(np.ascontiguousarray(plain[0::2]).data, level)
        return b"".join((PLANES_HEADER.pack(len(upper)), upper, lower))

    def claimed(self, stored: memoryview) -> int:
        upper, lower = map(_content_size, self._frames(stored))
        return upper + lower if 0 <= upper <= lower <= upper + 1 else -1

    def unpack(self, stored: memoryview, out: memoryview, buffers: Buffers) -> None:
        frames = self._frames(stored)
        n = len(out) // 2
        lease = buffers.lease(len(out), wait=True)
        assert lease is not None
        try:
            planes = np.frombuffer(lease.view, np.uint8)
            _decompress(frames[0], planes[:n].data)
            _decompress(frames[1], planes[n:].data)
            _interleave(planes[:n], planes[n:], np.frombuffer(out, np.uint8))
        finally:
            lease.release()

    @staticmethod
    def _frames(stored: memoryview) -> tuple[memoryview, memoryview]:
        if len(stored) < PLANES_HEADER.size:
            raise CorruptError(f"{len(stored)} bytes are too few for two planes")
        split = PLANES_HEADER.size + PLANES_HEADER.unpack_from(stored)[0]
        return stored[PLANES_HEADER.size : split], stored[split:]


PACKINGS: dict[str, Packing] = {"raw": Raw(), "zstd": Zstd(), "planes": Planes()}
"""All of them, by the name that users give."""


def _interleave(upper: Bytes, lower: Bytes, out: Bytes) -> None:
    """Put planes together: 4 times as fast as ``out[1::2] = upper; out[::2] = lower``, since it writes whole values."""
    n = len(upper)
    values = out[: 2 * n].view("<u2")
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        block = values[start:end]
        block[:] = upper[start:end]
        np.left_shift(block, 8, out=block)
        np.bitwise_or(block, lower[start:end], out=block)
    out[2 * n :] = lower[n:]


def _compress(raw: Buffer, level: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(level, window_log=WINDOW_LOG)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(raw)


def _content_size(frame: memoryview) -> int:
    """What a frame says, -1 if it does not."""
    try:
        return int(zstandard.frame_content_size(frame))
    except zstandard.ZstdError as error:
        raise CorruptError(str(error)) from error


def _decompress(frame: memoryview, out: memoryview) -> None:
    """Straight into `out`; zstd never writes behind it, whatever the frame holds."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            n = reader.readinto(out) if len(out) else 0
    except zstandard.ZstdError as error:
        raise CorruptError(str(error)) from error
    if n != len(out):
        raise CorruptError(f"a frame of {n} bytes in the place of {len(out)}")
