"""Named parts as the bytes of a note, compressed, with a checksum: what a policy has learned, bookmarks, figures."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import xxhash
import zstandard

from prefixstore.errors import CorruptError

__all__ = ["MAX_STATE_BYTES", "pack_state", "unpack_state"]

# what is unpacked at most
MAX_STATE_BYTES = 4 << 20
MAGIC = b"pfxp\x01\0\0\0"
# magic and version, xxh3-64 of the rest
HEAD = struct.Struct("<8sQ")
# of each part: length of its name, length of its bytes
PART = struct.Struct("<II")


def pack_state(parts: Mapping[str, bytes]) -> bytes:
    """Named parts as one piece."""
    raw = b"".join(
        PART.pack(len(name.encode()), len(value)) + name.encode() + value for name, value in sorted(parts.items())
    )
    body = zstandard.ZstdCompressor(level=1).compress(raw)
    return HEAD.pack(MAGIC, xxhash.xxh3_64_intdigest(body)) + body


def unpack_state(packed: bytes) -> dict[str, bytes]:
    """The parts. Raises `CorruptError` if these are not such bytes, or those of another version."""
    if len(packed) < HEAD.size:
        raise CorruptError("a saved state is too short")
    magic, digest = HEAD.unpack_from(packed)
    body = packed[HEAD.size :]
    if magic != MAGIC or digest != xxhash.xxh3_64_intdigest(body):
        raise CorruptError("a saved state is damaged, or of another version")
    try:
        if zstandard.frame_content_size(body) > MAX_STATE_BYTES:
            raise CorruptError("a saved state is too large")
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_STATE_BYTES)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a saved state is damaged: {error}") from None
    parts: dict[str, bytes] = {}
    at = 0
    while at < len(raw):
        if at + PART.size > len(raw):
            raise CorruptError("a saved state is cut off")
        n_name, n_value = PART.unpack_from(raw, at)
        at += PART.size
        name, value = raw[at : at + n_name], raw[at + n_name : at + n_name + n_value]
        if len(value) != n_value:
            raise CorruptError("a saved state is cut off")
        parts[name.decode("utf-8", "replace")] = value
        at += n_name + n_value
    return parts
