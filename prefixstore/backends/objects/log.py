"""The log of commits of a store in object storage: follows it, appends to it, and merges its segments.

A commit is a segment, written first, and a new head that lists it, which replaces the head that was read: if another
process has committed meanwhile, the server refuses, and the update is done again on what is committed now. So of two
heads that follow the same one, only one is ever seen.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from prefixstore.backends import refusals
from prefixstore.backends.contract import Change, ConflictError
from prefixstore.backends.objects.client import Client, Version
from prefixstore.backends.objects.read_ahead import at_once
from prefixstore.backends.objects.segments import (
    HEAD,
    PROBES,
    RECENT,
    SEGMENTS,
    Head,
    Part,
    add,
    cost_of,
    name_in,
    pack,
    unpack,
)
from prefixstore.backends.sorted_rows import SortedRows
from prefixstore.errors import CorruptError, LocationError, StorageError, UnavailableError

__all__ = ["Log", "State"]

log = logging.getLogger("prefixstore")

# how often a server is tried
TRIALS = 3
# how often news are read again because a segment was merged into another one meanwhile
READS = 8
# how often the head is replaced again after another process has done so first, and the longest pause between, seconds
COMMITS = 40
LONGEST_PAUSE = 0.25
# segments at which the newest are merged, and how many of the newest are left as they are: others follow these
# one by one, and would have to read more if they were a part of something larger
MANY_SEGMENTS = 32
LEFT_SEGMENTS = 8
# A writer that stops in its turn keeps the others waiting no longer than this. One that works renews it.
TURN_SECONDS = 15.0
RENEW_SECONDS = 3.0
# a writer that waits longer for its turn gives up
WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class State:
    """What is known of a location: its head, which version of the head that is, and what its segments add up to.

    It is replaced as a whole: neither an interrupt nor a fork can divide that.
    """

    head: Head
    version: Version | None
    rows: SortedRows


class Log:
    """The commits of a location, as far as this process has read them.

    Parameters
    ----------
    client
        Of the location.
    read_only
        Whether nothing is ever written.

    Attributes
    ----------
    state
        What is known.
    """

    def __init__(self, client: Client, *, read_only: bool) -> None:
        self._client = client
        self._read_only = read_only
        self.state = State(Head(""), None, SortedRows(cost_of))
        # the turn that this process has, and when it has said so
        self._turn, self._renewed = "", 0.0
        self.renew()

    def renew(self) -> None:
        """Locks of this process."""
        # held while news are entered
        self._entering = threading.RLock()

    @property
    def _where(self) -> str:
        return self._client.where

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the log, or create the store. A server is tested once: it has to refuse writes that must fail.

        Raises
        ------
        LocationError
            If there is no store to read, or the server ignores conditional writes.
        """
        server = hashlib.blake2b(self._client.server.encode(), digest_size=8).hexdigest()
        if self._client.get(HEAD) is None:
            if self._read_only:
                raise refusals.no_store(self._where)
            self._require_conditional_writes()
            # if another process is faster, its store is used
            self._client.create(HEAD, Head(os.urandom(16).hex(), tried=[server]).pack())
        self.refresh()
        if not self._read_only and server not in self.state.head.tried:
            self._require_conditional_writes()
            self.change_head(lambda head: replace(head, tried=[*head.tried, server]))

    def _require_conditional_writes(self) -> None:
        # more than once: a reply may be lost, and what is sent again then is refused by a server that does it right
        if not any(self._keeps_conditions() for _ in range(TRIALS)):
            raise LocationError(
                f"{self._where}: the server ignores conditions of writes (If-None-Match, If-Match), so that processes "
                "would overwrite each other's pages; choose a server that supports them"
            )

    def _keeps_conditions(self) -> bool:
        name, client = name_in(PROBES), self._client
        try:
            first = client.create(name, b"1")
            again = client.create(name, b"2")
            changed = client.replace(name, b"3", first) if first else None
            outdated = client.replace(name, b"4", first) if first else None
            found = client.get(name)
        finally:
            self._discard(name)
        is_refused = again is None and outdated is None
        return is_refused and changed is not None and found is not None and bytes(found[0]) == b"3"

    # -- following ----------------------------------------------------------------------------------------------------

    def refresh(self) -> State:
        """Read what was committed until now: one request if that is nothing.

        Raises
        ------
        GoneError
            If the store was deleted.
        UnavailableError
            If the server does not answer.
        CorruptError, IncompatibleError
            If a segment is missing or damaged, or the store is of another version.
        """
        missing = ""
        for _ in range(READS):
            known = self.state
            found = self._client.get_if_changed(HEAD, known.version if not missing else None)
            if found is None:
                return self.state
            head = Head.unpack(self._where, found[0])
            with self._entering:
                missing = self._follow(head, found[1], known)
                if not missing:
                    return self.state
        raise CorruptError(f"{self._where}: the segment {missing} is missing; delete the store")

    def _follow(self, head: Head, version: Version, known: State) -> str:
        """Enter what a head lists that was asked for when something was known; the name of a segment that is gone."""
        now = self.state
        if now is not known and head.store == now.head.store and head.last <= now.head.last:
            # another thread was faster
            return ""
        news = [part for part in head.parts if part.last > now.head.last]
        rows = now.rows.copy() if news else now.rows
        if not _continues(head, now.head) or news[:1] == list(head.parts[:1]):
            rows, news = SortedRows(cost_of), list(head.parts)
        for part, changes in zip(news, self._read(news), strict=True):
            if changes is None:
                return part.name
            if part is head.parts[0]:
                rows = SortedRows(cost_of, sorted(_whole(changes)))
            else:
                rows.apply(changes)
        self.state = State(head, version, rows)
        return ""

    def _read(self, parts: Sequence[Part]) -> list[list[Change] | None]:
        """Segments; None for one that is gone."""

        def read(part: Part) -> list[Change] | None:
            found = self._client.get(part.name)
            return unpack(f"{self._where}: {part.name}", found[0]) if found is not None else None

        return at_once(parts, read, lambda part: part.n_bytes)

    # -- committing ---------------------------------------------------------------------------------------------------

    def require(self, base: State) -> None:
        """Raise `ConflictError` if something was committed after this state, or another writer has the turn."""
        head = self.state.head
        if (head.store, head.last) != (base.head.store, base.head.last) or head.turn not in ("", base.head.turn):
            raise ConflictError(f"{self._where}: another process has written meanwhile; try again")

    def commit(self, changes: Sequence[Change], base: State) -> None:
        """Add a segment to the log.

        Parameters
        ----------
        changes
            One for each key, with references in place of payloads.
        base
            What they depend on.

        Raises
        ------
        ConflictError, GoneError
            Nothing was committed, as something else was after `base`, or the store was deleted.
        UnavailableError
            If the server does not answer: whether it was committed shows at the next refresh.
        """
        packed, name, rows = pack(changes), name_in(SEGMENTS), base.rows.copy()
        # one that is there already is this one: the reply to an earlier attempt was lost
        self._client.create(name, packed)
        rows.apply(changes)
        for attempt in range(COMMITS):
            failure, known = None, self.state
            try:
                self.require(base)
                if self._replace_head(known, known.head.with_commit(name, len(packed)), rows):
                    return
            except ConflictError:
                break
            except UnavailableError as error:
                failure = error
            self._pause(attempt)
            # it may have been written although the reply says otherwise, or was lost
            if name in self.refresh().head.recent:
                return
            if failure is not None:
                raise failure
        self._discard(name)
        raise ConflictError(f"{self._where}: another process has written meanwhile; try again")

    def _discard(self, name: str) -> None:
        with suppress(StorageError):
            self._client.delete([name])

    def _replace_head(self, known: State, head: Head, rows: SortedRows | None = None) -> bool:
        """Write the head that comes after the known one, with these rows; false if another process has been faster."""
        assert known.version is not None
        written = self._client.replace(HEAD, head.pack(), known.version)
        if written is not None:
            with self._entering:
                # unless another thread has read it, or what came after it, by now
                if self.state is known:
                    self.state = State(head, written, rows or known.rows)
        return written is not None

    def change_head(self, change: Callable[[Head], Head] = lambda head: head) -> bool:
        """Replace the head by what it becomes, unless another process has been faster each time."""
        for attempt in range(COMMITS):
            known = self.state
            if self._replace_head(known, change(known.head)):
                return True
            self._pause(attempt)
            self.refresh()
        return False

    @staticmethod
    def _pause(attempt: int) -> None:
        """Wait before new commits are read, not after: what was read is soon outdated."""
        time.sleep(random.random() * min(0.002 * 2**attempt, LONGEST_PAUSE))

    # -- turns --------------------------------------------------------------------------------------------------------

    def begin(self, *, in_turn: bool) -> State:
        """Wait until no other writer has the turn, and take it, if wanted; what is committed then.

        Raises
        ------
        GoneError
            If the store was deleted.
        UnavailableError
            If others are writing for too long.
        """
        begun = since = time.monotonic()
        self._turn = os.urandom(8).hex() if in_turn else ""
        version, attempt = None, 0
        while True:
            state, now = self.refresh(), time.monotonic()
            if state.version != version:
                version, since = state.version, now
            if in_turn and state.head.turn == self._turn:
                self._renewed = now
                return state
            if not state.head.turn or now - since > TURN_SECONDS:
                if not in_turn:
                    return state
                if self._replace_head(state, replace(state.head, turn=self._turn)):
                    continue
            if now - begun > WAIT_SECONDS:
                raise UnavailableError(f"{self._where}: other processes have been writing for {WAIT_SECONDS:.0f} s")
            self._pause(attempt := attempt + 1)

    def keep_turn(self) -> None:
        """Renew the turn, if there is one and some time has passed."""
        now = time.monotonic()
        if self._turn and now - self._renewed > RENEW_SECONDS:
            self._renewed = now
            if not self._replace_head(self.state, self.state.head):
                self.refresh()

    def end_turn(self) -> None:
        """Have the others go on. A commit has done it; without a reply, they do so after a while."""
        turn, self._turn = self._turn, ""
        if turn and self.state.head.turn == turn:
            with suppress(StorageError):
                self.change_head(lambda head: replace(head, turn="" if head.turn == turn else head.turn))

    # -- making it shorter --------------------------------------------------------------------------------------------

    def shorten(self) -> None:
        """Merge small segments if there are many, after a commit. If that fails, the next process does it."""
        head = self.state.head
        if len(head.parts) <= MANY_SEGMENTS:
            return
        end = len(head.parts) - LEFT_SEGMENTS
        begin, n_bytes = end - 1, head.parts[end - 1].n_bytes
        while begin and head.parts[begin - 1].n_bytes < 2 * n_bytes:
            begin -= 1
            n_bytes += head.parts[begin].n_bytes
        try:
            self._merge(head, begin, end)
        except StorageError as error:
            log.info("%s: segments were not merged: %s", self._where, error)

    def fold(self) -> None:
        """Merge all segments into one, so that none contains deleted data any more.

        Raises
        ------
        UnavailableError
            If others commit all the time.
        """
        for _ in range(READS):
            head = self.refresh().head
            if not head.parts or self._merge(head, 0, len(head.parts)):
                return
        raise UnavailableError(f"{self._where}: other processes keep committing; try again")

    def _merge(self, head: Head, begin: int, end: int) -> bool:
        """Replace some segments by one; false if another process has changed the head first."""
        parts = list(head.parts[begin:end])
        if len(parts) == 1:
            return True
        merged: dict[bytes, Change] = {}
        for changes in self._read(parts):
            if changes is None:
                return False  # another process has merged it
            for change in changes:
                add(merged, change)
        packed = pack(merged.values() if begin else _whole(merged.values()))
        name = name_in(SEGMENTS)
        self._client.create(name, packed)
        for _ in range(READS):
            known = self.state
            if list(known.head.parts[begin:end]) == parts:
                if not self._replace_head(known, known.head.with_merged(begin, end, name, len(packed))):
                    self.refresh()
                    continue
            elif not any(part.name == name for part in known.head.parts):
                break
            # or the reply to an earlier attempt was lost
            self._client.delete([part.name for part in parts])
            return True
        self._discard(name)
        return False


def _whole(changes: Iterable[Change]) -> Iterator[Change]:
    """What is left of changes if nothing was there before them."""
    return (change for change in changes if change.value is not None)


def _continues(head: Head, known: Head) -> bool:
    """Whether the commits that are known come before those of a head: not if the store was deleted, or replaced."""
    if head.store != known.store or head.last < known.last:
        return False
    is_named = head.last - known.last < RECENT and known.recent
    return not is_named or known.recent[-1] in head.recent
