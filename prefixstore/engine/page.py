"""Pages as the engine sees them, and trees of them, for maintenance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from prefixstore.format.keys import PAGE, TOKEN_BYTES, common_prefix
from prefixstore.format.record import Record, Usage

__all__ = ["Page", "Path", "in_order", "is_same", "later", "shared_tokens"]


@dataclass(slots=True, eq=False)
class Page:
    """One page or snapshot, as a lookup found it, or as it waits to be written.

    Times are nanoseconds since the epoch. Its `uses` and its class are those that the eviction policy counts; see
    `prefixstore.format.record.Usage`.

    Attributes
    ----------
    parent
        Key of its parent; of a first page, of the namespace.
    tokens
        Little-endian int32 bytes.
    raw_bytes, stored_bytes
        Size of the state, and of its stored form.
    compute_us
        Microseconds that computing the tokens took, as a prefill; 0 if it is not known.
    hits
        How often the page was restored.
    pinned
        Whether it is exempt from eviction and expiry.
    priority
        Pages of lower priority are evicted first, under the policy of this name.
    expires
        0 for never. The ancestors of a page do not expire before it does.
    form
        `PAGE`, or `SNAPSHOT`: the state needed to resume after its tokens, which are those since the end of its
        parent. A snapshot has no children.
    children
        What follows it, in a tree of pages: pages and snapshots. Empty in a lookup.
    is_far
        Whether the far one of two locations has given it.
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
        """The page that these rows describe."""
        # fields in their order: a lookup makes one for each page
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
        """What changes of it, as it is stored."""
        numbers = self.last_used, self.hits, self.pinned, self.priority, self.expires
        return Usage(*numbers, self.uses, self.page_class)

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the page."""
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
        # what is unpinned later expires when it is said to
        if not self.expires or (self.pinned and other.pinned):
            return True
        return bool(other.expires) and not other.pinned and self.expires >= other.expires


def later(expires: int, other: int) -> int:
    """The later of two times at which a page expires; 0 is never."""
    return max(expires, other) if expires and other else 0


def is_same(one: Page | Record, other: Page | Record) -> bool:
    """Whether two pages with one key are the same page: a hash only nominates, the tokens prove it.

    The position is not compared: it follows from the parent. Where it comes from stored bytes, compare it as well.
    """
    if (one.tokens, one.parent) != (other.tokens, other.parent):
        return False
    return (one.namespace, one.form) == (other.namespace, other.form)


@dataclass(frozen=True)
class Path:
    """The first pages of a sequence, and how many of its tokens they cover."""

    pages: tuple[Page, ...]
    n_tokens: int


def shared_tokens(a: bytes, b: bytes) -> int:
    """How many tokens two byte strings of tokens have in common at their beginning."""
    return common_prefix(np.frombuffer(a, "<i4"), np.frombuffer(b, "<i4"))


def in_order(pages: Iterable[Page]) -> list[Page]:
    """Pages, parents before their children, which are entered in them; without those that do not follow what is there.

    Of two with one key, the first one.
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
