"""How pages are stored in a Valkey server: names of keys, the bytes of values, and their size in the server.

A location has a fixed number of keys, and one more for each page:

- a hash of all entries, by page key: the page's counts, its usage, its record
- two sorted sets: the page keys in order, and the index of children
- hashes of settings, notes, the log of changes, and facts of the whole location
- for each page a value with its record and its payload, so that the two are read with one GET and belong together

``docs/format.md`` describes them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.keys import KEY_BYTES, TOKEN_BYTES
from prefixstore.format.record import USAGE, Record, Usage, place_of

__all__ = [
    "COUNTED",
    "LARGEST_VALUE",
    "LENGTH",
    "MAGIC",
    "RECORD_AT",
    "USAGE_AT",
    "Counts",
    "Names",
    "counted",
    "entry_of",
    "member_of",
    "prefix_of",
    "readable",
    "span_of",
    "sum_of",
    "upper_bound",
    "value_head",
    "weight_of",
]

MAGIC = "prefixstore"
# an entry: what the page weighs, the bytes of its payload and of its state; then its usage and its record
COUNTED = struct.Struct("<QQQ")
USAGE_AT = COUNTED.size
RECORD_AT = COUNTED.size + USAGE.size
# before the record in the value of a page: its length
LENGTH = struct.Struct("<I")
# Valkey's proto-max-bulk-len, by default, less some space for the record
LARGEST_VALUE = 500 << 20
# What a page takes beside its bytes: its slots in two hashes and two ordered sets, its name, its place in the log of
# changes; measured with 50,000 pages.
PAGE_BYTES = 640


class Names(NamedTuple):
    """The names of the keys of a location. What is in braces keeps them on one node of a cluster."""

    meta: bytes
    entries: bytes
    order: bytes
    children: bytes
    settings: bytes
    notes: bytes
    log: bytes
    lock: bytes
    # what the names of values of pages, and of those that are not committed yet, begin with
    pages: bytes
    staged: bytes

    @classmethod
    def of(cls, name: str) -> Names:
        """The names for a location of this name."""
        kinds = ("meta", "entries", "order", "children", "settings", "notes", "log", "lock", "page:", "new:")
        return cls(*(f"{{{name}}}:{kind}".encode() for kind in kinds))

    def page(self, key: bytes) -> bytes:
        """The name of the value of a page."""
        return self.pages + key.hex().encode()


class Counts(NamedTuple):
    """Counts of a location, or of a page: pages, their size in the server, the bytes of payloads and of states."""

    entries: int
    bytes: int
    stored_bytes: int
    raw_bytes: int

    def plus(self, other: Counts) -> Counts:
        """With these pages."""
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: Counts) -> Counts:
        """Without these pages."""
        return Counts(*(mine - its for mine, its in zip(self, other, strict=True)))


def sum_of(counts: Iterable[Counts]) -> Counts:
    """The counts of some pages together."""
    total = Counts(0, 0, 0, 0)
    for each in counts:
        total = total.plus(each)
    return total


def entry_of(record: Record, packed: bytes, usage: Usage) -> bytes:
    """The stored entry of a page."""
    weight = weight_of(len(record.tokens), record.stored_bytes)
    return COUNTED.pack(weight, record.stored_bytes, record.raw_bytes) + usage.pack() + packed


def counted(entry: bytes) -> Counts:
    """What a page was counted as when it was put; zeros for an entry that is too short."""
    return Counts(1, *COUNTED.unpack_from(entry)) if len(entry) >= COUNTED.size else Counts(1, 0, 0, 0)


def readable(key: bytes, entry: bytes) -> tuple[Record | StorageError, Usage]:
    """Record (or why it cannot be read) and usage in an entry."""
    try:
        if len(entry) < RECORD_AT:
            raise CorruptError(f"the entry of page {key.hex()} is truncated: {len(entry)} bytes")
        return Record.unpack(key, entry[RECORD_AT:]), Usage.unpack(entry[USAGE_AT:RECORD_AT])
    except StorageError as error:
        return error, Usage(0)


# -- the index of children -----------------------------------------------------------------------------------------

# Members of an ordered set are compared byte by byte. So that tokens come before other tokens that begin with them,
# whatever follows, a byte before each token says that there is one, and another byte ends them.
_MORE, _END = 1, b"\0"


def prefix_of(parent: bytes, form: int) -> bytes:
    """The common beginning of the members for the children of a page with one form."""
    return parent + bytes([form])


def span_of(parent: bytes, form: int, tokens: bytes) -> bytes:
    """The beginning of the member for the child with these tokens, and of no other."""
    marked = np.full((len(tokens) // TOKEN_BYTES, 1 + TOKEN_BYTES), _MORE, np.uint8)
    marked[:, 1:] = np.frombuffer(tokens, np.uint8).reshape(-1, TOKEN_BYTES)
    return prefix_of(parent, form) + marked.tobytes() + _END


def upper_bound(prefix: bytes) -> bytes:
    """A bound above everything that begins with this."""
    return prefix + b"\xff" * (KEY_BYTES + 2)


def member_of(key: bytes, entry: bytes) -> bytes | None:
    """The member of a page in the index of children; None if its record cannot be read."""
    place = place_of(entry[RECORD_AT:])
    if place is None or len(place[2]) % TOKEN_BYTES:
        return None
    parent, form, tokens = place
    return span_of(parent, form, tokens) + key


# -- space ---------------------------------------------------------------------------------------------------------


def weight_of(n_token_bytes: int, n_bytes: int) -> int:
    """The memory that a page takes in the server, in bytes, as its ``used_memory`` counts it."""
    n_record = 168 + n_token_bytes
    value = _allocated(LENGTH.size + n_record + n_bytes + 16)
    entry = _allocated(RECORD_AT + n_record + 16)
    member = _allocated(2 * KEY_BYTES + 2 + n_token_bytes // TOKEN_BYTES * (1 + TOKEN_BYTES) + 16)
    return value + entry + member + PAGE_BYTES


def _allocated(n_bytes: int) -> int:
    """What an allocation of so many bytes takes: jemalloc has four sizes between two powers of two."""
    step = 1 << max((n_bytes - 1).bit_length() - 3, 4)
    return -(-n_bytes // step) * step


def value_head(packed: bytes) -> bytes:
    """What precedes the payload in the value of a page."""
    return LENGTH.pack(len(packed)) + packed
