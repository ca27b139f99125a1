"""Named parts as the bytes of a note, compressed, with a checksum: what a policy has learned, bookmarks, figures."""

from __future__ import annotations

import json
from collections.abc import Mapping

import xxhash
import zstandard

from prefixstore.errors import CorruptError

# what is unpacked at most
MAX_STATE_BYTES = 8 << 20
MAGIC = b"pfxp\x02\0\0\0"
HEAD_BYTES = 16


def _head(frame: bytes) -> bytes:
    # a checksum of zstd would not cover the head of its frame
    return MAGIC + xxhash.xxh3_64_digest(frame)


def pack_state(parts: Mapping[str, bytes]) -> bytes:
    """Named parts as one piece."""
    raw = json.dumps({name: value.hex() for name, value in sorted(parts.items())})
    frame = zstandard.ZstdCompressor(level=1).compress(raw.encode())
    return _head(frame) + frame


def unpack_state(packed: bytes) -> dict[str, bytes]:
    """The parts. Raises `CorruptError` if these are not such bytes, or those of another version."""
    frame = packed[HEAD_BYTES:]
    if packed[:HEAD_BYTES] != _head(frame):
        raise CorruptError("a saved state is damaged, or of another version")
    try:
        if zstandard.frame_content_size(frame) > MAX_STATE_BYTES:
            raise CorruptError("a saved state is too large")
        parts = json.loads(zstandard.ZstdDecompressor().decompress(frame, max_output_size=MAX_STATE_BYTES))
        return {name: bytes.fromhex(value) for name, value in parts.items()}
    except (zstandard.ZstdError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"a saved state is damaged: {error}") from None
