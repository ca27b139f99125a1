"""Which stored pages go first: for want of room, of all or of a tenant, and because their time is over."""

from __future__ import annotations

from collections.abc import Callable, Generator

from prefixstore.engine.eviction import Ordering, Policy, VictimQueue, by_expiry
from prefixstore.engine.index import Index, Page

__all__ = ["Candidates"]


class Candidates:
    """The pages of an index that may be deleted, in several orders. Used under the lock of the catalog.

    Parameters
    ----------
    index
        Whose pages they are.
    policy
        The order in which pages are evicted.
    is_stored
        Whether a page is in the backend: others cannot be deleted there.
    """

    def __init__(self, index: Index, policy: Policy, is_stored: Callable[[Page], bool]) -> None:
        self._index = index
        self._policy = policy
        self._is_stored = is_stored
        self._victims = VictimQueue(index, policy)
        self._expiring = VictimQueue(index, Ordering(by_expiry))
        # of the groups that quotas bound, made when one of them needs room first
        self._victims_of: dict[frozenset[bytes], VictimQueue] = {}

    def offer(self, page: Page) -> None:
        """A stored page has become a leaf, or may be a victim again."""
        self._victims.push(page)
        if page.expires:
            self._expiring.push(page)
        for namespaces, queue in self._victims_of.items():
            if page.namespace in namespaces:
                queue.push(page)

    def victims(self, namespaces: frozenset[bytes] | None = None) -> Generator[Page, None, None]:
        """Pages to evict, first one first, of these namespaces or of all; see `VictimQueue.victims`."""
        if namespaces is None:
            return self._victims.victims()
        if namespaces not in self._victims_of:
            queue = self._victims_of[namespaces] = VictimQueue(self._index, self._policy)
            for page in self._index:
                if page.namespace in namespaces and self._is_stored(page):
                    queue.push(page)
        return self._victims_of[namespaces].victims()

    def expiring(self) -> Generator[Page, None, None]:
        """Pages that expire, in this order; see `VictimQueue.victims`."""
        return self._expiring.victims()
