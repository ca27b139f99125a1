"""Sessions that outlive the process: their names and tokens, as bookmarks in the location of the store."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prefixstore.engine.bookmark import Bookmark, Unset
from prefixstore.engine.engine import Engine
from prefixstore.engine.miss import Guard
from prefixstore.format.keys import PAGE, SNAPSHOT, Tokens, page_key, page_keys
from prefixstore.sessions.table import Entry

__all__ = ["SavedSessions"]


class SavedSessions:
    """The saved sessions of a namespace. A failing location has none, and loses those saved meanwhile.

    Parameters
    ----------
    engine
        Has the location.
    namespace
        Key of the namespace.
    page_tokens
        Length of a page.
    min_tokens
        Shorter sequences are not stored, so they cannot be saved.
    has_snapshots
        Whether a sequence is restored from a snapshot at its end.
    """

    def __init__(
        self, engine: Engine, namespace: bytes, page_tokens: int, min_tokens: int, *, has_snapshots: bool
    ) -> None:
        self._engine = engine
        self._namespace = namespace
        self._page_tokens = page_tokens
        self._min_tokens = min_tokens
        self._has_snapshots = has_snapshots

    def names(self) -> list[str]:
        """The names of those that can be resumed: all that they hold is stored."""
        with self._looking_up():
            return self._engine.whole_bookmarks(self._namespace)
        return []

    def newer(self, set_at: Mapping[str, int]) -> set[str]:
        """Which of these sessions were saved after these times."""
        with self._looking_up():
            return set(self._newer(set_at))
        return set()

    def find(self, newer_than: Mapping[str, int]) -> list[Entry]:
        """Those of these sessions that were saved after these times, by another process or an earlier one."""
        found = []
        with self._looking_up():
            for name, bookmark in self._newer(newer_than).items():
                tokens = self._engine.bookmarked(self._namespace, bookmark)
                if tokens is not None:
                    keys = self.pages_of(tokens)
                    found.append(Entry(name, tokens, bookmark.generation, keys=keys, set_at=bookmark.set_at))
        return found

    def _newer(self, set_at: Mapping[str, int]) -> dict[str, Bookmark]:
        saved = self._engine.bookmarks(self._namespace) if set_at else {}
        return {name: saved[name] for name, before in set_at.items() if name in saved and saved[name].set_at > before}

    def _looking_up(self) -> Guard:
        return Guard(self._engine.counters, "resume:miss:error", "resume:miss:unavailable")

    def save(self, entry: Entry) -> None:
        """Save a session with the commit after its pages; one that holds too little is not saved any more."""
        tokens, n_full = entry.tokens, len(entry.tokens) // self._page_tokens
        if len(tokens) < max(self._min_tokens, 1):
            self.forget(entry.name, entry.set_at)
            return
        bookmark = Bookmark(
            entry.keys[n_full - 1] if n_full else self._namespace,
            tokens[n_full * self._page_tokens :].tobytes(),
            len(tokens),
            SNAPSHOT if self._has_snapshots else PAGE,
            entry.generation,
            entry.set_at,
        )
        self._engine.set_bookmark(self._namespace, entry.name, bookmark)

    def forget(self, name: str, set_at: int | None = None) -> None:
        """Remove a session, unless another process has saved it after this time."""
        self._engine.set_bookmark(self._namespace, name, None if set_at is None else Unset(set_at))

    def pages_of(self, tokens: Tokens) -> tuple[bytes, ...]:
        """The keys of all pages and snapshots that may hold a sequence: first those of its full pages."""
        full_pages = page_keys(self._namespace, tokens, self._page_tokens)
        parent = full_pages[-1] if full_pages else self._namespace
        rest = tokens[len(full_pages) * self._page_tokens :].tobytes()
        forms = (PAGE, SNAPSHOT) if self._has_snapshots else (PAGE,)
        return (*full_pages, *(page_key(parent, rest, form) for form in forms if rest or form == SNAPSHOT))

    @staticmethod
    def now(before: int) -> int:
        """The time, but later than that of everything saved before."""
        return max(time.time_ns(), before + 1)
