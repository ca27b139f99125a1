"""Records and usage: what never changes of a stored page, and what does. No other module knows their byte layout.

``docs/format.md`` shows the same tables; a test compares them with the structs below.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, TOKEN_BYTES, page_key

Buffer: TypeAlias = "bytes | bytearray | memoryview"

FORMAT_VERSION = 2
CHECKSUM_BYTES = 16

# Fields by name, with their codes of `struct`. A record ends with its tokens (int32 each), and an xxh3-64 of everything
# before it.
_RECORD_FIELDS = {
    **dict.fromkeys(("version", "codec", "form", "reserved"), "B"),
    **dict.fromkeys(("n_tokens", "start", "compute_us"), "I"),
    **dict.fromkeys(("raw_bytes", "stored_bytes", "created"), "Q"),
    **dict.fromkeys(("namespace", "parent"), f"{KEY_BYTES}s"),
    "checksum": f"{CHECKSUM_BYTES}s",
}
_USAGE_FIELDS = {
    "last_used": "Q",
    "expires": "Q",
    "hits": "I",
    "priority": "h",
    "uses": "H",
    "page_class": "B",
    "pinned": "B",
}
RECORD = struct.Struct("<" + "".join(_RECORD_FIELDS.values()))
RECORD_SEAL = struct.Struct("<Q")
USAGE = struct.Struct("<" + "".join(_USAGE_FIELDS.values()))
# how far in the future the last use may be, by the clock of another machine
CLOCK_SLACK = 300 * 10**9
# the largest time: every database has an integer type for it; and the most bytes of a page: those of all are added up
LARGEST, MOST_BYTES = 2**63 - 1, 2**40
# no more uses are counted
MOST_USES = 2**16 - 1


def time_of_use(last_used: int, now: int) -> int:
    """A stored time of last use; 0 if it cannot be right, because it is in the future."""
    return last_used if last_used <= now + CLOCK_SLACK else 0


def checksum(stored: Buffer) -> bytes:
    """xxh3-128 of stored bytes."""
    return xxhash.xxh3_128_digest(stored)


@dataclass(frozen=True, slots=True)
class Usage:
    """What changes of a page after it was written.

    Attributes
    ----------
    last_used
        Nanoseconds since the epoch.
    hits
        How often the page was restored.
    pinned
        Whether the page is exempt from eviction and expiry.
    priority
        Pages of lower priority are evicted first, under the policy of this name. From -32768 to 32767.
    expires
        Nanoseconds since the epoch; 0 for never.
    uses
        How often the page was used, as the eviction policy counts: including captures, and uses before an eviction.
    page_class
        The number of the class in which the policy has put it, from 1 on; 0 if that is not known.
    """

    last_used: int
    hits: int = 0
    pinned: bool = False
    priority: int = 0
    expires: int = 0
    uses: int = 1
    page_class: int = 0

    def pack(self) -> bytes:
        """The stored form, `USAGE`."""
        hits, uses = min(self.hits, 2**32 - 1), min(self.uses, MOST_USES)
        return USAGE.pack(self.last_used, self.expires, hits, self.priority, uses, self.page_class, self.pinned)

    @classmethod
    def unpack(cls, stored: Buffer) -> Usage:
        """Read the stored form.

        Raises
        ------
        CorruptError
            If it has a wrong length, or a time that is out of range.
        """
        try:
            last_used, expires, hits, priority, uses, page_class, pinned = USAGE.unpack(stored)
        except struct.error as error:
            raise CorruptError(f"the usage of a page cannot be unpacked: {error}") from None
        if max(last_used, expires) > LARGEST:
            raise CorruptError(f"the usage of a page has times out of range: {last_used=}, {expires=}")
        return cls(last_used, hits, bool(pinned), priority, expires, uses, page_class)


@dataclass(frozen=True, slots=True)
class Record:
    """What a page holds, how it is stored, and a checksum. Only how it is stored may differ when it is stored again.

    Attributes
    ----------
    namespace, parent
        Keys of the namespace, and of the parent, which for a first page is the namespace.
    start
        Position of the first token.
    tokens
        The tokens, little-endian int32 bytes.
    codec
        One of the numbers in `prefixstore.format.codec.CODECS`.
    raw_bytes, stored_bytes
        Size of the state, and of its stored form.
    checksum
        xxh3-128 of the stored bytes.
    compute_us
        Microseconds that computing the tokens took, as a prefill; 0 if unknown.
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
        """The page key."""
        return page_key(self.parent, self.tokens, self.form)

    @property
    def end(self) -> int:
        """The boundary: the position after the last token."""
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def head(self) -> Head:
        """The fixed fields, without tokens and payload."""
        sizes = len(self.tokens) // TOKEN_BYTES, self.raw_bytes, self.stored_bytes
        return Head(self.namespace, self.parent, self.start, *sizes, self.form)

    def follows(self, parent: Record | None) -> bool:
        """Whether the page starts where its parent ends; `parent` is None for the first page of a sequence."""
        if parent is None:
            return self.parent == self.namespace and self.start == 0
        return (parent.namespace, parent.form, parent.end) == (self.namespace, PAGE, self.start)

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
        return body + _seal(body)

    @classmethod
    def unpack(cls, key: bytes, stored: Buffer) -> Record:
        """Read the stored form of the page with this key.

        Raises
        ------
        CorruptError
            If a byte differs from what was written, the record belongs to another key, or its values are impossible.
        IncompatibleError
            If a newer version wrote it, or it has a form that this version does not know.
        """
        view = memoryview(stored)
        if len(view) < RECORD.size + RECORD_SEAL.size:
            raise CorruptError(f"record {key.hex()} is truncated: {len(view)} bytes")
        version, codec, form, _, n_tokens, start, us, raw, size, created, namespace, parent, proof = RECORD.unpack_from(
            view
        )
        body, seal = view[: -RECORD_SEAL.size], view[-RECORD_SEAL.size :]
        if version != FORMAT_VERSION or _seal(body) != seal:
            # if only the version byte is damaged, the record is not from a newer version
            if version > FORMAT_VERSION and _seal(bytes([FORMAT_VERSION]) + bytes(body[1:])) != seal:
                raise IncompatibleError(
                    f"record {key.hex()} has format {version}, this version reads up to {FORMAT_VERSION}; "
                    "upgrade prefixstore"
                )
            raise CorruptError(f"record {key.hex()}: checksum mismatch")
        if form not in (PAGE, SNAPSHOT):
            # this version cannot compute its key either
            raise IncompatibleError(
                f"record {key.hex()} has form {form}, which this version does not know; upgrade prefixstore"
            )
        tokens = bytes(body[RECORD.size :])
        record = cls(namespace, parent, start, tokens, codec, raw, size, proof, us, created, form)
        if len(tokens) != n_tokens * TOKEN_BYTES or record.key != key:
            raise CorruptError(f"record {key.hex()} belongs to another page")
        if (form == PAGE and not tokens) or max(raw, size) > MOST_BYTES or created > LARGEST:
            raise CorruptError(f"record {key.hex()} has impossible values: {n_tokens} tokens, {raw} and {size} bytes")
        return record


