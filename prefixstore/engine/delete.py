"""Purge, clear and repair: which pages to delete, with their descendants, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefixstore.backends.threads import handed_over
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.index import Page, depth_first
from prefixstore.engine.invariants import Violation, astray, strays
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pages import fewer, retried
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.pending import Damage
from prefixstore.engine.relatives import with_descendants
from prefixstore.engine.siblings import children_of, first_node
from prefixstore.engine.space import PAGES_AT_ONCE
from prefixstore.errors import CorruptError, FullError, IncompatibleError
from prefixstore.format.codec import decode
from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES
from prefixstore.format.record import Record

__all__ = [
    "Choice",
    "Deleter",
    "Removed",
    "beginning_with",
    "in_common",
    "of_namespaces",
    "subtree",
    "unused_since",
]

Choice: TypeAlias = Callable[[Sequence[Page]], Collection[bytes]]
"""Chooses keys of pages from all pages, in the order of `Lookups.pages`; with a page, all of its descendants."""


@dataclass(frozen=True)
class Removed:
    """How many pages were deleted, and the size of their payloads."""

    pages: int = 0
    bytes: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.pages + other.pages, self.bytes + other.bytes)


# -- choices ----------------------------------------------------------------------------------------------------------


def of_namespaces(pages: Sequence[Page], namespaces: Collection[bytes]) -> set[bytes]:
    """The pages of these namespaces."""
    return {page.key for page in pages if page.namespace in namespaces}


def subtree(pages: Sequence[Page], key: bytes) -> set[bytes]:
    """A page and its descendants."""
    return {one.key for one in depth_first(page for page in pages if page.key == key)}


def unused_since(pages: Sequence[Page], before: int) -> set[bytes]:
    """The pages that were last used before this, in nanoseconds since the epoch, and whose descendants were too."""
    used: dict[bytes, int] = {}
    for page in reversed(pages):
        used[page.key] = max([page.last_used, *(used[child.key] for child in page.children)])
    return {key for key, last in used.items() if last < before}


def beginning_with(pages: Sequence[Page], tokens: bytes, namespaces: Collection[bytes] | None) -> set[bytes]:
    """The pages of sequences that begin with these tokens, and those that led only to them."""
    doomed: set[bytes] = set()
    inside: list[Page] = []
    roots = [page for page in pages if page.parent == page.namespace]
    waiting = [(page, tokens) for page in roots if namespaces is None or page.namespace in namespaces]
    while waiting:
        page, rest = waiting.pop()
        if page.tokens.startswith(rest):
            doomed |= {one.key for one in depth_first([page])}
        elif rest.startswith(page.tokens):
            inside.append(page)
            waiting += [(child, rest[len(page.tokens) :]) for child in page.children]
    for page in reversed(inside):
        if all(child.key in doomed for child in page.children):
            doomed.add(page.key)
    return doomed


def in_common(pages: Sequence[Page], choices: Iterable[Choice]) -> list[Page]:
    """The pages selected by every choice, in this order; all if there are no choices."""
    keys = {page.key for page in pages}
    for choose in choices:
        keys &= set(choose(pages))
    return [page for page in pages if page.key in keys]


# -- deleting ---------------------------------------------------------------------------------------------------------


class Deleter(Part):
    """Deletes pages from a location, pinned or not.

    Parameters
    ----------
    shared, lookups, bookmarks
        Of the engine.

    Attributes
    ----------
    n_begun
        How often it has begun to delete something.
    """

    n_begun = 0

    def __init__(self, shared: Shared, lookups: Lookups, bookmarks: Bookmarks) -> None:
        super().__init__(shared)
        self._lookups = lookups
        self._bookmarks = bookmarks

    @handed_over
    def delete(self, choices: Sequence[Choice]) -> Removed:
        """Delete the pages that all choices have in common, pinned ones too, and what others add after them until then.

        Also the names of sequences that are no longer stored.
        """
        self.n_begun += 1
        doomed = in_common(self._lookups.pages(), choices)[::-1]
        for page in doomed:
            self._catalog.forget(page)
        removed = self._delete_all([page.key for page in doomed])
        self._bookmarks.prune()
        return removed

    @handed_over
    def select(self, choices: Iterable[Choice]) -> list[bytes]:
        """The keys that several choices have in common, parents before their children."""
        return [page.key for page in in_common(self._lookups.pages(), choices)]

    @handed_over
    def delete_strays(self, *, newer: bool = False) -> Removed:
        """Delete what can never be found: damaged records, and pages without the one that they follow.

        With `newer` also those that a newer version wrote, and what follows them.
        """
        with self._backend.view() as view:
            lost, of_newer = strays(view)
        return self._delete_all(lost | of_newer if newer else lost, strays_only=True)

    @handed_over
    def n_newer(self) -> int:
        """How many stored pages cannot be read, or found, because a newer version wrote them or what they follow."""
        with self._backend.view() as view:
            return sum(1 for _ in with_descendants(view, strays(view)[1]))

    @handed_over
    def repair(self, found: Iterable[Violation]) -> Removed:
        """Delete the pages that a check has named, and their descendants; a wrong index is rebuilt instead."""
        found = list(found)
        if any(violation.rule == "index" for violation in found):
            self._backend.reindex()
        # a forged usage may have an empty key; other violations without one are of the location
        named = [one for one in found if one.rule == "orphan" or (one.key and one.rule != "index")]
        return self._delete_all({bytes.fromhex(one.key) for one in named})

    def _delete_all(self, keys: Iterable[bytes], *, strays_only: bool = False) -> Removed:
        """Delete pages, and what is stored after them: children first, some at a time.

        With `strays_only`, not those that can be found, as what they follow was stored since.
        """
        removed, at_once, doomed = Removed(), PAGES_AT_ONCE, list(keys)
        while doomed:
            now, later = doomed[:at_once], doomed[at_once:]
            try:
                deleted, left = self._delete_next(now, at_once, strays_only=strays_only)
            except FullError as error:
                at_once = fewer(self._backend, at_once, error)
                continue
            removed += Removed(len(deleted), sum(deleted.values()))
            # what stays after them may keep them
            doomed = [key for key in now if deleted and key in left] + later
        self._backend.mend()
        return removed

    @retried
    def _delete_next(
        self, keys: Sequence[bytes], at_once: int, *, strays_only: bool
    ) -> tuple[dict[bytes, int], set[bytes]]:
        with self._catalog.update(self._backend) as transaction:
            some = [key for key in keys if not strays_only or _is_stray(transaction, key)]
            return self._delete_some(transaction, some, at_once)

    def _delete_some(
        self, transaction: Transaction, keys: Iterable[bytes], at_once: int = PAGES_AT_ONCE
    ) -> tuple[dict[bytes, int], set[bytes]]:
        """Delete pages and what is stored after them, children first, as many as one transaction may.

        Returns
        -------
        tuple of dict and set
            The sizes of those that were deleted, by key; and those of `keys` that are left.
        """
        left = dict.fromkeys(keys)
        self.n_begun += 1
        deleted: dict[bytes, int] = {}
        for entry in with_descendants(transaction, list(left)[::-1], at_once):
            if len(deleted) == at_once:
                break
            left.pop(entry.key, None)
            if transaction.followed([entry.key]) and _is_needed(transaction, entry.key):
                continue
            record = entry.record if isinstance(entry.record, Record) else None
            if transaction.delete(entry.key):
                deleted[entry.key] = record.stored_bytes if record is not None else 0
        return deleted, set(left)

    def delete_damaged(self, transaction: Transaction, suspects: Mapping[bytes, Damage]) -> tuple[int, set[bytes]]:
        """Delete those suspects that are really damaged, and their descendants.

        Another process may have replaced a suspect by a good page, or have added descendants that are not known here.

        Returns
        -------
        tuple of int and set
            How many pages were deleted, and which suspects are left for another transaction.
        """
        keys = sorted(suspects)
        now, later = keys[:PAGES_AT_ONCE], set(keys[PAGES_AT_ONCE:])
        doomed = [key for key in now if _is_damaged(transaction, key, suspects[key])]
        deleted, left = self._delete_some(transaction, doomed)
        return len(deleted), left | later

    def delete_other(self, transaction: Transaction, key: bytes) -> list[bytes]:
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
        """Forget the settings of namespaces that have no pages any more."""
        with self._catalog.update(self._backend) as transaction:
            transaction.drop_empty_namespaces()


def _is_needed(transaction: Transaction, key: bytes) -> bool:
    """Whether something follows a page that stays: what a newer version wrote, or what leads to that."""
    nodes = [first_node(key, form) for form in (PAGE, SNAPSHOT)]
    children = [child for some in children_of(transaction.rows, nodes) for child in some]
    return any(not isinstance(record, CorruptError) for record, _ in transaction.records(children).values())


def _is_damaged(transaction: Transaction, key: bytes, suspect: Damage) -> bool:
    """Whether a page can never be restored: by its own fault, or because it does not follow its parent."""
    try:
        payload, record = transaction.payload(key), transaction.record(key)
        if record is None or payload is None:
            return record is not None or payload is not None
        if suspect.size is not None and record.raw_bytes > suspect.size:
            return True
        state = decode(record, payload)
        if suspect.fits is not None and not suspect.fits(state, record.start, len(record.tokens) // TOKEN_BYTES):
            return True
        return not record.follows(transaction.record(record.parent) if record.parent != record.namespace else None)
    except CorruptError:
        return True
    except IncompatibleError:
        return False


def _is_stray(transaction: Transaction, key: bytes) -> bool:
    """Whether a page can never be found: it cannot be read, or does not follow what is stored."""
    record, _ = transaction.records([key]).get(key, (None, None))
    return not isinstance(record, Record) or any(astray(transaction, [key]))
