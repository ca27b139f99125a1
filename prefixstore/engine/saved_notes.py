"""What an engine saves as notes in its location: what its policy has learned, and which pages were evicted lately.

Several processes have one note. What cannot be read is ignored, and what cannot be saved is lost: that costs hits, or a
diagnosis, and nothing else.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from prefixstore.engine.evictions import EVICTIONS_NOTE, KEY_PART, Eviction, parsed
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages
from prefixstore.engine.space import Evictor, Space
from prefixstore.errors import StorageError
from prefixstore.format.saved_state import pack_state

__all__ = ["POLICY_NOTE", "EvictionNote", "PolicyMemory", "SavedNote", "note_policy", "noted_policy"]

log = logging.getLogger("prefixstore")

# a note takes at most this part of the budget
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


class SavedNote(ABC):
    """A note that is saved at intervals, if enough has happened, and at the end.

    Parameters
    ----------
    backend
        Of the engine.
    evictor
        Makes space for the note.
    clock
        Seconds.
    """

    seconds: float
    """It is saved so often at most."""
    least = 1
    """And only if so much has happened since."""

    def __init__(self, backend: Pages, evictor: Evictor, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._catalog = evictor.catalog
        self._evictor = evictor
        self._clock = clock
        self._saved_at = clock()
        self._n_saved = 0

    @property
    @abstractmethod
    def name(self) -> bytes | None:
        """Of the note; None if there is nothing to be saved."""

    @property
    @abstractmethod
    def n_happened(self) -> int:
        """How much has happened since the start."""

    @abstractmethod
    def pack(self, old: bytes | None, at_most: int) -> bytes:
        """The note, given that of another process, in at most so many bytes; nothing if that is too little."""

    def save(self, *, closing: bool = False) -> None:
        """Save the note if enough has happened since the last time; not too often, unless the engine is closing."""
        n, now, name = self.n_happened, self._clock(), self.name
        if name is None or n < self._n_saved + self.least or (not closing and now < self._saved_at + self.seconds):
            return
        self._saved_at, self._n_saved = now, n
        max_bytes = self._evictor.budget.max_bytes
        try:
            with self._catalog.update(self._backend) as transaction:
                old = transaction.note(name)
                new = self.pack(old, int(max_bytes * PART_OF_BUDGET))
                if new and new != old:
                    growth = len(new) - len(old or b"")
                    Space(self._evictor, transaction).shrink(max_bytes - growth)
                    transaction.put_note(name, new)
        except StorageError as error:
            log.warning("a note of the engine was not saved: %s", error)


class PolicyMemory(SavedNote):
    """Keeps what the policy has learned: the last process that saves it wins."""

    seconds = 600.0
    # prompts
    least = 50
    _is_loaded = False

    @property
    def name(self) -> bytes | None:
        return self._catalog.policy.note if self._is_loaded else None

    @property
    def n_happened(self) -> int:
        return self._catalog.n_lookups

    def pack(self, old: bytes | None, at_most: int) -> bytes:
        packed = pack_state(self._catalog.learned())
        return packed if len(packed) <= at_most else b""

    def load(self) -> None:
        """Read the note, once, before the first commit. Raises `StorageError`."""
        name = self._catalog.policy.note
        if self._is_loaded or name is None:
            return
        with self._backend.view() as view:
            note = view.note(name)
        self._is_loaded = True
        if note is not None and not self._catalog.load_policy(note):
            log.warning("the saved state of the eviction policy cannot be read; it starts afresh")


class EvictionNote(SavedNote):
    """Keeps the log of evictions, and adds those of other processes."""

    seconds = 60.0

    @property
    def name(self) -> bytes:
        return EVICTIONS_NOTE

    @property
    def n_happened(self) -> int:
        return self._catalog.evictions.n_added

    def pack(self, old: bytes | None, at_most: int) -> bytes:
        return self._catalog.evictions.pack(old, at_most)

    def find(self, view: View, keys: Sequence[bytes]) -> dict[bytes, Eviction]:
        """What is known of these pages, by this process or by others. Raises `StorageError`."""
        noted = parsed(view.note(EVICTIONS_NOTE))
        known = ((key, self._catalog.evictions.find(key) or noted.get(key[:KEY_PART])) for key in keys)
        return {key: one for key, one in known if one is not None}