def _seal(body: Buffer) -> bytes:
    return RECORD_SEAL.pack(xxhash.xxh3_64_intdigest(body))


def record_bytes(n_token_bytes: int) -> int:
    """The length of a stored record with this many bytes of tokens."""
    return RECORD.size + n_token_bytes + RECORD_SEAL.size


class Identity(NamedTuple):
    """What makes a page this page, and where it is indexed; see `Record`."""

    namespace: bytes
    parent: bytes
    form: int
    tokens: bytes


def identity_of(stored: Buffer | None) -> Identity | None:
    """The page that a stored record names, which may be damaged; None if it is missing, or too short."""
    if stored is None or len(stored) < RECORD.size + RECORD_SEAL.size:
        return None
    head = RECORD.unpack_from(stored)
    return Identity(head[10], head[11], head[2], bytes(stored[RECORD.size : -RECORD_SEAL.size]))


class Head(NamedTuple):
    """The fields of a record that matter without its tokens and its payload; see `Record`."""

    namespace: bytes
    parent: bytes
    start: int
    n_tokens: int
    raw_bytes: int
    stored_bytes: int
    form: int

    @property
    def quota_bytes(self) -> int:
        """What the page counts against a quota: its payload and its tokens."""
        return self.stored_bytes + self.n_tokens * TOKEN_BYTES


