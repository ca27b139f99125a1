"""What an engine does to a location that is neither a lookup nor a capture: check, pin, delete, evict, leave notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from prefixstore.backends.threads import handed_over
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.engine.budget import Budget, Evicted
from prefixstore.engine.delete import Choice, Removed, of_namespaces
from prefixstore.engine.eviction_log import Cause
from prefixstore.engine.index import Page, Path
from prefixstore.engine.invariants import Violation, violations
from prefixstore.engine.lookup import Prompt
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.pages import retried
from prefixstore.engine.policy import Policy
from prefixstore.engine.reading import Reading
from prefixstore.engine.relatives import pinned_with
from prefixstore.engine.space import Evictor
from prefixstore.engine.waiting import Lock, LockT
from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.keys import Tokens
from prefixstore.format.namespace import Namespace
from prefixstore.units import counted

__all__ = ["Upkeep"]


class Upkeep(Reading):
    """Checks a location, and changes what is stored; see `Engine`, which has the parts."""

    bookmarks: Bookmarks
    budget: Budget
    _policy: Policy

    @handed_over
    def namespaces(self) -> list[Namespace]:
        """The namespaces that have pages in the location, except those whose settings are damaged."""
        found: list[Namespace] = []
        with self._backend.view() as view:
            for settings in view.namespaces().values():
                with suppress(CorruptError):
                    found.append(Namespace.parse(settings))
        return found

    @handed_over
    def note(self, name: bytes) -> bytes | None:
        """A note that a job has left in the location. Raises `StorageError`."""
        with self._backend.view() as view:
            return view.note(name)

    @handed_over
    @retried
    def change_note(self, name: bytes, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace a note by what `change` makes of it (None for no note), atomically. Raises `StorageError`.

        `change` is called again if another process has changed the note meanwhile.
        """
        with self._backend.update() as transaction:
            old = transaction.note(name)
            new = change(old)
            if new != old:
                transaction.put_note(name, new)

    def wrap_lock(self, wrap: Callable[[Lock], LockT]) -> LockT:
        """Have the catalog use what `wrap` makes of its lock; for measurements, before another thread uses the engine.

        Returns
        -------
        object
            What `wrap` has returned: a context manager that takes the lock.
        """
        return self._catalog.wrap_lock(wrap)

    @handed_over
    def check(self, budget: Budget | None = None) -> list[Violation]:
        """Check every invariant of the location, every checksum, and a budget (by default the engine's)."""
        # first, since it finds out which keys others use now
        n_rows = self._backend.undecryptable()
        with self._backend.view() as view:
            found = violations(view, self.budget if budget is None else budget)
        if n_rows:
            what = f"{counted(n_rows, 'row')} cannot be decrypted: changed, or of a forgotten tenant"
            found.append(Violation("undecryptable", "", what))
        return found

    @handed_over
    def pin(self, namespace: bytes, tokens: Tokens, page_tokens: int, *, pinned: bool) -> int:
        """Pin or unpin the committed pages of the longest stored prefix; the number of tokens they cover."""
        path = Path((), 0)

        def chosen(transaction: Transaction) -> Sequence[bytes]:
            nonlocal path
            prompt = Prompt(namespace, tokens, page_tokens, self._trie)
            found = self._catalog.locate(transaction, self._catalog.along(prompt), prompt, snapshots=True)
            # where there are snapshots, pages alone cannot be restored
            path = next((found.path_to(*one) for one in found.fitting_snapshots()), found.path())
            return [page.key for page in path.pages]

        self._set_pinned(chosen, pinned=pinned)
        return path.n_tokens

    @handed_over
    def pin_page(self, page: Page, *, pinned: bool) -> int:
        """Pin or unpin a page with its descendants and its ancestors; how many pages changed.

        An ancestor of an unpinned page stays pinned if it leads to another pinned page.
        """

        def chosen(transaction: Transaction) -> Sequence[bytes]:
            return pinned_with(transaction, page.key, pinned=pinned)

        return self._set_pinned(chosen, pinned=pinned)

    @retried
    def _set_pinned(self, choose: Callable[[Transaction], Sequence[bytes]], *, pinned: bool) -> int:
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
    def delete(self, choices: Sequence[Choice]) -> Removed:
        """Delete the pages that all choices have in common, pinned ones too; see `engine.delete`."""
        removed = self.deleter.delete(choices)
        self.bookmarks.prune()
        return removed

    def clear(self, namespace: bytes | None) -> int:
        """Delete all pages of a namespace, pinned ones too (None: of the location); how many.

        In several transactions, so that others need not wait for all of it. Pages captured meanwhile stay, unless they
        continue a deleted one. Raises `StorageError`; what was deleted until then stays deleted.
        """
        choices = [] if namespace is None else [partial(of_namespaces, namespaces={namespace})]
        return self.delete(choices).pages

    @handed_over
    def evict(self, max_bytes: int, *, dry_run: bool = False) -> Evicted:
        """Evict in the order of the policy until the location holds `max_bytes`, or only what is pinned.

        A `dry_run` finds out what that would be, and changes nothing. Raises `StorageError`.
        """
        self._load_policy()
        chosen: list[bytes] = []
        evictor = Evictor(self._catalog, self.budget, self.counters, Cause.ASKED)
        before = self.used()[0].bytes
        if dry_run:
            chosen, left = evictor.trial(self._backend, max_bytes)
        else:
            n_before, left = -1, max_bytes + 1
            # what a location takes is known exactly only after a commit
            while left > max_bytes and len(chosen) > n_before:
                n_before = len(chosen)
                chosen += evictor.shrink(self._backend, max_bytes)[0]
                self._backend.reclaim()
                left = self.used()[0].bytes
            self._backend.mend()
        keys = tuple(key.hex() for key in chosen)
        return Evicted(keys, max(before - left, 0), self._policy.name, max_bytes, left, dry_run)

    def _load_policy(self) -> None:
        """Have the policy know what was learned before; what cannot be read now is asked for again."""
        with suppress(StorageError):
            self._notes.load()

    @handed_over
    def scrub(self) -> None:
        """Overwrite what deletions have freed. Raises `UnavailableError` if another process still reads it."""
        self._backend.scrub()

    @handed_over
    def compact(self) -> int:
        """Return free space to the disk; how many bytes. Raises `UnavailableError`."""
        return self._backend.compact()
