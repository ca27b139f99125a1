"""Pages out of a location for good: which ones, in which order, in transactions that others can wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from prefixstore.backends.base import Backend
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.check import Violation
from prefixstore.engine.index import Page
from prefixstore.errors import IncompatibleError
from prefixstore.format.record import Record

__all__ = ["Choice", "Purge", "Removed", "depth_first"]

# servers wait while a transaction is open: it deletes so much and no more
PAGES_AT_ONCE = 512
# how often what servers put behind the pages that are deleted is deleted as well
ROUNDS = 16

# keys of pages, as the index stands; with a page it has all that are stored behind it
Choice: TypeAlias = Callable[[], "set[bytes]"]


@dataclass(frozen=True)
class Removed:
    """How many pages were deleted, and the size of their payloads."""

    pages: int = 0
    bytes: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.pages + other.pages, self.bytes + other.bytes)


def depth_first(roots: Iterable[Page]) -> Iterator[Page]:
    """Pages, each before those that are stored behind it."""
    waiting = list(roots)[::-1]
    while waiting:
        page = waiting.pop()
        yield page
        waiting += page.dependents[::-1]


class Purge:
    """Deletes from a location, whether pinned or not."""

    def __init__(self, backend: Backend, catalog: Catalog) -> None:
        self._backend = backend
        self._catalog = catalog

    def _roots(self) -> list[Page]:
        return [page for page in self._catalog.index if page.parent == page.namespace]

    # -- choices ------------------------------------------------------------------------------------------------------

    def of(self, namespaces: Collection[bytes]) -> set[bytes]:
        """The pages of these namespaces."""
        return {page.key for page in self._catalog.index if page.namespace in namespaces}

    def behind(self, key: bytes) -> set[bytes]:
        """A page and all behind it."""
        page = self._catalog.index.get(key)
        return {one.key for one in depth_first([page] if page is not None else [])}

    def unused_since(self, before: int) -> set[bytes]:
        """The pages that were last used before this, in nanoseconds since the epoch, and all behind them too."""
        used: dict[bytes, int] = {}
        for page in reversed(list(depth_first(self._roots()))):
            used[page.key] = max([page.last_used, *(used[child.key] for child in page.dependents)])
        return {key for key, last in used.items() if last < before}

    def beginning_with(self, tokens: bytes, namespaces: Collection[bytes] | None) -> set[bytes]:
        """The pages of sequences that begin with these tokens, and those that led only to them."""
        doomed: set[bytes] = set()
        inside: list[Page] = []
        waiting = [(page, tokens) for page in self._roots() if namespaces is None or page.namespace in namespaces]
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

    # -- deleting -----------------------------------------------------------------------------------------------------

    def delete(self, choices: Sequence[Choice]) -> Removed:
        """Delete the pages that every choice has, leaves first; what servers put behind them meanwhile too."""
        removed = Removed()
        for _ in range(ROUNDS):
            with self._backend.view() as view:
                self._catalog.refresh(view)
            with self._catalog.lock:
                keys = set(self._catalog.index.pages)
                for choice in choices:
                    keys &= choice()
                doomed = [page.key for page in depth_first(self._roots()) if page.key in keys]
            if not doomed:
                break
            waiting = reversed(doomed)
            while some := list(islice(waiting, PAGES_AT_ONCE)):
                removed += self._delete_leaves(some)
        return removed

    def _delete_leaves(self, keys: Sequence[bytes]) -> Removed:
        removed = Removed()
        with self._catalog.transaction(self._backend) as transaction, self._catalog.lock:
            for key in keys:
                page = self._catalog.index.get(key)
                # another process may have put something behind it
                if page is not None and page.is_leaf:
                    transaction.delete(key)
                    self._catalog.forget(key)
                    removed += Removed(1, page.stored_bytes)
        return removed

    def delete_strays(self, namespaces: Collection[bytes] | None) -> Removed:
        """Delete pages that have no place in the index; if all namespaces are meant, the unreadable ones too."""
        with self._catalog.transaction(self._backend) as transaction:
            known = self._catalog.index.pages
            strays = {
                key: record.stored_bytes if isinstance(record, Record) else 0
                for key, record, _ in transaction.scan()
                if key not in known
                and (namespaces is None or (isinstance(record, Record) and record.namespace in namespaces))
            }
            if namespaces is None:
                strays |= dict.fromkeys(set(transaction.payload_keys()) - known.keys() - strays.keys(), 0)
            return sum((Removed(1, size) for key, size in strays.items() if transaction.delete(key)), Removed())

    def delete_broken(self, found: Iterable[Violation]) -> Removed:
        """Delete the pages that a check has named, and all behind them."""
        doomed = dict.fromkeys(bytes.fromhex(violation.key) for violation in found if violation.key)
        if not doomed:
            return Removed()
        with self._catalog.transaction(self._backend) as transaction:
            children: defaultdict[bytes, list[bytes]] = defaultdict(list)
            sizes: dict[bytes, int] = {}
            for key, record, _ in transaction.scan():
                if isinstance(record, Record):
                    children[record.parent].append(key)
                    sizes[key] = record.stored_bytes
            behind = list(doomed)
            for key in behind:
                behind += children.pop(key, ())
            gone = [key for key in dict.fromkeys(behind) if transaction.delete(key)]
        with self._catalog.lock:
            self._catalog.distrust()
        return Removed(len(gone), sum(sizes.get(key, 0) for key in gone))

    def drop_namespaces(self) -> None:
        """Forget the settings of namespaces that have no pages any more."""
        with self._catalog.transaction(self._backend) as transaction:
            records = [record for _, record, _ in transaction.scan()]
            if any(isinstance(record, IncompatibleError) for record in records):
                return  # a newer version's page, whose namespace is not known
            held = {record.namespace for record in records if isinstance(record, Record)}
            for key in transaction.namespaces().keys() - held:
                transaction.drop_namespace(key)
