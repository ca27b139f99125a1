"""Deleting by choice: purge, clear, and repair. Which pages, and in which order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from prefixstore.backends.base import Backend, Transaction
from prefixstore.engine.catalog import Catalog, depth_first, roots
from prefixstore.engine.index import Index, Page
from prefixstore.engine.invariants import Violation
from prefixstore.engine.pending import Fits
from prefixstore.errors import CorruptError, FullError, IncompatibleError, UnavailableError
from prefixstore.format.codec import decode
from prefixstore.format.keys import TOKEN_BYTES
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

# other processes wait while a transaction is open: it deletes so many pages and no more
PAGES_AT_ONCE = 512
# how often pages that others add after the deleted ones are deleted as well
ROUNDS = 16

Choice: TypeAlias = Callable[[Index], Collection[bytes]]
"""Chooses keys of pages from the index; with a page it chooses all of its descendants."""


@dataclass(frozen=True)
class Removed:
    """How many pages were deleted, and the size of their payloads."""

    pages: int = 0
    bytes: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.pages + other.pages, self.bytes + other.bytes)


# -- choices ----------------------------------------------------------------------------------------------------------


def of_namespaces(index: Index, namespaces: Collection[bytes]) -> set[bytes]:
    """The pages of these namespaces."""
    return {page.key for page in index if page.namespace in namespaces}


def subtree(index: Index, key: bytes) -> set[bytes]:
    """A page and its descendants."""
    page = index.get(key)
    return {one.key for one in depth_first([page] if page is not None else [])}


def unused_since(index: Index, before: int) -> set[bytes]:
    """The pages that were last used before this, in nanoseconds since the epoch, and whose descendants were too."""
    used: dict[bytes, int] = {}
    for page in reversed(list(depth_first(roots(index)))):
        used[page.key] = max([page.last_used, *(used[child.key] for child in page.dependents)])
    return {key for key, last in used.items() if last < before}


def beginning_with(index: Index, tokens: bytes, namespaces: Collection[bytes] | None) -> set[bytes]:
    """The pages of sequences that begin with these tokens, and those that led only to them."""
    doomed: set[bytes] = set()
    inside: list[Page] = []
    waiting = [(page, tokens) for page in roots(index) if namespaces is None or page.namespace in namespaces]
    while waiting:
        page, rest = waiting.pop()
        if page.tokens.startswith(rest):
            doomed |= {one.key for one in depth_first([page])}
        elif rest.startswith(page.tokens):
            inside.append(page)
            waiting += [(child, rest[len(page.tokens) :]) for child in page.dependents]
    for page in reversed(inside):
        if all(child.key in doomed for child in page.dependents):
            doomed.add(page.key)
    return doomed


def in_common(index: Index, choices: Sequence[Choice]) -> set[bytes]:
    """The keys selected by every choice; all keys if there are no choices."""
    keys = set(index.pages)
    for choose in choices:
        keys &= set(choose(index))
    return keys


# -- deleting ---------------------------------------------------------------------------------------------------------


class Deleter:
    """Deletes pages from a location, pinned or not.

    Parameters
    ----------
    backend
        The location.
    catalog
        Of the engine.
    """

    def __init__(self, backend: Backend, catalog: Catalog) -> None:
        self._backend = backend
        self._catalog = catalog

    def delete(self, choices: Sequence[Choice]) -> Removed:
        """Delete the pages that all choices have in common, leaves first, and what others add to them meanwhile.

        Raises
        ------
        UnavailableError
            If others add pages faster than they are deleted. What was deleted until then stays deleted.
        """
        with self._backend.view() as view:
            self._catalog.refresh(view)
        doomed = self._catalog.select(partial(in_common, choices=choices))
        # a page that is captured again is another one, and stays
        chosen = {page.key: page.created for page in doomed}
        removed, at_once = Removed(), PAGES_AT_ONCE
        for _ in range(ROUNDS):
            waiting = doomed[::-1]
            while waiting:
                try:
                    removed += self._delete_leaves(waiting[:at_once])
                except FullError:
                    if at_once == 1:
                        raise
                    # to delete a page takes space as well, until the transaction is committed
                    at_once = max(at_once // 4, 1)
                    with suppress(FullError):
                        self._backend.reclaim()
                    continue
                waiting = waiting[at_once:]
            with self._backend.view() as view:
                self._catalog.refresh(view)
            doomed = self._catalog.select(partial(_left, chosen=chosen))
            if not doomed:
                return removed
        raise UnavailableError(
            f"{removed.pages:,} pages were deleted, but {len(doomed):,} are left, since other processes keep adding "
            "pages; stop them, and delete again"
        )

    def _delete_leaves(self, pages: Sequence[Page]) -> Removed:
        removed = Removed()
        with self._catalog.update(self._backend) as transaction:
            for chosen in pages:
                # not one that another process has continued since
                page = self._catalog.remove_leaf(chosen.key)
                if page is not None and transaction.delete(chosen.key):
                    removed += Removed(1, page.stored_bytes)
        return removed

    def delete_strays(self, namespaces: Collection[bytes] | None) -> Removed:
        """Delete pages that have no place in the index; if all namespaces are meant, unreadable ones too."""
        with self._catalog.update(self._backend) as transaction:
            known = {page.key for page in self._catalog.pages()}
            strays = {
                key: record.stored_bytes if isinstance(record, Record) else 0
                for key, record, _ in transaction.scan()
                if key not in known
                and (namespaces is None or (isinstance(record, Record) and record.namespace in namespaces))
            }
            if namespaces is None:
                strays |= dict.fromkeys(set(transaction.payload_keys()) - known - strays.keys(), 0)
            return sum((Removed(1, size) for key, size in strays.items() if transaction.delete(key)), Removed())

    def repair(self, found: Iterable[Violation]) -> Removed:
        """Delete the pages that a check has named, and their descendants."""
        doomed = dict.fromkeys(bytes.fromhex(violation.key) for violation in found if violation.key)
        if not doomed:
            return Removed()
        with self._catalog.update(self._backend) as transaction:
            sizes = _delete_with_descendants(transaction, doomed)
        self._catalog.distrust()
        return Removed(len(sizes), sum(sizes.values()))

    def delete_damaged(self, transaction: Transaction, suspects: Iterable[bytes], fits: Mapping[bytes, Fits]) -> int:
        """Delete those suspects that are damaged indeed, and their descendants; how many.

        Another process may have replaced a suspect by a good page, or have added descendants that are not known here.
        """
        doomed = [key for key in suspects if _is_damaged(transaction, key, fits.get(key))]
        gone = _delete_with_descendants(transaction, doomed) if doomed else {}
        for key in {*doomed, *gone}:
            self._catalog.lose(key)
        return len({*doomed, *gone})

    def drop_empty_namespaces(self) -> None:
        """Forget the settings of namespaces that have no pages any more."""
        with self._catalog.update(self._backend) as transaction:
            records = [record for _, record, _ in transaction.scan()]
            if any(isinstance(record, IncompatibleError) for record in records):
                return  # a newer version's page, whose namespace is not known
            held = {record.namespace for record in records if isinstance(record, Record)}
            for key in transaction.namespaces().keys() - held:
                transaction.drop_namespace(key)


def _left(index: Index, chosen: Mapping[bytes, int]) -> set[bytes]:
    """Those of the chosen pages, by key and time of creation, that are still there, and their descendants."""
    pages = (page for key in chosen if (page := index.get(key)) is not None and page.created == chosen[key])
    return {page.key for page in depth_first(pages)}


def _delete_with_descendants(transaction: Transaction, keys: Iterable[bytes]) -> dict[bytes, int]:
    """Delete pages and all that are stored after them, by the parents in their records; the sizes of those deleted."""
    children: defaultdict[bytes, list[bytes]] = defaultdict(list)
    sizes: dict[bytes, int] = {}
    for key, record, _ in transaction.scan():
        if isinstance(record, Record):
            children[record.parent].append(key)
            sizes[key] = record.stored_bytes
    closure = list(dict.fromkeys(keys))
    for key in closure:
        closure += children.pop(key, ())
    return {key: sizes.get(key, 0) for key in dict.fromkeys(closure) if transaction.delete(key)}


def _is_damaged(transaction: Transaction, key: bytes, fits: Fits | None) -> bool:
    """Whether a page can never be restored: by its own fault, or because it does not follow its parent."""
    try:
        payload, record = transaction.payload(key), transaction.record(key)
        if record is None or payload is None:
            return record is not None or payload is not None
        state = decode(record, payload)
        if fits is not None and not fits(state, record.start, len(record.tokens) // TOKEN_BYTES):
            return True
        return not record.follows(transaction.record(record.parent) if record.parent != record.namespace else None)
    except CorruptError:
        return True
    except IncompatibleError:
        return False
