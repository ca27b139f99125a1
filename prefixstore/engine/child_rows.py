"""Child rows: the index that leads from a page to the pages that follow it.

The children of a page form a trie of their tokens: the first step has 32 tokens, each further one 112. So the child
that shares most tokens with a prompt is found among thousands, and every key is short enough for LMDB. The first step
is short because most pages need no other, and long keys make the trees of a location deeper.

A node is the common beginning of the keys of sibling rows. The first node is a hash of the parent and the form, each
further one a hash of the row above it. A row names the only page below it, or says that there may be more: those are
then under the node below the row, and the row itself names the page that ends there, if any.

No keys are compared here: under a node, rows that begin with the same tokens are beside each other, after the row whose
tokens end there. Apart from that their order is the location's; an encrypted one has another (`engine.encrypted`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prefixstore.backends.contract import Range, Row, Update, View, after_all
from prefixstore.engine.keyspace import CHILD, RECORD, under
from prefixstore.format.keys import KEY_BYTES, TOKEN_BYTES
from prefixstore.format.record import Buffer, Identity, Record, identity_of

# bytes of tokens in the key of a row: of the first step, and of the others
FIRST_BYTES = 32 * TOKEN_BYTES
STEP_BYTES = 112 * TOKEN_BYTES
NODE_BYTES = 16
_OF_NODE = b"prefixstore node"


class ChildRow(NamedTuple):
    """A child row.

    Attributes
    ----------
    page
        Key of the only page below; with `has_more`, of the page whose tokens end here, or None.
    has_more
        Whether there may be other pages, under the node below.
    """

    page: bytes | None
    has_more: bool = False

    def pack(self) -> bytes:
        """The stored form."""
        return bytes([self.has_more]) + (self.page or b"")

    @classmethod
    def unpack(cls, stored: bytes | None) -> ChildRow | None:
        """Read the stored form; None if it is missing or damaged."""
        if stored is None or len(stored) not in (1, 1 + KEY_BYTES) or stored[0] > 1:
            return None
        child = cls(stored[1:] or None, bool(stored[0]))
        return child if child.page is not None or child.has_more else None


def _node(content: bytes, size: int) -> bytes:
    """The node that is a hash of `content`, of this many bytes."""
    return CHILD + hashlib.blake2b(content, digest_size=size, person=_OF_NODE).digest()


def all_children(parent: bytes) -> bytes:
    """What the nodes of all children of a page, or of a namespace, begin with, whatever their form."""
    return _node(parent, NODE_BYTES - 1)


def first_node(parent: bytes, form: int) -> bytes:
    """The node with all children of a page, or of a namespace, that have this form."""
    return all_children(parent) + bytes([form])


def node_below(row: bytes) -> bytes:
    """The node below a child row."""
    return _node(row[len(CHILD) :], NODE_BYTES)


def child_path(parent: bytes, form: int, tokens: Buffer) -> list[bytes]:
    """The path of a page: the keys of all child rows that it can have, from the first step on."""
    tokens = bytes(tokens)
    path = [first_node(parent, form) + tokens[:FIRST_BYTES]]
    for at in range(FIRST_BYTES, len(tokens), STEP_BYTES):
        path.append(node_below(path[-1]) + tokens[at : at + STEP_BYTES])
    return path


def page_path(page: Record | Identity) -> list[bytes]:
    """The path of this page; see `child_path`."""
    return child_path(page.parent, page.form, page.tokens)


def child_bytes(n_token_bytes: int) -> int:
    """The length of the longest key on the path of a page with this many bytes of tokens."""
    return len(CHILD) + NODE_BYTES + min(n_token_bytes, STEP_BYTES)


def add_child(draft: Update, key: bytes, path: Sequence[bytes], owner: bytes) -> None:
    """Index a page, whose tenant is `owner`."""
    draft.get(path)  # in one round trip; the draft keeps them
    other, its_path = None, list[bytes]()
    for i, row in enumerate(path):
        # this may be a page that the step before has moved here
        stored = ChildRow.unpack(draft.get([row])[0])
        if stored == ChildRow(key):
            return
        found = stored
        if found is not None and not found.has_more:
            if found.page != other:
                # once, however many steps they share
                other, its_path = found.page, _stored_path(draft, found.page or b"")
            found = _split(draft, found, its_path[i : i + 2], row, owner)
        if found is None or not found.has_more:
            draft.put(row, ChildRow(key).pack(), owner=owner)
            return
        if i == len(path) - 1:
            found = ChildRow(key, has_more=True)
        if found != stored:
            draft.put(row, found.pack(), owner=owner)


def _stored_path(draft: Update, page: bytes) -> list[bytes]:
    """The path of a page by its record; empty if that is not there."""
    identity = identity_of(draft.get([RECORD + page])[0])
    return page_path(identity) if identity is not None else []


def _split(draft: Update, child: ChildRow, its_path: Sequence[bytes], row: bytes, owner: bytes) -> ChildRow | None:
    """Move the page that is alone below a row one node down, and return the new row; None if it is not stored."""
    # the node of a row is a hash of those above it
    if its_path[:1] != [row]:
        return None
    if len(its_path) == 1:
        return ChildRow(child.page, has_more=True)
    draft.put(its_path[1], child.pack(), owner=owner)
    return ChildRow(None, has_more=True)


def remove_child(draft: Update, key: bytes, path: Sequence[bytes]) -> bool:
    """Remove a page from the index; returns whether it was there."""
    for i, (row, stored) in enumerate(zip(path, draft.get(path), strict=True)):
        found = ChildRow.unpack(stored)
        if found is not None and found.page == key and (not found.has_more or i == len(path) - 1):
            take_out(draft, row)
            for above in reversed(path[:i]):
                mend_child(draft, above)
            return True
        if found is None or not found.has_more:
            return False
    return False


def take_out(draft: Update, row: bytes) -> None:
    """Remove the page from a row; a damaged row is deleted."""
    child = ChildRow.unpack(draft.get([row])[0])
    if child is not None and child.has_more:
        draft.put(row, ChildRow(None, has_more=True).pack())
        mend_child(draft, row)
    else:
        draft.delete(row)


def mend_child(draft: Update, row: bytes) -> None:
    """Correct a row that claims more pages than there are under the node below it."""
    found = ChildRow.unpack(draft.get([row])[0])
    if found is None or not found.has_more or draft.ranges([under(node_below(row), 1)])[0]:
        return
    if found.page is not None:
        draft.put(row, ChildRow(found.page).pack())
    else:
        draft.delete(row)


def hollow(view: View, rows: Sequence[Row]) -> list[Row]:
    """The rows that claim more pages, and have none under the node below."""
    forks = [row for row in rows if (child := ChildRow.unpack(row.value)) is not None and child.has_more]
    below = view.ranges([under(node_below(row.key), 1) for row in forks])
    return [row for row, found in zip(forks, below, strict=True) if not found]


def leads_to(key: bytes, stored: Sequence[bytes | None]) -> bool:
    """Whether the stored rows of its path lead to this page."""
    for i, value in enumerate(stored):
        found = ChildRow.unpack(value)
        if found is None or not found.has_more or i == len(stored) - 1:
            return found is not None and found.page == key
    return False


def around(path: Sequence[bytes]) -> list[Range]:
    """The ranges that `nearest` needs: at each step, the last two rows up to the path, and the first one after it."""
    ranges: list[Range] = []
    for row in path:
        node = row[: len(CHILD) + NODE_BYTES]
        ranges += [Range(node, row + b"\0", 2, reverse=True), Range(row + b"\0", after_all(node), 1)]
    return ranges


def nearest(view: View, path: Sequence[bytes], found: Iterable[Sequence[Row]]) -> list[bytes]:
    """The children nearest to a path, from the rows of the ranges of `around`, which are taken as they are needed.

    At most three: the last one before the path, one that may be on either side of it, and the first one after it.
    """
    before: Sequence[Row] = ()
    after: Sequence[Row] = ()
    beside = None
    sides = iter(found)
    for i, row in enumerate(path):
        below, above = next(sides), next(sides)
        here = next((ChildRow.unpack(one.value) for one in below if one.key == row), None)
        # the rows of deeper steps are nearer
        before = [one for one in below if one.key != row][:1] or before
        after = above or after
        if here is None or not here.has_more:
            beside = here.page if here is not None else None
            break
        if here.page is not None:
            # a page that ends here comes before the others
            before = [Row(row, ChildRow(here.page).pack())]
        if i == len(path) - 1:
            after = view.ranges([under(node_below(row), 1)])[0] or after
    keys = _outermost(view, before, last=True), beside, _outermost(view, after, last=False)
    return [key for key in keys if key is not None]


def _outermost(view: View, rows: Sequence[Row], *, last: bool) -> bytes | None:
    """The first page below a row, or the last one; None if it leads to none."""
    found = None
    while rows and (child := ChildRow.unpack(rows[0].value)) is not None:
        found = child.page
        if found is not None and not (child.has_more and last):
            break
        # those that go on come after the one that ends here
        rows = view.ranges([under(node_below(rows[0].key), 1)._replace(reverse=last)])[0]
    return found


def children_of(view: View, nodes: Sequence[bytes], at_most: int | None = None) -> list[list[bytes]]:
    """The pages under each node, in the order of the location's rows; of each node the first `at_most`."""
    return pages_below(view, view.ranges([under(node, at_most) for node in nodes]), at_most)


def pages_below(view: View, found: Sequence[Sequence[Row]], at_most: int | None = None) -> list[list[bytes]]:
    """As `children_of`, from the rows under each node."""
    levels: list[list[list[tuple[bytes, ChildRow]]]] = []
    while found:
        rows = [[(row.key, child) for row in some if (child := ChildRow.unpack(row.value))] for some in found]
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
