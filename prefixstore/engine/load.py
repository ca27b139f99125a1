"""Reads from a location what a lookup, a commit or maintenance needs and the index lacks.

What was read from a view is used only if the catalog is still at the view's generation, and no transaction of this
process has ended since the view was opened (`Follower.epoch`). Otherwise it is read again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from prefixstore.engine.follow import Follower
from prefixstore.engine.index import Index, Page, Unknown
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import Entry, View
from prefixstore.engine.pages import Pages
from prefixstore.engine.relatives import with_ancestors
from prefixstore.format.keys import SNAPSHOT, TOKEN_BYTES, Tokens, page_keys
from prefixstore.format.record import Record, time_of_use

__all__ = ["Loader"]

# how often what a lookup needs is read again if a commit of this process makes it outdated meanwhile
LOADS = 4


class Loader(Follower):
    """The part of the catalog that reads what the index lacks."""

    def read(self, backend: Pages, load: Callable[[View, int], bool]) -> int:
        """Refresh, and call one of the methods below; retried if its view is too old by then.

        Returns
        -------
        int
            How many records have changed.
        """
        n_records = 0
        for _ in range(LOADS):
            epoch = self._epoch
            with backend.view() as view:
                n_records += self.refresh(view)
                if load(view, epoch):
                    break
            self._wait_for_outcome()
        return n_records

    def load(
        self,
        view: View,
        epoch: int,
        namespace: bytes,
        tokens: Tokens,
        page_tokens: int,
        *,
        snapshots: bool = False,
    ) -> bool:
        """Read what the index lacks of a sequence.

        Parameters
        ----------
        view
            Up to which the catalog was brought.
        epoch
            The catalog's, from before the view was opened.
        namespace, tokens, page_tokens
            The sequence.
        snapshots
            Whether the snapshots along it are wanted.

        Returns
        -------
        bool
            False if the view is too old by now.
        """
        with self._lock, self._guard:
            unknown = self._unknown(namespace, tokens, page_tokens, snapshots=snapshots)
        if unknown is None:
            return True
        rest = tokens[unknown.at :].tobytes()
        keys = page_keys(unknown.parent, tokens[unknown.at :], page_tokens)
        step = page_tokens * TOKEN_BYTES
        pages = view.leading(keys) if keys else []
        # a key only nominates: the tokens decide
        are_good = (_holds(page, rest[i * step : (i + 1) * step]) for i, page in enumerate(pages))
        n_good = sum(1 for _ in itertools.takewhile(bool, are_good))
        parent = pages[n_good - 1].key if n_good else unknown.parent
        wanted = rest[n_good * step : (n_good + 1) * step]
        parents = [*unknown.without_snapshots, *(page.key for page in pages[:n_good])] if snapshots else []
        near: list[Entry] = []
        beside: list[Entry] = []
        if wanted and parents:
            near, beside = view.beside(parent, wanted, parents)
        elif wanted:
            near = view.neighbors(parent, wanted)
        elif parents:
            beside = view.children(parents, SNAPSHOT)
        generation = view.generation
        with self._lock, self._guard:
            if not self._may_learn(generation, epoch):
                return False
            contents = self._contents
            are_known = [contents.learn(entry) for entry in pages[:n_good]]
            for entry in pages[n_good : n_good + 1]:
                contents.learn(entry)
            if all(are_known) and wanted:
                contents.know_between(parent, namespace, wanted, near)
            if snapshots:
                contents.know_snapshots(parents, namespace, beside)
            return True

    def _unknown(self, namespace: bytes, tokens: Tokens, page_tokens: int, *, snapshots: bool) -> Unknown | None:
        index = self._contents.index
        find = index.snapshots_along if snapshots else index.match
        return find(namespace, tokens, page_tokens)[1]

    def _may_learn(self, generation: int, epoch: int) -> bool:
        """Whether what was read from a view is what is stored now, but for what the open transaction does."""
        return self._trusted and epoch == self._epoch and generation == self._generation

    def load_pages(self, view: View, epoch: int, keys: Collection[bytes]) -> bool:
        """Read what the index lacks of these pages and their ancestors; false if the view is too old."""
        with self._lock, self._guard:
            wanted = [key for key in keys if key not in self._contents.index]
        found = with_ancestors(view, wanted)
        generation = view.generation
        with self._lock, self._guard:
            if not self._may_learn(generation, epoch):
                return False
            for entry in sorted(found.values(), key=_start_of):
                self._contents.learn(entry)
            return True

    def whole_index(self, backend: Pages) -> Index:
        """An index of its own with all that is stored, and the pending pages; for maintenance."""
        # before the view: what is committed meanwhile is stored
        with self._lock:
            contents, started = self._contents, self._contents.started
            pending = [replace(new.page) for new in contents.pending.values()]
            used = {key: page.last_used for key in contents.deferred.uses if (page := contents.index.get(key))}
        now, stored = time.time_ns(), []
        with backend.view() as view:
            for key, record, usage in view.scan():
                if isinstance(record, Record):
                    page = Page.stored(key, record, usage)
                    page.last_used = max(time_of_use(page.last_used, now) or started, used.get(key, 0))
                    stored.append(page)
        for page in pending:
            page.forget_dependents()
        index = Index()
        for page in sorted(stored + pending, key=lambda page: page.start):
            index.add(page)
        return index

    def load_beside(self, transaction: Transaction, page: Page) -> None:
        """Read the siblings of a page about to be written: the tail that it continues, or a page that continues it."""
        with self._lock, self._guard:
            if page.form == SNAPSHOT or self._contents.index.is_sealed(page):
                return
        wanted, near = page.tokens, transaction.neighbors(page.parent, page.tokens)
        with self._lock, self._guard:
            self._contents.know_between(page.parent, page.namespace, wanted, near)
        if any(_holds(entry, wanted) for entry in near):
            # it is stored: a tail that it continues comes just before
            wanted = page.tokens[:-TOKEN_BYTES]
            near = transaction.neighbors(page.parent, wanted)
            with self._lock, self._guard:
                self._contents.know_between(page.parent, page.namespace, wanted, near)


def _holds(entry: Entry, tokens: bytes) -> bool:
    return isinstance(entry.record, Record) and entry.record.tokens == tokens


def _start_of(entry: Entry) -> int:
    return entry.record.start if isinstance(entry.record, Record) else -1
