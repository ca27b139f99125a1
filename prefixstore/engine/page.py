"""Pages as the engine sees them; for maintenance, as trees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES, common_prefix
from prefixstore.format.record import Record, Usage


@dataclass(slots=True, eq=False)
class Page:
    """One page or snapshot, as a lookup found it, or pending. Most fields are those of its `Record` and its `Usage`.

    Attributes
    ----------
    expires
        Nanoseconds since the epoch; 0 for never. The ancestors of a page do not expire before it does.
    form
        `PAGE`, or `SNAPSHOT`: the state needed to resume after its tokens, which are those since the end of its
        parent. A snapshot has no children.
    children
        The pages and snapshots that follow it in a tree of pages; empty in a lookup.
    is_far
        Whether it was found in the far location.
    """

    key: bytes
    parent: bytes
    namespace: bytes
    start: int
    tokens: bytes
    raw_bytes: int
    stored_bytes: int
    compute_us: int
    created: int
    last_used: int
    hits: int = 0
    pinned: bool = False
    priority: int = 0
    expires: int = 0
    form: int = PAGE
    uses: int = 1
    page_class: int = 0
    children: list[Page] = field(default_factory=list, repr=False)
    is_far: bool = False

    @classmethod
    def stored(cls, key: bytes, record: Record, usage: Usage) -> Page:
        """The page with this record and usage."""
        # positional, which is faster: a lookup makes many pages
        return cls(
            key,
            record.parent,
            record.namespace,
            record.start,
            record.tokens,
            record.raw_bytes,
            record.stored_bytes,
            record.compute_us,
            record.created,
            usage.last_used,
            usage.hits,
            usage.pinned,
            usage.priority,
            usage.expires,
            record.form,
            usage.uses,
            usage.page_class,
        )

    @property
    def usage(self) -> Usage:
        """Its usage, as it is stored."""
        numbers = self.last_used, self.hits, self.pinned, self.priority, self.expires
        return Usage(*numbers, self.uses, self.page_class)

    @property
    def n_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """The boundary: the position after the last token."""
        return self.start + self.n_tokens

    @property
    def is_leaf(self) -> bool:
        """Whether no page follows this one in the tree."""
        return not self.children

    def has_expired(self, now: int) -> bool:
        """Whether the page has expired, at this time in nanoseconds since the epoch."""
        return 0 < self.expires <= now and not self.pinned

    def lasts_until(self, other: Page) -> bool:
        """Whether the page is kept at least as long as another one."""
        # a pinned page may be unpinned later, and expires then
        if not self.expires or (self.pinned and other.pinned):
            return True
        return bool(other.expires) and not other.pinned and self.expires >= other.expires


def later(expires: int, other: int) -> int:
    """The later of two times at which a page expires; 0 is never."""
    return max(expires, other) if expires and other else 0


def is_same(one: Page | Record, other: Page | Record) -> bool:
    """Whether two pages with one key are the same page. Equal keys are no proof, equal tokens are.

    The position follows from the parent, and is not compared; compare it as well if it was read from stored bytes.
    """
    if (one.tokens, one.parent) != (other.tokens, other.parent):
        return False
    return (one.namespace, one.form) == (other.namespace, other.form)


@dataclass(frozen=True)
class Path:
    """The first pages of a sequence, and how many of its tokens they cover.

    The last one may be a snapshot, which can be resumed only at its end. Some of those before it may have only tokens.
    """

    pages: tuple[Page, ...]
    n_tokens: int

    @property
    def to_read(self) -> tuple[Page, ...]:
        """The pages that a restore reads: the last one, and those with a payload."""
        return (*(page for page in self.pages[:-1] if page.raw_bytes), *self.pages[-1:])

    @property
    def ends_in_snapshot(self) -> bool:
        """Whether the last one is a snapshot."""
        return bool(self.pages) and self.pages[-1].form == SNAPSHOT


def shared_tokens(a: bytes, b: bytes) -> int:
    """The length of the common prefix of two byte strings of tokens, in tokens."""
    return common_prefix(np.frombuffer(a, "<i4"), np.frombuffer(b, "<i4"))


def in_order(pages: Iterable[Page]) -> list[Page]:
    """Pages as trees, parents before their children; without pages whose parent is missing or does not fit.

    Of two pages with one key, only the first one is kept.
    """
    known: dict[bytes, Page] = {}
    first: list[Page] = []
    for page in sorted(pages, key=lambda page: page.start):
        parent = known.get(page.parent)
        if page.parent == page.namespace:
            beside, is_in_place = first, page.start == 0
        elif parent is not None:
            beside = parent.children
            is_in_place = (page.start, page.namespace, PAGE) == (parent.end, parent.namespace, parent.form)
        else:
            continue
        if is_in_place and page.key not in known:
            beside.append(page)
            known[page.key] = page
    ordered: list[Page] = []
    waiting = sorted(first, key=lambda page: (page.namespace, page.tokens), reverse=True)
    while waiting:
        ordered.append(waiting.pop())
        waiting += sorted(ordered[-1].children, key=lambda one: (one.form, one.tokens), reverse=True)
    return ordered
