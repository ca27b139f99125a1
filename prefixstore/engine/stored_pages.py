"""The page table together with the policy and the queues of victims: which stored page is evicted next.

Used under the lock of the catalog. The table has the pages that this process has captured or written, and all others
once it was filled. From then on it follows every change.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from prefixstore.backends.base import Entry, Facts
from prefixstore.engine.eviction import Candidates, VictimQueue
from prefixstore.engine.index import Page
from prefixstore.engine.page_columns import SHIFT
from prefixstore.engine.page_table import MASK, PageTable, TableEntry
from prefixstore.engine.policy import Policy
from prefixstore.engine.table_fill import TableFill
from prefixstore.engine.totals import Group, Totals
from prefixstore.format.keys import TOKEN_BYTES
from prefixstore.format.record import Record, Usage, time_of_use

__all__ = ["StoredPages", "Victim"]

Victim: TypeAlias = TableEntry


class _Row(NamedTuple):
    """A page that was removed from the table, with what the policy has noted."""

    entry: TableEntry
    parent: bytes
    clock: int
    page_class: int
    gain: float


class StoredPages:
    """The page table, kept up with the location.

    Parameters
    ----------
    policy
        The order of eviction.

    Attributes
    ----------
    policy
        As above.
    table
        The pages.
    is_loaded
        Whether the table has all stored pages.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._fill: TableFill | None = None
        # pages to keep, by owner
        self._kept: dict[str, Collection[bytes]] = {}
        # pages that the open transaction has deleted
        self._removed: dict[bytes, _Row] = {}
        self.unload(())

    # -- filling ------------------------------------------------------------------------------------------------------

    def unload(self, pending: Iterable[Page]) -> None:
        """Forget all pages but these, which wait for a commit."""
        self.is_loaded = False
        self._fill = None
        self._removed = {}
        self._lacks_pages = False
        self.table = PageTable()
        for keys in self._kept.values():
            self.table.keep(keys)
        self._candidates = Candidates(self.table, self.policy)
        for page in pending:
            self._add(page, is_stored=page.is_stored, may_be_victim=False)

    @property
    def is_loading(self) -> bool:
        """Whether the table is being filled."""
        return self._fill is not None

    def begin(self) -> None:
        """Begin to fill the table."""
        self._fill = TableFill(self.table, self.policy.describe, time.time_ns())

    @property
    def fill(self) -> object:
        """What fills the table now; another object after each `begin`, and None if nothing does."""
        return self._fill

    def add_facts(self, facts: Facts) -> None:
        """Add a slice of all pages; see `View.facts`."""
        assert self._fill is not None
        self._fill.add(facts)

    def finish(self) -> Iterator[None]:
        """After the last slice: the rest of the work, in steps."""
        assert self._fill is not None
        yield from self._fill.finish()
        self._fill, self.is_loaded = None, True

    # -- what happens to pages ----------------------------------------------------------------------------------------

    def announced(self, page: Page) -> None:
        """A page was captured, and waits for a commit."""
        if self.table.find(page.key) < 0:
            self._add(page, is_stored=False, may_be_victim=False)
            self.policy.added(self.table, page.namespace, page)

    def given_up(self, key: bytes) -> None:
        """A page does not wait for a commit any more; it may be stored all the same."""
        slot = self.table.find(key)
        if slot >= 0:
            if self.table.entry(slot).is_stored:
                self.table.change(key, may_be_victim=True)
            else:
                self._remove(key)

    def not_admitted(self, page: Page) -> None:
        """A captured page is not worth what would be evicted for it. If it is captured again, that is another use."""
        slot = self.table.find(page.key)
        self.policy.evicted(page.key, *(self.table.noted(slot) if slot >= 0 else (1, 0)))

    def put(self, page: Page, *, may_be_victim: bool) -> TableEntry | None:
        """The open transaction has put a page, or found it stored; what was known of it before."""
        slot = self.table.find(page.key)
        if slot < 0:
            self._add(page, is_stored=True, may_be_victim=may_be_victim)
            return None
        before = self.table.entry(slot)
        self._change(page, may_be_victim=may_be_victim)
        self.policy.stored(self.table, slot, page)
        return before

    def take_back(self, key: bytes, before: TableEntry | None, *, is_pending: bool) -> None:
        """A page was not put after all."""
        if before is None or not (before.is_stored or is_pending):
            # given up while its transaction was open
            self._remove(key)
        else:
            self.table.change(
                key,
                n_bytes=before.n_bytes,
                pinned=before.pinned,
                expires=before.expires,
                priority=before.priority,
                is_stored=before.is_stored,
                # one that another process has stored may have been given up here meanwhile
                may_be_victim=before.may_be_victim or (before.is_stored and not is_pending),
            )

    def committed(self, key: bytes) -> None:
        """A page that waited for a commit is stored."""
        self.table.change(key, may_be_victim=True)

    def deleted(self, key: bytes) -> None:
        """The open transaction has deleted a page."""
        slot = self.table.find(key)
        if slot >= 0:
            block, at = self.table.blocks[slot >> SHIFT], slot & MASK
            row = _Row(
                self.table.entry(slot),
                self.table.parent(slot),
                block.clock[at],
                block.page_class[at],
                block.gain[at],
            )
            self._remove(key)
            self._removed[key] = row

    def restore(self, key: bytes) -> None:
        """A page was not deleted after all."""
        row = self._removed.pop(key, None)
        slot = self.table.find(key)
        if row is None:
            # if it is not back already, it was deleted before the table was filled with what was left
            self._lacks_pages = self._lacks_pages or slot < 0
            return
        entry = row.entry
        if slot >= 0:
            # captured again meanwhile
            if entry.is_stored:
                self.table.change(
                    key,
                    n_bytes=entry.n_bytes,
                    pinned=entry.pinned,
                    expires=entry.expires,
                    priority=entry.priority,
                    is_stored=True,
                )
            return
        slot = self.table.add(
            key,
            row.parent,
            entry.namespace,
            end=entry.end,
            n_bytes=entry.n_bytes,
            last_used=entry.last_used,
            uses=entry.uses,
            expires=entry.expires,
            priority=entry.priority,
            form=entry.form,
            pinned=entry.pinned,
            is_stored=entry.is_stored,
            may_be_victim=entry.may_be_victim,
            gain=row.gain,
        )
        block, at = self.table.blocks[slot >> SHIFT], slot & MASK
        block.clock[at], block.page_class[at] = row.clock, row.page_class

    def end_transaction(self) -> bool:
        """What was deleted is gone, or restored; false if the table lacks a page now, and has to be filled again."""
        self._removed = {}
        lacks_pages, self._lacks_pages = self._lacks_pages, False
        return not lacks_pages or not (self.is_loaded or self.is_loading)

    def follow(self, key: bytes, entry: Entry | None, *, is_pending: bool) -> None:
        """Another process has changed a page: what is stored of it now, None for nothing."""
        slot = self.table.find(key)
        if entry is None or not isinstance(entry.record, Record):
            if slot >= 0 and is_pending:
                self.table.change(key, is_stored=False, may_be_victim=False)
            else:
                self._remove(key)
            return
        page = Page.stored(key, entry.record, entry.usage)
        page.last_used = time_of_use(page.last_used, time.time_ns())
        if slot >= 0:
            self._change(page, may_be_victim=not is_pending)
            self.used_elsewhere(key, page.last_used)
        elif self.is_loaded or self.is_loading:
            slot = self._add(page, is_stored=True, may_be_victim=not is_pending)
            self.policy.found(self.table, slot, page)

    def keep(self, owner: str, keys: Collection[bytes]) -> None:
        """Have these pages evicted after all others, and no more those that this owner has named before."""
        before = self._kept.pop(owner, ())
        if keys:
            self._kept[owner] = keys
        self.table.keep(keys)
        self.table.stop_keeping(before)

    def keep_nothing(self) -> None:
        """Undo every `keep`."""
        for owner in list(self._kept):
            self.keep(owner, ())

    def set_pinned(self, key: bytes, *, pinned: bool) -> None:
        """A page is pinned now, or not any more."""
        self.table.change(key, pinned=pinned)

    def set_expiry(self, key: bytes, expires: int) -> None:
        """When a page expires, in nanoseconds since the epoch; 0 for never."""
        self.table.change(key, expires=expires)

    def looked_up(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None) -> None:
        """A prompt began with these pages, none for a miss. Their hits do not count this use yet."""
        self.policy.looked_up(self.table, namespace, pages, n_tokens)

    def used(self, page: Page) -> None:
        """When a page was used last, and when it expires."""
        self.table.use(page.key, page.last_used)
        slot = self.table.find(page.key)
        if slot >= 0 and self.table.entry(slot).expires != page.expires:
            self.table.change(page.key, expires=page.expires)

    def used_elsewhere(self, key: bytes, last_used: int) -> None:
        """Another process used a page, at this time."""
        slot = self.table.find(key)
        if slot >= 0 and last_used > self.table.entry(slot).last_used:
            self.table.use(key, last_used)
            self.policy.used_elsewhere(self.table, slot)

    # -- eviction -----------------------------------------------------------------------------------------------------

    def spare(self, victim: Victim, usage: Usage, last_used: int) -> None:
        """A victim is kept, since its stored usage is not what was known of it."""
        self.used_elsewhere(victim.key, last_used)
        self.table.change(victim.key, pinned=usage.pinned, expires=max(usage.expires, victim.expires))
        self._candidates.add(victim.key)

    def put_back(self, key: bytes) -> None:
        """A victim that was given out was not deleted."""
        self._candidates.add(key)

    def evicted(self, key: bytes, uses: int, clock: int) -> None:
        """A page was evicted by this engine."""
        self.policy.evicted(key, uses, clock)

    def noted(self, key: bytes) -> tuple[int, int]:
        """What the policy has noted of the uses of a page."""
        slot = self.table.find(key)
        return self.table.noted(slot) if slot >= 0 else (1, 0)

    def admits(self, new: bytes, victim: bytes) -> bool:
        """Whether a new page is worth more than a victim, by the policy."""
        slots = self.table.find(new), self.table.find(victim)
        return min(slots) < 0 or self.policy.admits(self.table, *slots)

    def victims(self, group: Group = None) -> VictimQueue:
        """Leaves to evict, of a group of pages or of all, in the order of the policy."""
        return self._candidates.victims(group)

    def expiring(self) -> VictimQueue:
        """Leaves that expire, the first one first."""
        return self._candidates.expiring()

    @property
    def totals(self) -> Totals:
        """What all pages, namespaces and salts hold."""
        return self.table.totals

    def set_salt(self, namespace: bytes, salt: str | None) -> None:
        """Note whose pages those of a namespace are."""
        self.totals.set_salt(namespace, salt)
        self._candidates.joined(namespace)

    def strays(self) -> list[bytes]:
        """Pages whose parents are not stored."""
        return [self.table.key(slot) for slot in self.table.strays()]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _add(self, page: Page, *, is_stored: bool, may_be_victim: bool) -> int:
        return self.table.add(
            page.key,
            page.parent,
            page.namespace,
            end=page.end,
            n_bytes=page.stored_bytes + len(page.tokens),
            last_used=page.last_used,
            uses=page.hits + 1,
            expires=page.expires,
            priority=page.priority,
            form=page.form,
            pinned=page.pinned,
            is_stored=is_stored,
            may_be_victim=may_be_victim,
        )

    def _change(self, page: Page, *, may_be_victim: bool) -> None:
        self.table.change(
            page.key,
            n_bytes=page.stored_bytes + page.n_tokens * TOKEN_BYTES,
            pinned=page.pinned,
            expires=page.expires,
            priority=page.priority,
            is_stored=True,
            may_be_victim=may_be_victim,
        )

    def _remove(self, key: bytes) -> None:
        slot = self.table.find(key)
        if slot < 0:
            return
        namespace = self.table.entry(slot).namespace
        self.table.remove(key)
        salt = self.totals.salt_of(namespace)
        if self.totals.forget_if_empty(namespace):
            self._candidates.forget(namespace)
            if salt is not None:
                self._candidates.forget(salt)