def head_of(stored: Buffer | None) -> Head | None:
    """The fixed fields of a stored record; None if it is missing, damaged, or of another version."""
    if stored is None or len(stored) < RECORD.size + RECORD_SEAL.size or stored[0] != FORMAT_VERSION:
        return None
    if _seal(stored[: -RECORD_SEAL.size]) != stored[-RECORD_SEAL.size :]:
        return None
    _, _, form, _, n_tokens, start, _, raw, size, _, namespace, parent, _ = RECORD.unpack_from(stored)
    if max(raw, size) > MOST_BYTES:
        return None
    return Head(namespace, parent, start, n_tokens, raw, size, form)


class StoredPage(NamedTuple):
    """A page as it is stored: its key, record, usage and payload."""

    key: bytes
    record: Record
    usage: Usage
    payload: Buffer


# -- of many pages at once --------------------------------------------------------------------------------------------


def _layout(fields: Mapping[str, str]) -> np.dtype[np.void]:
    """The same layout for NumPy, to read many at once."""
    return np.dtype([(name, f"V{code[:-1]}" if code.endswith("s") else f"<{code}") for name, code in fields.items()])


Facts: TypeAlias = npt.NDArray[np.void]
_RECORDS, _USAGES = _layout(_RECORD_FIELDS), _layout(_USAGE_FIELDS)
_OF_RECORD = ("parent", "namespace", "raw_bytes", "stored_bytes", "created", "start", "n_tokens", "compute_us", "form")
_OF_USAGE = ("last_used", "expires", "hits", "priority")
# What `PageView.facts` returns of a page: all but its tokens, its checksum and its payload.
FACTS = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        *((name, _RECORDS[name]) for name in _OF_RECORD),
        *((name, _USAGES[name]) for name in _OF_USAGE),
        ("pinned", "?"),
        ("is_readable", "?"),
    ]
)


def facts_of(
    keys: Sequence[bytes],
    records: Sequence[Buffer],
    usages: Sequence[Buffer | None],
) -> Facts:
    """The facts of pages, as `PageView.facts` returns them, from their stored rows; usage may be missing."""
    facts = np.zeros(len(keys), FACTS)
    facts["key"] = np.frombuffer(b"".join(keys), FACTS["key"])
    record, sizes = _fields(records, RECORD.size, _RECORDS)
    usage, usage_sizes = _fields([each or b"" for each in usages], USAGE.size, _USAGES)
    is_used = np.fromiter((each is not None for each in usages), bool, len(usages))
    readable = (
        (record["version"] == FORMAT_VERSION)
        & ((record["form"] == PAGE) | (record["form"] == SNAPSHOT))
        & (sizes == RECORD.size + TOKEN_BYTES * record["n_tokens"].astype(np.int64) + RECORD_SEAL.size)
        & ((usage_sizes == USAGE.size) | ~is_used)
    )
    readable &= np.maximum(record["raw_bytes"], record["stored_bytes"]) <= MOST_BYTES
    readable &= np.maximum.reduce([record["created"], usage["last_used"], usage["expires"]]) <= LARGEST
    for fields, names in ((record, _OF_RECORD), (usage, _OF_USAGE)):
        for name in names:
            facts[name][readable] = fields[name][readable]
    facts["last_used"] = np.where(is_used, facts["last_used"], facts["created"])
    facts["pinned"] = (usage["pinned"] != 0) & readable
    facts["is_readable"] = readable
    return facts


def _fields(
    stored: Sequence[Buffer], size: int, layout: np.dtype[np.void]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """The first `size` bytes of each (zeros if it is shorter), and the length of each."""
    missing = bytes(size)
    fields = np.frombuffer(b"".join([each[:size] if len(each) >= size else missing for each in stored]), layout)
    return fields, np.fromiter(map(len, stored), np.int64, len(stored))
