"""A location without a model: inspect it, delete from it, repair it. The command line is built on it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, closing

from prefixstore.backends import is_persistent
from prefixstore.backends.encryption_keys import Key, Keys
from prefixstore.counters import Counters
from prefixstore.engine.budget import Budget
from prefixstore.engine.delete import Choice, Removed, beginning_with, subtree
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES, policy_named
from prefixstore.engine.invariants import Violation
from prefixstore.engine.page import Page
from prefixstore.engine.page_view import PageView, Used
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.engine.relatives import with_descendants
from prefixstore.engine.saved_notes import noted_policy
from prefixstore.errors import IncompatibleError, InvalidParameterError, LocationError, StorageError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.codec import decode
from prefixstore.format.figures import NOTE
from prefixstore.format.keys import TokenSequence, as_tokens
from prefixstore.format.record import Facts, Record
from prefixstore.maintenance.holdings import Holding, holdings_of, only_one, read_facts
from prefixstore.opening import OpenLocation
from prefixstore.parameters import Parameters
from prefixstore.units import counted, parse_bytes, parse_seconds, shown

log = logging.getLogger("prefixstore")

# the budget of a location that is opened without one, as of a `PrefixStore`
DEFAULT_BYTES = parse_bytes(Parameters.MAX_BYTES, "max_bytes")
NO_BUDGET = Budget(2**63 - 1)
# pages with the same first digits whose records are read at once
MOST_NAMED = 8


class Archive(OpenLocation):
    """A location, opened without a model. Other processes may use it at the same time.

    Parameters
    ----------
    location
        As for `prefixstore.PrefixStore`.
    max_bytes
        What the location may hold when pages are written through this archive; by default 10 GiB, or what it holds.
    create
        Whether to create a store where there is none.
    read_only
        Whether nothing may be written.
    policy
        In which order pages are evicted through this archive, as for `prefixstore.PrefixStore`; by default in that of
        the store which was the last to begin writing to the location, and ``"lru"`` if that is not known.
    key
        As for `prefixstore.PrefixStore`.

    Attributes
    ----------
    backend
        Holds the bytes; for measurements.
    policy
        The name of the policy.
    max_bytes
        What the location may hold when pages are written.

    Raises
    ------
    LocationError
        If there is no store, or it cannot be opened.
    IncompatibleError
        If it belongs to another application, or was written by a newer version.

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
        policy: str | None = None,
        key: Key | None = None,
    ) -> None:
        if policy is not None:
            policy_named(policy)  # raises if it is unknown
        if max_bytes is not None:
            max_bytes = parse_bytes(max_bytes, "max_bytes")
        size = max_bytes or DEFAULT_BYTES
        if not read_only and is_persistent(location):
            # opening for writing would create a store at a mistyped path
            try:
                with (
                    closing(open_pages(location, max_bytes=size, read_only=True, key=key)) as found,
                    found.view() as view,
                ):
                    used = view.used.bytes
            except (LocationError, IncompatibleError):
                if not create:
                    raise
                used = 0
            if max_bytes is None:
                # even deleting needs some free space
                size = max(size, used + (used >> 3))
        self.backend: Pages = open_pages(location, max_bytes=size, read_only=read_only, key=key)
        try:
            with self.backend.view() as view:
                noted = noted_policy(view)
        except BaseException:
            self.backend.close()
            raise
        self.policy = policy or (noted if noted in POLICIES else "lru")
        self.max_bytes = size
        engine = Engine(
            self.backend,
            Budget(size),
            policy_named(self.policy),
            Encoder("raw"),
            Counters(),
            write_behind=False,
            read_only=read_only,
            housekeeping=False,
        )
        super().__init__(engine, max_bytes)

    @property
    def keys(self) -> Keys | None:
        """The keys under which the location is encrypted; None if it is not."""
        return self.backend.encrypted.keys if self.backend.encrypted is not None else None

    @property
    def encryption(self) -> str:
        """Whether the location is encrypted, and under which keys, in words."""
        if self.backend.encrypted is None:
            return "none"
        newest, *older = self.backend.encrypted.key_ids()
        return f"AES-256-GCM, key {newest}" + (f"; older: {', '.join(older)}" if older else "")

    def rotate_keys(self) -> tuple[str, int, int]:
        """Have everything encrypted under the newest key: its id, and what `Encrypted.rotate` returns.

        Raises
        ------
        InvalidParameterError
            If the location is not encrypted.
        """
        if self.backend.encrypted is None:
            raise InvalidParameterError(f"{self.location} is not encrypted; prefixstore copy --to-key encrypts a copy")
        done, left = self.engine.threads.call(self.backend.encrypted.rotate)
        return self.backend.encrypted.keys.newest.hex(), done, left

    # -- inspecting ---------------------------------------------------------------------------------------------------

    def view(self) -> AbstractContextManager[PageView]:
        """A view of what is stored now."""
        return self.engine.view()

    def used(self) -> Used:
        """What the location holds, index included."""
        with self.backend.view() as view:
            return view.used

    def holdings(self, namespace: str | None = None, salt: str | None = None) -> list[Holding]:
        """What the location holds of each namespace, the most recently used first.

        If they are given, of one namespace (see `namespace`), and of one tenant.
        """
        if namespace is not None:
            found = [self.namespace(namespace)]
        else:
            with self.view() as view:
                found = holdings_of(view)
        return [one for one in found if salt is None or (one.namespace and one.namespace.salt == salt)]

    def namespace(self, name: str) -> Holding:
        """The namespace whose key begins with these hexadecimal digits, or which has this label.

        Raises
        ------
        InvalidParameterError
            If none or several do.
        """
        name = string_of(name, "namespace")
        found = [
            holding
            for holding in self.holdings()
            if holding.key.hex().startswith(name.lower()) or holding.settings.get("label") == name
        ]
        return only_one(found, "namespace", name, self.location)

    def pages(self, namespace: bytes | None = None) -> list[Page]:
        """The pages of a namespace, or of all, parents before their children."""
        return [page for page in self.engine.lookups.pages() if namespace in (None, page.namespace)]

    def find(self, digits: str) -> Page:
        """The page whose key begins with these hexadecimal digits.

        Raises
        ------
        InvalidParameterError
            If none or several do.
        """
        with self.view() as view:
            return self.find_in(view, read_facts(view), digits)

    def find_in(self, view: PageView, facts: Facts, digits: str) -> Page:
        """As `find`, among these pages of a view."""
        digits = string_of(digits, "page")
        keys = [key for key in map(bytes, facts["key"]) if key.hex().startswith(digits.lower())]
        found: list[Page] = []
        # those that cannot be read do not count, however many there are
        while keys and len(found) < 2:
            some, keys = keys[:MOST_NAMED], keys[MOST_NAMED:]
            entries = view.records(some).items()
            found += [Page.stored(key, record, usage) for key, (record, usage) in entries if isinstance(record, Record)]
        return only_one(found, "page", digits, self.location)

    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        return self.engine.lookups.path(page)

    def damage(self, key: bytes) -> str | None:
        """What is wrong with the stored bytes of the page with this key; None if they are what was written."""
        with self.backend.view() as view:
            try:
                found = next(iter(view.fetch([key])), None)
                if found is None:
                    return "the page was deleted meanwhile"
                decode(*found)
            except StorageError as error:
                return str(error)
        return None

    def select(
        self,
        *,
        namespaces: Collection[bytes] | None = None,
        tokens: TokenSequence | None = None,
        page: str | None = None,
    ) -> set[bytes]:
        """The keys of the pages that match all of the given parameters, and of their ancestors.

        Without these the pages could not be restored.

        Parameters
        ----------
        namespaces
            Pages of these namespaces.
        tokens
            Pages of sequences that begin with these tokens, and pages that lead only to them.
        page
            The page with this key, and its descendants; see `find`.
        """
        wanted = set(self.engine.deleter.select(self._choice(namespaces, None, tokens, page)))
        # children before their parents: one pass is enough
        for one in reversed(self.pages()):
            if one.key in wanted and one.parent != one.namespace:
                wanted.add(one.parent)
        return wanted

    def check(self, max_bytes: int | None = None) -> list[Violation]:
        """Verify every invariant and every checksum; with `max_bytes` also that the location holds no more."""
        return self.engine.upkeep.check(
            Budget(parse_bytes(max_bytes, "max_bytes")) if max_bytes is not None else NO_BUDGET
        )

    # -- changing -----------------------------------------------------------------------------------------------------

    def pin(self, page: Page, *, pinned: bool = True) -> int:
        """Pin or unpin a page with its descendants and its ancestors; how many pages changed.

        An ancestor of an unpinned page stays pinned if it leads to another pinned page.
        """
        return self.engine.upkeep.pin_page(page, pinned=pinned)

    def purge(
        self,
        *,
        namespace: str | None = None,
        salt: str | None = None,
        older_than: float | None = None,
        tokens: TokenSequence | None = None,
        page: str | None = None,
        everything: bool = False,
        dry_run: bool = False,
    ) -> Removed:
        """Delete pages, pinned ones too. What was deleted can be read from the files until `scrub` is called.

        If several parameters are given, the pages that match all of them are deleted. Damaged pages, of which it is not
        known what they match, are deleted as well, with what is stored after them.

        Parameters
        ----------
        namespace
            Pages of one namespace; see `Archive.namespace`.
        salt
            Pages of one tenant, for all models.
        older_than
            Pages that were not used for this many seconds, and whose descendants were not either.
        tokens
            Pages of sequences that begin with these tokens, at least one, and pages that led only to them.
        page
            The page with this key and its descendants; see `find`.
        everything
            All pages, unreadable ones too.
        dry_run
            Count the pages that match, and delete nothing. Damaged ones are not counted.

        Raises
        ------
        InvalidParameterError
            If no parameter is given, `tokens` is empty, or there is no such namespace or page.

        Notes
        -----
        Whose pages they are is in the settings of their namespace. If those are missing or damaged, `salt` does not
        choose them, and a warning is logged with the key of the namespace.
        """
        if not everything and all(choice is None for choice in (namespace, salt, older_than, tokens, page)):
            raise InvalidParameterError(
                "purge() needs at least one of namespace=, salt=, older_than=, tokens=, page=, or everything=True"
            )
        namespaces = None
        if namespace is not None or salt is not None:
            salt = None if salt is None else string_of(salt, "salt")
            namespaces = {one.key for one in self.holdings(namespace, salt)}
        choice = self._choice(namespaces, older_than, tokens, page)
        is_all, deleter = choice == Choice(), self.engine.deleter
        if dry_run:
            sizes = deleter.select(choice)
            return Removed(len(sizes), sum(sizes.values()))
        # first: a page that such a one follows could not be deleted
        removed = deleter.delete_strays(newer=is_all) + deleter.delete(choice)
        deleter.drop_empty_namespaces()
        if is_all:
            self.engine.upkeep.change_note(NOTE, lambda _: None)
        for left in self.unmatched(salt):
            log.warning("%s: %s", self.location, left)
        return removed

    def unmatched(self, salt: str | None = None) -> list[str]:
        """What a purge, of this tenant or of all, leaves since it is not known whether it matches: sentences."""
        found = [
            f"{counted(one.pages, 'page')} may be of this tenant or of another, since the settings of namespace "
            f"{one.key.hex()} are missing or damaged; to delete them, purge that namespace"
            for one in (self.holdings() if salt is not None else [])
            if one.namespace is None and one.pages
        ]
        if n := self.engine.deleter.n_newer():
            found.append(
                f"not deleted: {counted(n, 'page')} of a newer prefixstore, or after such a page, which may match; "
                "purge with that version, or everything"
            )
        return found

    def _choice(
        self,
        namespaces: Collection[bytes] | None,
        older_than: float | None,
        tokens: TokenSequence | None,
        page: str | None,
    ) -> Choice:
        """What pages have to be to be chosen: all of what is given."""
        before, keys = None, None
        if older_than is not None:
            before = time.time_ns() - round(parse_seconds(older_than, "older_than") * 1e9)
        wanted = as_tokens(tokens) if tokens is not None else None
        if wanted is not None and not len(wanted):
            raise InvalidParameterError(
                "tokens is empty, and every sequence begins with it; leave it out for all pages"
            )
        first = self.find(page).key if page is not None else None
        with self.view() as view:
            if wanted is not None:
                keys = beginning_with(view, wanted.tobytes(), namespaces)
            if first is not None:
                below = subtree(view, first)
                keys = below if keys is None else keys & below
        return Choice(namespaces, before, keys)

    def scrub(self) -> None:
        """Overwrite what deletions have freed, so that nothing of it can be read from the files.

        Raises `UnavailableError` if another process still reads it. The documentation of each backend says what it can
        guarantee.
        """
        self.engine.upkeep.scrub()

    def repair(self, max_bytes: int | None = None, *, dry_run: bool = False) -> tuple[list[Violation], Removed]:
        """Delete damaged pages and their descendants, and rebuild a wrong index of children.

        Returns what was found, and how much was deleted.

        With `max_bytes`, pages are then evicted until the location holds no more. With `dry_run` nothing is changed;
        what would be evicted is not counted.
        """
        found = self.check(max_bytes)
        if dry_run:
            keys = {bytes.fromhex(one.key) for one in found if one.key and one.rule != "index"}
            with self.backend.view() as view:
                sizes = [getattr(one.record, "stored_bytes", 0) for one in with_descendants(view, keys)]
            return found, Removed(len(sizes), sum(sizes))
        # what rows that cannot be decrypted leave behind is seen once they are gone
        more = self.check() if self.backend.undecryptable(delete=True) else []
        removed = self.engine.deleter.repair([*found, *more])
        if max_bytes is not None:
            evicted = self.evict(max_bytes)
            removed += Removed(len(evicted.pages), evicted.bytes)
        return found, removed

    def compact(self) -> int:
        """Return the space that deletions have freed to the file system; how many bytes.

        Raises
        ------
        UnavailableError
            If it cannot be done at present.
        """
        return self.engine.upkeep.compact()


def string_of(value: object, parameter: str) -> str:
    """A value that has to be a string. Raises `InvalidParameterError`."""
    if not isinstance(value, str):
        raise InvalidParameterError(f"{parameter}={shown(value)} must be a string")
    return value
