"""Stored pages that have no place in the index: damaged ones until they are deleted, and what depends on them."""

from __future__ import annotations

from collections.abc import Collection

from prefixstore.engine.index import Page

__all__ = ["Strays"]


class Strays:
    """What a location holds beside the pages of the index. Used under the lock of the catalog.

    Attributes
    ----------
    pages
        Pages whose records can be read.
    unreadable
        Keys of records that cannot be read, and whether a newer version wrote them.
    """

    def __init__(self) -> None:
        self.pages: dict[bytes, Page] = {}
        self.unreadable: dict[bytes, bool] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self.pages or key in self.unreadable

    def parents_first(self) -> list[Page]:
        """The pages in the order in which they can be added to an index."""
        return sorted(self.pages.values(), key=lambda page: page.start)

    def by_parent(self) -> dict[bytes, list[Page]]:
        """The pages that follow each page."""
        found: dict[bytes, list[Page]] = {}
        for page in self.pages.values():
            found.setdefault(page.parent, []).append(page)
        return found

    def keys(self, namespaces: Collection[bytes] | None) -> list[bytes]:
        """The pages of these namespaces; for None all, those that cannot be read included."""
        found = [page.key for page in self.pages.values() if namespaces is None or page.namespace in namespaces]
        return found + (list(self.unreadable) if namespaces is None else [])

    def namespaces(self) -> set[bytes] | None:
        """The namespaces of these pages; None if one of a newer version may belong to any."""
        if any(self.unreadable.values()):
            return None
        return {page.namespace for page in self.pages.values()}
