"""All pages of a location in object storage, in memory: records, usage, index of children; no payloads.

Some 2 KB a page with 256 tokens. It is changed by applying segments only, in the order of the commits.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace

from prefixstore.backends.base import CHANGES_KEPT, Entry
from prefixstore.backends.objects.manifest import CHANGED_KEYS_KEPT, Part, Payload, Segment, Stored
from prefixstore.format.keys import PAGE, SNAPSHOT
from prefixstore.format.record import RECORD, USAGE, Record

__all__ = ["Pages", "Siblings", "cost_of", "entries_of"]

# what a page takes in segments beside its tokens: record, usage, its key here and in the log of changes, its name
ENTRY_BYTES = RECORD.size + USAGE.size + 128

# The children of a page that have one form: tokens and key of each, in order.
Siblings = list[tuple[bytes, bytes]]


def cost_of(stored: Stored) -> int:
    """How many bytes of the budget a page takes."""
    if not isinstance(stored.record, Record):
        return len(stored.packed) + ENTRY_BYTES
    return len(stored.record.tokens) + stored.record.stored_bytes + ENTRY_BYTES


def entries_of(pages: Iterable[tuple[bytes, Stored | None]]) -> list[Entry]:
    """Those of these pages that are there."""
    return [Entry(key, stored.record, stored.usage) for key, stored in pages if stored is not None]


class Pages:
    """The result of all segments up to a commit. `lock` is held while it changes, and for reads of several steps.

    Parameters
    ----------
    shift
        How much higher this process counts generations than the log: a store that took the place of another one begins
        after all that was seen of that.
    """

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift
        self.lock = threading.RLock()
        self.entries: dict[bytes, Stored] = {}
        self.children: dict[tuple[bytes, int], Siblings] = {}
        # pages whose records cannot be read: anything may be their parent
        self.unreadable: set[bytes] = set()
        self.namespaces: dict[bytes, bytes] = {}
        self.notes: dict[bytes, bytes] = {}
        # payloads without a page, to be deleted
        self.dead: dict[Payload, None] = {}
        self.changes: deque[tuple[int, list[bytes]]] = deque()
        self._n_changes = 0
        self.position = 0
        self.generation = 0
        self.bytes = 0
        self.sizes = 0, 0
        # all keys in order, as of a position; made when they are asked for
        self._ordered: tuple[int, list[bytes]] = 0, []

    def apply(self, segment: Segment, part: Part) -> None:
        """Bring the pages to the end of a segment that begins at the next commit, or before it.

        Its effect is the state of everything that it names, so it does not matter if a part of it is known already.
        """
        with self.lock:
            for key, stored in segment.puts.items():
                self._remove(key)
                self._insert(key, stored)
            for key in segment.deleted:
                self._remove(key)
            for key, usage in segment.usages.items():
                if key in self.entries:
                    self.entries[key] = replace(self.entries[key], usage=usage)
            _overlay(self.namespaces, segment.namespaces)
            _overlay(self.notes, segment.notes)
            self.dead.update(segment.buried)
            for payload in segment.removed:
                self.dead.pop(payload, None)
            self._note_changes(segment.groups, part.generation)
            self.generation, self.position = part.generation, part.last

    def _insert(self, key: bytes, stored: Stored) -> None:
        self.entries[key] = stored
        # put again by a commit that was replayed once more
        self.dead.pop((key, stored.nonce), None)
        record = stored.record
        if isinstance(record, Record):
            insort(self.children.setdefault((record.parent, record.form), []), (record.tokens, key))
        else:
            self.unreadable.add(key)
        self._count(stored, 1)

    def _remove(self, key: bytes) -> None:
        stored = self.entries.pop(key, None)
        if stored is None:
            return
        self.dead[key, stored.nonce] = None
        record = stored.record
        if isinstance(record, Record):
            of = record.parent, record.form
            siblings = self.children[of]
            del siblings[bisect_left(siblings, (record.tokens, key))]
            if not siblings:
                del self.children[of]
        self.unreadable.discard(key)
        self._count(stored, -1)

    def _count(self, stored: Stored, sign: int) -> None:
        self.bytes += sign * cost_of(stored)
        self.sizes = self.sizes[0] + sign * stored.stored_bytes, self.sizes[1] + sign * stored.raw_bytes

    def _note_changes(self, groups: list[list[bytes]], generation: int) -> None:
        begin = generation - len(groups)
        if begin > self.generation:
            self.changes.clear()
            self._n_changes = 0
        for i, group in enumerate(groups):
            if begin + i + 1 > self.generation:
                self.changes.append((begin + i + 1, group))
                self._n_changes += len(group)
        while len(self.changes) > CHANGES_KEPT or (self._n_changes > CHANGED_KEYS_KEPT and len(self.changes) > 1):
            self._n_changes -= len(self.changes.popleft()[1])

    @property
    def shown_generation(self) -> int:
        """The generation, as this process counts."""
        return self.generation + self.shift

    def changed_since(self, since: int) -> list[bytes] | None:
        """Keys of pages changed after a generation, as this process counts; None if that is not known."""
        since -= self.shift
        with self.lock:
            kept, now = list(self.changes), self.generation
        if since == now:
            return []
        if since > now or not kept or kept[0][0] > since + 1:
            return None
        return [key for generation, keys in kept if generation > since for key in keys]

    def ordered(self) -> list[bytes]:
        """All keys in order."""
        with self.lock:
            if self._ordered[0] != self.position:
                self._ordered = self.position, sorted(self.entries)
            return self._ordered[1]

    def has_children(self, key: bytes, without: Collection[bytes]) -> bool:
        """Whether this page has children other than these."""
        siblings = (self.children.get((key, form), []) for form in (PAGE, SNAPSHOT))
        return any(child not in without for some in siblings for _, child in some)


def _overlay(values: dict[bytes, bytes], changes: dict[bytes, bytes | None]) -> None:
    for key, value in changes.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
