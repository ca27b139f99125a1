"""What an eviction policy has learned, saved as a note in the location so that it survives a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages
from prefixstore.engine.space import Evictor
from prefixstore.errors import StorageError
from prefixstore.format.saved_state import pack_state

__all__ = ["POLICY_NOTE", "PolicyMemory", "note_policy", "noted_policy"]

log = logging.getLogger("prefixstore")

# it is saved so often at most, and only after so many lookups
SAVE_SECONDS = 600.0
SAVE_LOOKUPS = 50
# and only if it takes at most this part of the budget
PART_OF_BUDGET = 1 / 256


# the name of the policy by which pages are evicted
POLICY_NOTE = b"policy"


def note_policy(transaction: Transaction, name: str) -> None:
    """Note the name of the policy in a location, for commands that open it without the store's parameters."""
    if name and transaction.note(POLICY_NOTE) != name.encode():
        transaction.put_note(POLICY_NOTE, name.encode())


def noted_policy(view: View) -> str | None:
    """The policy of the last store that wrote pages; None if it is not known."""
    note = view.note(POLICY_NOTE)
    return note.decode("ascii", "replace") if note is not None else None


class PolicyMemory:
    """Loads what was learned before the first commit, and saves it at intervals and at the end.

    Several processes have one note: the last one that saves wins. What cannot be read is ignored. What cannot be saved
    is lost, which costs hits and nothing else.

    Parameters
    ----------
    backend
        Of the engine.
    catalog
        Has the policy.
    evictor
        Makes space for the note.
    budget
        What the location may hold.
    clock
        Seconds.
    """

    def __init__(
        self,
        backend: Pages,
        catalog: Catalog,
        evictor: Evictor,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._catalog = catalog
        self._evictor = evictor
        self._budget = budget
        self._clock = clock
        self._saved_at = clock()
        self._saved_lookups = 0
        self._is_loaded = False

    def load(self) -> None:
        """Read the note, once. Raises `StorageError`."""
        name = self._catalog.policy_note
        if self._is_loaded or name is None:
            return
        with self._backend.view() as view:
            note = view.note(name)
        self._is_loaded = True
        if note is not None and not self._catalog.load_policy(note):
            log.warning("the saved state of the eviction policy cannot be read; it starts afresh")

    def save(self, *, closing: bool = False) -> None:
        """Write the note if enough has happened since the last time."""
        name, lookups = self._catalog.policy_note, self._catalog.n_lookups
        if name is None or not self._is_loaded or lookups < self._saved_lookups + SAVE_LOOKUPS:
            return
        if not closing and self._clock() < self._saved_at + SAVE_SECONDS:
            return
        self._saved_at, self._saved_lookups = self._clock(), lookups
        # packed without the lock of the catalog
        note = pack_state(self._catalog.learned())
        if len(note) > self._budget.max_bytes * PART_OF_BUDGET:
            return
        try:
            self._write(name, note)
        except StorageError as error:
            log.warning("the state of the eviction policy was not saved: %s", error)

    def _write(self, name: bytes, note: bytes) -> None:
        with self._backend.view() as view:
            used, old = view.used.bytes, view.note(name)
        size = len(note) - (len(old) if old is not None else 0)
        if used + size > self._budget.max_bytes:
            self._evictor.shrink(self._backend, self._budget.max_bytes - size)
        with self._backend.update() as transaction:
            transaction.put_note(name, note)
