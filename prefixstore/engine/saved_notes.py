"""What an engine saves as notes in its location: what its policy has learned, and which pages were evicted lately.

Several processes have one note. What cannot be read is ignored, and what cannot be saved is lost: that costs hits, or a
diagnosis, and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from prefixstore.engine.eviction_log import EVICTIONS_NOTE, KEY_PART, Eviction, parsed
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages
from prefixstore.engine.space import Evictor, Space
from prefixstore.errors import StorageError

__all__ = ["POLICY_NOTE", "SavedNotes", "note_policy", "noted_policy"]

log = logging.getLogger("prefixstore")

# a note takes at most this part of the budget
PART_OF_BUDGET = 1 / 256
# what the policy has learned is saved so often at most, and only after so many lookups; evictions so often at most
POLICY_SECONDS, POLICY_LOOKUPS = 600.0, 50
EVICTION_SECONDS = 60.0
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


class SavedNotes:
    """Saves the two notes at intervals, if enough has happened, and at the end. Each takes a small part of the budget.

    Parameters
    ----------
    backend
        Of the engine.
    evictor
        Makes space for the notes.
    clock
        Seconds.
    """

    def __init__(self, backend: Pages, evictor: Evictor, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._catalog = evictor.catalog
        self._evictor = evictor
        self._clock = clock
        self._is_loaded = self._has_warned = False
        self._started = clock()
        # when each was saved, and how much had happened until then
        self._saved: dict[bytes, tuple[float, int]] = {}

    def load(self) -> None:
        """Have the policy go on with what was learned, before the first commit. What cannot be read is read later."""
        name = self._catalog.policy.note
        if self._is_loaded or name is None:
            return
        try:
            with self._backend.view() as view:
                note = view.note(name)
        except StorageError as error:
            if not self._has_warned:
                log.warning("what the eviction policy has learned cannot be read yet: %s", error)
            self._has_warned = True
            return
        self._is_loaded = True
        if note is not None and not self._catalog.load_policy(note):
            log.warning("the saved state of the eviction policy cannot be read; it starts afresh")

    def find(self, view: View, keys: Sequence[bytes]) -> dict[bytes, Eviction]:
        """What is known of the evictions of these pages, by this process or by others. Raises `StorageError`."""
        noted = parsed(view.note(EVICTIONS_NOTE))
        known = ((key, self._catalog.evictions.find(key) or noted.get(key[:KEY_PART])) for key in keys)
        return {key: one for key, one in known if one is not None}

    def save(self, *, closing: bool = False) -> None:
        """Save what is due: when the engine is closing, all that has changed."""
        catalog = self._catalog
        name, evictions = catalog.policy.note if self._is_loaded else None, catalog.evictions
        if name is not None and self._is_due(name, catalog.n_lookups, POLICY_LOOKUPS, POLICY_SECONDS, closing):
            self._write(name, lambda _, at_most: _fitting(catalog.learned(), at_most))
        if self._is_due(EVICTIONS_NOTE, evictions.n_added, 1, EVICTION_SECONDS, closing):
            self._write(EVICTIONS_NOTE, evictions.pack)

    def _is_due(self, name: bytes, n: int, least: int, seconds: float, closing: bool) -> bool:
        """Whether so much has happened since a note was saved, and long enough ago; if so, it is saved now."""
        now = self._clock()
        at, n_before = self._saved.get(name, (self._started, 0))
        if n < n_before + least or (not closing and now < at + seconds):
            return False
        self._saved[name] = now, n
        return True

    def _write(self, name: bytes, pack: Callable[[bytes | None, int], bytes]) -> None:
        max_bytes = self._evictor.budget.max_bytes
        try:
            with self._catalog.update(self._backend) as transaction:
                old = transaction.note(name)
                new = pack(old, int(max_bytes * PART_OF_BUDGET))
                if new and new != old:
                    Space(self._evictor, transaction).shrink(max_bytes - len(new) + len(old or b""))
                    transaction.put_note(name, new)
        except StorageError as error:
            log.warning("a note of the engine was not saved: %s", error)


def _fitting(note: bytes, at_most: int) -> bytes:
    return note if len(note) <= at_most else b""
