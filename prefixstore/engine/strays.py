"""Stored pages that have no place in the index: damaged ones until they are deleted, and what depends on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from prefixstore.engine.index import Page

__all__ = ["Strays"]


class Strays:
    """What a location holds beside the pages of the index. Used under the lock of the catalog.

    Attributes
    ----------
    unreadable
        Keys of records that cannot be read, and whether a newer version wrote them.
    """

    def __init__(self) -> None:
        # pages whose records can be read, and how many of them follow each page
        self._pages: dict[bytes, Page] = {}
        self._n_after: Counter[bytes] = Counter()
        self.unreadable: dict[bytes, bool] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages or key in self.unreadable

    def get(self, key: bytes) -> Page | None:
        """The page with this key, if its record can be read."""
        return self._pages.get(key)

    def follow(self, key: bytes) -> bool:
        """Whether a page depends on the one with this key: that one must not be deleted before it."""
        return key in self._n_after

    def add(self, page: Page) -> None:
        """Add a page, in place of another one with its key."""
        self.remove(page.key)
        self._pages[page.key] = page
        self._n_after[page.parent] += 1

    def remove(self, key: bytes) -> Page | None:
        """Remove a page whose record can be read; the page, if there is one."""
        page = self._pages.pop(key, None)
        if page is not None:
            self._n_after[page.parent] -= 1
            if not self._n_after[page.parent]:
                del self._n_after[page.parent]
        return page

    def parents_first(self) -> list[Page]:
        """The pages in the order in which they can be added to an index."""
        return sorted(self._pages.values(), key=lambda page: page.start)

    def by_parent(self) -> dict[bytes, list[Page]]:
        """The pages that follow each page."""
        found: dict[bytes, list[Page]] = {}
        for page in self._pages.values():
            found.setdefault(page.parent, []).append(page)
        return found

    def keys(self, namespaces: Collection[bytes] | None) -> list[bytes]:
        """The pages of these namespaces; for None all, those that cannot be read included."""
        found = [page.key for page in self._pages.values() if namespaces is None or page.namespace in namespaces]
        return found + (list(self.unreadable) if namespaces is None else [])

    def namespaces(self) -> set[bytes] | None:
        """The namespaces of these pages; None if one of a newer version may belong to any."""
        if any(self.unreadable.values()):
            return None
        return {page.namespace for page in self._pages.values()}
