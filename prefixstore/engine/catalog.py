"""Looks pages up: those of the location, and those that wait to be written. The location is the only truth.

What this process has not written yet is in `engine.waiting`, and `engine.choose` chooses what is evicted; each extends
the one before. Nothing that was read of the location decides anything later: what another process does is seen by the
next lookup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from prefixstore.engine.choose import Chooser
from prefixstore.engine.index import Index, Page, Path, branches, depth_first
from prefixstore.engine.lookup import Located, Prompt, Waiting, locate
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import Damage, Suspicion, Use
from prefixstore.engine.snapshot_policy import thin
from prefixstore.engine.waiting import Outdated
from prefixstore.errors import CorruptError
from prefixstore.format.keys import PAGE, SNAPSHOT, page_key
from prefixstore.format.record import Record, Usage, time_of_use

__all__ = ["Catalog"]

# siblings compared at each page to find out where sequences fork: where there are many, they fork in few places
SIBLINGS_COMPARED = 64


class Catalog(Chooser):
    """What is found in a location and among what waits for it. Parameters as for `Chooser`.

    Attributes
    ----------
    n_lookups
        How many prompts were recorded whose pages were used, or none, since this engine was opened.
    """

    n_lookups = 0

    # -- looking pages up ---------------------------------------------------------------------------------------------

    def locate(self, view: View, waiting: Waiting, prompt: Prompt, *, snapshots: bool = False) -> Located:
        """What there is of a prompt; `waiting` was taken before the view was opened."""
        found = locate(view, waiting, prompt, self.nodes, snapshots=snapshots)
        self.unreadable(found.unreadable)
        # states of pages that others have deleted
        self._ram.drop(prompt.keys[len(found.pages) :])
        return found

    def longest(self, found: Located) -> Path:
        """The longest prefix, up to the last page that has not expired."""
        path = found.path()
        n_kept = self._n_kept(path.pages)
        if n_kept == len(path.pages):
            return path
        self.expired()
        pages = path.pages[:n_kept]
        return Path(pages, pages[-1].end if pages else 0)

    def deepest_snapshot(self, found: Located, multiple_of: int = 1) -> Path:
        """The path to the deepest snapshot at a multiple of `multiple_of`."""
        n_kept = self._n_kept(found.pages)
        for n_pages, snapshot in found.fitting_snapshots():
            if n_pages > n_kept or self._n_kept([snapshot]) == 0:
                self.expired()
            elif snapshot.end % multiple_of == 0:
                return found.path_to(n_pages, snapshot)
        return Path((), 0)

    def _n_kept(self, pages: Sequence[Page]) -> int:
        """How many of the first of these pages have not expired."""
        now = time.time_ns()
        return next((i for i, page in enumerate(pages) if page.has_expired(now)), len(pages))

    def missing(self, found: Located) -> list[int]:
        """Which full pages of a prompt to capture.

        Raises
        ------
        CorruptError
            If another page has one of the keys: nothing may be stored after it.
        """
        if found.other is not None:
            raise CorruptError(f"page {found.other.hex()} has tokens that do not match its key")
        return list(range(len(found.pages), len(found.prompt.keys)))

    def wants(self, view: View, parent: bytes, tokens: bytes) -> bool:
        """Whether the page with these tokens after `parent` is worth capturing: no page has them all, or its key."""
        key = page_key(parent, tokens)
        record, _ = view.records([key]).get(key, (None, None))
        if record is not None and not isinstance(record, CorruptError):
            return False
        near = view.neighbors(parent, tokens)
        return not any(isinstance(one.record, Record) and one.record.tokens.startswith(tokens) for one in near)

    def path(self, view: View, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        path = [page]
        while path[-1].parent != path[-1].namespace:
            key = path[-1].parent
            above = self.get(key)
            if above is None:
                record, usage = view.records([key]).get(key, (None, Usage(0)))
                if not isinstance(record, Record):
                    break
                above = Page.stored(key, record, usage)
                above.is_far = self.is_far
            path.append(above)
        return path[::-1]

    def whole_index(self, backend: Pages) -> Index:
        """A tree of all that is stored, and of what waits; for maintenance."""
        # before the view: what is committed meanwhile is stored
        with self._lock:
            pending = [replace(new.page, children=[]) for new in self._pending.values()]
            used = {key: use.last_used for key, use in self._deferred.uses.items()}
        now, stored = time.time_ns(), []
        with backend.view() as view:
            for key, record, usage in view.scan():
                if isinstance(record, Record):
                    page = Page.stored(key, record, usage)
                    page.last_used = max(time_of_use(page.last_used, now) or self._started, used.get(key, 0))
                    stored.append(page)
        index = Index()
        for page in sorted(stored + pending, key=lambda page: page.start):
            index.add(page)
        return index

    def pages(self, backend: Pages) -> list[Page]:
        """All pages, stored and pending, parents before their children."""
        return list(depth_first(self.whole_index(backend).roots()))

    def select(self, backend: Pages, choose: Callable[[Index], Collection[bytes]]) -> list[Page]:
        """The pages whose keys a function of a tree of all pages chooses, parents before their children."""
        index = self.whole_index(backend)
        keys = choose(index)
        return [page for page in depth_first(index.roots()) if page.key in keys]

    # -- using --------------------------------------------------------------------------------------------------------

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

    def thin(self, view: View, found: Located, keep: int, interval: int, valued: Collection[int] = ()) -> int:
        """Give up all but `keep` of the snapshots along a prompt, except pinned ones; how many."""
        with self._lock:
            thinned = self._deferred.thinned
            there = [page for _, page in found.fitting_snapshots() if page.key not in thinned][::-1]
        if len(there) <= keep:
            return 0
        namespace, tokens = found.prompt.namespace, found.prompt.tokens
        ends = {namespace: 0} | {page.key: page.end for page in found.path().pages if page.end <= len(tokens)}
        others = {key: [page.tokens for page in self.pending_after(key)[:SIBLINGS_COMPARED]] for key in ends}
        for form in (PAGE, SNAPSHOT):
            for entry in view.children(list(ends), form, SIBLINGS_COMPARED):
                if isinstance(entry.record, Record):
                    others[entry.record.parent].append(entry.record.tokens)
        positions = [page.end for page in there]
        forks = branches([(end, others[key]) for key, end in ends.items()], tokens)
        # other sequences start from the last snapshot before the fork
        shared = {max((n for n in positions if n <= fork), default=0) for fork in forks}
        doomed = thin(positions, keep, interval, shared.union(valued))
        discarded = [page for page in there if page.end in doomed and not page.pinned]
        for page in discarded:
            self.discard_snapshot(page)
        return len(discarded)

    def discard_snapshot(self, page: Page) -> None:
        """Give up a snapshot that is no longer wanted; if it is stored, the next commit deletes it."""
        with self._lock:
            new = self._pending.get(page.key)
            if new is not None and not new.is_writing:
                self.give_up(page.key, Outdated.THINNED)
            self._deferred.thinned.add(page.key)

    def mark_damaged(self, page: Page, suspicion: Suspicion | None = None) -> None:
        """Have a damaged page, and what follows it, deleted with the next commit; until then it is not found.

        With a `suspicion` its checksum is right, but its state is not usable: it is deleted unless the page stored by
        then is.
        """
        with self._lock:
            known = self._deferred.damaged.get(page.key)
            if suspicion is None and known is not None:
                suspicion = known.suspicion
            self._deferred.damaged[page.key] = Damage(page.created, suspicion)
        self._ram.drop([page.key])

    def is_damaged(self, key: bytes, page: Page | Record) -> bool:
        """Whether a stored page is not to be used. Another one may have been written under the key since."""
        found = self._deferred.damaged.get(key)
        return found is not None and found.created == page.created

    # -- for the next commit ------------------------------------------------------------------------------------------

    def forget(self, page: Page) -> None:
        """Give up a page that is to be deleted, if it waits; not one that was captured again since."""
        with self._lock:
            new = self._pending.get(page.key)
            if new is not None and new.page.created == page.created:
                self.give_up(page.key, Outdated.DELETED)
