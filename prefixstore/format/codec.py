"""The state of a page to stored bytes and back.

A page says by number how it was packed, so pages of all codecs may lie side by side.
"""

from __future__ import annotations

import numpy as np

from prefixstore.buffers import Buffers
from prefixstore.errors import CorruptError, IncompatibleError, InvalidParameterError, UnavailableError
from prefixstore.format.autocodec import AutoCodec, Encoder, FixedCodec
from prefixstore.format.packing import PACKINGS
from prefixstore.format.record import Buffer, Record, checksum

__all__ = ["CODECS", "decode", "decode_into", "inspect", "pick", "verify", "verify_checksum"]

CODECS = {name: packing.number for name, packing in PACKINGS.items()}
_BY_NUMBER = {packing.number: packing for packing in PACKINGS.values()}


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


def inspect(record: Record, stored: Buffer) -> memoryview:
    """The stored bytes, which are as many as were written, and as many unpacked: all of `verify` but the checksum.

    Raises as `verify` does.
    """
    view = memoryview(stored)
    if len(view) != record.stored_bytes:
        raise CorruptError(f"page {record.key.hex()}: {len(view)} bytes stored, {record.stored_bytes} written")
    packing = _BY_NUMBER.get(record.codec)
    if packing is None:
        raise IncompatibleError(f"page {record.key.hex()}: codec {record.codec} is unknown to this version; upgrade it")
    try:
        claimed = packing.claimed(view)
    except CorruptError as error:
        raise CorruptError(f"page {record.key.hex()}: {error}") from error
    if claimed != record.raw_bytes:
        raise CorruptError(f"page {record.key.hex()}: {claimed} bytes of state, {record.raw_bytes} written")
    return view


def verify(record: Record, stored: Buffer) -> memoryview:
    """The stored bytes, of which is known now that they are those written, and as large unpacked as the record says.

    Raises
    ------
    CorruptError
        If they are not.
    IncompatibleError
        If this version does not know the codec.
    """
    view = memoryview(stored)
    if len(view) == record.stored_bytes:
        # first, since what is damaged is not of a newer version
        verify_checksum(record, view)
    return inspect(record, stored)


def verify_checksum(record: Record, view: memoryview) -> None:
    """Raise `CorruptError` if the stored bytes are not those written."""
    if checksum(view) != record.checksum:
        raise CorruptError(f"page {record.key.hex()}: the checksum does not fit the stored bytes")


def decode_into(record: Record, verified: memoryview, out: memoryview, buffers: Buffers) -> None:
    """Write the state to `out`, of `record.raw_bytes`; what is needed besides is lent from `buffers`.

    Raises
    ------
    CorruptError
        If what was stored is not what the codec makes of a state. `out` may be written in part then.
    UnavailableError
        If there is no memory for it.
    """
    try:
        _BY_NUMBER[record.codec].unpack(verified, out, buffers)
    except CorruptError as error:
        raise CorruptError(f"page {record.key.hex()}: {error}") from error
    except MemoryError as error:
        raise UnavailableError(f"page {record.key.hex()}: no memory to unpack {record.raw_bytes} bytes") from error


def decode(record: Record, stored: Buffer) -> memoryview:
    """The state in `stored`, verified; stored raw, it is not copied. Raises as `verify` and `decode_into` do."""
    view = verify(record, stored)
    if record.codec == CODECS["raw"]:
        return view
    try:
        out = np.empty(record.raw_bytes, np.uint8).data
    except (MemoryError, ValueError) as error:
        raise UnavailableError(f"page {record.key.hex()}: no memory for {record.raw_bytes} bytes") from error
    decode_into(record, view, out, Buffers(2 * len(out)))
    return out
