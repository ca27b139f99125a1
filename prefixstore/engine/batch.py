"""Writes the pages of a batch in one transaction: parents first, each as far as there is space for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from prefixstore.engine.delete import Deleter
from prefixstore.engine.eviction import Victim
from prefixstore.engine.index import Page, is_same, later
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pending import DropReason, PendingPage
from prefixstore.engine.relatives import siblings_of
from prefixstore.engine.space import Evictor, Space
from prefixstore.errors import IncompatibleError, StorageError
from prefixstore.format.record import Record, Usage
from prefixstore.results import Shortage

__all__ = ["Batch"]

log = logging.getLogger("prefixstore")


class Batch:
    """Writes packed pages.

    Attributes
    ----------
    written
        The pages that are stored when the transaction is committed, also those that were stored before.
    put
        The keys of those that were not.
    refused
        The others, and why.
    """

    def __init__(self, transaction: Transaction, space: Space, evictor: Evictor, deleter: Deleter) -> None:
        self._transaction = transaction
        self._space = space
        self._evictor = evictor
        self._catalog = evictor.catalog
        self._deleter = deleter
        # the records of the pages, and of their parents, as far as they are stored, or why they cannot be read
        self._stored: dict[bytes, Record | StorageError] = {}
        self.written: list[PendingPage] = []
        self.put: set[bytes] = set()
        self.refused: list[tuple[PendingPage, DropReason]] = []

    def write(self, packed: Sequence[PendingPage]) -> None:
        """Write pages, parents before their children."""
        keys = dict.fromkeys(key for new in packed for key in (new.page.parent, new.page.key))
        self._stored = {key: record for key, (record, _) in self._transaction.records(list(keys)).items()}
        reasons: dict[bytes, DropReason] = {}
        for i, new in enumerate(packed):
            # what follows a page that is refused is refused as well
            reason = reasons.get(new.page.parent) or self._hindrance(new)
            if reason is None:
                reason = self._write(new, partial(self._admits, packed, i))
            if reason is not None:
                reasons[new.page.key] = reason
                self.refused.append((new, reason))

    def shortage(self) -> Shortage | None:
        """What the last of the refused pages asked for, and what there was; None if none was refused for its size."""
        for new, reason in reversed(self.refused):
            if reason in (DropReason.BUDGET, DropReason.QUOTA, DropReason.ADMISSION):
                return self._space.shortage(new, reason, sum(other is reason for _, other in self.refused))
        return None

    def _hindrance(self, new: PendingPage) -> DropReason | None:
        """Why a page cannot be written, whatever space there is: nothing is evicted for it then."""
        page = new.page
        # The parent has to be stored; the page itself may be: another process may have computed it too.
        for key in (page.parent, page.key):
            error = self._stored.get(key)
            if isinstance(error, IncompatibleError):
                log.warning("a page was not written: %s", error)
                return DropReason.UNAVAILABLE
        return None if page.parent in self.put or self._follows(new.record) else DropReason.ORPHAN

    def _follows(self, record: Record) -> bool:
        """Whether a page may be written: what it follows is stored."""
        if record.parent == record.namespace:
            return record.follows(None)
        parent = self._stored.get(record.parent)
        return isinstance(parent, Record) and parent.key == record.parent and record.follows(parent)

    def _admits(self, packed: Sequence[PendingPage], i: int, victim: Victim) -> bool:
        """Whether a page, or one that follows it, is to be stored in any case, or is worth more than a victim."""
        followers = _followers(packed, i)
        return any(new.is_wanted or new.page.pinned or self._evictor.admits(new, victim) for new in followers)

    def _write(self, new: PendingPage, admits: Callable[[Victim], bool]) -> DropReason | None:
        """Write one page; returns the reason if it is refused."""
        transaction, record, page = self._transaction, new.record, new.page
        tail, is_covered = siblings_of(transaction, page)
        if not self._catalog.claim(new, is_covered=is_covered):
            return None
        if tail is not None and (self._catalog.pending_after(tail.key) or transaction.followed([tail.key])):
            tail = None
        if tail is not None and tail.pinned:
            page.pinned = True
        if self._is_stored(page):
            self._use_stored(page, tail)
        else:
            reason = self._space.make(new, admits, tail)
            if reason is not None:
                return reason
            if tail is not None:
                transaction.delete(tail.key)
            transaction.put_namespace(page.namespace, new.settings)
            transaction.put(page.key, record, _usage_of(new), new.payload)
            self._space.put(page.namespace, page.key)
            self.put.add(page.key)
        page.stored_bytes = record.stored_bytes
        self._keep_ancestors(page)
        self.written.append(new)
        return None

    def _is_stored(self, page: Page) -> bool:
        """Whether a page is stored already. Another page under its key is deleted, with all that is stored after it."""
        stored = self._stored.get(page.key)
        if not isinstance(stored, Record):
            return False  # one whose record is damaged is overwritten
        if is_same(stored, page) and stored.start == page.start:
            return True
        log.warning("another page has the key %s; deleting it and its descendants", page.key.hex())
        for key in self._deleter.delete_other(self._transaction, page.key):
            self._stored.pop(key, None)
        return False

    def _use_stored(self, page: Page, tail: Page | None) -> None:
        """A captured page is stored already: it lasts as long as the captured one, and takes the place of the tail."""
        usage = self._transaction.usage(page.key)
        if usage is not None:
            pinned = usage.pinned or (tail is not None and tail.pinned)
            expires = later(usage.expires, page.expires)
            if (pinned, expires) != (usage.pinned, usage.expires):
                self._transaction.touch(page.key, replace(usage, pinned=pinned, expires=expires))
        if tail is not None:
            self._transaction.delete(tail.key)

    def _keep_ancestors(self, page: Page) -> None:
        """Have the pages that a new one follows expire no earlier than it does."""
        key = page.parent
        while key != page.namespace:
            record, usage = self._transaction.records([key]).get(key, (None, Usage(0)))
            if not isinstance(record, Record) or Page.stored(key, record, usage).lasts_until(page):
                return
            self._transaction.touch(key, replace(usage, expires=page.expires if not page.pinned else 0))
            key = record.parent


def _followers(packed: Sequence[PendingPage], first: int) -> Sequence[PendingPage]:
    """A page, and those that come after it, each the parent of the next; the last one first."""
    end = first + 1
    while end < len(packed) and packed[end].page.parent == packed[end - 1].page.key:
        end += 1
    return packed[first:end][::-1]


def _usage_of(new: PendingPage) -> Usage:
    """The first usage of a page. The uses that a captured one has had already are among those written afterwards."""
    page = new.page
    if new.usage is not None:
        return replace(new.usage, pinned=page.pinned)
    return Usage(page.last_used, 0, page.pinned, page.priority, page.expires, page.uses, page.page_class)
