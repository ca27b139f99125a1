"""Deletes pages and their descendants: chosen ones, damaged ones, and those that can never be found."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from prefixstore.backends.threads import handed_over
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.child_rows import children_of, first_node
from prefixstore.engine.invariants import Violation, is_stray, strays
from prefixstore.engine.keyspace import COUNT, RECORD, walk
from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.page_view import PageView, tokens_of
from prefixstore.engine.pages import fewer, retried
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.pending import Damage
from prefixstore.engine.relatives import with_descendants
from prefixstore.engine.space import PAGES_AT_ONCE
from prefixstore.engine.trie import Entry
from prefixstore.errors import CorruptError, FullError, IncompatibleError
from prefixstore.format.codec import decode
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT
from prefixstore.format.record import Record, time_of_use


@dataclass(frozen=True)
class Removed:
    """How many pages were deleted, and the size of their payloads."""

    pages: int = 0
    bytes: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.pages + other.pages, self.bytes + other.bytes)


@dataclass(frozen=True)
class Choice:
    """Which pages to delete: those that meet all given criteria, and whose descendants do.

    Attributes
    ----------
    namespaces
        Pages of these namespaces.
    before
        Pages that were last used before this, in nanoseconds since the epoch.
    keys
        Pages with these keys, as `subtree` and `beginning_with` find them.
    """

    namespaces: Collection[bytes] | None = None
    before: int | None = None
    keys: Collection[bytes] | None = None

    def has(self, key: bytes, namespace: bytes, last_used: int) -> bool:
        """Whether a page meets the criteria."""
        if self.keys is not None and key not in self.keys:
            return False
        if self.namespaces is not None and namespace not in self.namespaces:
            return False
        # a time in the future cannot be right, and does not count as old
        now = time.time_ns()
        return self.before is None or (time_of_use(last_used, now) or now) < self.before

    def has_stored(self, entry: Entry) -> bool:
        """Whether a stored page can be read and meets the criteria."""
        record = entry.record
        return isinstance(record, Record) and self.has(entry.key, record.namespace, entry.usage.last_used)


def subtree(view: PageView, key: bytes) -> set[bytes]:
    """A page and its descendants."""
    return {entry.key for entry in with_descendants(view, [key])}


def beginning_with(view: PageView, tokens: bytes, namespaces: Collection[bytes] | None) -> set[bytes]:
    """The pages of sequences that begin with these tokens, and their ancestors that lead only to such sequences."""
    if namespaces is None:
        namespaces = {row[-KEY_BYTES:] for row in view.counts() if row != COUNT}
    found: set[bytes] = set()
    inside: dict[bytes, list[bytes]] = {}
    waiting = [(key, tokens) for key in namespaces]
    while waiting:
        parent, rest = waiting.pop()
        children = [one for form in (PAGE, SNAPSHOT) for one in view.children([parent], form)]
        if parent not in namespaces:
            inside[parent] = [one.key for one in children]
        for one in children:
            here = tokens_of(one)
            if here.startswith(rest):
                found |= subtree(view, one.key)
            elif rest.startswith(here):
                waiting.append((one.key, rest[len(here) :]))
    for key, after in reversed(inside.items()):
        if found.issuperset(after):
            found.add(key)
    return found


class Deleter(Part):
    """Deletes pages from a location, pinned or not."""

    # how often a deletion was started
    n_begun = 0

    def __init__(self, shared: Shared, bookmarks: Bookmarks) -> None:
        super().__init__(shared)
        self._bookmarks = bookmarks

    @handed_over
    def delete(self, choice: Choice) -> Removed:
        """Delete the chosen pages, pinned ones too, and bookmarks of sequences that are no longer stored.

        A page that is not chosen stays, with its ancestors. Pages that others add after chosen ones meanwhile go, too.
        """
        self.n_begun += 1
        for page in self._catalog.all_waiting()[0]:
            if choice.has(page.key, page.namespace, page.last_used):
                self._catalog.forget(page)
        # descendants that are added meanwhile go as well, whatever their keys
        removed, below = Removed(), replace(choice, keys=None)
        if choice.before is not None:
            # in one pass: old pages may be ancestors of one that stays, and looking for it after each would take long
            removed = self._delete_all(self.select(choice), below)
        else:
            for entries in self._entries(choice):
                removed += self._delete_all([one.key for one in entries if choice.has_stored(one)], below)
        if removed.pages:
            self._bookmarks.prune()
        return removed

    @handed_over
    def select(self, choice: Choice) -> dict[bytes, int]:
        """The pages that `delete` would delete, and the sizes of their payloads; children come first."""
        chosen: dict[bytes, Record] = {}
        kept: list[bytes] = []
        for entry in chain.from_iterable(self._entries(choice)):
            if isinstance(entry.record, Record):
                if choice.has_stored(entry):
                    chosen[entry.key] = entry.record
                else:
                    kept.append(entry.record.parent)
        while kept:
            # the ancestors of a page that stays
            if (record := chosen.pop(kept.pop(), None)) is not None:
                kept.append(record.parent)
        ends_first = sorted(chosen.items(), key=lambda item: item[1].start, reverse=True)
        return {key: record.stored_bytes for key, record in ends_first}

    def _entries(self, choice: Choice) -> Iterator[list[Entry]]:
        """The stored pages that may be chosen, some at a time. No view is open in between."""
        keys = list(choice.keys) if choice.keys is not None else []
        after: bytes | None = b""
        while after is not None:
            with self._backend.view() as view:
                if choice.keys is None:
                    keys = [row.key[1:] for row in next(walk(view.rows, RECORD, after), [])]
                entries = [Entry(key, *one) for key, one in view.records(keys).items()]
            after = keys[-1] if keys and choice.keys is None else None
            yield entries

    @handed_over
    def delete_strays(self, *, newer: bool = False) -> Removed:
        """Delete what can never be found: damaged records, and pages without their parent.

        With `newer`, also pages that a newer version wrote, and their descendants.
        """
        with self._backend.view() as view:
            lost, of_newer = strays(view)
        return self._delete_all(lost | of_newer if newer else lost, strays_only=True)

    @handed_over
    def n_newer(self) -> int:
        """How many stored pages were written by a newer version, or follow such a page."""
        with self._backend.view() as view:
            return sum(1 for _ in with_descendants(view, strays(view)[1]))

    @handed_over
    def repair(self, found: Iterable[Violation]) -> Removed:
        """Delete the pages that a check has found, and their descendants; a wrong index is rebuilt instead."""
        found = list(found)
        # if a record cannot be read, a check does not see whether the counts are right
        if any(violation.rule in ("index", "record") for violation in found):
            self._backend.reindex()
        # a forged usage row may have an empty key; other violations without a key are about the location
        named = [one for one in found if one.rule == "orphan" or (one.key and one.rule != "index")]
        return self._delete_all({bytes.fromhex(one.key) for one in named})

    def _delete_all(self, keys: Iterable[bytes], choice: Choice | None = None, *, strays_only: bool = False) -> Removed:
        """Delete pages and their descendants, children first, some at a time.

        With a choice, only what it chooses, and no ancestor of another page. With `strays_only`, not a page that can be
        found after all, since its parent was stored meanwhile.
        """
        removed, at_once, doomed = Removed(), PAGES_AT_ONCE, list(keys)
        while doomed:
            now, later = doomed[:at_once], doomed[at_once:]
            try:
                deleted, left = self._delete_next(now, at_once, choice, strays_only=strays_only)
            except FullError as error:
                at_once = fewer(self._backend, at_once, error)
                continue
            removed += Removed(len(deleted), sum(deleted.values()))
            # a page that stays may be a descendant of these
            doomed = [key for key in now if deleted and key in left] + later
        self._backend.mend()
        return removed

    @retried
    def _delete_next(
        self, keys: Sequence[bytes], at_once: int, choice: Choice | None, *, strays_only: bool
    ) -> tuple[dict[bytes, int], set[bytes]]:
        with self._catalog.update(self._backend) as transaction:
            some = [key for key in keys if not strays_only or is_stray(transaction, key)]
            return self._delete_some(transaction, some, at_once, choice)

    def _delete_some(
        self,
        transaction: PageUpdate,
        keys: Iterable[bytes],
        at_once: int = PAGES_AT_ONCE,
        choice: Choice | None = None,
    ) -> tuple[dict[bytes, int], set[bytes]]:
        """Delete pages and their descendants, children first, at most `at_once`.

        Returns the payload sizes of the deleted pages, by key, and which of `keys` are left.
        """
        left = dict.fromkeys(keys)
        self.n_begun += 1
        deleted: dict[bytes, int] = {}
        for entry in with_descendants(transaction, list(left)[::-1], at_once):
            if len(deleted) == at_once:
                break
            left.pop(entry.key, None)
            record = entry.record if isinstance(entry.record, Record) else None
            if choice is not None and record is not None and not choice.has_stored(entry):
                continue
            if transaction.followed([entry.key]) and _is_needed(transaction, entry.key):
                continue
            if transaction.delete(entry.key):
                deleted[entry.key] = record.stored_bytes if record is not None else 0
        return deleted, set(left)

    def delete_damaged(self, transaction: PageUpdate, suspects: Mapping[bytes, Damage]) -> tuple[int, set[bytes]]:
        """Delete the suspects that are really damaged or useless, and their descendants.

        Another process may have replaced a suspect by a good page meanwhile. Returns how many pages were deleted, and
        which suspects are left for another transaction.
        """
        keys = sorted(suspects)
        now, later = keys[:PAGES_AT_ONCE], set(keys[PAGES_AT_ONCE:])
        doomed = [key for key in now if _is_damaged(transaction, key, suspects[key])]
        deleted, left = self._delete_some(transaction, doomed)
        return len(deleted), left | later

    def delete_other(self, transaction: PageUpdate, key: bytes) -> list[bytes]:
        """Delete the other page stored under a key, and its descendants; returns their keys."""
        gone: list[bytes] = []
        while True:
            deleted, left = self._delete_some(transaction, [key])
            gone += deleted
            if not left or not deleted:
                return gone

    @handed_over
    @retried
    def drop_empty_namespaces(self) -> None:
        """Delete the settings of namespaces that have no pages any more."""
        with self._catalog.update(self._backend) as transaction:
            transaction.drop_empty_namespaces()


def _is_needed(transaction: PageUpdate, key: bytes) -> bool:
    """Whether a page has a child that stays: one that a newer version wrote, or an ancestor of one."""
    nodes = [first_node(key, form) for form in (PAGE, SNAPSHOT)]
    children = [child for some in children_of(transaction.rows, nodes) for child in some]
    return any(not isinstance(record, CorruptError) for record, _ in transaction.records(children).values())


def _is_damaged(transaction: PageUpdate, key: bytes, damage: Damage) -> bool:
    """Whether a page can never be restored: it is damaged, useless, or does not follow its parent."""
    try:
        payload, record = transaction.payload(key), transaction.record(key)
        if record is None or payload is None:
            return record is not None or payload is not None
        if damage.is_useless and record.created == damage.created:
            return True
        decode(record, payload)
        return not record.follows(transaction.record(record.parent) if record.parent != record.namespace else None)
    except CorruptError:
        return True
    except IncompatibleError:
        return False
