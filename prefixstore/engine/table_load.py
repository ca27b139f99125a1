"""Reads into the page table what eviction needs of all pages, and gives out the pages to evict.

The table is filled in slices of `FACTS_AT_ONCE` pages, between which lookups and commits go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

from prefixstore.backends.base import Backend, Facts, Transaction, View
from prefixstore.engine.eviction import VictimQueue
from prefixstore.engine.follow import Lock
from prefixstore.engine.load import Loader
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.ram import RamTier
from prefixstore.engine.stored_pages import StoredPages, Victim
from prefixstore.engine.totals import Group, Total
from prefixstore.errors import CorruptError
from prefixstore.format.record import CLOCK_SLACK
from prefixstore.stats import Counters

__all__ = ["TableLoader", "Victims"]

# pages of which facts are read at a time: the lock is held while they are entered into the table
FACTS_AT_ONCE = 4_000
# and at least so many, where others commit all the time
FEWEST_FACTS = 64
# Seconds between two steps. A lock is not passed on to the thread that waits for it if it is taken again at once: with
# a tenth of this, a lookup waited for several steps.
PAUSE = 1e-3


class Victims:
    """Pages to delete, in order. `next` takes the catalog's lock for a moment, or for several if it has to rank."""

    def __init__(self, lock: Lock, guard: Lock, table: StoredPages, queue: VictimQueue) -> None:
        self._lock = lock
        self._guard = guard
        self._table = table
        # the queue is one of this table, even if the pages are read again meanwhile
        self._pages = table.table
        self._queue = queue
        self._given: bytes | None = None

    def next(self) -> Victim | None:
        """The next page; None when there are no more."""
        while True:
            with self._lock, self._guard:
                self._given = None
                slot = self._queue.next()
                if slot is None:
                    return None
                if isinstance(slot, int):
                    victim = self._pages.entry(slot)
                    self._given = victim.key
                    return victim
            time.sleep(PAUSE)

    def spared(self) -> None:
        """A new page gave way to the last one."""
        with self._lock, self._guard:
            self._queue.spared()

    def close(self) -> None:
        """Put the last page back, if it was not deleted."""
        with self._lock, self._guard:
            if self._given is not None:
                self._table.put_back(self._given)


