"""A location without a model: look into it, delete from it, keep it healthy. The command line uses it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from prefixstore.backends import is_persistent, open_backend
from prefixstore.backends.base import Backend, Transaction, Used, View
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.check import Violation, violations
from prefixstore.engine.delete import Choice, Purge, Removed, depth_first
from prefixstore.engine.eviction import Ordering, lru
from prefixstore.engine.index import Page
from prefixstore.engine.room import Room
from prefixstore.errors import CorruptError, InvalidParameterError
from prefixstore.format.keys import TokenSequence, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.stats import Counters

if TYPE_CHECKING:
    import os

    from typing_extensions import Self

__all__ = ["Archive", "Holding"]

_T = TypeVar("_T")

# what a location is opened with when nobody says how large it may be: the budget of a store that is told nothing either
DEFAULT_BYTES = 10 << 30
# servers wait while a transaction is open: it evicts so much and no more
BYTES_AT_ONCE = 256 << 20
NO_BUDGET = Budget(2**63 - 1)


@dataclass(frozen=True)
class Holding:
    """What a location has of one namespace.

    Attributes
    ----------
    key
        Key of the namespace, 16 bytes.
    namespace
        Its settings; None if they are missing or damaged.
    pages, tokens, stored_bytes, raw_bytes
        How many, how many tokens they hold, the size of their payloads, and of the states these stand for.
    hits
        How often pages were restored.
    pinned
        How many of the pages are pinned.
    created, last_used
        Of the oldest page, and of the page used last; nanoseconds since the epoch.
    """

    key: bytes
    namespace: Namespace | None
    pages: int
    tokens: int
    stored_bytes: int
    raw_bytes: int
    hits: int
    pinned: int
    created: int
    last_used: int


class Archive:
    """A location, opened without a model. Servers may use it meanwhile.

    Parameters
    ----------
    location
        As for `prefixstore.PrefixStore`.
    max_bytes
        What the location may hold, for what is written through this archive; by default 10 GiB, or what it holds.
    create
        Whether a location that holds no store becomes one.
    read_only
        Whether nothing may be written.

    Raises
    ------
    LocationError
        If there is no store, or it cannot be opened.
    IncompatibleError
        If it is another application's, or a newer version's.

    Examples
    --------
    >>> with Archive("lmdb:///var/cache/kv") as archive:  # doctest: +SKIP
    ...     for holding in archive.holdings():
    ...         print(holding.namespace, holding.pages)
    ...     archive.purge(salt="tenant-7")
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | None,
        *,
        max_bytes: int | None = None,
        create: bool = False,
        read_only: bool = False,
    ) -> None:
        if not create and not read_only and is_persistent(location):
            # opening to write would make a store where a path was mistyped
            open_backend(location, max_bytes=DEFAULT_BYTES, read_only=True).close()
        self.budget = Budget(max_bytes or DEFAULT_BYTES)
        self.backend: Backend = open_backend(location, max_bytes=self.budget.max_bytes, read_only=read_only)
        self.counters = Counters()
        self.catalog = Catalog(Ordering(lru), self.counters)
        try:
            used = self.used().bytes
            if max_bytes is None and used > 0.9 * DEFAULT_BYTES:
                # even to delete takes some room
                self.budget = Budget(used + (used >> 3))
                self.backend.close()
                self.backend = open_backend(location, max_bytes=self.budget.max_bytes, read_only=read_only)
        except BaseException:
            self.backend.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the location."""
        self.backend.close()

    @property
    def location(self) -> str:
        """The location as a URL."""
        return self.backend.location

    # -- looking ------------------------------------------------------------------------------------------------------

    @contextmanager
    def view(self) -> Iterator[View]:
        """What is stored now; the catalog is brought up to it."""
        with self.backend.view() as view:
            with self.catalog.lock:
                self.catalog.refresh(view)
            yield view

    def used(self) -> Used:
        """What the location holds, index included."""
        with self.backend.view() as view:
            return view.used

    def holdings(self) -> list[Holding]:
        """What there is of each namespace, the one used last first."""
        with self.view() as view:
            settings = view.namespaces()
        by_namespace: defaultdict[bytes, list[Page]] = defaultdict(list, {key: [] for key in settings})
        for page in self.catalog.index:
            by_namespace[page.namespace].append(page)
        found = [_holding(key, settings.get(key), pages) for key, pages in by_namespace.items()]
        return sorted(found, key=lambda holding: -holding.last_used)

    def namespace(self, name: str) -> Holding:
        """The namespace whose key begins with these hexadecimal digits, or which has this label.

        Raises
        ------
        InvalidParameterError
            If there is none, or more than one.
        """
        found = [
            holding
            for holding in self.holdings()
            if holding.key.hex().startswith(name.lower())
            or (holding.namespace is not None and holding.namespace.settings.get("label") == name)
        ]
        return _only(found, f"namespace {name!r}", [holding.key.hex() for holding in found])

    def pages(self, namespace: bytes | None = None) -> list[Page]:
        """The pages of a namespace, or all: each before what is stored behind it."""
        with self.view():
            return list(depth_first(self._roots(namespace)))

    def _roots(self, namespace: bytes | None = None) -> list[Page]:
        wanted = (page for page in self.catalog.index if page.parent == page.namespace)
        return [page for page in wanted if namespace in (None, page.namespace)]

    def find(self, digits: str) -> Page:
        """The page whose key begins with these hexadecimal digits.

        Raises
        ------
        InvalidParameterError
            If there is none, or more than one.
        """
        with self.view():
            found = [page for page in self.catalog.index if page.key.hex().startswith(digits.lower())]
        return _only(found, f"page {digits!r}", [page.key.hex() for page in found])

    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        path = [page]
        while (before := self.catalog.index.get(path[-1].parent)) is not None:
            path.append(before)
        return path[::-1]

    def check(self, max_bytes: int | None = None) -> list[Violation]:
        """Verify every invariant and every checksum; with `max_bytes` the budget as well."""
        with self.backend.view() as view:
            return violations(view, Budget(max_bytes) if max_bytes is not None else NO_BUDGET)

    # -- changing -----------------------------------------------------------------------------------------------------

    def pin(self, page: Page, *, pinned: bool = True) -> int:
        """Keep a page from eviction, with all before and behind it; or do so no longer. How many pages changed.

        What comes before a page that is unpinned stays pinned if it leads to another pinned one.
        """
        with self.catalog.transaction(self.backend) as transaction, self.catalog.lock:
            here = self.catalog.index.get(page.key)
            if here is None:
                return 0
            changed = sum(self._pin(transaction, one, pinned) for one in depth_first([here]))
            for one in self.path(here)[-2::-1]:
                if pinned or not any(child.pinned for child in one.dependents):
                    changed += self._pin(transaction, one, pinned)
            return changed

    def _pin(self, transaction: Transaction, page: Page, pinned: bool) -> bool:
        usage = transaction.usage(page.key)
        if usage is None or usage.pinned == pinned:
            return False
        transaction.touch(page.key, replace(usage, pinned=pinned))
        page.pinned = pinned
        self.catalog.candidates.offer(page)
        return True

    def evict_to(self, max_bytes: int) -> Removed:
        """Evict, least recently used first, until the location holds `max_bytes`, or only what is pinned."""
        before, evicted = self.used().bytes, self.counters["evictions"]
        used, done = before, -1
        while used > max_bytes and self.counters["evictions"] > done:
            done = self.counters["evictions"]
            with self.catalog.transaction(self.backend) as transaction:
                target = Budget(max(max_bytes, transaction.used.bytes - BYTES_AT_ONCE))
                Room(self.catalog, target, self.counters).make_spare(transaction, 0)
                used = transaction.used.bytes
        self.backend.reclaim()
        return Removed(self.counters["evictions"] - evicted, max(before - used, 0))

    def purge(
        self,
        *,
        namespace: str | None = None,
        salt: str | None = None,
        older_than: float | None = None,
        tokens: TokenSequence | None = None,
        page: str | None = None,
        everything: bool = False,
    ) -> Removed:
        """Delete pages, pinned ones too. Call `scrub` for what was deleted to be unreadable.

        Parameters
        ----------
        namespace
            Those of one namespace; see `Archive.namespace`.
        salt
            Those of one tenant, of all models.
        older_than
            Those that were not used for so many seconds, nor anything behind them.
        tokens
            Those of sequences that begin with these tokens, and what led only to them.
        page
            The page with this key and all behind it; see `find`.
        everything
            All. What cannot be read goes too.

        Raises
        ------
        InvalidParameterError
            If nothing is chosen. Of what is chosen by several parameters, that which fits all is deleted.
        """
        if not everything and (namespace, salt, older_than, tokens, page) == (None,) * 5:
            raise InvalidParameterError("purge() needs a choice: namespace=, salt=, older_than=, … or everything=True")
        purge = Purge(self.backend, self.catalog)
        choices: list[Choice] = []
        spaces: set[bytes] | None = None
        if namespace is not None or salt is not None:
            among = [self.namespace(namespace)] if namespace is not None else self.holdings()
            spaces = {one.key for one in among if salt is None or (one.namespace and one.namespace.salt == salt)}
            choices.append(partial(purge.of, spaces))
        if older_than is not None:
            choices.append(partial(purge.unused_since, time.time_ns() - round(older_than * 1e9)))
        if tokens is not None:
            choices.append(partial(purge.beginning_with, as_tokens(tokens).tobytes(), spaces))
        if page is not None:
            choices.append(partial(purge.behind, self.find(page).key))
        removed = purge.delete(choices)
        if older_than is None and tokens is None and page is None:
            removed += purge.delete_strays(spaces)
        purge.drop_namespaces()
        return removed

    def scrub(self) -> None:
        """See to it that nothing of what was deleted can be read from the files.

        Raises `UnavailableError` if somebody still reads it. What each backend can promise is in ``docs/backends.md``.
        """
        self.backend.scrub()

    def repair(self, max_bytes: int | None = None) -> tuple[list[Violation], Removed]:
        """Delete what is broken, and what is stored behind it; what was found, and how much is gone."""
        found = self.check(max_bytes)
        removed = Purge(self.backend, self.catalog).delete_broken(found)
        if max_bytes is not None:
            removed += self.evict_to(max_bytes)
        return found, removed

    def compact(self) -> int:
        """Give room that deletions have freed back to the disk; how many bytes.

        Raises
        ------
        UnavailableError
            If it cannot be done now.
        """
        return self.backend.compact()


def _only(found: Sequence[_T], what: str, names: Sequence[str]) -> _T:
    if len(found) == 1:
        return found[0]
    if not found:
        raise InvalidParameterError(f"{what} is not here")
    raise InvalidParameterError(f"{what} is not the only one: {', '.join(name[:12] for name in names[:4])} …")


def _parsed(settings: bytes) -> Namespace | None:
    try:
        return Namespace.parse(settings)
    except CorruptError:
        return None


def _holding(key: bytes, settings: bytes | None, pages: Sequence[Page]) -> Holding:
    return Holding(
        key,
        _parsed(settings) if settings is not None else None,
        len(pages),
        sum(page.n_tokens for page in pages),
        sum(page.stored_bytes for page in pages),
        sum(page.raw_bytes for page in pages),
        sum(page.hits for page in pages),
        sum(page.pinned for page in pages),
        min((page.created for page in pages), default=0),
        max((page.last_used for page in pages), default=0),
    )
