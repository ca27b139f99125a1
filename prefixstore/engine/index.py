"""The index: finds the longest stored prefix of a prompt, to the token.

It is a trie of pages in memory, and a bounded cache: it has the pending pages, and the stored pages that lookups have
found. A lookup reads what it lacks from the location. The index knows its gaps: each gap between two siblings says
whether anything may be stored there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES, Tokens, common_prefix
from prefixstore.format.record import Record, Usage

__all__ = ["Index", "Page", "Path", "Unknown", "branches", "depth_first", "is_same"]

# Roots of namespaces without pages here are kept so that a miss need not ask the location; so many of them.
EMPTY_ROOTS = 1024


@dataclass(slots=True, eq=False)
class Page:
    """One page or snapshot: a node of the trie.

    Attributes
    ----------
    key, parent
        Page keys of the page and of its parent (for a first page: key of the namespace).
    namespace
        Key of the namespace.
    start
        Position of the first token.
    tokens
        The tokens, little-endian int32 bytes.
    raw_bytes, stored_bytes
        Size of the state, and of its stored form.
    compute_us
        Microseconds that computing the tokens took, as a prefill; 0 if it is not known.
    created, last_used
        Nanoseconds since the epoch.
    hits
        How often the page was restored.
    uses, page_class
        As the eviction policy counts; see `prefixstore.format.record.Usage`.
    pinned
        Whether the page is exempt from eviction and expiry.
    priority
        Pages of lower priority are evicted first, under the policy of this name.
    expires
        Nanoseconds since the epoch; 0 for never. The ancestors of a page do not expire before it does.
    form
        `PAGE`, or `SNAPSHOT`: the state needed to resume after its tokens, which are those since the end of its
        parent. A snapshot has no children.
    announced_expiry
        The expiry that other processes know of.
    is_stored
        Whether the backend has it, or the open transaction of this process has put it there.
    child_tokens, children
        The children that are in the index, in the order of their tokens.
    sealed
        For each gap before, between and after them: whether nothing is stored there.
    snapshots
        The snapshots that are in the index, by their tokens.
    knows_snapshots
        Whether these are all that are stored.
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
    announced_expiry: int = 0
    is_stored: bool = False
    uses: int = 1
    page_class: int = 0
    child_tokens: list[bytes] = field(default_factory=list, repr=False)
    children: list[Page] = field(default_factory=list, repr=False)
    sealed: list[bool] = field(default_factory=lambda: [False], repr=False)
    snapshots: dict[bytes, Page] = field(default_factory=dict, repr=False)
    knows_snapshots: bool = field(default=False, repr=False)

    @classmethod
    def stored(cls, key: bytes, record: Record, usage: Usage) -> Page:
        """The node of a page that is in a backend."""
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
            form=record.form,
            announced_expiry=usage.expires,
            is_stored=True,
            uses=usage.uses,
            page_class=usage.page_class,
        )

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
        """Whether no page in the index depends on this one; the location may have others."""
        return not self.children and not self.snapshots

    @property
    def dependents(self) -> list[Page]:
        """The pages and snapshots in the index whose parent this page is."""
        return [*self.children, *self.snapshots.values()]

    def has_expired(self, now: int) -> bool:
        """Whether the page has expired, at this time in nanoseconds since the epoch."""
        return 0 < self.expires <= now and not self.pinned

    def lasts_until(self, other: Page) -> bool:
        """Whether the page is kept at least as long as another one."""
        # what is unpinned later expires when it is said to
        if not self.expires or (self.pinned and other.pinned):
            return True
        return bool(other.expires) and not other.pinned and self.expires >= other.expires

    def forget_dependents(self) -> None:
        """Forget the children and snapshots of this page, and what is known of them."""
        self.child_tokens, self.children, self.sealed, self.snapshots = [], [], [False], {}
        self.knows_snapshots = False

    def has_no_other_dependents(self) -> None:
        """Note that this page has no stored descendants but those in the index."""
        self.sealed = [True] * len(self.sealed)
        self.knows_snapshots = True


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


