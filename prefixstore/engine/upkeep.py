"""Upkeep of a location: measure, check, pin, clear, compact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from prefixstore.backends.threads import handed_over
from prefixstore.engine.budget import Budget
from prefixstore.engine.delete import Choice, Deleter
from prefixstore.engine.invariants import Violation, violations
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.page import Page, Path
from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.page_view import Used
from prefixstore.engine.pages import retried
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.relatives import pinned_with
from prefixstore.engine.space import Evictor
from prefixstore.errors import ClosedError, CorruptError, StorageError
from prefixstore.format.keys import Tokens
from prefixstore.format.namespace import Namespace
from prefixstore.units import counted

if TYPE_CHECKING:
    from prefixstore.engine.engine import Engine

log = logging.getLogger("prefixstore")


class Upkeep(Part):
    """Checks a location, and changes what is stored.

    Attributes
    ----------
    behind
        Returns the engine of the far location, where some methods do the same; None for one location.
    """

    behind: Callable[[], Engine] | None = None

    def __init__(self, shared: Shared, lookups: Lookups, deleter: Deleter, evictor: Evictor) -> None:
        super().__init__(shared)
        self._lookups = lookups
        self._deleter = deleter
        self._evictor = evictor
        # the bytes of all payloads and states, as measured last
        self._sizes = (0, 0)

    # -- what it holds ------------------------------------------------------------------------------------------------

    @handed_over
    def used(self) -> tuple[Used, int, int]:
        """The size of the location, and the bytes of all payloads as stored and as states."""
        with self._backend.view() as view:
            self._evictor.saw(view.used)
            count = view.count()
        self._sizes = count.stored_bytes, count.raw_bytes
        return self.last_used()

    def last_used(self) -> tuple[Used, int, int]:
        """What `used` returned last; does not ask the location."""
        return self._evictor.used or Used(0, 0), *self._sizes

    @handed_over
    def measure(self) -> bool:
        """Bring `last_used` up to date, for monitoring; returns whether the location answered.

        Does not block while the circuit is open, and never raises because of the location.
        """
        try:
            with self.breaker.asking():
                self.used()
        except (ClosedError, StorageError):
            return False
        return True

    @handed_over
    def namespaces(self) -> list[Namespace]:
        """The namespaces that have pages, in the far location as well, except those whose settings are damaged."""
        with self.breaker.asking(), self._backend.view() as view:
            stored = view.namespaces()
        found: dict[bytes, Namespace] = {}
        for key, settings in stored.items():
            with suppress(CorruptError):
                found[key] = Namespace.parse(settings)
        if self.behind is not None:
            try:
                found = {one.key: one for one in self.behind().upkeep.namespaces()} | found
            except (ClosedError, StorageError) as error:
                log.warning("the far location cannot list its namespaces: %s", error)
        return list(found.values())

    # -- notes --------------------------------------------------------------------------------------------------------

    @handed_over
    @retried
    def change_note(self, name: bytes, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace a note by what `change` makes of it (None for no note), atomically.

        `change` is called again if another process has changed the note meanwhile. Raises `StorageError`.
        """
        with self._backend.update() as transaction:
            old = transaction.note(name)
            new = change(old)
            if new != old:
                transaction.put_note(name, new)

    # -- checking and changing it ------------------------------------------------------------------------------------

    @handed_over
    def check(self, budget: Budget | None = None) -> list[Violation]:
        """Check every invariant, every checksum, and a budget (by default its own); in the far location as well."""
        # first: this finds out which keys others use now
        n_rows = self._backend.undecryptable()
        with self._backend.view() as view:
            found = violations(view, self._budget if budget is None else budget)
        if n_rows:
            what = f"{counted(n_rows, 'row')} cannot be decrypted: changed, or of a forgotten tenant"
            found.append(Violation("undecryptable", "", what))
        return found + (self.behind().upkeep.check() if self.behind is not None else [])

    @handed_over
    def pin(self, namespace: bytes, tokens: Tokens, page_tokens: int, *, pinned: bool) -> int:
        """Pin or unpin the committed pages of the longest stored prefix; returns how many tokens they cover.

        In the far location as well, if it answers; the number is that of the near one.
        """
        path = Path((), 0)

        def chosen(transaction: PageUpdate) -> Sequence[bytes]:
            nonlocal path
            prompt = self._lookups.prompt(namespace, tokens, page_tokens)
            found = self._lookups.locate(transaction, prompt, self._catalog.along(prompt), snapshots=True)
            # if there are snapshots, pages alone cannot be restored
            path = next(iter(found.to_snapshots()), found.path())
            return [page.key for page in path.pages]

        self._set_pinned(chosen, pinned=pinned)
        if self.behind is not None:
            try:
                self.behind().upkeep.pin(namespace, tokens, page_tokens, pinned=pinned)
            except (ClosedError, StorageError) as error:
                log.warning("the far location does not follow: %s", error)
        return path.n_tokens

    @handed_over
    def pin_page(self, page: Page, *, pinned: bool) -> int:
        """Pin or unpin a page with its relatives (see `pinned_with`); returns how many pages changed."""

        def chosen(transaction: PageUpdate) -> Sequence[bytes]:
            return pinned_with(transaction, page.key, pinned=pinned)

        return self._set_pinned(chosen, pinned=pinned)

    @retried
    def _set_pinned(self, choose: Callable[[PageUpdate], Sequence[bytes]], *, pinned: bool) -> int:
        changed = 0
        with self._catalog.update(self._backend) as transaction:
            keys = choose(transaction)
            for key in keys:
                usage = transaction.usage(key)
                if usage is not None and usage.pinned != pinned:
                    transaction.touch(key, replace(usage, pinned=pinned))
                    changed += 1
        return changed

    @handed_over
    def clear(self, namespace: bytes | None) -> int:
        """Delete all pages of a namespace, or of all (None), pinned ones too, in both locations; returns how many.

        In several updates, so that others need not wait for all of it. Pages that are captured meanwhile stay, unless
        they continue a deleted one. Raises `StorageError`; what was deleted until then stays deleted.
        """
        n_pages = self._deleter.delete(Choice(None if namespace is None else {namespace})).pages
        return n_pages + (self.behind().upkeep.clear(namespace) if self.behind is not None else 0)

    @handed_over
    def scrub(self) -> None:
        """Overwrite what deletions have freed, so that nothing of a deleted page can be read from the files.

        Raises `UnavailableError` if that is not possible now, because a reader still sees it. What the location cannot
        promise is described in ``docs/operations.md``.
        """
        self._backend.rows.compact(erase=True)

    @handed_over
    def compact(self) -> int:
        """Return free space to the disk; how many bytes. Raises `UnavailableError`."""
        return self._backend.rows.compact()
