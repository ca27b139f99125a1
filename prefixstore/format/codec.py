"""Codecs: from the state of a page to stored bytes and back.

A record names its codec by number, so one location may hold pages of several codecs. States are 16-bit floats, or
blocks of 8-bit integers with a 16-bit scale. Mantissas do not compress; what can be saved is in sign and exponent, the
upper byte of each value.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import zstandard

from prefixstore.buffers import BufferPool
from prefixstore.errors import CorruptError, IncompatibleError, UnavailableError
from prefixstore.format.record import Buffer, Record, checksum

Bytes = npt.NDArray[np.uint8]

# zstd makes a table of symbols for each block, and a block is at most as large as the window. With 64 KiB, a block
# holds one layer's K or V even in small models: a ratio of 1.235 instead of 1.205 on the trained one, as good on the
# large one.
WINDOW_LOG = 16
LEVELS = range(1, 23)
DEFAULT_LEVEL = 1

# How many values are merged in one step: few enough for the cache of a core, and enough to make few calls (with 1 << 12
# values the calls cost more than the bytes: 2.2 GB/s instead of 9).
BLOCK = 1 << 17

# length of the frame with the upper plane; the frame with the lower plane follows it
PLANES_HEADER = struct.Struct("<Q")


class Packing(ABC):
    """One way to store a state.

    Attributes
    ----------
    number
        Identifies it in the record. Numbers are never reused.
    levels
        Levels that `pack` accepts; empty if it has no levels.
    """

    number: ClassVar[int]
    levels: ClassVar[range] = LEVELS

    @abstractmethod
    def pack(self, raw: Buffer, level: int = DEFAULT_LEVEL) -> Buffer:
        """The stored form of a state; not a copy if it is the state itself."""

    @abstractmethod
    def claimed(self, stored: memoryview) -> int:
        """The size of the state that stored bytes claim to hold, -1 if unknown. Nothing is allocated for it."""

    @abstractmethod
    def unpack(self, stored: memoryview, out: memoryview, buffers: BufferPool) -> None:
        """Write the state to `out`, which has the claimed size; further memory comes from `buffers`.

        Raises
        ------
        CorruptError
            If the bytes do not unpack to exactly this size.
        """


class Raw(Packing):
    """The state itself. A restore reads it in place."""

    number = 0
    levels = range(0)

    def pack(self, raw: Buffer, level: int = DEFAULT_LEVEL) -> Buffer:
        return raw

    def claimed(self, stored: memoryview) -> int:
        return len(stored)

    def unpack(self, stored: memoryview, out: memoryview, buffers: BufferPool) -> None:
        out[:] = stored


class Zstd(Packing):
    """One zstd frame, which contains its content size."""

    number = 1

    def pack(self, raw: Buffer, level: int = DEFAULT_LEVEL) -> Buffer:
        return _compress(raw, level)

    def claimed(self, stored: memoryview) -> int:
        return _content_size(stored)

    def unpack(self, stored: memoryview, out: memoryview, buffers: BufferPool) -> None:
        _decompress(stored, out)


class Planes(Packing):
    """Two zstd frames: the bytes at odd offsets (the upper halves of 16-bit values), and those at even offsets."""

    number = 2

    def pack(self, raw: Buffer, level: int = DEFAULT_LEVEL) -> Buffer:
        plain = np.frombuffer(raw, np.uint8)
        upper = _compress(np.ascontiguousarray(plain[1::2]).data, level)
        lower = _compress(np.ascontiguousarray(plain[0::2]).data, level)
        return b"".join((PLANES_HEADER.pack(len(upper)), upper, lower))

    def claimed(self, stored: memoryview) -> int:
        upper, lower = map(_content_size, self._frames(stored))
        return upper + lower if 0 <= upper <= lower <= upper + 1 else -1

    def unpack(self, stored: memoryview, out: memoryview, buffers: BufferPool) -> None:
        frames = self._frames(stored)
        n = len(out) // 2
        buffer = buffers.acquire(len(out), wait=True)
        assert buffer is not None
        try:
            planes = np.frombuffer(buffer.view, np.uint8)
            _decompress(frames[0], planes[:n].data)
            _decompress(frames[1], planes[n:].data)
            _interleave(planes[:n], planes[n:], np.frombuffer(out, np.uint8))
        finally:
            buffer.release()

    @staticmethod
    def _frames(stored: memoryview) -> tuple[memoryview, memoryview]:
        if len(stored) < PLANES_HEADER.size:
            raise CorruptError(f"{len(stored)} bytes are too short for two planes")
        split = PLANES_HEADER.size + PLANES_HEADER.unpack_from(stored)[0]
        return stored[PLANES_HEADER.size : split], stored[split:]


PACKINGS: dict[str, Packing] = {"raw": Raw(), "zstd": Zstd(), "planes": Planes()}
"""All packings, by their name in ``codec=``."""


def _interleave(upper: Bytes, lower: Bytes, out: Bytes) -> None:
    """Merge the planes: 4 times as fast as ``out[1::2] = upper; out[::2] = lower``, since it writes whole values."""
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
    """The content size that a frame contains, or -1."""
    try:
        return int(zstandard.frame_content_size(frame))
    except zstandard.ZstdError as error:
        raise CorruptError(str(error)) from error


def _decompress(frame: memoryview, out: memoryview) -> None:
    """Decompress into `out`; zstd never writes past its end, whatever the frame holds."""
    try:
        # a frame also says how much memory it needs to be unpacked: no frame that is written here needs more
        with zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG).stream_reader(frame) as reader:
            n = reader.readinto(out) if len(out) else 0
    except zstandard.ZstdError as error:
        raise CorruptError(str(error)) from error
    if n != len(out):
        raise CorruptError(f"a frame holds {n} bytes, not {len(out)}")


CODECS = {name: packing.number for name, packing in PACKINGS.items()}
RAW = Raw.number
_BY_NUMBER = {packing.number: packing for packing in PACKINGS.values()}


def inspect(record: Record, stored: Buffer) -> memoryview:
    """The stored bytes, if both sizes are those in the record: `verify_payload` without the checksum.

    Raises as `verify_payload` does.
    """
    view = memoryview(stored)
    if len(view) != record.stored_bytes:
        raise CorruptError(f"page {record.key.hex()}: {len(view)} bytes stored, {record.stored_bytes} expected")
    packing = _BY_NUMBER.get(record.codec)
    if packing is None:
        raise IncompatibleError(
            f"page {record.key.hex()}: codec {record.codec} is not known to this version; upgrade prefixstore"
        )
    try:
        claimed = packing.claimed(view)
    except CorruptError as error:
        raise CorruptError(f"page {record.key.hex()}: {error}") from error
    if claimed != record.raw_bytes:
        raise CorruptError(f"page {record.key.hex()}: {claimed} bytes of state, {record.raw_bytes} expected")
    return view


def verify_payload(record: Record, stored: Buffer) -> memoryview:
    """The stored bytes, verified: they are what was written, and unpack to the size in the record.

    Raises `CorruptError` if not, and `IncompatibleError` if this version does not know the codec.
    """
    view = memoryview(stored)
    if len(view) == record.stored_bytes:
        # first: a damaged page is not one of a newer version
        verify_checksum(record, view)
    return inspect(record, stored)


def verify_checksum(record: Record, view: memoryview) -> None:
    """Raise `CorruptError` if the stored bytes are not those written."""
    if checksum(view) != record.checksum:
        raise CorruptError(f"page {record.key.hex()}: checksum mismatch")


def decode_into(record: Record, verified: memoryview, out: memoryview, buffers: BufferPool) -> None:
    """Unpack verified bytes into `out`, of `record.raw_bytes`; further memory comes from `buffers`.

    Raises `CorruptError` if the codec cannot have made these bytes, when a part of `out` may be written already, and
    `UnavailableError` if there is not enough memory.
    """
    try:
        _BY_NUMBER[record.codec].unpack(verified, out, buffers)
    except CorruptError as error:
        raise CorruptError(f"page {record.key.hex()}: {error}") from error
    except MemoryError as error:
        raise UnavailableError(f"page {record.key.hex()}: no memory to unpack {record.raw_bytes} bytes") from error


def decode(record: Record, stored: Buffer) -> memoryview:
    """The state in `stored`, verified; a raw one is not copied. Raises as `verify_payload` and `decode_into` do."""
    view = verify_payload(record, stored)
    if record.codec == RAW:
        return view
    try:
        out = np.empty(record.raw_bytes, np.uint8).data
    except (MemoryError, ValueError) as error:
        raise UnavailableError(f"page {record.key.hex()}: no memory for {record.raw_bytes} bytes") from error
    decode_into(record, view, out, BufferPool(2 * len(out)))
    return out
