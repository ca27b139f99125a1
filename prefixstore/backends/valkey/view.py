"""A view of a Valkey server: each call is one script, which sees one moment."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixstore.backends.base import FACTS, Entry, Used, View
from prefixstore.backends.valkey.connections import Connections
from prefixstore.backends.valkey.entries import FACT_BYTES, entries_in, facts_in, members_in
from prefixstore.backends.valkey.history import COMPLETE, Head, History, changed_in
from prefixstore.backends.valkey.layout import (
    Counts,
    Names,
    counted,
    member_of,
    prefix_of,
    readable,
    span_of,
    sum_of,
    upper_bound,
)
from prefixstore.backends.valkey.payloads import KeptBuffers, Value, receive
from prefixstore.backends.valkey.scripts import ENTRIES, GONE, HAVE_ENTRIES, HEAD, RANGES, WALK
from prefixstore.backends.valkey.scripts import FACTS as READ_FACTS
from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT
from prefixstore.format.record import CLOCK_SLACK, Buffer, Record, Usage

__all__ = ["BASE_BYTES", "Range", "ServerView", "Shared"]

# changed pages that come with the newest generation, at most
MOST_NEWS = 1000
# entries, and facts, that the server reads in one step: others wait meanwhile
ENTRIES_AT_ONCE = 500
FACTS_AT_ONCE = 2000
SCANNED_AT_ONCE = 1000
# how often a walk is repeated if more was changed meanwhile than the log of changes has
WALKS = 5
# views whose buffers are kept for others, 64 MiB each at most
KEPT_VIEWS = 2
# of an empty location, and of its log of changes
BASE_BYTES = 64 << 10


class Shared:
    """What all views of a backend have in common."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.history = History()
        self._buffers: deque[KeptBuffers] = deque()

    @property
    def names(self) -> Names:
        """Of the keys of the location."""
        return self.connections.names

    def learn(self, head: Head) -> None:
        """Remember the newest generation."""
        if head.generation >= self.history.generation + self.history.shift:
            self.history = head.history

    def take_buffers(self) -> KeptBuffers:
        """Buffers for one view."""
        try:
            return self._buffers.pop()
        except IndexError:
            return KeptBuffers()

    def give_buffers_back(self, buffers: KeptBuffers) -> None:
        """Keep them for the next view, unless there are enough."""
        if len(self._buffers) < KEPT_VIEWS:
            buffers.trim()
            self._buffers.append(buffers)


class Range(NamedTuple):
    """Members of the index of children: from one end to the other, or back, and how many; -1 for all."""

    low: bytes
    high: bytes
    limit: int = -1
    is_reversed: bool = False

    def arguments(self) -> tuple[bytes, bytes, int, bytes]:
        """As the script takes them; no member is equal to an end."""
        return b"(" + self.low, b"(" + self.high, self.limit, b"R" if self.is_reversed else b""


