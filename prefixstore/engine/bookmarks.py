"""The bookmarks of a location: read, and written with the next commit."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import numpy as np

from prefixstore.backends.threads import handed_over
from prefixstore.engine.bookmark import Bookmark, BookmarkChange, Unset, is_whole, merged, note_name, parse
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pages import retried
from prefixstore.engine.part import Part, Shared
from prefixstore.format.keys import Tokens
from prefixstore.format.record import Record
from prefixstore.format.saved_state import pack_state

__all__ = ["MAX_BOOKMARKS", "Bookmarks"]

# of a namespace; those that were set last are kept
MAX_BOOKMARKS = 1024
# a note takes at most this part of the budget
PART_OF_BUDGET = 1 / 256


class Bookmarks(Part):
    """Reads bookmarks, and writes them with the next commit."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        # held for steps in memory only
        self._lock = threading.Lock()
        # to be written, by namespace and name
        self._pending: dict[bytes, dict[str, BookmarkChange]] = {}
        # the note that was read last, and what it says: each admission reads it
        self._parsed: tuple[bytes | None, Mapping[str, Bookmark]] = (None, {})
        # what this process has read or written, by namespace and name, until it is found to be deleted
        self._seen: dict[bytes, dict[str, Bookmark]] = {}

    @property
    def has_pending(self) -> bool:
        """Whether some wait for a commit."""
        return bool(self._pending)

    def set(self, namespace: bytes, name: str, bookmark: BookmarkChange) -> None:
        """Set a bookmark with the next commit; None removes it."""
        with self._lock:
            self._pending.setdefault(namespace, {})[name] = bookmark

    @handed_over
    def read(self, namespace: bytes) -> Mapping[str, Bookmark]:
        """All bookmarks of a namespace, including waiting ones, the latest at the end. Raises `StorageError`.

        A note that is damaged is none.
        """
        with self._backend.view() as view:
            note = view.note(note_name(namespace))
        parsed = self._parsed
        if note != parsed[0]:
            self._parsed = parsed = note, parse(note)
        with self._lock:
            self._seen.setdefault(namespace, {}).update(parsed[1])
            changes = self._pending.get(namespace)
            return merged(parsed[1], changes) if changes else parsed[1]

    @handed_over
    def take_deleted(self, namespace: bytes, known: Collection[str]) -> dict[str, Bookmark]:
        """Bookmarks that were there, and were deleted with their sequences, as by a purge; each once.

        `known` are the names of those that `read` has found now. Raises `StorageError`.
        """
        with self._lock:
            missing = {name: each for name, each in self._seen[namespace].items() if name not in known}
        kept = set(self._whole(namespace, missing)) if missing else set()
        deleted = {name: each for name, each in missing.items() if name not in kept}
        with self._lock:
            for name in deleted:
                self._seen[namespace].pop(name, None)
        return deleted

    def write(self) -> None:
        """Write waiting bookmarks. What cannot be written is tried again later; raises `StorageError`.

        A bookmark of a sequence that is not stored any more, or was not stored after all, is not written: its name is
        removed.
        """
        with self._lock:
            waiting = {namespace: dict(changes) for namespace, changes in self._pending.items()}
            before = {namespace: dict(changes) for namespace, changes in waiting.items()}
        if not waiting:
            return
        # asked after these were set: the pages of a bookmark are captured before
        may_be_whole_later = self._catalog.has_pending
        with self._backend.update() as transaction:
            for namespace, changes in waiting.items():
                for name, bookmark in list(changes.items()):
                    if not isinstance(bookmark, Bookmark) or is_whole(transaction, namespace, bookmark):
                        continue
                    if may_be_whole_later:
                        del changes[name]
                    else:
                        changes[name] = Unset(bookmark.set_at)
                self._write(transaction, namespace, changes)
        with self._lock:
            for namespace, changes in waiting.items():
                self._written(namespace, changes, before[namespace])

    def _written(
        self, namespace: bytes, changes: Mapping[str, BookmarkChange], asked: Mapping[str, BookmarkChange]
    ) -> None:
        """These changes were written, for those that were asked for. Called under the lock."""
        left, seen = self._pending.get(namespace, {}), self._seen.setdefault(namespace, {})
        for name, bookmark in changes.items():
            if isinstance(bookmark, Bookmark):
                seen[name] = bookmark
            else:
                seen.pop(name, None)
            # not one that was set again meanwhile
            if name in left and left[name] is asked[name]:
                del left[name]
        if not left:
            self._pending.pop(namespace, None)

    def _write(self, transaction: Transaction, namespace: bytes, changes: Mapping[str, BookmarkChange]) -> None:
        old = transaction.note(note_name(namespace))
        new = self._pack(merged(parse(old), changes))
        if new != old:
            transaction.put_note(note_name(namespace), new, namespace)

    def _pack(self, bookmarks: Mapping[str, Bookmark]) -> bytes | None:
        """A note with as many of the last ones as it may have; None if there are none."""
        kept = list(bookmarks.items())[-MAX_BOOKMARKS:]
        while kept:
            note = pack_state({name: bookmark.pack() for name, bookmark in kept})
            if len(note) <= self._budget.max_bytes * PART_OF_BUDGET:
                return note
            kept = kept[-(len(kept) // 2) :] if len(kept) > 1 else []
        return None

    # -- what they stand for ------------------------------------------------------------------------------------------

    @handed_over
    def whole(self, namespace: bytes) -> list[str]:
        """The names of those whose sequences are stored as a whole. Raises `StorageError`."""
        return self._whole(namespace, self.read(namespace))

    def _whole(self, namespace: bytes, bookmarks: Mapping[str, Bookmark]) -> list[str]:
        """The names of those whose sequences are stored as a whole. Raises `StorageError`."""
        with self._backend.view() as view:
            return [name for name, bookmark in bookmarks.items() if is_whole(view, namespace, bookmark)]

    @handed_over
    def tokens(self, namespace: bytes, bookmark: Bookmark) -> Tokens | None:
        """The sequence; None if not all of it is stored. Raises `StorageError`."""
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
        """Remove the bookmarks of sequences that are not stored any more, as after a deletion. Raises `StorageError`.

        Those of a namespace without pages are removed with its settings.
        """
        with self._backend.view() as view:
            found = {namespace: parse(view.note(note_name(namespace))) for namespace in view.namespaces()}
            torn = [
                namespace
                for namespace, bookmarks in found.items()
                if not all(is_whole(view, namespace, bookmark) for bookmark in bookmarks.values())
            ]
        if torn:
            with self._backend.update() as transaction:
                for namespace in torn:
                    known = parse(transaction.note(note_name(namespace)))
                    left = {name: each for name, each in known.items() if is_whole(transaction, namespace, each)}
                    transaction.put_note(note_name(namespace), self._pack(left), namespace)
