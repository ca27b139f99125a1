"""What this process knows beside the location: pages and changes that wait to be written, and what was used.

What waits is in `engine.waiting`, and `engine.choose` chooses what is evicted; each extends the one before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prefixstore.engine.choose import Chooser
from prefixstore.engine.index import Page
from prefixstore.engine.pending import Damage, Use
from prefixstore.engine.waiting import Outdated
from prefixstore.format.record import Record

__all__ = ["Catalog"]


class Catalog(Chooser):
    """What waits for a location, and what of it is used. Parameters as for `Chooser`.

    Attributes
    ----------
    n_lookups
        How many prompts were recorded whose pages were used, or none, since this engine was opened.
    """

    n_lookups = 0

    def all_waiting(self) -> tuple[list[Page], Mapping[bytes, Use]]:
        """Copies of all pages that wait, and the uses of pages that do."""
        with self._lock:
            return [replace(new.page, children=[]) for new in self._pending.values()], dict(self._deferred.uses)

    def touch(
        self,
        namespace: bytes,
        pages: Sequence[Page],
        ttl_ns: int | None,
        n_tokens: int | None = None,
        *,
        is_written: bool = True,
    ) -> None:
        """Record a lookup and the pages it used, none for a miss; renew their time to live.

        Without `is_written`, nothing waits for a commit.
        """
        fresh: list[int] = []
        with self._lock:
            now = self.time_of_use()
            expires = time.time_ns() + ttl_ns if ttl_ns is not None else 0
            self.policy.looked_up(pages, n_tokens, now)
            self.n_lookups += 1
            uses = self._deferred.uses
            for page in reversed(pages):
                page.last_used = max(page.last_used, now)
                if page.expires and page.expires < expires:
                    page.expires = expires
                if not page.hits:
                    fresh.append(page.created)
                page.hits += 1
                if is_written:
                    n = uses[page.key].n if page.key in uses else 0
                    uses[page.key] = Use(n + 1, page.last_used, page.expires, page.uses, page.page_class)
        if fresh:
            self._counters.observe("first_reuse", [(now - created) / 1e9 for created in fresh])

    def discard_snapshot(self, page: Page) -> None:
        """Give up a snapshot that is no longer wanted; if it is stored, the next commit deletes it."""
        with self._lock:
            new = self._pending.get(page.key)
            if new is not None and not new.is_writing:
                self.give_up(page.key, Outdated.THINNED)
            self._deferred.thinned.add(page.key)

    def is_thinned(self, key: bytes) -> bool:
        """Whether a snapshot is given up already."""
        return key in self._deferred.thinned

    def mark_damaged(self, page: Page, *, is_useless: bool = False) -> None:
        """Have a damaged page, and what follows it, deleted with the next commit; until then it is not found."""
        with self._lock:
            known = self._deferred.damaged.get(page.key)
            is_useless = is_useless or (known is not None and known.is_useless and known.created == page.created)
            self._deferred.damaged[page.key] = Damage(page.created, is_useless)
        self._ram.drop([page.key])

    def is_damaged(self, key: bytes, page: Page | Record) -> bool:
        """Whether a stored page is not to be used. Another one may have been written under the key since."""
        found = self._deferred.damaged.get(key)
        return found is not None and found.created == page.created

    def forget(self, page: Page) -> None:
        """Give up a page that is to be deleted, if it waits; not one that was captured again since."""
        with self._lock:
            new = self._pending.get(page.key)
            if new is not None and new.page.created == page.created:
                self.give_up(page.key, Outdated.DELETED)
