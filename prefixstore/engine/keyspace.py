"""The rows of a location: their keys and values. No other module knows them, except `engine.child_rows`.

==========  =================================  ==========================================
row         key                                value
==========  =================================  ==========================================
record      ``r`` page key                     a record; the payload is beside it
usage       ``u`` page key                     a usage
child       ``c`` node, up to 112 tokens       one page, or several that share these tokens
namespace   ``n`` namespace key                canonical settings
note        ``o`` name                         what was noted
leaf        ``l`` namespace, page key          a `Leaf`: what eviction ranks by
count       ``t``; ``t`` tenant, namespace     a `Count`: of all pages; of those of a namespace
==========  =================================  ==========================================

Pages that have no children and are not pinned have a leaf row. A tenant is a hash of a salt; a namespace without a salt
is a tenant of its own, named by the beginning of its key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import add
from typing import NamedTuple

import numpy as np
import xxhash

from prefixstore.backends.contract import Range, Row, View, after_all
from prefixstore.format.keys import KEY_BYTES, TOKEN_BYTES
from prefixstore.format.record import MOST_USES, Head, Usage

RECORD = b"r"
USAGE = b"u"
CHILD = b"c"
NAMESPACE = b"n"
NOTE = b"o"
LEAF = b"l"
COUNT = b"t"
TENANT_BYTES = 16
_OF_TENANT = b"prefixstore salt"
# By kind: where the parts of a key end. An encrypted location hides these one by one. Ranges of such rows begin and end
# between parts, or after a whole key. Rows of other kinds are only read by their keys.
PARTS: dict[bytes, Sequence[int]] = {
    RECORD: (33,),
    USAGE: (33,),
    # the first 15 bytes of a node, its last one, and up to 112 tokens
    CHILD: (16, *range(17, 17 + 113 * TOKEN_BYTES, TOKEN_BYTES)),
    NAMESPACE: (33,),
    LEAF: (33, 65),
    COUNT: (17, 49),
}
# how many rows a walk reads at a time
AT_ONCE = 1024


def everything(kind: bytes) -> Range:
    """All rows of a kind, given by its letter."""
    return Range(kind, bytes([kind[0] + 1]))


def walk(view: View, kind: bytes, after: bytes = b"") -> Iterator[list[Row]]:
    """All rows of a kind, some at a time, beginning after the key ``kind + after``. No list is empty."""
    whole = everything(kind)
    start = kind + after + b"\0" if after else whole.start
    while rows := view.ranges([Range(start, whole.stop, AT_ONCE)])[0]:
        yield rows
        start = rows[-1].key + b"\0"


def leaf_row(namespace: bytes, key: bytes) -> bytes:
    """The key of the leaf row of a page."""
    return LEAF + namespace + key


def leaves_of(namespace: bytes, start: bytes = b"", limit: int | None = None) -> Range:
    """The leaf rows of a namespace, from the page key `start` on."""
    return Range(leaf_row(namespace, start), after_all(leaf_row(namespace, b"")), limit)


def count_row(tenant: bytes, namespace: bytes) -> bytes:
    """The key of the count row of a namespace."""
    return COUNT + tenant + namespace


@lru_cache(1024)
def tenant_of(salt: str | None, namespace: bytes) -> bytes:
    """The tenant of a namespace with this salt, or without one."""
    if salt is None:
        return namespace[:TENANT_BYTES]
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=TENANT_BYTES, person=_OF_TENANT).digest()


def counts_from(start: bytes, limit: int) -> Range:
    """The count rows of namespaces, from the tenant `start` on."""
    return Range(COUNT + (start or b"\0"), everything(COUNT).stop, limit)


def counts_of(tenant: bytes) -> Range:
    """The count rows of the namespaces of a tenant."""
    return under(COUNT + tenant)


class Count(NamedTuple):
    """What a group of pages adds up to, or a change of that.

    `stored_bytes` are those of payloads, `raw_bytes` those of the states in them, and `quota_bytes` what the pages
    count against a quota (`Head.quota_bytes`). `pinned_bytes` is what the pinned pages count of that, `leaves` the
    number of leaf rows.
    """

    pages: int = 0
    stored_bytes: int = 0
    raw_bytes: int = 0
    quota_bytes: int = 0
    pinned: int = 0
    pinned_bytes: int = 0
    leaves: int = 0

    @classmethod
    def of(cls, head: Head, usage: Usage) -> Count:
        """What a page with this record and usage counts as, without a leaf row."""
        size = head.quota_bytes
        return cls(1, head.stored_bytes, head.raw_bytes, size, int(usage.pinned), size * usage.pinned)

    def plus(self, other: Count) -> Count:
        """With the pages of another one."""
        return Count(*map(add, self, other))

    def pack(self) -> bytes:
        """The stored form: numbers of 8 bytes and an xxh3-64 of them."""
        body = _COUNT.pack(*self)
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def unpack(cls, stored: bytes | None) -> Count | None:
        """Read the stored form; None if it is missing or damaged."""
        if stored is None or len(stored) != _COUNT.size + 8:
            return None
        body = stored[: _COUNT.size]
        return cls(*_COUNT.unpack(body)) if xxhash.xxh3_64_digest(body) == stored[_COUNT.size :] else None


_COUNT = struct.Struct("<7q")


class Leaf(NamedTuple):
    """What eviction ranks a page by. The fields are those of its record and its usage.

    A wrong leaf row spoils the order of eviction, and nothing else: what is deleted follows from the record.
    """

    parent: bytes
    last_used: int
    expires: int
    stored_bytes: int
    end: int
    n_tokens: int
    uses: int
    priority: int
    page_class: int

    @classmethod
    def of(cls, head: Head, usage: Usage) -> Leaf:
        """The leaf of a page with this record and usage."""
        return cls(
            head.parent,
            usage.last_used,
            usage.expires,
            head.stored_bytes,
            min(head.start + head.n_tokens, MOST_TOKENS),
            head.n_tokens,
            min(usage.uses, MOST_USES),
            usage.priority,
            usage.page_class,
        )

    def pack(self) -> bytes:
        """The stored form, `LEAVES`."""
        return _LEAF.pack(*self)

    @classmethod
    def unpack(cls, stored: bytes | None) -> Leaf | None:
        """Read the stored form; None if it is missing, or has another length."""
        return cls(*_LEAF.unpack(stored)) if stored is not None and len(stored) == _LEAF.size else None


MOST_TOKENS = 2**32 - 1
_LEAF = struct.Struct(f"<{KEY_BYTES}sQQQIIHhB")
# the same layout for NumPy, to rank many leaves at once
LEAVES = np.dtype(
    [
        ("parent", f"V{KEY_BYTES}"),
        ("last_used", "<u8"),
        ("expires", "<u8"),
        ("stored_bytes", "<u8"),
        ("end", "<u4"),
        ("n_tokens", "<u4"),
        ("uses", "<u2"),
        ("priority", "<i2"),
        ("page_class", "u1"),
    ]
)


def bookmarks_note(namespace: bytes) -> bytes:
    """The name of the note with the bookmarks of a namespace."""
    return b"bookmarks:" + namespace


def under(node: bytes, limit: int | None = None) -> Range:
    """The rows whose keys begin with these bytes, such as a node."""
    return Range(node, after_all(node), limit)
