"""Bookmarks: names for stored sequences, kept in a note of each namespace, and written with the next commit.

A bookmark has only the tokens after the last full page; the others are in the records of the pages. It is valid while
the whole sequence is stored: whatever deletes the sequence ends the bookmark, which reveals nothing that the pages do
not.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from prefixstore.backends.threads import handed_over
from prefixstore.engine.budget import PART_FOR_A_NOTE
from prefixstore.engine.keyspace import bookmarks_note
from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.page_view import PageView
from prefixstore.engine.pages import retried
from prefixstore.engine.part import Part, Shared
from prefixstore.errors import CorruptError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, TOKEN_BYTES, Tokens, page_key
from prefixstore.format.record import Record
from prefixstore.format.saved_state import pack_state, unpack_state

log = logging.getLogger("prefixstore")

# how many a namespace has at most; the latest are kept
MAX_BOOKMARKS = 1024
HEAD = struct.Struct(f"<{KEY_BYTES}sIIQBI")
# no owner discards a sequence that often, and no clock is that late
LARGEST_GENERATION = 1 << 31
LATEST = 1 << 63


@dataclass(frozen=True)
class Bookmark:
    """A name for a stored sequence.

    Attributes
    ----------
    page
        Key of the last full page, or of the namespace if there is none.
    rest
        Token bytes after that page.
    n_tokens
        Length of the whole sequence.
    form
        `PAGE` if it is restored from pages, `SNAPSHOT` if from a snapshot at its end.
    generation
        A number that means something to the owner.
    set_at
        When it was set, in nanoseconds since the epoch.
    """

    page: bytes
    rest: bytes
    n_tokens: int
    form: int
    generation: int
    set_at: int

    @property
    def start(self) -> int:
        """The position where the rest begins."""
        return self.n_tokens - len(self.rest) // TOKEN_BYTES

    def pack(self) -> bytes:
        """The stored form."""
        numbers = (self.n_tokens, self.generation, self.set_at, self.form, len(self.rest))
        return HEAD.pack(self.page, *numbers) + self.rest

    @classmethod
    def unpack(cls, packed: bytes) -> Bookmark:
        """Read the stored form. Raises `CorruptError` if it is damaged."""
        if len(packed) < HEAD.size:
            raise CorruptError("a bookmark is cut off")
        page, n_tokens, generation, set_at, form, n_rest = HEAD.unpack_from(packed)
        rest = packed[HEAD.size :]
        is_sound = len(rest) == n_rest and not n_rest % TOKEN_BYTES and n_rest <= n_tokens * TOKEN_BYTES
        # both are incremented: a value that no longer fits would make a whole commit fail
        has_room = generation < LARGEST_GENERATION and set_at < LATEST
        if not is_sound or not has_room or form not in (PAGE, SNAPSHOT):
            raise CorruptError("a bookmark is damaged")
        return cls(page, rest, n_tokens, form, generation, set_at)


@dataclass(frozen=True)
class Unset:
    """A change that removes a bookmark, unless it was set after this time."""

    set_at: int = LATEST


BookmarkChange: TypeAlias = Bookmark | Unset


class Bookmarks(Part):
    """Reads bookmarks, and writes them with the next commit."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        # held for short steps in memory only
        self._lock = threading.Lock()
        # changes to write, by namespace and name
        self._pending: dict[tuple[bytes, str], BookmarkChange] = {}
        # the note that was read last, and its bookmarks: each admission of a session reads it
        self._parsed: tuple[bytes | None, Mapping[str, Bookmark]] = (None, {})
        # what this process has read or written, by namespace and name, to find out what was deleted
        self._seen: dict[bytes, dict[str, Bookmark]] = {}

    @property
    def has_pending(self) -> bool:
        """Whether changes wait for a commit."""
        return bool(self._pending)

    def set(self, namespace: bytes, name: str, bookmark: BookmarkChange) -> None:
        """Set or remove a bookmark with the next commit."""
        with self._lock:
            self._pending[namespace, name] = bookmark

    @handed_over
    def read(self, namespace: bytes) -> Mapping[str, Bookmark]:
        """All bookmarks of a namespace, including those not written yet, the latest at the end. Raises `StorageError`.

        A damaged note counts as empty.
        """
        with self._backend.view() as view:
            note = view.note(bookmarks_note(namespace))
        parsed = self._parsed
        if note != parsed[0]:
            self._parsed = parsed = note, bookmarks_in(note)
        with self._lock:
            seen = self._seen.setdefault(namespace, {})
            seen.update(parsed[1])
            # bounded: other processes may use ever more names
            for name in list(seen)[: -4 * MAX_BOOKMARKS]:
                del seen[name]
            changes = {name: change for (space, name), change in self._pending.items() if space == namespace}
        return merged(parsed[1], changes) if changes else parsed[1]

    @handed_over
    def take_deleted(self, namespace: bytes, names: Collection[str]) -> dict[str, Bookmark]:
        """Which of these names, not found by `read`, had bookmarks that were deleted with their sequences; each once.

        Raises `StorageError`.
        """
        with self._lock:
            seen = self._seen.get(namespace, {})
            missing = {name: seen[name] for name in names if name in seen}
        kept = set(self.whole(namespace, missing)) if missing else set()
        deleted = {name: each for name, each in missing.items() if name not in kept}
        with self._lock:
            for name in deleted:
                self._seen[namespace].pop(name, None)
        return deleted

    def write(self, transaction: PageUpdate, batch: Collection[bytes]) -> None:
        """Write waiting changes, after the pages of a batch.

        A bookmark whose sequence is not stored (any more) is removed instead.
        """
        with self._lock:
            asked = dict(self._pending)
        if not asked:
            return
        # read after `asked`: the pages of a bookmark are captured before it is set
        may_be_whole_later = self._catalog.waits_beside(batch)
        made: dict[tuple[bytes, str], BookmarkChange] = {}
        for (namespace, name), change in asked.items():
            if isinstance(change, Unset) or is_whole(transaction, namespace, change):
                made[namespace, name] = change
            elif not may_be_whole_later:
                made[namespace, name] = Unset(change.set_at)
        for namespace in {namespace for namespace, _ in made}:
            changes = {name: change for (space, name), change in made.items() if space == namespace}
            old = transaction.note(bookmarks_note(namespace))
            new = self._pack(merged(bookmarks_in(old), changes))
            if new != old:
                transaction.put_note(bookmarks_note(namespace), new, namespace)
        if made:
            transaction.after_commit.append(lambda: self._written(made, asked))

    def _written(
        self, made: Mapping[tuple[bytes, str], BookmarkChange], asked: Mapping[tuple[bytes, str], BookmarkChange]
    ) -> None:
        """Note that these changes were committed, for those that were asked for."""
        with self._lock:
            for (namespace, name), change in made.items():
                seen = self._seen.setdefault(namespace, {})
                if isinstance(change, Bookmark):
                    seen[name] = change
                else:
                    seen.pop(name, None)
                # unless it was changed again meanwhile
                if self._pending.get((namespace, name)) is asked[namespace, name]:
                    del self._pending[namespace, name]

    def _pack(self, bookmarks: Mapping[str, Bookmark]) -> bytes | None:
        """A note with the latest bookmarks, as many as fit; None if there are none."""
        kept = list(bookmarks.items())[-MAX_BOOKMARKS:]
        while kept:
            note = pack_state({name: bookmark.pack() for name, bookmark in kept})
            if len(note) <= self._budget.max_bytes * PART_FOR_A_NOTE:
                return note
            kept = kept[-(len(kept) // 2) :] if len(kept) > 1 else []
        return None

    # -- sequences ----------------------------------------------------------------------------------------------------

    @handed_over
    def whole(self, namespace: bytes, bookmarks: Mapping[str, Bookmark] | None = None) -> list[str]:
        """The names of those bookmarks, by default of all, whose sequences are stored. Raises `StorageError`."""
        if bookmarks is None:
            bookmarks = self.read(namespace)
        with self._backend.view() as view:
            return [name for name, bookmark in bookmarks.items() if is_whole(view, namespace, bookmark)]

    @handed_over
    def tokens(self, namespace: bytes, bookmark: Bookmark) -> Tokens | None:
        """The tokens of the sequence; None if not all of it is stored. Raises `StorageError`."""
        with self._backend.view() as view:
            if not is_whole(view, namespace, bookmark):
                return None
            pieces, key, end = [bookmark.rest], bookmark.page, bookmark.start
            while key != namespace:
                record, _ = view.records([key]).get(key, (None, None))
                if not isinstance(record, Record) or record.end != end or record.key != key:
                    return None
                pieces.append(record.tokens)
                key, end = record.parent, record.start
        return np.frombuffer(b"".join(reversed(pieces)), "<i4") if end == 0 else None

    @retried
    def prune(self) -> None:
        """Remove the bookmarks of sequences that are no longer stored. Raises `StorageError`.

        A namespace without pages loses its bookmarks with its settings.
        """
        with self._backend.view() as view:
            found = {namespace: bookmarks_in(view.note(bookmarks_note(namespace))) for namespace in view.namespaces()}
            torn = [
                namespace
                for namespace, bookmarks in found.items()
                if not all(is_whole(view, namespace, bookmark) for bookmark in bookmarks.values())
            ]
        if torn:
            with self._backend.update() as transaction:
                for namespace in torn:
                    known = bookmarks_in(transaction.note(bookmarks_note(namespace)))
                    left = {name: each for name, each in known.items() if is_whole(transaction, namespace, each)}
                    transaction.put_note(bookmarks_note(namespace), self._pack(left), namespace)


def is_whole(view: PageView, namespace: bytes, bookmark: Bookmark) -> bool:
    """Whether the whole sequence is stored. Only its end is looked up: no page is stored without its parent."""
    page, rest = bookmark.page, bookmark.rest
    if page != namespace:
        record, _ = view.records([page]).get(page, (None, None))
        if not isinstance(record, Record) or (record.namespace, record.end) != (namespace, bookmark.start):
            return False
    elif bookmark.start:
        return False
    if bookmark.form == SNAPSHOT:
        key = page_key(page, rest, SNAPSHOT)
        record, _ = view.records([key]).get(key, (None, None))
        return isinstance(record, Record) and record.tokens == rest
    if not rest:
        return page != namespace
    # a longer page may have replaced the tail
    beside = [each.record for each in view.neighbors(page, rest)]
    return any(isinstance(record, Record) and record.tokens.startswith(rest) for record in beside)


def merged(old: Mapping[str, Bookmark], changes: Mapping[str, BookmarkChange]) -> dict[str, Bookmark]:
    """The old bookmarks with the changes, sorted by the time when they were set; for each name the later one."""
    found: dict[str, Bookmark] = dict(old)
    for name, change in changes.items():
        known = found.get(name)
        if known is None or change.set_at >= known.set_at:
            if isinstance(change, Bookmark):
                found[name] = change
            else:
                found.pop(name, None)
    return dict(sorted(found.items(), key=lambda item: item[1].set_at))


def bookmarks_in(note: bytes | None) -> dict[str, Bookmark]:
    """The bookmarks of a note, sorted by the time when they were set; damaged ones are left out."""
    found: dict[str, Bookmark] = {}
    try:
        parts = unpack_state(note) if note is not None else {}
    except CorruptError as error:
        log.warning("names of stored sequences cannot be read and are dropped: %s", error)
        return found
    for name, packed in parts.items():
        try:
            found[name] = Bookmark.unpack(packed)
        except CorruptError as error:
            log.warning("the name of a stored sequence cannot be read and is dropped: %s", error)
    return dict(sorted(found.items(), key=lambda item: item[1].set_at))
