"""What is written about a page beside its state. The byte layout of records and usage is in this module only.

``docs/format.md`` shows the same tables; a test compares them with the structs below.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import xxhash

from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import TOKEN_BYTES, page_key

__all__ = ["FORMAT_VERSION", "PAGE", "SNAPSHOT", "Buffer", "Record", "StoredPage", "Usage", "checksum"]

Buffer: TypeAlias = "bytes | bytearray | memoryview"

FORMAT_VERSION = 1

# forms: the state of the tokens themselves, or what is needed to go on behind them
PAGE = 0
SNAPSHOT = 1

# version, codec, form, reserved, number of tokens, start, compute time, raw bytes, stored bytes, created, namespace,
# parent, checksum;
# the tokens follow (int32 each), and then an xxh3-64 of everything before it.
RECORD = struct.Struct("<BBBBIIIQQQ16s16s16s")
RECORD_SEAL = struct.Struct("<Q")
# last used, hits, pinned, reserved, priority, expires
USAGE = struct.Struct("<QIB1xhQ")
# of times and sizes: what every database has a number for
LARGEST = 2**63 - 1


def checksum(stored: Buffer) -> bytes:
    """xxh3-128 of stored bytes."""
    return xxhash.xxh3_128_digest(stored)


@dataclass(frozen=True, slots=True)
class Usage:
    """What changes about a page after it was written.

    Attributes
    ----------
    last_used
        Nanoseconds since the epoch.
    hits
        How often the page was restored.
    pinned
        Whether eviction passes the page by.
    priority
        For the policy of this name: pages of lower priority go first. From -32768 to 32767.
    expires
        Nanoseconds since the epoch; 0 for never.
    """

    last_used: int
    hits: int = 0
    pinned: bool = False
    priority: int = 0
    expires: int = 0

    def pack(self) -> bytes:
        """The stored form, `USAGE`."""
        return USAGE.pack(self.last_used, min(self.hits, 2**32 - 1), self.pinned, self.priority, self.expires)

    @classmethod
    def unpack(cls, stored: Buffer) -> Usage:
        """Read the stored form.

        Raises
        ------
        CorruptError
            If it has another length, or a time that never comes.
        """
        try:
            last_used, hits, pinned, priority, expires = USAGE.unpack(stored)
        except struct.error as error:
            raise CorruptError(f"usage of a page: {error}") from None
        if max(last_used, expires) > LARGEST:
            raise CorruptError(f"usage of a page: last used at {last_used}, expires at {expires}")
        return cls(last_used, hits, bool(pinned), priority, expires)


@dataclass(frozen=True, slots=True)
class Record:
    """What never changes about a page: what it holds, how it is stored, and the proof of both.

    Attributes
    ----------
    namespace, parent
        Keys of the namespace and of the page before (of the namespace again for a first page), 16 bytes each.
    start
        Position of the first token.
    tokens
        The tokens, little-endian int32 bytes.
    codec
        One of the numbers in `prefixstore.format.codec.CODECS`.
    raw_bytes, stored_bytes
        Size of the state, and of what the codec made of it.
    checksum
        xxh3-128 of the stored bytes.
    compute_us
        Microseconds that computing the tokens took, as a prefill; 0 if it is not known.
    created
        Nanoseconds since the epoch.
    form
        `PAGE` or `SNAPSHOT`.
    """

    namespace: bytes
    parent: bytes
    start: int
    tokens: bytes
    codec: int
    raw_bytes: int
    stored_bytes: int
    checksum: bytes
    compute_us: int
    created: int
    form: int = PAGE

    @property
    def key(self) -> bytes:
        """The boundary hash, which is the page's key in every backend."""
        return page_key(self.parent, self.tokens, self.form)

    def follows(self, before: Record | None) -> bool:
        """Whether the page stands where the one before it ends; None if that is the start of a sequence."""
        if before is None:
            return self.parent == self.namespace and self.start == 0
        end = before.start + len(before.tokens) // TOKEN_BYTES
        return (before.namespace, before.form, end) == (self.namespace, PAGE, self.start)

    def pack(self) -> bytes:
        """The stored form: `RECORD`, the tokens, `RECORD_SEAL`."""
        body = (
            RECORD.pack(
                FORMAT_VERSION,
                self.codec,
                self.form,
                0,
                len(self.tokens) // TOKEN_BYTES,
                self.start,
                min(self.compute_us, 2**32 - 1),
                self.raw_bytes,
                self.stored_bytes,
                self.created,
                self.namespace,
                self.parent,
                self.checksum,
            )
            + self.tokens
        )
        return body + RECORD_SEAL.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, key: bytes, stored: Buffer) -> Record:
        """Read the stored form of the page with this key.

        Raises
        ------
        CorruptError
            If a byte differs from what was written, the record belongs to another key, or it is that of no page.
        IncompatibleError
            If a newer version wrote it, or it has a form that this version does not know.
        """
        view = memoryview(stored)
        if len(view) < RECORD.size + RECORD_SEAL.size:
            raise CorruptError(f"record {key.hex()}: {len(view)} bytes are too few")
        head = RECORD.unpack_from(view)
        version, codec, form, _, n_tokens, start, us, raw, size, created, namespace, parent, proof = head
        body = view[: -RECORD_SEAL.size]
        seal = RECORD_SEAL.unpack(view[-RECORD_SEAL.size :])[0]
        if version != FORMAT_VERSION or xxhash.xxh3_64_intdigest(body) != seal:
            # a record of ours whose version byte alone is damaged is not of the future
            mended = bytes([FORMAT_VERSION]) + bytes(body[1:])
            if version > FORMAT_VERSION and xxhash.xxh3_64_intdigest(mended) != seal:
                raise IncompatibleError(
                    f"record {key.hex()} has format {version}, this prefixstore reads up to {FORMAT_VERSION}; "
                    "upgrade it"
                )
            raise CorruptError(f"record {key.hex()}: checksum {seal:016x} does not fit its bytes")
        tokens = bytes(body[RECORD.size :])
        record = cls(namespace, parent, start, tokens, codec, raw, size, proof, us, created, form)
        if len(tokens) != n_tokens * TOKEN_BYTES or record.key != key:
            raise CorruptError(f"record {key.hex()} belongs to another page")
        if form not in (PAGE, SNAPSHOT):
            raise IncompatibleError(
                f"record {key.hex()} has the form {form}, which this version does not know; upgrade"
            )
        if (form == PAGE and not tokens) or max(raw, size, created) > LARGEST:
            raise CorruptError(f"record {key.hex()} is that of no page: {n_tokens} tokens in {raw} bytes")
        return record


class StoredPage(NamedTuple):
    """A page as it is stored: its key, record, usage and payload."""

    key: bytes
    record: Record
    usage: Usage
    payload: Buffer