class TableLoader(Loader):
    """The part of the catalog that fills the page table, and asks it. Parameters as for `Follower`."""

    def __init__(self, table: StoredPages, counters: Counters, ram: RamTier) -> None:
        super().__init__(table, counters, ram)
        # taken by the thread that fills the table
        self._loading = threading.Lock()

    # -- filling ------------------------------------------------------------------------------------------------------

    def load_table(self, backend: Backend) -> None:
        """Read what eviction needs of all pages, in slices, if that was not done yet. Not in a transaction."""
        with self._loading:
            fill: object = None
            after, at_once = b"", FACTS_AT_ONCE
            while not self._table.is_loaded:
                if not self._table.is_loading or fill is not self._table.fill:
                    # no transaction of this process fills it meanwhile; what was left of another attempt is forgotten
                    with self._turn, self._lock, self._guard:
                        if not self._table.is_loaded:
                            fill, after = self._begin_table(), b""
                    continue
                epoch = self.epoch
                with backend.view() as view:
                    self.refresh(view)
                    facts, generation = view.facts(after, at_once), view.generation
                    damaged = _damaged(view, facts)
                with self._lock, self._guard:
                    if fill is not self._table.fill:
                        continue
                    may_learn = self._may_learn(generation, epoch)
                    if may_learn and len(facts):
                        after = self._enter(facts, damaged)
                        at_once = min(at_once * 2, FACTS_AT_ONCE)
                        continue
                    if may_learn:
                        steps = self._table.finish()
                if may_learn:
                    self._finish_table(steps, fill)
                else:
                    # where much is committed meanwhile, fewer pages are read before the next commit
                    at_once = max(at_once // 2, min(FEWEST_FACTS, FACTS_AT_ONCE))
                    self._wait_for_outcome()

    def require_table(self, transaction: Transaction) -> None:
        """As `load_table`, in a transaction for which the catalog is up to date: others wait meanwhile."""
        fill: object = None
        after = b""
        while not self._table.is_loaded:
            if fill is None or fill is not self._table.fill:
                with self._lock, self._guard:
                    fill, after = self._begin_table(), b""
            facts = transaction.facts(after, FACTS_AT_ONCE)
            damaged = _damaged(transaction, facts)
            with self._lock, self._guard:
                if fill is not self._table.fill:
                    # another thread was interrupted in the middle of a change
                    continue
                if len(facts):
                    after = self._enter(facts, damaged)
                    continue
                steps = self._table.finish()
            self._finish_table(steps, fill)

    def _begin_table(self) -> object:
        """Begin to fill the table. A page that was filled in before, and not linked to its parent, is forgotten."""
        if self._table.is_loading:
            self._table.unload(new.page for new in self._contents.pending.values())
        self._table.begin()
        return self._table.fill

    def _enter(self, facts: Facts, damaged: Collection[bytes]) -> bytes:
        """Enter a slice into the table; up to which key it is filled now."""
        # a time in the future is not believed
        facts["last_used"][facts["last_used"] > time.time_ns() + CLOCK_SLACK] = self._contents.started
        self._table.add_facts(facts)
        self._contents.deferred.damaged |= set(damaged)
        journal = self._contents.journal
        for key in journal.deleted if journal is not None else ():
            self._table.deleted(key)
        return bytes(facts["key"][-1])

    def _finish_table(self, steps: Iterator[None], fill: object) -> None:
        """After the last slice: the lock is free between the steps."""
        while True:
            with self._lock, self._guard:
                if fill is not self._table.fill or next(steps, self) is self:
                    break
            time.sleep(PAUSE)
        with self._lock, self._guard:
            if self._table.is_loaded:
                # uses that are not written yet
                for page in map(self._contents.index.get, self._contents.deferred.uses):
                    if page is not None:
                        self._table.used(page)
                self._contents.deferred.damaged |= set(self._table.strays())

    @property
    def has_table(self) -> bool:
        """Whether `victims`, `expiring` and `total` know all pages."""
        return self._table.is_loaded

    def victims(self, group: Group = None) -> Victims:
        """Stored leaves to evict, of a group of pages or of all, in the order of the policy."""
        with self._lock:
            return Victims(self._lock, self._guard, self._table, self._table.victims(group))

    def expiring(self) -> Victims:
        """Stored leaves that expire, the first one first."""
        with self._lock:
            return Victims(self._lock, self._guard, self._table, self._table.expiring())

    def total(self, group: Group = None) -> Total:
        """What a group of pages holds; see `Total`."""
        with self._lock:
            return replace(self._table.totals.of(group))

    def namespaces_without_salt(self) -> list[bytes]:
        """Namespaces with pages, for which `set_salt` was not called yet."""
        with self._lock:
            return list(self._table.totals.without_salt)

    def set_salt(self, namespace: bytes, salt: str | None) -> None:
        """Note whose pages those of a namespace are."""
        with self._lock, self._guard:
            self._table.set_salt(namespace, salt)

    def put_back(self, key: bytes) -> None:
        """A victim was passed over."""
        with self._lock, self._guard:
            self._table.put_back(key)

    def admits(self, new: PendingPage, victim: Victim) -> bool:
        """Whether a new page is worth more than a victim, by the policy."""
        with self._lock:
            return self._table.admits(new.page.key, victim.key)

    @property
    def policy_note(self) -> bytes | None:
        """The name of the note with what the policy has learned; None if it learns nothing."""
        return self._table.policy.note

    @property
    def policy_name(self) -> str:
        """The name of the policy, as in ``policy=``."""
        return self._table.policy.name

    def learned(self) -> dict[str, bytes]:
        """What the policy has learned."""
        with self._lock:
            return self._table.policy.parts()

    def load_policy(self, note: bytes) -> bool:
        """Have the policy go on with what was learned before; whether that can be read."""
        with self._lock, self._guard:
            return self._table.policy.load(note)


def _damaged(view: View, facts: Facts) -> list[bytes]:
    """Those of these pages whose records are damaged."""
    unreadable = [bytes(key) for key in facts["key"][~facts["is_readable"]]]
    return [key for key, (error, _) in view.records(unreadable).items() if isinstance(error, CorruptError)]
