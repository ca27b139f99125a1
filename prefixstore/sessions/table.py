"""The session table: which sessions there are, what each of them holds, and which one has the ``Llama``.

A session is idle, leased, or discarded: then it holds nothing, and its generation is one higher. Nothing here touches a
model or a store. Used under the lock of its owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from prefixstore.errors import BusyError, InvalidParameterError
from prefixstore.format.keys import NO_TOKENS, Tokens

__all__ = ["Entry", "SessionTable", "State"]


class State(str, Enum):
    """The state of a session."""

    IDLE = "idle"
    LEASED = "leased"
    """It has the ``Llama``."""
    DISCARDED = "discarded"
    """It ended with an exception, and holds nothing."""


@dataclass
class Entry:
    """A session.

    Attributes
    ----------
    name
        Given by the caller.
    tokens
        What it has evaluated. Never changed, only replaced: forks share it.
    generation
        How often it was discarded.
    state
        What it does.
    lease
        Number of its last lease.
    keys
        Keys of the pages that hold the tokens.
    set_at
        When its tokens were set, in nanoseconds since the epoch.
    """

    name: str
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    generation: int = 0
    state: State = State.IDLE
    lease: int = 0
    keys: tuple[bytes, ...] = ()
    set_at: int = 0

    def hold(self, tokens: Tokens, keys: tuple[bytes, ...], set_at: int) -> None:
        """Note what the session holds from now on."""
        self.tokens, self.keys, self.set_at = tokens, keys, set_at


class SessionTable:
    """Sessions by name, the least recently used one first.

    Parameters
    ----------
    max_sessions
        How many there may be. A leased one is never evicted.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max = max_sessions
        self._entries: dict[str, Entry] = {}
        self._leases = itertools.count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, name: str) -> Entry | None:
        """A session."""
        return self._entries.get(name)

    def leased_one(self) -> Entry | None:
        """The session that has the ``Llama``."""
        return next((entry for entry in self if entry.state is State.LEASED), None)

    def add(self, entry: Entry) -> list[Entry]:
        """Add an idle session, or replace one that is not leased, as the last used; returns those evicted for it."""
        self._entries.pop(entry.name, None)
        self._entries[entry.name] = entry
        return self._evict_surplus(entry)

    def lease(self, name: str) -> tuple[Entry, list[Entry]]:
        """Lease a session, a new one if there is none; and those evicted for it.

        One that is leased already was abandoned, since only one at a time can be: it is discarded first.
        """
        for abandoned in self:
            if abandoned.state is State.LEASED:
                self._discard(abandoned)
        entry = self._entries.pop(name, None) or Entry(name)
        self._entries[name] = entry
        entry.lease = next(self._leases)
        entry.state = State.LEASED
        return entry, self._evict_surplus(entry)

    def end(self, name: str, lease: int, *, is_kept: bool) -> Entry | None:
        """End a lease: the session is idle, and the last used one; or discarded, unless it `is_kept`.

        None if the lease has ended already.
        """
        entry = self._entries.get(name)
        if entry is None or entry.state is not State.LEASED or entry.lease != lease:
            return None
        if is_kept:
            entry.state = State.IDLE
            self._entries[name] = self._entries.pop(name)
        else:
            self._discard(entry)
        return entry

    @staticmethod
    def _discard(entry: Entry) -> None:
        entry.generation += 1
        entry.state = State.DISCARDED
        entry.hold(NO_TOKENS, (), entry.set_at)

    def fork(self, name: str, new: str) -> tuple[Entry, list[Entry]]:
        """A second session with the same tokens, and those evicted for it.

        Raises
        ------
        InvalidParameterError
            If there is no such session, or the new one holds something already.
        BusyError
            If one of them is leased.
        """
        entry, there = self._entries.get(name), self._entries.get(new)
        for each in (entry, there):
            if each is not None and each.state is State.LEASED:
                raise BusyError(f"session {each.name!r} has the Llama; fork it after its block")
        if entry is None or entry.state is State.DISCARDED:
            raise InvalidParameterError(f"there is no session {name!r} to fork; names() lists the sessions")
        if there is not None and there.state is State.IDLE:
            raise InvalidParameterError(f"session {new!r} already exists; evict it first, or choose another name")
        self._entries[name] = self._entries.pop(name)
        fork = Entry(new, entry.tokens, there.generation if there is not None else 0, keys=entry.keys)
        return fork, self.add(fork)

    def is_shared(self, entry: Entry) -> bool:
        """Whether a session was forked, and neither it nor a fork has continued since."""
        return len(entry.tokens) > 0 and any(
            other is not entry and other.tokens is entry.tokens for other in self._entries.values()
        )

    def evict(self, name: str) -> Entry | None:
        """Forget a session; None if there is none. Raises `BusyError` if it is leased."""
        entry = self._entries.get(name)
        if entry is not None and entry.state is State.LEASED:
            raise BusyError(f"session {name!r} has the Llama; evict it after its block")
        return self._entries.pop(name, None)

    def evict_all(self) -> list[Entry]:
        """Forget all sessions but a leased one."""
        gone = [entry for entry in self if entry.state is not State.LEASED]
        self._entries = {entry.name: entry for entry in self if entry.state is State.LEASED}
        return gone

    def _evict_surplus(self, but: Entry) -> list[Entry]:
        """Forget discarded sessions, then the least recently used idle ones, as long as there are too many."""
        surplus = len(self._entries) - self._max
        if surplus <= 0:
            return []
        free = [entry for entry in self if entry is not but and entry.state is not State.LEASED]
        free.sort(key=lambda entry: entry.state is not State.DISCARDED)
        for entry in free[:surplus]:
            del self._entries[entry.name]
        return free[:surplus]
