"""Finds what is stored of a prompt, to the token: in a view of the location, and among what waits to be written.

Mostly three round trips to a server: the records of all full pages, whose keys follow from the tokens, then the child
rows after the last of them, and the records of these. Nothing that was found is used for the next lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixstore.engine.index import Page, Path, shared_tokens
from prefixstore.engine.page_view import View
from prefixstore.engine.trie import Entry, Trie
from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES, Tokens
from prefixstore.format.record import Record

__all__ = ["Located", "Prompt", "Waiting", "locate"]


class Prompt:
    """A sequence of tokens, cut into pages.

    Parameters
    ----------
    namespace
        Key of its namespace.
    tokens
        The tokens.
    page_tokens
        Length of a page.
    trie
        Knows the keys of pages that were looked up before.

    Attributes
    ----------
    pieces
        The tokens of its pages, little-endian int32 bytes; the last one may be shorter, or empty.
    keys
        Keys of its full pages.
    parents
        What each of its pages follows.
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
        """Whether one of its full pages is this one: a key only nominates, the tokens prove it."""
        return (
            page.tokens == self.pieces[number]
            and page.start == number * self.page_tokens
            and page.parent == self.parents[number]
            and page.namespace == self.namespace
            and page.form == PAGE
        )


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
    n_read
        Records that were read.
    pages
        Its full pages, from the start.
    n_stored
        How many of them are stored; the others wait.
    beside
        Pages after the last one that have the longest beginning in common with what follows in the prompt.
    snapshots
        The snapshots after each of these pages, the namespace first.
    unreadable
        Stored pages of the prompt that cannot be read, and one that does not start where its parent ends.
    other
        Key of a page of the prompt under which another page is stored.
    """

    prompt: Prompt
    n_read: int = 0
    pages: list[Page] = field(default_factory=list)
    n_stored: int = 0
    beside: list[Page] = field(default_factory=list)
    snapshots: list[list[Page]] = field(default_factory=list)
    unreadable: list[Entry] = field(default_factory=list)
    other: bytes | None = None

    def path(self) -> Path:
        """The longest prefix, whose last page may extend beyond it."""
        at = len(self.pages)
        wanted = self.prompt.pieces[at]
        shared, n = max(((shared_tokens(wanted, page.tokens), i) for i, page in enumerate(self.beside)), default=(0, 0))
        more = (self.beside[n],) if shared else ()
        return Path((*self.pages, *more), at * self.prompt.page_tokens + shared)

    def fitting_snapshots(self) -> list[tuple[int, Page]]:
        """The snapshots whose tokens begin the prompt, the deepest first, each with the number of pages before it."""
        found = [
            (i, page)
            for i, after in enumerate(self.snapshots)
            for page in after
            if self.prompt.pieces[i].startswith(page.tokens)
        ]
        return sorted(found, key=lambda one: one[1].end, reverse=True)

    def path_to(self, n_pages: int, snapshot: Page) -> Path:
        """The path to a snapshot."""
        return Path((*self.pages[:n_pages], snapshot), snapshot.end)


def locate(
    view: View | None,
    waiting: Waiting,
    prompt: Prompt,
    nodes: Callable[[Sequence[Entry]], list[Page]],
    *,
    snapshots: bool = False,
) -> Located:
    """What there is of a prompt.

    Parameters
    ----------
    view
        Of the location; None if it cannot be read.
    waiting
        What waits to be written.
    prompt
        The prompt.
    nodes
        Makes pages of stored ones.
    snapshots
        Whether the snapshots along the prompt are wanted.
    """
    found = Located(prompt)
    entries = view.leading(prompt.keys) if view is not None and prompt.keys else []
    good = list(_good(entries, prompt, waiting))
    found.n_read, found.n_stored = len(entries), len(good)
    for entry in entries[len(good) : len(good) + 1]:
        if not isinstance(entry.record, Record) or _starts_elsewhere(entry.record, prompt, len(good)):
            found.unreadable.append(entry)
        elif not prompt.has(len(good), entry.record):
            found.other = entry.key
    pages = found.pages = nodes(good)
    for number in range(len(pages), len(prompt.keys)):
        page = waiting.pages.get(prompt.keys[number])
        if page is None or not prompt.has(number, page):
            break
        pages.append(page)
    at = len(pages)
    wanted, parent = prompt.pieces[at], prompt.parents[at]
    # after a page that waits nothing is stored
    asks = bool(wanted) and at == found.n_stored
    parents = prompt.parents[: found.n_stored + 1] if snapshots else []
    near: list[Entry] = []
    after: list[Entry] = []
    if view is not None and asks:
        near, after = view.beside(parent, wanted, parents)
    elif view is not None and parents:
        after = view.children(parents, SNAPSHOT)
    found.n_read += len(near) + len(after)
    start = at * prompt.page_tokens
    found.beside = nodes([one for one in near if _follows(one, prompt.namespace, parent, start, PAGE, waiting)])
    known = {page.key for page in found.beside}
    found.beside += [page for page in waiting.after.get(parent, ()) if page.form == PAGE and page.key not in known]
    if snapshots:
        found.snapshots = _snapshots(after, waiting, prompt, at, nodes)
    return found


def _snapshots(
    after: Sequence[Entry],
    waiting: Waiting,
    prompt: Prompt,
    n_pages: int,
    nodes: Callable[[Sequence[Entry]], list[Page]],
) -> list[list[Page]]:
    found: list[list[Page]] = []
    for number in range(n_pages + 1):
        parent, start = prompt.parents[number], number * prompt.page_tokens
        stored = nodes([one for one in after if _follows(one, prompt.namespace, parent, start, SNAPSHOT, waiting)])
        known = {page.key for page in stored}
        mine = [page for page in waiting.after.get(parent, ()) if page.form == SNAPSHOT and page.key not in known]
        found.append(stored + mine)
    return found


def _good(entries: Sequence[Entry], prompt: Prompt, waiting: Waiting) -> Iterator[Entry]:
    """Pages of a prompt, up to the first that is not to be used."""
    for number, entry in enumerate(entries):
        record = entry.record
        if not isinstance(record, Record) or not waiting.allows(entry.key, record) or not prompt.has(number, record):
            return
        yield entry


def _starts_elsewhere(record: Record, prompt: Prompt, number: int) -> bool:
    return (record.parent, record.tokens) == (prompt.parents[number], prompt.pieces[number]) and (
        record.start != number * prompt.page_tokens or record.namespace != prompt.namespace
    )


def _follows(entry: Entry, namespace: bytes, parent: bytes, start: int, form: int, waiting: Waiting) -> bool:
    record = entry.record
    if not isinstance(record, Record) or not waiting.allows(entry.key, record):
        return False
    return (record.namespace, record.parent, record.start, record.form) == (namespace, parent, start, form)
