"""The index of children in LMDB: the children of each page in the order of their tokens, as rows of ``children``.

A key of LMDB has at most 511 bytes, and the tokens of a page have thousands, so they are cut into chunks. The children
of a page form a tree of nodes; its root has the page's own key (the namespace's for first pages):

    key      node, 32 bytes; form, 1 byte; chunk: the next `CHUNK` bytes of the tokens, fewer where they end
    value    0, u32; key of the child
        or   depth, u32; node, 32 bytes

A row names a child unless several share its chunk. Then it names the node at which they diverge, and the depth of that
node: how many bytes of tokens precede it, all of which they share. So a child adds at most two rows, and a search for
it reads one row for each place at which a sibling diverges from it: at most one for each chunk, and mostly one.

The bytes between two nodes are in no row. So a path through the rows may lead to a child that shares less of the tokens
than the rows suggest; its record shows how much. Rows are derived from records: whatever they name is compared with its
record, and a row that names anything else is ignored by readers, and replaced by a writer that needs its place.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import lmdb

from prefixstore.backends.base import Entry
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import Buffer, Record

__all__ = ["CHUNK", "Siblings", "Target", "remove_everywhere", "target_of"]

# 16 tokens: a multiple of the size of a token
CHUNK = 64
# depth of a node, or 0 for a child; its key
ROW = struct.Struct(f"<I{KEY_BYTES}s")
# what BLAKE2b calls the person: no node below a root has the key of a page or of a namespace
_OF_NODE = b"prefixstore node"


class Target(NamedTuple):
    """What a row leads to: a child if the depth is 0, else a node."""

    depth: int
    key: bytes


class _Step(NamedTuple):
    """A row on a way through the tree; without a target if it is not there."""

    node: Target
    row: bytes
    target: Target | None


class Siblings:
    """The children of one page with one form, in the order of their tokens.

    Parameters
    ----------
    txn, database
        The transaction, and the database ``children``.
    parent, form
        Whose children, and which.
    entry_of
        The page with this key, if its record and usage can be read.
    """

    def __init__(
        self, txn: lmdb.Transaction, database: Any, parent: bytes, form: int, entry_of: Callable[[bytes], Entry | None]
    ) -> None:
        self._txn = txn
        self._db = database
        self._parent = parent
        self._form = form
        self._entry_of = entry_of
        self._root = Target(0, parent)

    # -- reading ------------------------------------------------------------------------------------------------------

    def ordered(self) -> Iterator[Entry]:
        """All of them, in the order of their tokens."""
        return self._children(self._rows(self._root))

    def stored_or_not(self) -> Iterator[bytes]:
        """The keys of all of them, including those whose records cannot be read."""
        waiting = [self._root]
        seen = {self._root}
        for node in waiting:
            for target in self._rows(node):
                if target.depth:
                    if target not in seen:
                        seen.add(target)
                        waiting.append(target)
                else:
                    yield target.key

    def around(self, tokens: bytes) -> list[Entry]:
        """The last one whose tokens are not above these, and the first one whose tokens are, as far as they exist."""
        steps = self._way(tokens)
        other = self._any_near(steps)
        _drop_beyond(steps, 0 if other is None else _shared(_tokens_of(other), tokens))
        below = above = None
        if other is not None and (target := steps[-1].target) is not None:
            # all children that it leads to are on the same side
            if _tokens_of(other) <= tokens:
                below = next(self._children(iter([target]), backwards=True), None)
            else:
                above = next(self._children(iter([target])), None)
        below = below or self._beside(steps, backwards=True)
        above = above or self._beside(steps)
        return [each for each in (below, above) if each is not None]

    def row_of(self, key: bytes, tokens: bytes) -> bytes | None:
        """The row that these tokens lead to, if it names this child."""
        _, row, target = self._way(tokens)[-1]
        return row if target == Target(0, key) else None

    def _way(self, tokens: bytes) -> list[_Step]:
        """The rows on the way of these tokens, from the root. The last one leads to a child, or is not there."""
        steps: list[_Step] = []
        target: Target | None = self._root
        while target is not None and (target.depth or not steps):
            node, row = target, self._head(target) + tokens[target.depth : target.depth + CHUNK]
            target = target_of(self._txn.get(row, db=self._db), node)
            steps.append(_Step(node, row, target))
        return steps

    def _any_near(self, steps: list[_Step]) -> Entry | None:
        """A child that shares as much of a way as any does: all that the last row leads to do, or all in its node.

        None also where that does not matter: if the way ends in the root.
        """
        if len(steps) == 1 and steps[0].target is None:
            return None
        for step in reversed(steps):
            near = self._rows(step.node) if step.target is None else iter([step.target])
            found = next(self._children(near), None)
            if found is not None:
                return found
        return next(self.ordered(), None)

    def _beside(self, steps: list[_Step], *, backwards: bool = False) -> Entry | None:
        """The first child that comes after the rows of a way (before them, backwards)."""
        for step in reversed(steps):
            rows = self._rows(step.node, step.row, backwards=backwards)
            found = next(self._children(rows, backwards=backwards), None)
            if found is not None:
                return found
        return None

    def _children(self, targets: Iterator[Target], *, backwards: bool = False) -> Iterator[Entry]:
        """The children that some rows lead to, in order."""
        waiting = [targets]
        # damaged rows may lead to one node in as many ways as there are nodes, and each way doubled by the next
        seen: set[Target] = set()
        while waiting:
            target = next(waiting[-1], None)
            if target is None:
                waiting.pop()
            elif target.depth:
                if target not in seen:
                    seen.add(target)
                    waiting.append(self._rows(target, backwards=backwards))
            elif (entry := self._child(target.key)) is not None:
                yield entry

    def _child(self, key: bytes) -> Entry | None:
        """The page with this key, if it is one of the children."""
        entry = self._entry_of(key)
        if entry is None or not isinstance(entry.record, Record):
            return None
        return entry if (entry.record.parent, entry.record.form) == (self._parent, self._form) else None

    def _rows(self, node: Target, beyond: bytes | None = None, *, backwards: bool = False) -> Iterator[Target]:
        """What the rows of a node lead to, in order; those beyond one of them, if it is given."""
        head = self._head(node)
        cursor = self._txn.cursor(self._db)
        if backwards:
            found = cursor.set_range(beyond or head + b"\xff" * (CHUNK + 1))
            found = cursor.prev() if found else cursor.last()
        else:
            found = cursor.set_range(beyond or head)
            if found and beyond is not None and cursor.key() == beyond:
                found = cursor.next()
        while found:
            row, value = cursor.item()
            if row[: len(head)] != head:
                return
            target = target_of(value, node)
            if target is not None:
                yield target
            found = cursor.prev() if backwards else cursor.next()

    def _head(self, node: Target) -> bytes:
        return node.key + bytes([self._form])

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, key: bytes, tokens: bytes) -> None:
        """Add a child, whose record need not be stored yet; nothing happens if it is there."""
        steps = self._way(tokens)
        added = Target(0, key)
        if steps[-1].target == added:
            return
        other = self._any_near(steps)
        shared = 0 if other is None else _shared(_tokens_of(other), tokens) // CHUNK * CHUNK
        _drop_beyond(steps, shared)
        node, row, target = steps[-1]
        if other is None or target is None or shared <= node.depth:
            # there is no such row, or it leads to nothing that is stored
            self._put(row, added)
            return
        # what the row leads to shares so much with the new child: both go below a new node
        parting = Target(shared, self._node_after(tokens[:shared]))
        self._put(self._head(parting) + _chunk(_tokens_of(other), shared), target)
        self._put(self._head(parting) + _chunk(tokens, shared), added)
        self._put(row, parting)

    def remove(self, key: bytes, tokens: bytes) -> bool:
        """Remove a child; returns whether the rows led to it."""
        steps = self._way(tokens)
        if steps[-1].target != Target(0, key):
            return False
        self._txn.delete(steps.pop().row, db=self._db)
        if steps and (target := steps[-1].target) is not None:
            _shorten(self._txn, self._db, steps[-1].row, self._head(target))
        return True

    def _put(self, row: bytes, target: Target) -> None:
        self._txn.put(row, ROW.pack(*target), db=self._db)

    def _node_after(self, tokens: bytes) -> bytes:
        content = self._parent + bytes([self._form]) + tokens
        return hashlib.blake2b(content, digest_size=KEY_BYTES, person=_OF_NODE).digest()


def remove_everywhere(txn: lmdb.Transaction, database: Any, keys: Collection[bytes]) -> None:
    """Remove children whose parents are unknown, since their records are damaged, by reading all rows."""
    named = {ROW.pack(0, key) for key in keys}
    for row in [bytes(row) for row, value in txn.cursor(database) if value in named]:
        txn.delete(row, db=database)
        node, form = row[:KEY_BYTES], row[KEY_BYTES : KEY_BYTES + 1]
        above = next(
            (bytes(other) for other, value in txn.cursor(database) if _is_above(other, value, node, form)), None
        )
        if above is not None:
            _shorten(txn, database, above, node + form)


def _is_above(row: Buffer, value: Buffer, node: bytes, form: bytes) -> bool:
    """Whether a row leads to this node."""
    target = target_of(value, Target(0, b""))
    return target is not None and target.depth > 0 and target.key == node and row[KEY_BYTES : KEY_BYTES + 1] == form


def _shorten(txn: lmdb.Transaction, database: Any, above: bytes, head: bytes) -> None:
    """Have the row above a node take over what the only row of the node leads to; without rows it goes, too."""
    cursor = txn.cursor(database)
    rows: list[tuple[bytes, bytes]] = []
    found = cursor.set_range(head)
    while found and len(rows) < 2 and cursor.key()[: len(head)] == head:
        rows.append((bytes(cursor.key()), bytes(cursor.value())))
        found = cursor.next()
    if len(rows) == 1:
        txn.put(above, rows[0][1], db=database)
        txn.delete(rows[0][0], db=database)
    elif not rows:
        txn.delete(above, db=database)


def target_of(stored: Buffer | None, node: Target) -> Target | None:
    """What a row of a node leads to; None if it is missing, or leads nowhere further down."""
    if stored is None or len(stored) != ROW.size:
        return None
    target = Target(*ROW.unpack(stored))
    return target if not target.depth or target.depth > node.depth else None


def _drop_beyond(steps: list[_Step], shared: int) -> None:
    """Leave out the steps to nodes whose children share more than so many bytes with each other."""
    while steps[-1].node.depth > shared:
        steps.pop()


def _chunk(tokens: bytes, depth: int) -> bytes:
    return tokens[depth : depth + CHUNK]


def _tokens_of(entry: Entry) -> bytes:
    assert isinstance(entry.record, Record)
    return entry.record.tokens


def _shared(a: bytes, b: bytes) -> int:
    """How many bytes two byte strings have in common at their start."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    difference = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return n - (difference.bit_length() + 7) // 8
