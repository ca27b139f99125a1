"""The sessions of a ``Llama``: which there are, what each of them holds, and which are saved in the location."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefixstore.engine.bookmarks import Bookmark, Unset
from prefixstore.engine.miss import Guard
from prefixstore.errors import BusyError
from prefixstore.format.keys import NO_TOKENS, PAGE, SNAPSHOT, Tokens, page_keys

if TYPE_CHECKING:
    from prefixstore.llama.hook import Hook
    from prefixstore.sessions.llama_queue import Ticket


@dataclass(eq=False)
class SessionState:
    """What is known of a session, whether it has the ``Llama`` or not.

    Attributes
    ----------
    tokens
        What it has evaluated; none of a new or discarded one. Never changed, only replaced.
    generation
        How often it was discarded.
    set_at
        When its tokens were set, in nanoseconds since the epoch.
    """

    name: str
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    generation: int = 0
    set_at: int = 0


@dataclass(eq=False)
class Turn:
    """A session's turn at the ``Llama``: `Sessions.turn`, from its admission to its end.

    Attributes
    ----------
    entry
        The session.
    ticket
        A weak reference to its place in the queue, which lasts as long as something can end the turn.
    cache, n_evaluated
        The cache of the ``Llama`` before, and how many tokens it had evaluated.
    """

    entry: SessionState
    ticket: weakref.ref[Ticket]
    cache: object
    n_evaluated: int


class Table:
    """The sessions of a ``Llama``. While the location fails, no saved ones are found, and none can be saved.

    The session that has the ``Llama`` (`is_leased`) is never evicted. Sequences shorter than `min_tokens` are not
    stored, so they cannot be saved. `entries` are sorted by their last use; `lock` is held while they change.
    """

    def __init__(self, hook: Hook, max_sessions: int, is_leased: Callable[[SessionState], bool]) -> None:
        self._engine, self._hook, self._namespace = hook.context.engine, hook, hook.context.namespace.key
        self._max_sessions, self._is_leased = max_sessions, is_leased
        self.entries: dict[str, SessionState] = {}
        self.lock = threading.Lock()

    def used(self, entry: SessionState) -> list[SessionState]:
        """Make a session the most recently used; returns those evicted for it, to `forget`. Needs the lock."""
        self.entries.pop(entry.name, None)
        self.entries[entry.name] = entry
        surplus = len(self.entries) - self._max_sessions
        if surplus <= 0:
            return []
        free = [each for each in self.entries.values() if each is not entry and not self._is_leased(each)]
        # discarded ones first
        free.sort(key=lambda each: len(each.tokens) > 0)
        for each in free[:surplus]:
            del self.entries[each.name]
        return free[:surplus]

    def forget(self, entries: Sequence[SessionState]) -> None:
        """Remove the bookmarks of evicted sessions."""
        for entry in entries:
            self._engine.counters.count("session_evicted")
            with self._hook.guard():
                # not if another process has continued it
                self._engine.write_queue.set_bookmark(self._namespace, entry.name, Unset(entry.set_at))

    def hold(self, entry: SessionState, tokens: Tokens) -> None:
        """Note what a session holds from now on, and save it."""
        with self._hook.guard():
            with self.lock:
                # callers get this array
                tokens.setflags(write=False)
                entry.tokens, entry.set_at = tokens, _now(entry.set_at)
            self._save(entry)

    def discard(self, entry: SessionState) -> None:
        """Make a session empty."""
        self._engine.counters.count("session_discarded")
        with self.lock:
            # dated, so that what another process saves later is newer
            entry.tokens, entry.set_at = NO_TOKENS, _now(entry.set_at)
            entry.generation += 1
        with self._hook.guard():
            self._save(entry)

    def evict(self, name: str | None = None) -> int:
        """Forget a session, by default all idle ones, including saved ones; returns how many there were."""
        with self.lock:
            entry = self.entries.get(name or "")
            if entry is not None and self._is_leased(entry):
                raise BusyError(f"session {name!r} has the Llama; evict it after its block")
            gone = [each for each in self.entries.values() if name in (None, each.name) and not self._is_leased(each)]
            for each in gone:
                del self.entries[each.name]
            left = set(self.entries)
        self.forget(gone)
        bookmarks = self._bookmarks()
        saved = set(self._whole(bookmarks)) - left if name is None else bookmarks.keys() & {name}
        with self._hook.guard():
            for each_name in saved if name is None else {name}:
                self._engine.write_queue.set_bookmark(self._namespace, each_name, Unset())
        return len(saved | {each.name for each in gone})

    # -- what is saved ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The sessions that can be resumed, of this process and of the location."""
        saved = self._bookmarks()
        whole = self._whole(saved)
        with self.lock:
            held = {each.name for each in self.entries.values() if len(each.tokens) or self._is_leased(each)}
            empty = {name: each.set_at for name, each in self.entries.items() if name not in held}
        # a session that was discarded here, unless another process has saved it since
        hidden = {name for name in whole if saved[name].set_at <= empty.get(name, -1)}
        return sorted(held | (set(whole) - hidden))

    def look_up(self, name: str) -> None:
        """Take over what another process, or an earlier one, has saved or deleted of this session."""
        bookmark, tokens = self._bookmarks().get(name), None
        with self.lock:
            there = self.entries.get(name)
        if bookmark is None or (there is not None and there.set_at >= bookmark.set_at):
            return
        with self._looking_up():
            tokens = self._engine.bookmarks.tokens(self._namespace, bookmark)
        if tokens is None:
            return
        entry = SessionState(name, tokens, bookmark.generation, bookmark.set_at)
        with self.lock:
            there = self.entries.get(name) or SessionState(name)
            # unless it was changed here meanwhile
            if self._is_leased(there) or there.set_at >= entry.set_at:
                return
            entry.generation = max(entry.generation, there.generation)
            evicted = self.used(entry)
        self.forget(evicted)

    def _bookmarks(self) -> Mapping[str, Bookmark]:
        """What is saved. Sessions whose pages were deleted, as by a purge elsewhere, are dropped here."""
        saved: Mapping[str, Bookmark] = {}
        deleted: Mapping[str, Bookmark] = {}
        with self._looking_up():
            saved = self._engine.bookmarks.read(self._namespace)
            with self.lock:
                unsaved = self.entries.keys() - saved.keys()
            deleted = self._engine.bookmarks.take_deleted(self._namespace, unsaved)
        for name, bookmark in deleted.items():
            with self.lock:
                entry = self.entries.get(name)
                # unless it was continued here since
                if entry is None or entry.set_at > bookmark.set_at or self._is_leased(entry):
                    continue
                del self.entries[name]
        return saved

    def _whole(self, saved: Mapping[str, Bookmark]) -> list[str]:
        """Which of the saved sessions can be resumed: their whole sequence is stored."""
        with self._looking_up():
            return self._engine.bookmarks.whole(self._namespace, saved)
        return []

    def _looking_up(self) -> Guard:
        return Guard(self._engine.counters, "resume:miss:error", "resume:miss:unavailable")

    def _save(self, entry: SessionState) -> None:
        """Save a session as a bookmark, with the commit of its last pages; remove the bookmark if it is too short."""
        full_pages = page_keys(self._namespace, entry.tokens, self._hook.page_tokens)
        end = len(full_pages) * self._hook.page_tokens
        page = full_pages[-1] if full_pages else self._namespace
        form = SNAPSHOT if self._hook.kind.has_snapshots else PAGE
        rest, n = entry.tokens[end:].tobytes(), len(entry.tokens)
        is_stored = n >= max(self._hook.context.parameters.min_tokens, 1)
        bookmark = Bookmark(page, rest, n, form, entry.generation, entry.set_at) if is_stored else Unset(entry.set_at)
        self._engine.write_queue.set_bookmark(self._namespace, entry.name, bookmark)


def _now(before: int) -> int:
    """The current time, but later than `before`."""
    return max(time.time_ns(), before + 1)
