"""A transaction on a Valkey server: its changes are kept here, its payloads under temporary names, until the commit.

It holds a lock of the location, which expires if this process does not renew it. The commit, one script, names its
owner: if it has lost the lock, since it was stopped or the server was replaced, nothing changes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixstore.backends import refusals
from prefixstore.backends.base import CHANGES_KEPT, FACTS, ConflictError, Entry, Transaction, facts_of
from prefixstore.backends.valkey.history import COMPLETE, Head
from prefixstore.backends.valkey.layout import (
    LARGEST_VALUE,
    MAGIC,
    RECORD_AT,
    USAGE_AT,
    Counts,
    counted,
    entry_of,
    member_of,
    readable,
    value_head,
    weight_of,
)
from prefixstore.backends.valkey.payloads import Value, send
from prefixstore.backends.valkey.scripts import BEGIN, COMMIT, RELEASE
from prefixstore.backends.valkey.view import (
    MOST_NEWS,
    Range,
    ServerView,
    Shared,
    all_children,
    entries_of,
    sides_of,
)
from prefixstore.errors import CorruptError, StorageError, UnavailableError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT
from prefixstore.format.record import CLOCK_SLACK, FORMAT_VERSION, Buffer, Record, Usage, place_of

__all__ = ["ServerTransaction"]

# a process that stops in the middle of a transaction keeps others from writing no longer than this
LOCK_SECONDS = 15.0
RENEW_SECONDS = 3.0
# a writer that waits longer for its turn gives up
WAIT_SECONDS = 30.0
# how often it asks
FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.025
# values of a transaction that never ends are gone after this
STAGED_SECONDS = 600


class _Staged(NamedTuple):
    """A page that this transaction has put: its entry, its place among its siblings, and the name of its value."""

    entry: bytes
    member: bytes
    name: bytes


class ServerTransaction(ServerView, Transaction):
    """Reads and writes, after `begin`.

    Attributes
    ----------
    is_new
        Whether the location was left incomplete, and starts over with this transaction.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.token = os.urandom(16)
        self.is_new = False
        self._renewed = 0.0
        self._n_staged = 0
        # pages as this transaction leaves them; None for one that it has deleted
        self._pages: dict[bytes, _Staged | None] = {}
        self._usages: dict[bytes, Usage] = {}
        self._settings: dict[bytes, bytes | None] = {}
        self._known_settings: dict[bytes, bytes | None] = {}
        self._notes: dict[bytes, bytes | None] = {}
        self._changed: list[bytes] = []
        self._discarded: list[bytes] = []
        # where children were deleted, by parent and form
        self._thinned: dict[tuple[bytes, int], int] = {}
        # entries that were read: no other process changes them now
        self._read: dict[bytes, bytes | None] = {}
        self._counts = Counts(0, 0, 0, 0)
        # whether the server may have given it the lock
        self._may_hold = False

    def begin(self) -> None:
        """Wait for the lock. Whatever happens then, `abort` or `finish` it."""
        until, pause = time.monotonic() + WAIT_SECONDS, FIRST_PAUSE
        while True:
            seen = self._shared.history
            asked = time.monotonic()
            self._may_hold = True
            answer = self._connections.run(
                BEGIN,
                seen.generation or -1,
                MOST_NEWS,
                self.token,
                round(1000 * LOCK_SECONDS),
                MAGIC,
                FORMAT_VERSION,
            )
            if answer is not None:
                break
            self._may_hold = False
            if asked > until:
                raise UnavailableError(
                    f"{self._connections.location}: another process has been writing for {WAIT_SECONDS:.0f} s"
                )
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(1.5 * pause, LONGEST_PAUSE)
        head = Head.of(answer, seen, self._connections.location)
        if head.n_structures != COMPLETE:
            raise refusals.foreign(self._connections.location, "keys")
        self.is_new = bool(answer[5])
        self._renewed = asked
        self._known = head
        self._counts = head.counts
        self._shared.learn(head)

    def keep_lock(self) -> None:
        """Renew the lock, if some time has passed. Raises `ConflictError` if it is lost."""
        now = time.monotonic()
        if now - self._renewed < RENEW_SECONDS:
            return
        if not self._connections.run(RELEASE, self.token, round(1000 * LOCK_SECONDS)):
            raise self._lost()
        self._renewed = now

    def _lost(self) -> ConflictError:
        return ConflictError(
            f"{self._connections.location}: the lock of this transaction is lost, since this process was stopped for "
            "too long or the server was replaced; nothing was written"
        )

    def abort(self) -> None:
        """Undo the transaction. If the server cannot be reached, it does so itself after a while."""
        if not self._may_hold:
            return
        staged = [page.name for page in self._pages.values() if page is not None]
        with suppress(StorageError):
            if staged or self._discarded:
                self._connections.call("UNLINK", *staged, *self._discarded)
            self._connections.run(RELEASE, self.token, 0)

    # -- reading what is stored, with what this transaction has changed ---------------------------------------------

    @property
    def counts(self) -> Counts:
        return self._counts

    def _entries(self, keys: Sequence[bytes], *, leading: bool = False) -> dict[bytes, bytes]:
        self.keep_lock()
        unread = [key for key in keys if key not in self._pages and key not in self._read]
        if unread:
            some = super()._entries(unread)
            self._read.update((key, some.get(key)) for key in unread)
        found: dict[bytes, bytes] = {}
        for key in keys:
            staged = self._pages.get(key)
            entry = self._read.get(key) if key not in self._pages else staged.entry if staged is not None else None
            if entry is not None:
                usage = self._usages.get(key)
                found[key] = entry if usage is None else _with_usage(entry, usage)
            elif leading:
                break
        return found

    def records(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Record | StorageError, Usage]]:
        if not self._pages and not self._usages:
            # what others have changed came with the beginning
            return super().records(keys)
        return {key: readable(key, entry) for key, entry in self._entries(keys).items()}

    def _all(self) -> dict[bytes, bytes]:
        stored = {key: entry for key, entry in sorted(self._walk()) if key not in self._pages}
        self._all_read = stored.keys()
        for key, usage in self._usages.items():
            if key in stored:
                stored[key] = _with_usage(stored[key], usage)
        return stored | self._entries([key for key, page in self._pages.items() if page is not None])

    def _live(self) -> dict[bytes, tuple[bytes, _Staged]]:
        """Staged pages, with their entries as they are now."""
        found = self._entries([key for key, page in self._pages.items() if page is not None])
        return {key: (entry, page) for key, entry in found.items() if (page := self._pages[key]) is not None}

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        self.keep_lock()
        if not self._pages and not self._usages:
            return super().facts(after, at_most)
        stored = super().facts(after, at_most + len(self._pages))
        rows = [row for row in stored if bytes(row["key"]) not in self._pages]
        found = {bytes(row["key"]): row for row in rows}
        again = [key for key in self._usages if key in found]
        again += [key for key, page in self._pages.items() if page is not None and key > after]
        changed = self._entries(again)
        if changed:
            entries = [Entry(key, *readable(key, entry)) for key, entry in changed.items()]
            found |= dict(zip(changed, np.array([facts_of(each) for each in entries], FACTS), strict=True))
        keys = sorted(found)[:at_most]
        return np.array([found[key] for key in keys], FACTS) if keys else np.empty(0, FACTS)

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        self.keep_lock()
        # so many of those next to it may be gone
        count = 1 + self._thinned.get((parent, PAGE), 0)
        found = [each for side in self._ranges(sides_of(parent, tokens, count)) for each in side]
        merged = self._merged(found, parent, PAGE)
        entries = entries_of(merged)
        if len(entries) < len(merged):
            # one cannot be read: then there may be another one beyond
            entries = self.children([parent], PAGE)
        ordered = sorted(entries, key=_tokens_of)
        n_below = sum(_tokens_of(each) <= tokens for each in ordered)
        return ordered[max(n_below - 1, 0) : n_below + 1]

    def beside(self, parent: bytes, tokens: bytes, parents: Sequence[bytes]) -> tuple[list[Entry], list[Entry]]:
        return self.neighbors(parent, tokens), self.children(parents, SNAPSHOT)

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        self.keep_lock()
        wanted = list(dict.fromkeys(parents))
        ranges = [
            all_children(each, form, -1 if at_most is None else at_most + self._thinned.get((each, form), 0))
            for each in wanted
        ]
        found: list[Entry] = []
        for parent, some in zip(wanted, self._ranges(ranges), strict=True):
            merged = sorted(entries_of(self._merged(some, parent, form)), key=_tokens_of)
            found += merged if at_most is None else merged[:at_most]
        return found

    def _merged(self, stored: Sequence[tuple[bytes, bytes]], parent: bytes, form: int) -> list[tuple[bytes, bytes]]:
        """Some stored children of a page, as this transaction leaves them, and those that it has put."""
        kept = [key for key, _ in stored if key not in self._pages]
        self._read.update((key, entry) for key, entry in stored if key not in self._pages)
        put = [
            key for key, page in self._pages.items() if page is not None and _place(page.entry)[:2] == (parent, form)
        ]
        return list(self._entries([*kept, *put]).items())

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        self.keep_lock()
        wanted = list(dict.fromkeys(keys))
        counts = [1 + sum(self._thinned.get((key, form), 0) for form in (PAGE, SNAPSHOT)) for key in wanted]
        ranges = [Range(key, key + b"\xff" * (KEY_BYTES + 2), count) for key, count in zip(wanted, counts, strict=True)]
        found = self._ranges(ranges, entries=False)
        put = {_place(page.entry)[0] for page in self._pages.values() if page is not None}
        return {
            key
            for key, some in zip(wanted, found, strict=True)
            if key in put or any(child not in self._pages for child, _ in some)
        }

    def _values(self, names: Sequence[bytes]) -> Iterator[Value | None]:
        self.keep_lock()
        mine = {self._names.page(key): page for key, page in self._pages.items()}
        # a page that was deleted has no value; a name that nothing has
        own = [name if name not in mine else page.name if (page := mine[name]) is not None else b"" for name in names]
        return super()._values([name or self._names.staged + b"none" for name in own])

    def payload_keys(self) -> Iterator[bytes]:
        yield from (key for key in super().payload_keys() if key not in self._pages)
        yield from (key for key, page in self._pages.items() if page is not None)

    def namespaces(self) -> Mapping[bytes, bytes]:
        some = {**super().namespaces(), **self._settings}
        return {key: settings for key, settings in some.items() if settings is not None}

    def namespace(self, key: bytes) -> bytes | None:
        if key in self._settings:
            return self._settings[key]
        if key not in self._known_settings:
            # read once: a batch of pages has one namespace
            self._known_settings[key] = super().namespace(key)
        return self._known_settings[key]

    def note(self, name: bytes) -> bytes | None:
        return self._notes[name] if name in self._notes else super().note(name)

    def flaws(self) -> Iterator[tuple[str, bytes, str]]:
        # what it changes itself is entered everywhere in one step
        return ServerView(self._shared).flaws()

    # -- writing ----------------------------------------------------------------------------------------------------

    def cost(self, record: Record, n_bytes: int) -> int:
        return weight_of(len(record.tokens), n_bytes)

    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        if len(payload) > LARGEST_VALUE:
            raise UnavailableError(
                f"page {key.hex()} has {len(payload):,} bytes: a value has at most {LARGEST_VALUE:,} in this server"
            )
        packed = record.pack()
        entry = entry_of(Record.unpack(key, packed), packed, usage)
        member = member_of(key, entry)
        assert member is not None, "it was packed just now"
        self.keep_lock()
        self._n_staged += 1
        name = b"%s%s:%d" % (self._names.staged, self.token.hex().encode(), self._n_staged)
        self._remove(key)
        # known before it is there: an interrupt may come in between
        self._pages[key] = _Staged(entry, member, name)
        self._counts = self._counts.plus(counted(entry))
        self._changed.append(key)
        send(self._connections, name, value_head(packed), payload, 1000 * STAGED_SECONDS, self.keep_lock)

    def delete(self, key: bytes) -> bool:
        found = self._remove(key)
        if not found and key not in self._pages:
            # a payload without an entry
            found = bool(self._connections.call("EXISTS", self._names.page(key)))
            if found:
                self._pages[key] = None
        if found:
            self._changed.append(key)
        return found

    def _remove(self, key: bytes) -> bool:
        """Take a page out, if it is stored."""
        entry = self._entries([key]).get(key)
        if entry is None:
            return False
        page = self._pages.get(key)
        if page is not None:
            self._discarded.append(page.name)
        if self._read.get(key) is not None:
            place = _place(entry)[:2]
            self._thinned[place] = self._thinned.get(place, 0) + 1
        self._counts = self._counts.minus(counted(entry))
        self._pages[key] = None
        self._usages.pop(key, None)
        return True

    def touch(self, key: bytes, usage: Usage, *, announce: bool = False) -> None:
        if self._entries([key]):
            self._usages[key] = usage
            self._changed += [key] * announce

    def put_namespace(self, key: bytes, settings: bytes) -> None:
        if self.namespace(key) != settings:
            self._settings[key] = settings

    def drop_namespace(self, key: bytes) -> None:
        self._settings[key] = None

    def put_note(self, name: bytes, value: bytes | None) -> None:
        self._notes[name] = value

    def finish(self) -> None:
        """Commit it, in one step."""
        steps = [*self._page_steps(), *self._usage_steps()]
        for name in self._discarded:
            steps += [b"discard", name]
        for kind, values in ((b"settings", self._settings), (b"note", self._notes)):
            for name, value in values.items():
                # a letter before the value tells an empty one from none
                steps += [kind, name, b"" if value is None else b"=" + value]
        if not steps and not self._changed:
            self._connections.run(RELEASE, self.token, 0)
            return
        head = self.head()
        generation = head.history.generation
        self.require_committed(
            self._connections.run(
                COMMIT,
                self.token,
                head.server_generation,
                generation + 1 if self._changed else b"",
                self.token + b"".join(self._changed),
                generation + 1 - CHANGES_KEPT,
                *self._counts,
                *steps,
            )
        )

    def require_committed(self, answer: Any) -> None:
        """Raise `UnavailableError` unless the server has committed it, `ConflictError` if it was too late."""
        if answer == b"evicted":
            raise UnavailableError(
                f"{self._connections.location}: the server has evicted data that was just written; give it more memory "
                "(maxmemory), or a smaller max_bytes to the store"
            )
        if answer != b"committed":
            raise self._lost()

    def _page_steps(self) -> Iterator[Any]:
        for key, page in self._pages.items():
            name = self._names.page(key)
            old = self._read.get(key)
            if page is None or (old is not None and member_of(key, old) != page.member):
                # the member of a record that is damaged cannot be known
                yield from (b"delete", key, (member_of(key, old) if old else None) or b"", name)
            if page is not None:
                usage = self._usages.get(key)
                entry = page.entry if usage is None else _with_usage(page.entry, usage)
                yield from (b"put", key, entry, page.member, page.name, name, _life(entry))

    def _usage_steps(self) -> Iterator[Any]:
        for key, usage in self._usages.items():
            if key not in self._pages:
                entry = self._read.get(key)
                assert entry is not None, "it was read before it was touched"
                packed = usage.pack()
                yield from (b"touch", key, packed, _life(_with_usage(entry, usage)), self._names.page(key))


def _with_usage(entry: bytes, usage: Usage) -> bytes:
    return entry[:USAGE_AT] + usage.pack() + entry[RECORD_AT:]


def _life(entry: bytes) -> int:
    """After how many milliseconds the server may drop the value; 0 for never.

    Some time after the page has expired: by then it cannot be found any more. The clock of the server may differ.
    """
    try:
        usage = Usage.unpack(entry[USAGE_AT:RECORD_AT])
    except CorruptError:
        return 0
    if usage.pinned or not usage.expires:
        return 0
    return (max(usage.expires - time.time_ns(), 0) + 2 * CLOCK_SLACK) // 10**6


def _place(entry: bytes) -> tuple[bytes, int]:
    """Parent and form of a page, if its record has them."""
    place = place_of(entry[RECORD_AT:])
    return place[:2] if place is not None else (b"", PAGE)


def _tokens_of(entry: Entry) -> bytes:
    assert isinstance(entry.record, Record)
    return entry.record.tokens
