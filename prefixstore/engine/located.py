"""What a lookup works on: a prompt cut into pages, what is pending along it, and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixstore.engine.page import Page, Path, shared_tokens
from prefixstore.engine.trie import Entry, Trie
from prefixstore.format.keys import PAGE, TOKEN_BYTES, Tokens
from prefixstore.format.record import Record


class PagedPrompt:
    """A sequence of tokens, cut into pages. The trie saves hashing keys that were looked up before.

    Attributes
    ----------
    pieces
        The tokens of its pages, little-endian int32 bytes; the last piece may be shorter, or empty.
    keys
        The keys of its full pages.
    parents
        The key of the parent of each piece; of the first one, that of the namespace.
    """

    def __init__(self, namespace: bytes, tokens: Tokens, page_tokens: int, trie: Trie) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.page_tokens = page_tokens
        raw, step = tokens.tobytes(), page_tokens * TOKEN_BYTES
        self.pieces = [raw[start : start + step] for start in range(0, len(raw) + 1, step)]
        self.keys = trie.keys(namespace, self.pieces[:-1])
        self.parents = [namespace, *self.keys]

    def has(self, number: int, page: Page | Record) -> bool:
        """Whether this is its full page of that number. Equal keys are no proof, equal tokens are."""
        return (
            page.tokens == self.pieces[number]
            and page.start == number * self.page_tokens
            and page.parent == self.parents[number]
            and page.namespace == self.namespace
            and page.form == PAGE
        )

    def good(self, entries: Sequence[Entry], waiting: Waiting) -> list[Entry]:
        """The leading entries that are its pages and may be used."""
        found: list[Entry] = []
        for number, entry in enumerate(entries):
            record = entry.record
            if not isinstance(record, Record) or not waiting.allows(entry.key, record) or not self.has(number, record):
                break
            found.append(entry)
        return found


class Waiting(NamedTuple):
    """What this process has not written yet; to be read before the view is opened."""

    pages: Mapping[bytes, Page]
    """Pending full pages of the prompt, by key."""
    after: Mapping[bytes, Sequence[Page]]
    """Pending pages and snapshots, by parent."""
    damaged: Mapping[bytes, int]
    """Stored pages that are not to be used: when they were created, by key."""

    def allows(self, key: bytes, record: Record) -> bool:
        """Whether a stored page may be used. A page stored later under a damaged one's key may."""
        return self.damaged.get(key) != record.created


@dataclass
class Located:
    """What was found of a prompt.

    Attributes
    ----------
    pages
        Its full pages, from the start.
    n_stored
        How many of them are stored; the others are pending.
    beside
        Children of the last page; among them is the one that shares most tokens with the rest of the prompt.
    snapshots
        The snapshots after the namespace, and after each of these pages.
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
        """The longest prefix that was found. Its last page may extend beyond it."""
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