@dataclass(frozen=True)
class Unknown:
    """Where the location may have more of a sequence than the index.

    Attributes
    ----------
    parent
        Key of the last known page, or of the namespace.
    at
        Where that page ends: how many tokens are known.
    without_snapshots
        Keys of the pages up to there, the namespace included, whose snapshots are not known.
    """

    parent: bytes
    at: int
    without_snapshots: tuple[bytes, ...] = ()


class Index:
    """The trie: pages by key, and by parent and tokens.

    A page is in the index only if its parent is, so every page that is found can be restored. The children of a page
    are sorted by their tokens. The sibling with the longest common prefix is next to the position where the wanted
    tokens would be inserted, so a bisection finds it. No page's tokens are a prefix of a sibling's (see
    `superseded_by`). Snapshots are kept apart from the children, by their tokens.

    Parameters
    ----------
    limit
        Beyond this number of pages, those that were not looked up for the longest time are forgotten; see `trim`.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        # how many pages, and namespaces, are too many; more than the limit where too many of them have to stay
        self._full_at = limit
        self._roots_full_at = 2 * EMPTY_ROOTS
        # those looked up last come last, as far as `limit` matters
        self.pages: dict[bytes, Page] = {}
        self._roots: dict[bytes, Page] = {}

    def __len__(self) -> int:
        return len(self.pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self.pages

    def __iter__(self) -> Iterator[Page]:
        return iter(list(self.pages.values()))

    def get(self, key: bytes) -> Page | None:
        """The page with this key."""
        return self.pages.get(key)

    def roots(self) -> list[Page]:
        """The first pages of all sequences."""
        return [page for root in self._roots.values() for page in root.dependents]

    def has_parent_of(self, page: Page) -> bool:
        """Whether the parent of `page` is in the index; the first page of a sequence needs none."""
        return page.parent == page.namespace or page.parent in self.pages

    def add(self, page: Page) -> bool:
        """Add a page; False, and nothing changes, if it is known, or its parent is missing or ends elsewhere."""
        if page.key in self.pages or not self.has_parent_of(page):
            return False
        parent = self.node(page.parent, page.namespace)
        if (page.start, page.namespace, PAGE) != (parent.end, parent.namespace, parent.form):
            return False
        if page.form == SNAPSHOT:
            parent.snapshots[page.tokens] = page
        else:
            at = bisect_left(parent.child_tokens, page.tokens)
            parent.child_tokens.insert(at, page.tokens)
            parent.children.insert(at, page)
            parent.sealed.insert(at, parent.sealed[at])
        self.pages[page.key] = page
        return True

    def remove(self, key: bytes, *, is_deleted: bool = True) -> list[Page]:
        """Remove a page and its descendants; the removed pages, deepest first.

        With `is_deleted`, nothing is stored in its place; otherwise that is not known.
        """
        page = self.pages.get(key)
        if page is None:
            return []
        subtree = [page]
        for node in subtree:
            subtree.extend(node.dependents)
        parent = self.node(page.parent, page.namespace)
        if page.form == SNAPSHOT:
            del parent.snapshots[page.tokens]
            parent.knows_snapshots = parent.knows_snapshots and is_deleted
        else:
            at = parent.children.index(page, bisect_left(parent.child_tokens, page.tokens))
            del parent.child_tokens[at], parent.children[at]
            parent.sealed[at : at + 2] = [is_deleted and parent.sealed[at] and parent.sealed[at + 1]]
        for gone in subtree:
            del self.pages[gone.key]
        return subtree[::-1]

    def unseal(self, parent: bytes, namespace: bytes) -> None:
        """Open all gaps after this page, or namespace: more may be stored there than is known."""
        node = self._node(parent, namespace)
        if node is not None:
            node.sealed = [False] * len(node.sealed)
            node.knows_snapshots = False

    def seal(self, parent: bytes, namespace: bytes, tokens: bytes, *, is_stored: bool) -> None:
        """Seal the gap for these tokens: the stored children on both sides of it are in the index."""
        node = self.node(parent, namespace)
        at = bisect_left(node.child_tokens, tokens)
        if not is_stored:
            node.sealed[at] = True
        if at < len(node.children) and node.child_tokens[at] == tokens:
            node.sealed[at + 1] = True

    def is_sealed(self, page: Page) -> bool:
        """Whether the gap of a page that is in the index, or may be put there, is sealed."""
        node = self._node(page.parent, page.namespace)
        if node is None:
            return False
        at = bisect_left(node.child_tokens, page.tokens)
        is_here = at < len(node.children) and node.child_tokens[at] == page.tokens
        return node.sealed[at] and (not is_here or node.sealed[at + 1])

    @property
    def is_full(self) -> bool:
        """Whether there are more pages than the limit, or many namespaces without any."""
        if self._full_at is None:
            return False
        return len(self.pages) > self._full_at or len(self._roots) > self._roots_full_at

    def trim(self, keep: Collection[bytes]) -> bool:
        """Forget stored pages that were not looked up for the longest time, if there are too many; whether it did.

        Not those to keep. A page is forgotten before its parent.
        """
        if self._limit is None or not self.is_full:
            return False
        is_too_much = len(self.pages) > self._limit
        # A copy: the first item of a dict from which the first ones are removed takes longer to find each time. A page
        # that has to stay has its turn again when all others had theirs.
        for key in list(self.pages) if is_too_much else ():
            if len(self.pages) <= self._limit - self._limit // 16:
                break
            page = self.pages[key]
            if page.is_leaf and page.is_stored and key not in keep:
                self.remove(key, is_deleted=False)
            else:
                self.pages[key] = self.pages.pop(key)
        empty = [key for key, root in self._roots.items() if root.is_leaf]
        for key in empty[: max(len(empty) - EMPTY_ROOTS, 0)]:
            del self._roots[key]
        # where most have to stay, not at each lookup
        self._full_at = self._limit
        if len(self.pages) > self._limit:
            self._full_at = len(self.pages) + self._limit // 16
        self._roots_full_at = len(self._roots) + EMPTY_ROOTS
        return is_too_much

    def used(self, pages: Sequence[Page]) -> None:
        """Note that these pages, from the start of a sequence, were looked up."""
        if self._limit is None or len(self.pages) <= self._limit // 2:
            return
        # parents after their children, so that those are forgotten first
        for page in reversed(pages):
            if self.pages.pop(page.key, None) is not None:
                self.pages[page.key] = page

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> tuple[Path, Unknown | None]:
        """The longest known prefix of `tokens`, whose last page may extend beyond it, and where there may be more."""
        node = self._roots.get(namespace)
        if node is None:
            return Path((), 0), Unknown(namespace, 0)
        raw = tokens.tobytes()
        step = page_tokens * TOKEN_BYTES
        pages: list[Page] = []
        at = 0
        while True:
            wanted = raw[at : at + step]
            i = bisect_left(node.child_tokens, wanted)
            is_here = i < len(node.child_tokens) and node.child_tokens[i] == wanted
            if is_here and len(wanted) == step:
                node = node.children[i]
                pages.append(node)
                at += step
                continue
            unknown = None if is_here or node.sealed[i] or not wanted else Unknown(node.key, at // TOKEN_BYTES)
            shared, nearest = max(
                ((_shared_tokens(wanted, node.child_tokens[j]), j) for j in (i, i - 1) if 0 <= j < len(node.children)),
                default=(0, -1),
            )
            if shared:
                pages.append(node.children[nearest])
            return Path(tuple(pages), at // TOKEN_BYTES + shared), unknown

    def snapshots_along(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> tuple[list[Path], Unknown | None]:
        """The known snapshots whose tokens are a prefix of `tokens`, the deepest first, each at the end of its path.

        And where there may be more pages on the way, or snapshots.
        """
        node = self._roots.get(namespace)
        if node is None:
            return [], Unknown(namespace, 0, (namespace,))
        raw = tokens.tobytes()
        step = page_tokens * TOKEN_BYTES
        pages: list[Page] = []
        found: list[Path] = []
        without: list[bytes] = []
        while True:
            at = len(pages) * step
            wanted = raw[at : at + step]
            if not node.knows_snapshots:
                without.append(node.key)
            here = _prefixes(node.snapshots, wanted)
            found += [Path((*pages, page), page.end) for page in sorted(here, key=lambda page: page.end)]
            i = bisect_left(node.child_tokens, wanted)
            if len(wanted) < step or i == len(node.child_tokens) or node.child_tokens[i] != wanted:
                is_certain = len(wanted) < step or node.sealed[i]
                break
            node = node.children[i]
            pages.append(node)
        unknown = None
        if without or not is_certain:
            unknown = Unknown(node.key, len(pages) * page_tokens, tuple(without))
        return found[::-1], unknown

    def superseded_by(self, page: Page) -> Page | None:
        """The sibling whose tokens are a proper prefix of those of `page`: the tail that `page` continues."""
        if page.form == SNAPSHOT:
            return None
        node = self._node(page.parent, page.namespace)
        at = bisect_left(node.child_tokens, page.tokens) - 1 if node is not None else -1
        if node is None or at < 0 or not page.tokens.startswith(node.child_tokens[at]):
            return None
        return node.children[at]

    def covers(self, page: Page) -> bool:
        """Whether a sibling already holds all tokens of `page`, and more."""
        if page.form == SNAPSHOT:
            return False
        node = self._node(page.parent, page.namespace)
        at = bisect_left(node.child_tokens, page.tokens) if node is not None else 0
        if node is not None and at < len(node.children) and node.child_tokens[at] == page.tokens:
            at += 1
        return node is not None and at < len(node.children) and node.child_tokens[at].startswith(page.tokens)

    def _node(self, parent: bytes, namespace: bytes) -> Page | None:
        return self._roots.get(namespace) if parent == namespace else self.pages.get(parent)

    def node(self, parent: bytes, namespace: bytes) -> Page:
        """The node of a parent that is in the index; the root of a namespace is created when it is first needed."""
        if parent == namespace and namespace not in self._roots:
            self._roots[namespace] = Page(namespace, b"", namespace, 0, b"", 0, 0, 0, 0, 0)
        node = self._node(parent, namespace)
        assert node is not None
        return node


def branches(path: Iterable[tuple[int, Iterable[bytes]]], tokens: Tokens) -> list[int]:
    """The positions along `tokens` at which stored sequences branch off, to the token.

    Parameters
    ----------
    path
        For each page along `tokens`, the start of the sequence included: where it ends, and the tokens of its children
        and snapshots.
    tokens
        The sequence.
    """
    raw = tokens.tobytes()
    found: list[int] = []
    for end, others in path:
        wanted = raw[end * TOKEN_BYTES :]
        found += [
            end + _shared_tokens(wanted[: len(other)], other)
            for other in others
            if not (wanted.startswith(other) or other.startswith(wanted))
        ]
    return found


def _prefixes(snapshots: dict[bytes, Page], wanted: bytes) -> list[Page]:
    """The snapshots whose tokens are a prefix of `wanted`."""
    if len(snapshots) * TOKEN_BYTES <= len(wanted):
        return [page for tokens, page in snapshots.items() if wanted.startswith(tokens)]
    starts = (wanted[:n] for n in range(0, len(wanted) + 1, TOKEN_BYTES))
    return [snapshots[tokens] for tokens in starts if tokens in snapshots]


def _shared_tokens(a: bytes, b: bytes) -> int:
    return common_prefix(np.frombuffer(a, "<i4"), np.frombuffer(b, "<i4"))


def depth_first(start: Iterable[Page]) -> Iterator[Page]:
    """Pages and their descendants, parents before their children."""
    waiting = list(start)[::-1]
    while waiting:
        page = waiting.pop()
        yield page
        waiting += page.dependents[::-1]
