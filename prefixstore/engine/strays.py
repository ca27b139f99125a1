"""Stored pages that have no place in the index, for maintenance: damaged ones, and what depends on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prefixstore.engine.index import Page
from prefixstore.engine.totals import Total

__all__ = ["Strays"]


class Strays:
    """What a location holds beside the pages of an index that has all that can be restored. Used by one thread.

    Attributes
    ----------
    corrupt, newer
        Keys of records that cannot be read: damaged ones, and those that a newer version wrote.
    """

    def __init__(self) -> None:
        # pages whose records can be read, which of them follow each page, and how many each namespace has
        self._pages: dict[bytes, Page] = {}
        self._after: dict[bytes, dict[bytes, Page]] = {}
        self._n_of: Counter[bytes] = Counter()
        # what each counts as evictable: a page may change while it is here
        self._n_bytes: dict[bytes, int] = {}
        self._evictable_bytes = 0
        # keys of those that are not pinned, and that none follows, in the order in which they became that
        self._leaves: dict[bytes, None] = {}
        self.corrupt: set[bytes] = set()
        self.newer: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages or key in self.corrupt or key in self.newer

    def get(self, key: bytes) -> Page | None:
        """The page with this key, if its record can be read."""
        return self._pages.get(key)

    def follow(self, key: bytes) -> bool:
        """Whether a page depends on the one with this key: that one must not be deleted before it."""
        return key in self._after

    def after(self, key: bytes) -> list[Page]:
        """The pages that depend on the one with this key."""
        return list(self._after.get(key, {}).values())

    def leaves(self) -> Iterator[Page]:
        """The pages that none of the others depends on; not those that were pinned when they came here."""
        return (self._pages[key] for key in self._leaves)

    def add(self, page: Page) -> None:
        """Add a page, in place of another one with its key."""
        self.remove(page.key)
        self._pages[page.key] = page
        self._after.setdefault(page.parent, {})[page.key] = page
        self._n_of[page.namespace] += 1
        if not page.pinned:
            self._n_bytes[page.key] = page.stored_bytes + len(page.tokens)
            self._evictable_bytes += self._n_bytes[page.key]
            if page.key not in self._after:
                self._leaves[page.key] = None
        self._leaves.pop(page.parent, None)

    def remove(self, key: bytes) -> Page | None:
        """Remove a page whose record can be read; the page, if there is one."""
        page = self._pages.pop(key, None)
        if page is not None:
            self._leaves.pop(key, None)
            self._evictable_bytes -= self._n_bytes.pop(key, 0)
            self._n_of[page.namespace] -= 1
            if not self._n_of[page.namespace]:
                del self._n_of[page.namespace]
            siblings = self._after[page.parent]
            del siblings[key]
            if not siblings:
                del self._after[page.parent]
                if page.parent in self._n_bytes:
                    self._leaves[page.parent] = None
        return page

    def add_unreadable(self, key: bytes, *, is_newer: bool) -> None:
        """Note a record that cannot be read."""
        (self.newer if is_newer else self.corrupt).add(key)

    def remove_unreadable(self, key: bytes) -> bool | None:
        """Forget a record that could not be read; whether a newer version wrote it, None if there is none."""
        found = True if key in self.newer else False if key in self.corrupt else None
        self.newer.discard(key)
        self.corrupt.discard(key)
        return found

    def damaged(self) -> set[bytes]:
        """Those that can never be restored: their records are damaged, or what they follow is not stored."""
        return self.corrupt | {page.key for page in self.roots() if page.parent not in self.newer}

    def roots(self) -> list[Page]:
        """The pages that follow none of the others."""
        return [page for page in self._pages.values() if page.parent not in self._pages]

    def keys(self) -> set[bytes]:
        """All pages, those that cannot be read included."""
        return {*self._pages, *self.corrupt, *self.newer}

    def may_be_of(self, namespace: bytes) -> bool:
        """Whether one of these pages belongs, or may belong, to a namespace: one of a newer version may, to any."""
        return bool(self.newer) or namespace in self._n_of

    @property
    def total(self) -> Total:
        """How much of this eviction could delete, at most."""
        return Total(evictable=len(self._n_bytes), evictable_bytes=self._evictable_bytes)
