"""What a lookup is about: a prompt, what waits to be written, and what is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixstore.engine.page import Page, Path, shared_tokens
from prefixstore.engine.record_cache import Entry, RecordCache
from prefixstore.format.keys import PAGE, TOKEN_BYTES, Tokens
from prefixstore.format.record import Record

__all__ = ["Located", "PagedPrompt", "Waiting"]


class PagedPrompt:
    """A sequence of tokens, cut into pages; the cache knows the keys of those that were looked up before.

    Attributes
    ----------
    pieces
        The tokens of its pages, little-endian int32 bytes; the last one may be shorter, or empty.
    keys
        Keys of its full pages.
    parents
        What each of its pages follows.
    """

    def __init__(self, namespace: bytes, tokens: Tokens, page_tokens: int, cache: RecordCache) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.page_tokens = page_tokens
        raw, step = tokens.tobytes(), page_tokens * TOKEN_BYTES
        self.pieces = [raw[start : start + step] for start in range(0, len(raw) + 1, step)]
        self.keys = cache.keys(namespace, self.pieces[:-1])
        self.parents = [namespace, *self.keys]

    def has(self, number: int, page: Page | Record) -> bool:
        """Whether one of its full pages is this one: a key only nominates, the tokens prove it."""
        return (
            page.tokens == self.pieces[number]
            and page.start == number * self.page_tokens
            and page.parent == self.parents[number]
            and page.namespace == self.namespace
            and page.form == PAGE
        )

    def good(self, entries: Sequence[Entry], waiting: Waiting) -> list[Entry]:
        """What is stored of its pages, up to the first that is not to be used."""
        found: list[Entry] = []
        for number, entry in enumerate(entries):
            record = entry.record
            if not isinstance(record, Record) or not waiting.allows(entry.key, record) or not self.has(number, record):
                break
            found.append(entry)
        return found


class Waiting(NamedTuple):
    """What a process knows that the location does not: taken before the view is opened."""

    pages: Mapping[bytes, Page]
    """Full pages of the prompt that wait to be written, by key."""
    after: Mapping[bytes, Sequence[Page]]
    """Pages and snapshots that wait, by what they follow."""
    damaged: Mapping[bytes, int]
    """Stored pages that are not to be used, by key: when they were created."""

    def allows(self, key: bytes, record: Record) -> bool:
        """Whether a stored page may be used. Another one may have been written under the key since."""
        return self.damaged.get(key) != record.created


@dataclass
class Located:
    """What there is of a prompt.

    Attributes
    ----------
    prompt
        The prompt.
    pages
        Its full pages, from the start.
    n_stored
        How many of them are stored; the others wait.
    beside
        Pages after the last one that have the longest beginning in common with what follows in the prompt.
    snapshots
        The snapshots after each of these pages, the namespace first.
    collision
        A key of the prompt under which another page is stored.
    """

    prompt: PagedPrompt
    pages: list[Page] = field(default_factory=list)
    n_stored: int = 0
    beside: list[Page] = field(default_factory=list)
    snapshots: list[list[Page]] = field(default_factory=list)
    collision: bytes | None = None

    def path(self) -> Path:
        """The longest prefix, whose last page may extend beyond it."""
        at = len(self.pages)
        wanted = self.prompt.pieces[at]
        shared, n = max(((shared_tokens(wanted, page.tokens), i) for i, page in enumerate(self.beside)), default=(0, 0))
        more = (self.beside[n],) if shared else ()
        return Path((*self.pages, *more), at * self.prompt.page_tokens + shared)

    def to_snapshots(self) -> list[Path]:
        """The paths to the snapshots whose tokens begin the prompt, the deepest first."""
        found = [
            Path((*self.pages[:n], page), page.end)
            for n, after in enumerate(self.snapshots)
            for page in after
            if self.prompt.pieces[n].startswith(page.tokens)
        ]
        return sorted(found, key=lambda path: path.n_tokens, reverse=True)