class ServerView(View):
    """The committed state. Later commits are visible, but each call sees one moment."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._connections = shared.connections
        self._names = shared.names
        self._known: Head | None = None
        self._kept: KeptBuffers | None = None
        # the keys of all pages, of the last walk through all
        self._all_read: AbstractSet[bytes] | None = None

    def close(self) -> None:
        """The payload is not used any more."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self._shared.give_buffers_back(kept)

    # -- generations ------------------------------------------------------------------------------------------------

    def head(self) -> Head:
        """The facts of the whole location; read once."""
        if self._known is None:
            self._known = self._read_head()
        return self._known

    def _read_head(self) -> Head:
        seen = self._shared.history
        # of a process that has seen nothing there is nothing to continue
        since = seen.generation or -1
        head = Head.of(self._connections.run(HEAD, since, MOST_NEWS), seen, self._connections.location)
        self._shared.learn(head)
        return head

    @property
    def generation(self) -> int:
        return self.head().generation

    def changes(self, since: int) -> list[bytes] | None:
        head = self.head()
        if since >= head.since or since < head.history.floor:
            return head.changes_since(since)
        # what this process has read before is newer than what the caller knows
        first = since - head.history.shift
        n_structures, meta, _, logged, _ = self._connections.run(HEAD, first, 0)
        if n_structures != COMPLETE or not head.history.generation <= int(meta[2]) == first + len(logged):
            return None
        return changed_in(logged[: head.generation - since])

    @property
    def counts(self) -> Counts:
        """What is counted."""
        return self.head().counts

    @property
    def sizes(self) -> tuple[int, int]:
        counts = self.counts
        return counts.stored_bytes, counts.raw_bytes

    @property
    def used(self) -> Used:
        counts = self.counts
        return Used(BASE_BYTES + counts.bytes, counts.entries)

    # -- pages ------------------------------------------------------------------------------------------------------

    def _entries(self, keys: Sequence[bytes], *, leading: bool = False) -> dict[bytes, bytes]:
        """The entries of those of these pages that are stored; with `leading` up to the first that is not."""
        if not keys:
            return {}
        answer = self._connections.run(ENTRIES, b"".join(keys), b"1" if leading else b"0")
        return dict(entries_in(answer))

    def _entry(self, key: bytes) -> bytes | None:
        return self._entries([key]).get(key)

    def record(self, key: bytes) -> Record | None:
        entry = self._entry(key)
        if entry is None:
            return None
        record = readable(key, entry)[0]
        if isinstance(record, StorageError):
            raise record
        return record

    def usage(self, key: bytes) -> Usage | None:
        entry = self._entry(key)
        return readable(key, entry)[1] if entry is not None else None

    def records(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Record | StorageError, Usage]]:
        news = self._known.pages if self._known is not None else None
        if news is not None and all(key in news for key in keys):
            found = {key: news[key] for key in keys if news[key]}
        else:
            found = self._entries(keys)
        return {key: readable(key, entry) for key, entry in found.items()}

    def leading(self, keys: Sequence[bytes]) -> list[Entry]:
        found = self._entries(keys, leading=True)
        return [Entry(key, *readable(key, found[key])) for key in takewhile(found.__contains__, keys)]

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        for key, entry in self._all().items():
            yield key, *readable(key, entry)

    def _all(self) -> dict[bytes, bytes]:
        """All entries as they are at one moment, in the order of their keys."""
        for _ in range(WALKS):
            head = self._read_head()
            found = dict(sorted(self._walk()))
            # what was changed meanwhile is read again, until nothing is
            while True:
                now = self._read_head()
                if now.generation == head.generation:
                    self._known = now
                    self._all_read = found.keys()
                    return found
                changed = self._changes_between(head, now)
                if changed is None:
                    break
                for key in changed:
                    found.pop(key, None)
                found |= self._entries(changed)
                head = now
        raise CorruptError(f"{self._connections.location} is changed faster than it can be read; try again later")

    def _changes_between(self, before: Head, now: Head) -> list[bytes] | None:
        changed = now.changes_since(before.generation)
        if changed is None:
            self._known = now
            changed = self.changes(before.generation)
        return list(dict.fromkeys(changed)) if changed is not None else None

    def _walk(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and entries of all pages, in no order; some may come twice."""
        cursor: Any = b"0"
        while True:
            cursor, some = self._connections.run(WALK, cursor, ENTRIES_AT_ONCE)
            yield from entries_in(some)
            if cursor == b"0":
                return

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        parts: list[npt.NDArray[np.void]] = []
        left = at_most
        while left > 0 and (answer := self._connections.run(READ_FACTS, after, min(left, FACTS_AT_ONCE), FACT_BYTES)):
            parts.append(facts_in(answer))
            after, left = bytes(parts[-1]["key"][-1]), left - len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, FACTS)

    # -- children ---------------------------------------------------------------------------------------------------

    def _ranges(self, ranges: Sequence[Range], *, entries: bool = True) -> list[list[tuple[bytes, bytes]]]:
        """Keys and entries of the members of each range."""
        if not ranges:
            return []
        arguments = [argument for each in ranges for argument in each.arguments()]
        return members_in(self._connections.run(RANGES, b"1" if entries else b"0", *arguments), len(ranges))

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        return self._near(parent, tokens, self._ranges(sides_of(parent, tokens, 1)))

    def _near(self, parent: bytes, tokens: bytes, sides: Sequence[Sequence[tuple[bytes, bytes]]]) -> list[Entry]:
        found = [each for side in sides for each in side]
        entries = entries_of(found)
        # pages that cannot be read do not count: then there may be another one beyond
        return entries if len(entries) == len(found) else super().neighbors(parent, tokens)

    def beside(self, parent: bytes, tokens: bytes, parents: Sequence[bytes]) -> tuple[list[Entry], list[Entry]]:
        snapshots = [all_children(each, SNAPSHOT) for each in dict.fromkeys(parents)]
        found = self._ranges([*sides_of(parent, tokens, 1), *snapshots])
        return self._near(parent, tokens, found[:2]), [entry for some in found[2:] for entry in entries_of(some)]

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        ranges = [all_children(each, form, -1 if at_most is None else at_most) for each in dict.fromkeys(parents)]
        return [entry for some in self._ranges(ranges) for entry in entries_of(some)]

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        wanted = list(dict.fromkeys(keys))
        found = self._ranges([Range(key, upper_bound(key), 1) for key in wanted], entries=False)
        return {key for key, some in zip(wanted, found, strict=True) if some}

    # -- payloads ---------------------------------------------------------------------------------------------------

    def _values(self, names: Sequence[bytes]) -> Iterator[Value | None]:
        if self._kept is None:
            self._kept = self._shared.take_buffers()
        return receive(self._connections, names, self._kept, self._note_arrived)

    def _note_arrived(self, n_bytes: int) -> None:
        self.arrived = n_bytes

    def payload(self, key: bytes) -> Buffer | None:
        value = self._value(key)
        return value[1] if value is not None else None

    def _value(self, key: bytes) -> Value | None:
        return next(self._values([self._names.page(key)]), None)

    def fetch(self, keys: Sequence[bytes]) -> Iterator[tuple[Record, Buffer]]:
        for key, value in zip(keys, self._values([self._names.page(key) for key in keys]), strict=True):
            found = value
            if found is None and self._entry(key) is not None:
                # it was put just now, unless it is still missing
                found = self._value(key)
                if found is None and self._entry(key) is not None:
                    raise CorruptError(f"page {key.hex()} has no payload: the server has evicted it")
            if found is None:
                return
            record, payload = found
            yield Record.unpack(key, record), payload

    def stored(self) -> Iterator[tuple[bytes, Record | StorageError, Buffer | StorageError | None]]:
        pages = self._all()
        names = [self._names.page(key) for key in pages]
        for (key, entry), value in zip(pages.items(), self._values(names), strict=True):
            record, usage = readable(key, entry)
            if not isinstance(record, Record):
                yield key, record, None
            elif value is None:
                # also of one that was deleted meanwhile: it was there when its descendants were
                if not _is_over(usage):
                    yield key, record, None
            else:
                yield key, *self._belonging(key, record, value)

    def _belonging(self, key: bytes, record: Record, value: Value) -> tuple[Record, Buffer | StorageError]:
        """A payload with its record: that in its value, unless the page has another one."""
        try:
            own = Record.unpack(key, value[0])
        except StorageError as error:
            return record, error
        if own == record:
            return record, value[1]
        # it was put again meanwhile, in another form
        entry = self._entry(key)
        now = readable(key, entry)[0] if entry is not None else own
        return (
            (own, value[1])
            if now == own
            else (record, CorruptError(f"page {key.hex()} has the payload of another page"))
        )

    def payload_keys(self) -> Iterator[bytes]:
        # a page that was put since all were read is not one without an entry
        read, done = self._all_read, set[bytes]()
        names = scanned(self._connections, self._names.pages)
        while some := list(islice(names, SCANNED_AT_ONCE)):
            has_entry = self._connections.run(HAVE_ENTRIES, *some)
            for name, state in zip(some, has_entry, strict=True):
                key = key_in(name)
                if key is None or key in done or state == GONE or (state and read is not None and key not in read):
                    continue
                done.add(key)
                yield key

    # -- the rest ---------------------------------------------------------------------------------------------------

    def namespaces(self) -> Mapping[bytes, bytes]:
        some = self._connections.call("HGETALL", self._names.settings)
        return {key: value for key, value in zip(some[::2], some[1::2], strict=True) if key}

    def namespace(self, key: bytes) -> bytes | None:
        value: bytes | None = self._connections.call("HGET", self._names.settings, key)
        return value

    def note(self, name: bytes) -> bytes | None:
        value: bytes | None = self._connections.call("HGET", self._names.notes, name)
        return value

    def flaws(self) -> Iterator[tuple[str, bytes, str]]:
        pages = self._all()
        head = self.head()
        if head.n_structures != COMPLETE:
            if head.n_structures:
                yield (
                    "index",
                    b"",
                    "the server has evicted a part of the location; the next write creates an empty store",
                )
            return
        n_entries = int(self._connections.call("HLEN", self._names.entries)) - 1
        ordered, n_ordered = self._members(self._names.order)
        listed, n_listed = self._members(self._names.children)
        if self._read_head().generation != head.generation:
            # it was changed meanwhile: what differs may be that
            return
        if n_entries != len(pages) or n_ordered != len(pages) or ordered != pages.keys():
            yield (
                "index",
                b"",
                f"{n_entries} entries, and {n_ordered} keys in the index of keys, for {len(pages)} pages",
            )
        if n_listed != len(listed):
            yield "index", b"", f"{n_listed - len(listed)} children are out of order in the index of children"
        total = sum_of(map(counted, pages.values()))
        if total != head.counts:
            yield "index", b"", f"there are {total}; they were counted as {head.counts}"
        members = {key: member for key, entry in pages.items() if (member := member_of(key, entry)) is not None}
        for key, member in members.items():
            if member not in listed:
                yield "index", key, "it is missing from the index of its parent's children"
        for member in listed.difference(members.values()):
            yield "index", member[-KEY_BYTES:], "the index of children has an entry for it that matches no stored page"

    def _members(self, name: bytes) -> tuple[set[bytes], int]:
        """The members of an order that are in their place there, as none has a score; and how many there are."""
        found, all_found, cursor = set[bytes](), set[bytes](), b"0"
        while True:
            cursor, some = self._connections.call("ZSCAN", name, cursor, "COUNT", ENTRIES_AT_ONCE)
            members = dict(zip(some[::2], some[1::2], strict=True))
            members.pop(b"", None)
            all_found.update(members)
            found.update(member for member, score in members.items() if score == b"0")
            if cursor == b"0":
                return found, len(all_found)


def scanned(connections: Connections, beginning: bytes) -> Iterator[bytes]:
    """The names of keys that begin like this; some may come twice."""
    cursor: Any = b"0"
    while True:
        cursor, some = connections.call("SCAN", cursor, "MATCH", beginning + b"*", "COUNT", SCANNED_AT_ONCE)
        yield from some
        if cursor == b"0":
            return


def key_in(name: bytes) -> bytes | None:
    """The key at the end of the name of a value; None if there is none."""
    try:
        key = bytes.fromhex(name.rpartition(b":")[2].decode("ascii"))
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


def sides_of(parent: bytes, tokens: bytes, count: int) -> list[Range]:
    """The children of a page whose tokens are not above these, the last first; and those whose tokens are."""
    # after all children with these very tokens, and before those whose tokens begin with them
    between, prefix = upper_bound(span_of(parent, PAGE, tokens)), prefix_of(parent, PAGE)
    return [Range(prefix, between, count, is_reversed=True), Range(between, upper_bound(prefix), count)]


def all_children(parent: bytes, form: int, count: int = -1) -> Range:
    """The children of a page that have one form."""
    prefix = prefix_of(parent, form)
    return Range(prefix, upper_bound(prefix), count)


def entries_of(found: Iterable[tuple[bytes, bytes]]) -> list[Entry]:
    """Those that can be read, in the order in which they came."""
    entries = (Entry(key, *readable(key, entry)) for key, entry in found)
    return [entry for entry in entries if isinstance(entry.record, Record)]


def _is_over(usage: Usage) -> bool:
    """Whether a page has expired so long ago that the server has dropped its payload."""
    return bool(usage.expires) and not usage.pinned and usage.expires + CLOCK_SLACK <= time.time_ns()
