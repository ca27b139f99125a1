"""The rows of a location: their keys and their values. The only module that knows them.

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
change      ``g`` generation, big-endian       keys of the pages that it changed
==========  =================================  ==========================================

Only pages that no other one follows, and that are not pinned, have a leaf row. A tenant is a hash of a salt, or the
beginning of a namespace that has none.

The children of a page are a trie, in steps of 32 tokens, then 112 at a time, so that the one that shares most tokens
with a prompt is found among thousands, and a row has a key short enough for LMDB. Most pages have one row, of the first
step; it is short, because long keys make the trees of a location deeper. The rows under a node are those of all
children with the same tokens up to there. The first node is a hash of the parent, and the form; the next one, a hash
of the row above it. A row names the only page below it, or says that there are more: then the pages that go on are
under the node below it, and the row names the one that ends there, if any.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import NamedTuple

import numpy as np
import xxhash

from prefixstore.backends.contract import Draft, Range, Row, View
from prefixstore.format.keys import KEY_BYTES, TOKEN_BYTES
from prefixstore.format.record import MOST_USES, Buffer, Head, Usage, place_of

__all__ = [
    "CHANGE",
    "CHILD",
    "COUNT",
    "LEAF",
    "LEAVES",
    "NAMESPACE",
    "NOTE",
    "RECORD",
    "TENANT_BYTES",
    "UNKNOWN",
    "Child",
    "Count",
    "Leaf",
    "Nearest",
    "add_child",
    "all_children",
    "around",
    "change_row",
    "changes_between",
    "child_bytes",
    "child_path",
    "children_of",
    "count_row",
    "counts_from",
    "counts_of",
    "everything",
    "first_node",
    "generation_of",
    "hollow",
    "leads_to",
    "leaf_row",
    "leaves_of",
    "mend_child",
    "namespace_row",
    "nearest",
    "note_row",
    "pages_below",
    "record_row",
    "remove_child",
    "take_out",
    "tenant_of",
    "under",
    "usage_row",
    "walk",
]

RECORD = b"r"
USAGE = b"u"
CHILD = b"c"
NAMESPACE = b"n"
NOTE = b"o"
LEAF = b"l"
COUNT = b"t"
CHANGE = b"g"
# of the tokens in the key of a child row: of the first step, and of the others
FIRST_BYTES = 32 * TOKEN_BYTES
STEP_BYTES = 112 * TOKEN_BYTES
NODE_BYTES = 16
_OF_NODE = b"prefixstore node"
TENANT_BYTES = 16
_OF_TENANT = b"prefixstore salt"
_GENERATION = struct.Struct(">Q")
# steps of the longest page, of 450,000 tokens: a location that somebody has forged may have more
DEEPEST = 4096
# a location never has so many
LAST_GENERATION = 1 << 62
# rows that a walk reads at a time
AT_ONCE = 1024


def record_row(key: bytes) -> bytes:
    """The row with the record and the payload of a page."""
    return RECORD + key


def usage_row(key: bytes) -> bytes:
    """The row with the usage of a page."""
    return USAGE + key


def namespace_row(key: bytes) -> bytes:
    """The row with the settings of a namespace."""
    return NAMESPACE + key


def note_row(name: bytes) -> bytes:
    """The row of a note."""
    return NOTE + name


def change_row(generation: int) -> bytes:
    """The row with the keys of the pages that a generation has changed."""
    return CHANGE + _GENERATION.pack(generation)


def generation_of(row: bytes) -> int:
    """The generation of a row of changes; 0 if there can be none with this key."""
    generation = int(_GENERATION.unpack(row[1:])[0]) if len(row) == 1 + _GENERATION.size else 0
    return generation if generation <= LAST_GENERATION else 0


def changes_between(after: int, until: int) -> Range:
    """The rows of the generations after this one, up to that one."""
    return Range(change_row(after + 1), change_row(until) + b"\0")


def everything(kind: bytes) -> Range:
    """All rows of a kind, given by its letter."""
    return Range(kind, bytes([kind[0] + 1]))


def walk(view: View, kind: bytes, after: bytes = b"") -> Iterator[list[Row]]:
    """All rows of a kind, some at a time, from the one after the key ``kind + after`` on; none is an empty list."""
    whole = everything(kind)
    start = kind + after + b"\0" if after else whole.start
    while rows := view.ranges([Range(start, whole.stop, AT_ONCE)])[0]:
        yield rows
        start = rows[-1].key + b"\0"


def leaf_row(namespace: bytes, key: bytes) -> bytes:
    """The row with what eviction ranks a page by."""
    return LEAF + namespace + key


def leaves_of(namespace: bytes, start: bytes = b"", limit: int | None = None) -> Range:
    """The leaf rows of a namespace, from this page key on."""
    return Range(leaf_row(namespace, start), _after(leaf_row(namespace, b"")), limit)


def count_row(tenant: bytes, namespace: bytes) -> bytes:
    """The row with what a namespace holds."""
    return COUNT + tenant + namespace


def tenant_of(salt: str | None, namespace: bytes) -> bytes:
    """Whose pages those of a namespace are, with this salt or without one."""
    if salt is None:
        return namespace[:TENANT_BYTES]
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=TENANT_BYTES, person=_OF_TENANT).digest()


def counts_from(start: bytes, limit: int) -> Range:
    """The rows with what namespaces hold, from this tenant on."""
    return Range(COUNT + (start or b"\0"), everything(COUNT).stop, limit)


def counts_of(tenant: bytes) -> Range:
    """The rows with what the namespaces of a tenant hold."""
    return under(COUNT + tenant)


class Count(NamedTuple):
    """What a group of pages holds, or by how much that changes.

    Attributes
    ----------
    pages
        How many pages.
    stored_bytes, raw_bytes
        The bytes of their payloads as stored, and of the states that these stand for. In the row of all pages they are
        `UNKNOWN` after a page was deleted whose record was damaged.
    quota_bytes
        What they count against a quota: stored bytes and tokens.
    pinned, pinned_bytes
        How many of them are pinned, and what these count against a quota.
    leaves
        How many have a leaf row.
    """

    pages: int = 0
    stored_bytes: int = 0
    raw_bytes: int = 0
    quota_bytes: int = 0
    pinned: int = 0
    pinned_bytes: int = 0
    leaves: int = 0

    @property
    def has_sizes(self) -> bool:
        """Whether the sizes are known."""
        return self.stored_bytes != UNKNOWN

    def plus(self, other: Count) -> Count:
        """With the pages of another one; their sizes are unknown if those of one are."""
        both = Count(*map(add, self, other))
        if self.has_sizes and other.has_sizes:
            return both
        return both._replace(stored_bytes=UNKNOWN, raw_bytes=UNKNOWN)

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


# no sum of sizes, nor a difference
UNKNOWN = -(1 << 63)
_COUNT = struct.Struct("<7q")


class Leaf(NamedTuple):
    """What eviction ranks a page by that no other one follows. The fields are those of its record and its usage.

    A wrong one costs a good order, and nothing else: what is deleted follows from the record.
    """

    parent: bytes
    last_used: int
    expires: int
    stored_bytes: int
    end: int
    n_tokens: int
    compute_us: int
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
            min(head.compute_us, MOST_TOKENS),
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
_LEAF = struct.Struct(f"<{KEY_BYTES}sQQQIIIHhB")
# the same for NumPy, to rank many at once
LEAVES = np.dtype(
    [
        ("parent", f"V{KEY_BYTES}"),
        ("last_used", "<u8"),
        ("expires", "<u8"),
        ("stored_bytes", "<u8"),
        ("end", "<u4"),
        ("n_tokens", "<u4"),
        ("compute_us", "<u4"),
        ("uses", "<u2"),
        ("priority", "<i2"),
        ("page_class", "u1"),
    ]
)


# -- children ---------------------------------------------------------------------------------------------------------


class Child(NamedTuple):
    """A child row.

    Attributes
    ----------
    page
        The key of the only page below; where there may be more, of the one whose tokens end here, or None.
    has_more
        Whether there may be more: then they are under the next node.
    """

    page: bytes | None
    has_more: bool = False

    def pack(self) -> bytes:
        """The stored form."""
        return bytes([self.has_more]) + (self.page or b"")

    @classmethod
    def unpack(cls, stored: bytes | None) -> Child | None:
        """Read the stored form; None if it is missing or damaged."""
        if stored is None or len(stored) not in (1, 1 + KEY_BYTES) or stored[0] > 1:
            return None
        child = cls(stored[1:] or None, bool(stored[0]))
        return child if child.page is not None or child.has_more else None


def _node(content: bytes, size: int) -> bytes:
    """What the keys of all rows under a node begin with: in these bytes, a hash says which."""
    return CHILD + hashlib.blake2b(content, digest_size=size, person=_OF_NODE).digest()


def all_children(parent: bytes) -> bytes:
    """What the keys of the first rows of all children of a page, or of a namespace, begin with."""
    return _node(parent, NODE_BYTES - 1)


def first_node(parent: bytes, form: int) -> bytes:
    """The node with all children of a page, or of a namespace, that have this form."""
    return all_children(parent) + bytes([form])


def node_below(row: bytes) -> bytes:
    """The node below a child row."""
    return _node(row[len(CHILD) :], NODE_BYTES)


def under(node: bytes, limit: int | None = None) -> Range:
    """The rows under a node, or all whose keys begin with these bytes."""
    return Range(node, _after(node), limit)


def _after(node: bytes) -> bytes:
    """The first key that is above all that begin with these bytes."""
    return (int.from_bytes(node, "big") + 1).to_bytes(len(node), "big")


def child_path(parent: bytes, form: int, tokens: Buffer) -> list[bytes]:
    """The keys of all child rows that a page with these tokens can have, the first step first."""
    tokens = bytes(tokens)
    path = [first_node(parent, form) + tokens[:FIRST_BYTES]]
    for at in range(FIRST_BYTES, len(tokens), STEP_BYTES):
        path.append(node_below(path[-1]) + tokens[at : at + STEP_BYTES])
    return path


def child_bytes(n_token_bytes: int) -> int:
    """How long the key of a child row of a page with so many bytes of tokens is at most."""
    return len(CHILD) + NODE_BYTES + min(n_token_bytes, STEP_BYTES)


def _path_of_page(view: View, key: bytes) -> list[bytes] | None:
    """The path of a stored page; None if its record cannot be read."""
    record = view.get([record_row(key)])[0]
    place = place_of(record) if record is not None else None
    return child_path(*place) if place is not None else None


def add_child(draft: Draft, key: bytes, path: Sequence[bytes]) -> None:
    """Enter a page among its siblings."""
    draft.get(path)  # in one round trip; the draft keeps them
    for i, row in enumerate(path):
        # with what was moved here from the row above
        stored = Child.unpack(draft.get([row])[0])
        if stored == Child(key):
            return
        found = stored
        if found is not None and not found.has_more:
            found = _parted(draft, found.page or b"", path, i)
        if found is None or not found.has_more:
            draft.put(row, Child(key).pack())
            return
        if i == len(path) - 1:
            found = Child(key, has_more=True)
        if found != stored:
            draft.put(row, found.pack())


def _parted(draft: Draft, other: bytes, path: Sequence[bytes], i: int) -> Child | None:
    """Move a page that is alone below row `i` to the next node; what the row says then. None if it is not there."""
    its_path = _path_of_page(draft, other)
    if its_path is None or its_path[: i + 1] != list(path[: i + 1]):
        return None
    if len(its_path) == i + 1:
        return Child(other, has_more=True)
    draft.put(its_path[i + 1], Child(other).pack())
    return Child(None, has_more=True)


def remove_child(draft: Draft, key: bytes, path: Sequence[bytes]) -> bool:
    """Take a page out of its siblings; whether it was among them."""
    for i, (row, stored) in enumerate(zip(path, draft.get(path), strict=True)):
        found = Child.unpack(stored)
        if found is not None and found.page == key and (not found.has_more or i == len(path) - 1):
            take_out(draft, row, found)
            for above in reversed(path[:i]):
                mend_child(draft, above)
            return True
        if found is None or not found.has_more:
            return False
    return False


def take_out(draft: Draft, row: bytes, child: Child) -> None:
    """Have a row no longer name its page."""
    if child.has_more:
        draft.put(row, Child(None, has_more=True).pack())
        mend_child(draft, row)
    else:
        draft.delete(row)


def mend_child(draft: Draft, row: bytes) -> None:
    """Have a row no longer say that there are more pages, if there are none under the next node."""
    found = Child.unpack(draft.get([row])[0])
    if found is None or not found.has_more or draft.ranges([under(node_below(row), 1)])[0]:
        return
    if found.page is not None:
        draft.put(row, Child(found.page).pack())
    else:
        draft.delete(row)


def hollow(view: View, rows: Sequence[Row]) -> list[Row]:
    """Those of these child rows that say that there are more pages, and have none under the next node."""
    forks = [row for row in rows if (child := Child.unpack(row.value)) is not None and child.has_more]
    below = view.ranges([under(node_below(row.key), 1) for row in forks])
    return [row for row, found in zip(forks, below, strict=True) if not found]


def leads_to(key: bytes, stored: Sequence[bytes | None]) -> bool:
    """Whether a page is found among its siblings, by the stored rows of its path."""
    for i, value in enumerate(stored):
        found = Child.unpack(value)
        if found is None or not found.has_more or i == len(stored) - 1:
            return found is not None and found.page == key
    return False


def around(path: Sequence[bytes]) -> list[Range]:
    """What `nearest` has to know: at each step the last two rows that are not above the path, and the first that is."""
    ranges: list[Range] = []
    for row in path:
        node = row[: len(CHILD) + NODE_BYTES]
        ranges += [Range(node, row + b"\0", 2, reverse=True), Range(row + b"\0", _after(node), 1)]
    return ranges


class Nearest(NamedTuple):
    """The children of a page between which a path is.

    Attributes
    ----------
    before, after
        The last page that is not above the path, and the first one that is.
    beside
        A page that is one of the two: its tokens say which.
    """

    before: bytes | None
    after: bytes | None
    beside: bytes | None


def nearest(view: View, path: Sequence[bytes], found: Iterable[Sequence[Row]]) -> Nearest:
    """The children between which a path is, from the rows that `around` asks for, as far as they are needed."""
    before: list[Row] = []
    after: list[Row] = []
    beside = None
    sides = iter(found)
    for i, row in enumerate(path):
        below, above = next(sides), next(sides)
        here = next((Child.unpack(one.value) for one in below if one.key == row), None)
        # those of deeper steps are nearer
        before = [one for one in below if one.key != row][:1] + before
        after = [*above, *after]
        if here is None or not here.has_more:
            beside = here.page if here is not None else None
            break
        if here.page is not None:
            # it ends here, and so comes before the others
            before.insert(0, Row(row, Child(here.page).pack()))
        if i == len(path) - 1:
            after = view.ranges([under(node_below(row), 1)])[0] + after
    return Nearest(_outermost(view, before, last=True), _outermost(view, after, last=False), beside)


def _outermost(view: View, rows: Sequence[Row], *, last: bool) -> bytes | None:
    """The first page below the first of these rows that has any, or the last one."""
    waiting = list(rows[::-1])
    for _ in range(DEEPEST):
        if not waiting:
            return None
        row = waiting.pop()
        child = Child.unpack(row.value)
        if child is None:
            continue
        if child.page is not None and not (child.has_more and last):
            return child.page
        below = under(node_below(row.key), 1)
        if child.page is not None:
            # those that go on come after it
            waiting.append(Row(row.key, Child(child.page).pack()))
        waiting += view.ranges([below._replace(reverse=last)])[0]
    return None


def children_of(view: View, nodes: Sequence[bytes], at_most: int | None = None) -> list[list[bytes]]:
    """The pages below each of these nodes, in the order of their tokens: the first `at_most` of each."""
    return pages_below(view, view.ranges([under(node, at_most) for node in nodes]), at_most)


def pages_below(view: View, found: Sequence[Sequence[Row]], at_most: int | None = None) -> list[list[bytes]]:
    """As `children_of`, from the rows under each node."""
    levels: list[list[list[tuple[bytes, Child]]]] = []
    while found and len(levels) < DEEPEST:
        rows = [[(row.key, child) for row in some if (child := Child.unpack(row.value))] for some in found]
        levels.append(rows)
        forks = [under(node_below(key), at_most) for some in rows for key, child in some if child.has_more]
        found = view.ranges(forks) if forks else []
    pages: list[list[bytes]] = []
    for rows in reversed(levels):
        deeper = iter(pages)
        pages = [
            [
                page
                for _, child in some
                for page in (child.page, *(next(deeper, ()) if child.has_more else ()))
                if page is not None
            ][:at_most]
            for some in rows
        ]
    return pages
