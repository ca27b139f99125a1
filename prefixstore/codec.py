"""The state of a page to stored bytes and back."""

from __future__ import annotations

from collections.abc import Callable

import zstandard

from prefixstore.errors import CorruptError, IncompatibleError, InvalidParameterError
from prefixstore.record import Buffer, Record, checksum

__all__ = ["CODECS", "AutoCodec", "decode", "encode", "pick"]

CODECS = {"raw": 0, "zstd": 1}
ZSTD_LEVEL = 1


def encode(raw: Buffer, codec: str) -> tuple[int, Buffer]:
    """The number of the codec and the stored form of a page; a page that does not shrink is stored raw."""
    if codec == "zstd":
        packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(raw)
        if len(packed) < len(raw):
            return CODECS["zstd"], packed
    return CODECS["raw"], raw


def decode(record: Record, stored: Buffer) -> memoryview:
    """The state in `stored`, after its length and checksum were verified. Stored raw, it is not copied.

    Raises
    ------
    CorruptError
        If the bytes are not those that were written.
    IncompatibleError
        If this version does not know the codec.
    """
    view = memoryview(stored)
    if len(view) != record.stored_bytes:
        raise CorruptError(f"page {record.key.hex()}: {len(view)} bytes stored, {record.stored_bytes} written")
    if checksum(view) != record.checksum:
        raise CorruptError(f"page {record.key.hex()}: the checksum does not fit the stored bytes")
    if record.codec == CODECS["raw"]:
        raw = view
    elif record.codec == CODECS["zstd"]:
        try:
            # the frame says its size before anything is allocated for it
            if (claimed := zstandard.frame_content_size(view)) != record.raw_bytes:
                raise CorruptError(f"page {record.key.hex()}: frame of {claimed} bytes, {record.raw_bytes} written")
            raw = memoryview(zstandard.ZstdDecompressor().decompress(view))
        except zstandard.ZstdError as error:
            raise CorruptError(f"page {record.key.hex()}: {error}") from error
    else:
        raise IncompatibleError(f"page {record.key.hex()}: codec {record.codec} is unknown to this version; upgrade it")
    if len(raw) != record.raw_bytes:
        raise CorruptError(f"page {record.key.hex()}: {len(raw)} bytes decoded, {record.raw_bytes} written")
    return raw


class AutoCodec:
    """Picks the codec of each page: zstd while it saves a tenth, otherwise raw, with a new look now and then."""

    WORTH = 0.90
    LOOK_AGAIN = 64

    def __init__(self) -> None:
        self._skip = 0

    def __call__(self, raw: Buffer) -> tuple[int, Buffer]:
        """Encode one page."""
        if self._skip:
            self._skip -= 1
            return encode(raw, "raw")
        number, stored = encode(raw, "zstd")
        if len(stored) <= self.WORTH * len(raw):
            return number, stored
        self._skip = self.LOOK_AGAIN
        return encode(raw, "raw")


def pick(codec: str) -> Callable[[Buffer], tuple[int, Buffer]]:
    """The encoder with this name.

    Raises
    ------
    InvalidParameterError
        If there is none.
    """
    if codec == "auto":
        return AutoCodec()
    if codec not in CODECS:
        raise InvalidParameterError(f"codec={codec!r} is unknown; choose one of 'auto', {', '.join(map(repr, CODECS))}")
    return lambda raw: encode(raw, codec)
