"""The trie of pages in memory: finds the longest stored prefix, to the token. It can be rebuilt from any backend."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from prefixstore.engine.page_table import PageTable
from prefixstore.engine.totals import Totals
from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES, Tokens, common_prefix
from prefixstore.format.record import Record, Usage

__all__ = ["NEVER", "Index", "Page", "Path", "is_same"]

# later than every time
NEVER = 2**63
# Siblings that `Index.branches` compares at each position: where there are many, they begin to differ in few places.
SIBLINGS_COMPARED = 64


@dataclass(slots=True, eq=False)
class Page:
    """One stored page or snapshot: a node of the trie, with the facts that eviction needs.

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
    pinned
        Whether the page is exempt from eviction and expiry.
    priority
        Pages of lower priority are evicted first, under the policy of this name.
    expires
        Nanoseconds since the epoch; 0 for never.
    form
        `PAGE`, or `SNAPSHOT`: the state needed to resume after its tokens, which are those since the end of its
        parent. A snapshot has no children.
    codec
        Number of the codec of its stored form.
    announced_expiry
        The expiry that other processes know of.
    is_stored
        Whether the backend has it, or the open transaction of this process has put it there.
    may_be_victim
        Whether it is stored and not still in the hands of the transaction that wrote it.
    kept_until
        When the page and all its descendants will have expired; `NEVER` if one of them will not. Kept by the index.
    n_endless
        For how many of its dependents `kept_until` is `NEVER`. Kept by the index.
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
    codec: int = 0
    announced_expiry: int = 0
    is_stored: bool = False
    may_be_victim: bool = False
    kept_until: int = 0
    n_endless: int = field(default=0, repr=False)
    child_tokens: list[bytes] = field(default_factory=list, repr=False)
    children: list[Page] = field(default_factory=list, repr=False)
    snapshots: dict[bytes, Page] = field(default_factory=dict, repr=False)

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
            codec=record.codec,
            announced_expiry=usage.expires,
            is_stored=True,
            may_be_victim=True,
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
        """Whether no stored page depends on this one."""
        return not self.children and not self.snapshots

    @property
    def dependents(self) -> list[Page]:
        """The pages and snapshots whose parent this page is."""
        return [*self.children, *self.snapshots.values()]

    @property
    def own_expiry(self) -> int:
        """When the page itself expires; `NEVER` if it does not."""
        return NEVER if self.pinned or not self.expires else self.expires

    def drop_children(self) -> None:
        """Forget the children and snapshots of this page."""
        self.child_tokens, self.children, self.snapshots = [], [], {}
        self.n_endless = 0


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


