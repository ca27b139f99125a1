"""Finds stored pages that have no place in the index, for maintenance: damaged ones, and their descendants."""

from __future__ import annotations

from prefixstore.engine.index import Page

__all__ = ["Strays"]


class Strays:
    """What a location holds beside the pages of an index that has all that can be restored. Used by one thread.

    Attributes
    ----------
    corrupt, newer
        Keys of records that cannot be read: damaged ones, and those that a newer version wrote.
    """

    def __init__(self) -> None:
        # pages whose records can be read, and those that follow each page
        self._pages: dict[bytes, Page] = {}
        self._after: dict[bytes, list[Page]] = {}
        self.corrupt: set[bytes] = set()
        self.newer: set[bytes] = set()

    def after(self, key: bytes) -> list[Page]:
        """The pages that depend on the one with this key."""
        return self._after.get(key, [])

    def add(self, page: Page) -> None:
        """Add a page."""
        self._pages[page.key] = page
        self._after.setdefault(page.parent, []).append(page)

    def add_unreadable(self, key: bytes, *, is_newer: bool) -> None:
        """Note a record that cannot be read."""
        (self.newer if is_newer else self.corrupt).add(key)

    def damaged(self) -> set[bytes]:
        """Those that can never be restored: their records are damaged, or what they follow is not stored."""
        return self.corrupt | {page.key for page in self.roots() if page.parent not in self.newer}

    def roots(self) -> list[Page]:
        """The pages that follow none of the others."""
        return [page for page in self._pages.values() if page.parent not in self._pages]

    def keys(self) -> set[bytes]:
        """All pages, those that cannot be read included."""
        return {*self._pages, *self.corrupt, *self.newer}
