"""A name for a stored sequence, and the note with all bookmarks of a namespace.

A bookmark has only the tokens after the last full page; all others are in the records of the pages. It
is valid while the whole sequence is stored, so whatever deletes a sequence ends its bookmarks, and a bookmark reveals
nothing that the pages do not.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prefixstore.engine.page_view import View
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, TOKEN_BYTES, page_key
from prefixstore.format.record import Record
from prefixstore.format.saved_state import unpack_state

__all__ = ["Bookmark", "BookmarkChange", "Unset", "is_whole", "merged", "note_name", "parse"]

log = logging.getLogger("prefixstore")

# key of the last full page, tokens, generation, time, form, bytes of the rest
HEAD = struct.Struct(f"<{KEY_BYTES}sIIQBI")
# no owner discards a sequence so often, and no clock says so late
LARGEST_GENERATION = 1 << 31
LATEST = 1 << 63


@dataclass(frozen=True)
class Bookmark:
    """A name for a stored sequence.

    Attributes
    ----------
    page
        Key of its last full page; of the namespace if there is none.
    rest
        Token bytes after that page.
    n_tokens
        Length of the whole sequence.
    form
        Whether it is restored from pages (`PAGE`), or from a snapshot at its end (`SNAPSHOT`).
    generation
        A number of the owner's.
    set_at
        When, in nanoseconds since the epoch.
    """

    page: bytes
    rest: bytes
    n_tokens: int
    form: int
    generation: int
    set_at: int

    @property
    def start(self) -> int:
        """Where the rest begins."""
        return self.n_tokens - len(self.rest) // TOKEN_BYTES

    def pack(self) -> bytes:
        """As it is stored."""
        numbers = (self.n_tokens, self.generation, self.set_at, self.form, len(self.rest))
        return HEAD.pack(self.page, *numbers) + self.rest

    @classmethod
    def unpack(cls, packed: bytes) -> Bookmark:
        """Raises `CorruptError` if these bytes are not a bookmark."""
        if len(packed) < HEAD.size:
            raise CorruptError("a bookmark is cut off")
        page, n_tokens, generation, set_at, form, n_rest = HEAD.unpack_from(packed)
        rest = packed[HEAD.size :]
        is_sound = len(rest) == n_rest and not n_rest % TOKEN_BYTES and n_rest <= n_tokens * TOKEN_BYTES
        # both grow: one that no longer fits would keep all that wait with it from being written
        has_room = generation < LARGEST_GENERATION and set_at < LATEST
        if not is_sound or not has_room or form not in (PAGE, SNAPSHOT):
            raise CorruptError("a bookmark is damaged")
        return cls(page, rest, n_tokens, form, generation, set_at)


@dataclass(frozen=True)
class Unset:
    """Removes a bookmark, unless it was set after this time."""

    set_at: int


BookmarkChange: TypeAlias = Bookmark | Unset | None
"""What becomes of a bookmark; None removes it whenever it was set."""


def note_name(namespace: bytes) -> bytes:
    """The name of the note with the bookmarks of a namespace."""
    return b"bookmarks:" + namespace


def is_whole(view: View, namespace: bytes, bookmark: Bookmark) -> bool:
    """Whether all of a sequence is stored: its end is enough, since no page is stored without its parent."""
    page, rest = bookmark.page, bookmark.rest
    try:
        if page != namespace:
            record = view.record(page)
            if record is None or record.namespace != namespace or record.end != bookmark.start:
                return False
        elif bookmark.start:
            return False
    except (CorruptError, IncompatibleError):
        return False
    if bookmark.form == SNAPSHOT:
        key = page_key(page, rest, SNAPSHOT)
        return bool(view.records([key])) and _is_of(view, key, rest)
    if not rest:
        return page != namespace
    # a longer page may have taken the place of the tail
    beside = [each.record for each in view.neighbors(page, rest)]
    return any(isinstance(record, Record) and record.tokens.startswith(rest) for record in beside)


def _is_of(view: View, key: bytes, tokens: bytes) -> bool:
    record, _ = view.records([key]).get(key, (None, None))
    return isinstance(record, Record) and record.tokens == tokens


def merged(old: Mapping[str, Bookmark], changes: Mapping[str, BookmarkChange]) -> dict[str, Bookmark]:
    """The old bookmarks with the changes, by the time when they were set; for each name the later one."""
    found: dict[str, Bookmark] = dict(old)
    for name, change in changes.items():
        known = found.get(name)
        if change is None:
            found.pop(name, None)
        elif known is None or change.set_at >= known.set_at:
            if isinstance(change, Bookmark):
                found[name] = change
            else:
                found.pop(name, None)
    return dict(sorted(found.items(), key=lambda item: item[1].set_at))


def parse(note: bytes | None) -> dict[str, Bookmark]:
    """The bookmarks of a note, by the time when they were set; damaged ones are left out."""
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