class Index:
    """Pages by key, and by parent and tokens.

    A page is in the index only if its parent is, so every page that is found can be restored. The children of a page
    are sorted by their tokens. The sibling with the longest common prefix is next to the position where the wanted
    tokens would be inserted, so a bisection finds it. No page's tokens are a prefix of a sibling's (see
    `superseded_by`). Snapshots are kept apart from the children, by their tokens.
    """

    def __init__(self) -> None:
        self.pages: dict[bytes, Page] = {}
        self._roots: dict[bytes, Page] = {}
        self.raw_bytes = 0
        self.stored_bytes = 0
        self.table = PageTable()
        self._in_bulk = False

    def __len__(self) -> int:
        return len(self.pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self.pages

    def __iter__(self) -> Iterator[Page]:
        return iter(list(self.pages.values()))

    @property
    def totals(self) -> Totals:
        """What all pages, namespaces and salts hold."""
        return self.table.totals

    def get(self, key: bytes) -> Page | None:
        """The page with this key."""
        return self.pages.get(key)

    def has_parent_of(self, page: Page) -> bool:
        """Whether the parent of `page` is in the index; the first page of a sequence needs none."""
        return page.parent == page.namespace or page.parent in self.pages

    def add(self, page: Page) -> bool:
        """Add a page; False, and nothing changes, if it is known, or its parent is missing or ends elsewhere."""
        if page.key in self.pages or not self.has_parent_of(page):
            return False
        parent = self._parent_node(page.parent, page.namespace)
        if (page.start, page.namespace, PAGE) != (parent.end, parent.namespace, parent.form):
            return False
        if page.form == SNAPSHOT:
            parent.snapshots[page.tokens] = page
        else:
            at = bisect_left(parent.child_tokens, page.tokens)
            parent.child_tokens.insert(at, page.tokens)
            parent.children.insert(at, page)
        self.pages[page.key] = page
        self._count(page, 1)
        self.table.add(
            page.key,
            page.parent,
            page.namespace,
            end=page.end,
            n_bytes=page.stored_bytes + len(page.tokens),
            last_used=page.last_used,
            uses=page.hits + 1,
            expires=page.expires,
            priority=page.priority,
            codec=page.codec,
            form=page.form,
            pinned=page.pinned,
            is_stored=page.is_stored,
            may_be_victim=page.may_be_victim,
        )
        page.kept_until = page.own_expiry
        parent.n_endless += page.kept_until == NEVER
        if not self._in_bulk:
            self._keep_longer(self.pages.get(page.parent), page.kept_until)
        return True

    @contextmanager
    def adding_many(self) -> Iterator[None]:
        """Add pages, parents first, at constant cost each: how long parents are kept is worked out at the end."""
        self._in_bulk = True
        try:
            yield
        finally:
            self._in_bulk = False
            for page in reversed(self.pages.values()):
                parent = self.pages.get(page.parent)
                if parent is not None and parent.kept_until < page.kept_until:
                    self._keep_until(parent, page.kept_until)

    def remove(self, key: bytes) -> list[Page]:
        """Remove a page and its descendants; the removed pages, deepest first."""
        page = self.pages.get(key)
        if page is None:
            return []
        subtree = [page]
        for node in subtree:
            subtree.extend(node.dependents)
        parent = self._parent_node(page.parent, page.namespace)
        if page.form == SNAPSHOT:
            del parent.snapshots[page.tokens]
        else:
            at = parent.children.index(page, bisect_left(parent.child_tokens, page.tokens))
            del parent.child_tokens[at], parent.children[at]
        if page.parent == page.namespace and parent.is_leaf:
            del self._roots[page.namespace]
        for gone in reversed(subtree):
            del self.pages[gone.key]
            self._count(gone, -1)
            self.table.remove(gone.key)
        parent.n_endless -= page.kept_until == NEVER
        self._keep_shorter(self.pages.get(page.parent), page.kept_until)
        return subtree[::-1]

    def change(
        self,
        page: Page,
        *,
        stored_bytes: int | None = None,
        codec: int | None = None,
        priority: int | None = None,
        pinned: bool | None = None,
        expires: int | None = None,
        is_stored: bool | None = None,
        may_be_victim: bool | None = None,
    ) -> None:
        """Change facts on which totals, or the ancestors, depend. The page may have been removed meanwhile."""
        is_here = self.pages.get(page.key) is page
        was_kept = page.own_expiry
        if is_here:
            self._count(page, -1)
        page.stored_bytes = page.stored_bytes if stored_bytes is None else stored_bytes
        page.codec = page.codec if codec is None else codec
        page.priority = page.priority if priority is None else priority
        page.pinned = page.pinned if pinned is None else pinned
        page.expires = page.expires if expires is None else expires
        page.is_stored = page.is_stored if is_stored is None else is_stored
        page.may_be_victim = page.may_be_victim if may_be_victim is None else may_be_victim
        if not is_here:
            return
        self._count(page, 1)
        self.table.change(
            page.key,
            n_bytes=None if stored_bytes is None else stored_bytes + len(page.tokens),
            codec=codec,
            priority=priority,
            pinned=pinned,
            expires=expires,
            is_stored=is_stored,
            may_be_victim=may_be_victim,
        )
        self._keep_longer(page, page.own_expiry)
        if page.own_expiry < was_kept:
            self._keep_shorter(page, was_kept)

    def _count(self, page: Page, sign: int) -> None:
        self.raw_bytes += sign * page.raw_bytes
        self.stored_bytes += sign * page.stored_bytes

    def _keep_until(self, page: Page, until: int) -> None:
        parent = self.pages.get(page.parent)
        if parent is not None:
            parent.n_endless += (until == NEVER) - (page.kept_until == NEVER)
        page.kept_until = until

    def _keep_longer(self, page: Page | None, until: int) -> None:
        """The page, or a dependent, is kept until then."""
        while page is not None and page.kept_until < until:
            self._keep_until(page, until)
            page = self.pages.get(page.parent)

    def _keep_shorter(self, page: Page | None, was: int) -> None:
        """The page, or a dependent, was kept until then, and is not any more."""
        while page is not None and page.kept_until == was and page.own_expiry < was:
            until = NEVER if page.n_endless else _longest_kept(page, was)
            if until == was:
                return
            self._keep_until(page, until)
            page = self.pages.get(page.parent)

    def of_namespace(self, namespace: bytes) -> Iterator[Page]:
        """The pages of a namespace."""
        root = self._roots.get(namespace)
        waiting = root.dependents if root is not None else []
        while waiting:
            page = waiting.pop()
            yield page
            waiting += page.dependents

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest stored prefix of `tokens`; its last page may extend beyond it."""
        node = self._roots.get(namespace)
        raw = tokens.tobytes()
        step = page_tokens * TOKEN_BYTES
        pages: list[Page] = []
        at = 0
        while node is not None:
            wanted = raw[at : at + step]
            i = bisect_left(node.child_tokens, wanted)
            if len(wanted) == step and i < len(node.child_tokens) and node.child_tokens[i] == wanted:
                node = node.children[i]
                pages.append(node)
                at += step
                continue
            shared, nearest = max(
                ((_shared_tokens(wanted, node.child_tokens[j]), j) for j in (i, i - 1) if 0 <= j < len(node.children)),
                default=(0, -1),
            )
            if shared:
                pages.append(node.children[nearest])
            return Path(tuple(pages), at // TOKEN_BYTES + shared)
        return Path((), 0)

    def snapshots_along(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> list[Path]:
        """The snapshots whose tokens are a prefix of `tokens`, the deepest first, each at the end of its path."""
        node = self._roots.get(namespace)
        raw = tokens.tobytes()
        step = page_tokens * TOKEN_BYTES
        pages: list[Page] = []
        found: list[Path] = []
        while node is not None:
            at = len(pages) * step
            here = _prefixes(node.snapshots, raw[at : at + step])
            found += [Path((*pages, page), page.end) for page in sorted(here, key=lambda page: page.end)]
            wanted = raw[at : at + step]
            i = bisect_left(node.child_tokens, wanted)
            if len(wanted) < step or i == len(node.child_tokens) or node.child_tokens[i] != wanted:
                break
            node = node.children[i]
            pages.append(node)
        return found[::-1]

    def branches(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> list[int]:
        """The positions along `tokens` at which stored sequences branch off, to the token."""
        node = self._roots.get(namespace)
        raw = tokens.tobytes()
        step = page_tokens * TOKEN_BYTES
        at = 0
        found: list[int] = []
        while node is not None:
            wanted = raw[at : at + step]
            others = islice(chain(node.child_tokens, node.snapshots), SIBLINGS_COMPARED)
            found += [
                at // TOKEN_BYTES + _shared_tokens(wanted, other) for other in others if not _agree(other, wanted)
            ]
            i = bisect_left(node.child_tokens, wanted)
            if len(wanted) < step or i == len(node.child_tokens) or node.child_tokens[i] != wanted:
                break
            node, at = node.children[i], at + step
        return found

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
        """Whether a sibling already holds all tokens of `page`."""
        if page.form == SNAPSHOT:
            return False
        node = self._node(page.parent, page.namespace)
        at = bisect_left(node.child_tokens, page.tokens) if node is not None else 0
        return node is not None and at < len(node.children) and node.child_tokens[at].startswith(page.tokens)

    def _node(self, parent: bytes, namespace: bytes) -> Page | None:
        return self._roots.get(namespace) if parent == namespace else self.pages.get(parent)

    def _parent_node(self, parent: bytes, namespace: bytes) -> Page:
        """The node of a parent; the root of a namespace is created when it is first needed."""
        if parent == namespace and namespace not in self._roots:
            self._roots[namespace] = Page(namespace, b"", namespace, 0, b"", 0, 0, 0, 0, 0)
        node = self._node(parent, namespace)
        assert node is not None
        return node


def _longest_kept(page: Page, most: int) -> int:
    """When a page and its dependents will have expired; none of them is kept longer than `most`."""
    longest = page.own_expiry
    for each in chain(page.children, page.snapshots.values()):
        longest = max(longest, each.kept_until)
        if longest == most:
            break
    return longest


def _prefixes(snapshots: dict[bytes, Page], wanted: bytes) -> list[Page]:
    """The snapshots whose tokens are a prefix of `wanted`."""
    if len(snapshots) * TOKEN_BYTES <= len(wanted):
        return [page for tokens, page in snapshots.items() if wanted.startswith(tokens)]
    starts = (wanted[:n] for n in range(0, len(wanted) + 1, TOKEN_BYTES))
    return [snapshots[tokens] for tokens in starts if tokens in snapshots]


def _agree(a: bytes, b: bytes) -> bool:
    return a.startswith(b) or b.startswith(a)


def _shared_tokens(a: bytes, b: bytes) -> int:
    return common_prefix(np.frombuffer(a, "<i4"), np.frombuffer(b, "<i4"))
