"""Running totals over a page table: of all pages, each namespace, and each salt. Nothing here iterates over pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Group", "Total", "Totals"]

Group: TypeAlias = "bytes | str | None"
"""Whose pages: those of a namespace (its key), of a salt, or all (None)."""


@dataclass(slots=True)
class Total:
    """What a group of pages holds.

    Attributes
    ----------
    pages
        How many pages the table has, those included that are not stored yet.
    stored
        How many of them are stored.
    bytes
        What they count against a quota: stored bytes and tokens.
    evictable, evictable_bytes
        How many of them, and how many bytes, eviction could delete.
    """

    pages: int = 0
    stored: int = 0
    bytes: int = 0
    evictable: int = 0
    evictable_bytes: int = 0

    def add(self, other: Total) -> None:
        """Add another total."""
        self.pages += other.pages
        self.stored += other.stored
        self.bytes += other.bytes
        self.evictable += other.evictable
        self.evictable_bytes += other.evictable_bytes


class Totals:
    """The totals of all pages, of namespaces, and of salts as far as the salts of namespaces are known.

    Attributes
    ----------
    without_salt
        Namespaces whose settings have not been looked at yet: their pages are missing in the totals of salts.
    """

    def __init__(self) -> None:
        self._all = Total()
        self._namespaces: dict[bytes, Total] = {}
        self._salts: dict[str, Total] = {}
        self._salt_of: dict[bytes, str | None] = {}
        self._namespaces_of: dict[str, set[bytes]] = {}
        self.without_salt: set[bytes] = set()

    def of(self, group: Group) -> Total:
        """The total of a group; not to be changed."""
        if group is None:
            return self._all
        found = self._namespaces.get(group) if isinstance(group, bytes) else self._salts.get(group)
        return found or Total()

    def namespaces(self, group: bytes | str) -> set[bytes]:
        """The namespaces of a group that have pages."""
        return {group} if isinstance(group, bytes) else set(self._namespaces_of.get(group, ()))

    def salt_of(self, namespace: bytes) -> str | None:
        """The salt of a namespace; None if it has none, or is not known."""
        return self._salt_of.get(namespace)

    def count(self, namespace: bytes, sign: int, n_bytes: int, *, is_stored: bool, is_fixed: bool) -> None:
        """Add a page to the totals (sign 1), or take it out of them (-1)."""
        evictable = 0 if is_fixed else sign
        for each in self._totals_of(namespace):
            each.pages += sign
            each.stored += sign * is_stored
            each.bytes += sign * n_bytes
            each.evictable += evictable
            each.evictable_bytes += evictable * n_bytes

    def count_stored(self, namespace: bytes, pages: int, n_bytes: int, evictable: int, evictable_bytes: int) -> None:
        """Add so many stored pages to the totals."""
        for each in self._totals_of(namespace):
            each.add(Total(pages, pages, n_bytes, evictable, evictable_bytes))

    def _totals_of(self, namespace: bytes) -> tuple[Total, ...]:
        """The totals that a namespace is counted in."""
        total = self._namespaces.get(namespace)
        if total is None:
            total = self._namespaces[namespace] = Total()
            if namespace not in self._salt_of:
                self.without_salt.add(namespace)
        salt = self._salt_of.get(namespace)
        return (self._all, total) if salt is None else (self._all, total, self._salts[salt])

    def set_salt(self, namespace: bytes, salt: str | None) -> None:
        """Note whose pages those of a namespace are."""
        self.without_salt.discard(namespace)
        if namespace in self._salt_of or namespace not in self._namespaces:
            return
        self._salt_of[namespace] = salt
        if salt is not None:
            self._namespaces_of.setdefault(salt, set()).add(namespace)
            self._salts.setdefault(salt, Total()).add(self._namespaces[namespace])

    def forget_if_empty(self, namespace: bytes) -> bool:
        """Forget a namespace that has no pages any more; whether it had none."""
        total = self._namespaces.get(namespace)
        if total is not None and total.pages:
            return False
        self._namespaces.pop(namespace, None)
        self.without_salt.discard(namespace)
        salt = self._salt_of.pop(namespace, None)
        if salt is not None:
            self._namespaces_of[salt].discard(namespace)
            if not self._namespaces_of[salt]:
                del self._namespaces_of[salt], self._salts[salt]
        return True
