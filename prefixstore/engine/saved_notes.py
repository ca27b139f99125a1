"""What an engine saves as notes in its location: what its policy has learned, which pages were evicted lately, figures.

Several processes have one note. What cannot be read is ignored, and what cannot be saved is lost: that costs hits, or a
diagnosis, and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from prefixstore.engine.eviction_log import EVICTIONS_NOTE, KEY_PART, Eviction, parsed
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages, retried
from prefixstore.engine.space import Evictor, Space
from prefixstore.errors import StorageError
from prefixstore.format.figures import NOTE, History
from prefixstore.stats import Counters, Kept

__all__ = ["POLICY_NOTE", "SavedNotes", "note_policy", "noted_policy"]

log = logging.getLogger("prefixstore")

# a note takes at most this part of the budget
PART_OF_BUDGET = 1 / 256
# what the policy has learned is saved so often at most, and only after so many lookups; evictions so often at most
POLICY_SECONDS, POLICY_LOOKUPS = 600.0, 50
EVICTION_SECONDS = 60.0
# figures are saved so often at most; for so many bytes of the budget they may have a row, and there are so many at most
FIGURE_SECONDS, BYTES_FOR_A_ROW, MOST_ROWS = 10.0, 1 << 16, 2048
# how often a reader of figures waits for those that are being saved, and how long
ATTEMPTS, PAUSE_SECONDS = 20, 0.01
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
    """Saves the notes at intervals, if enough has happened, and at the end. Each takes a small part of the budget.

    Parameters
    ----------
    backend
        Of the engine.
    evictor
        Makes space for the notes.
    counters
        Have the figures of this process.
    models
        The names of models to keep with them; see `History`.
    notes_budget
        Whether the budget is kept with them: not that of an `Archive`, which serves no prompts.
    clock
        Seconds.
    """

    def __init__(
        self,
        backend: Pages,
        evictor: Evictor,
        counters: Counters,
        models: Mapping[str, str] | None = None,
        *,
        notes_budget: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._counters = counters
        self._models = models if models is not None else {}
        self._notes_budget = notes_budget
        # figures are added to the note by one thread at a time
        self._adding = threading.Lock()
        # odd while that is done
        self._turn = 0
        self._catalog = evictor.catalog
        self._evictor = evictor
        self._clock = clock
        self._is_loaded = self._has_warned = False
        self._started = self._figures_at = clock()
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
        if closing or self.figures_are_due:
            self._figures_at = self._clock()
            self.save_figures()

    @property
    def figures_are_due(self) -> bool:
        """Whether something was counted that has waited for long enough."""
        return self._clock() >= self._figures_at + FIGURE_SECONDS and bool(self._counters.unwritten())

    def save_figures(self) -> None:
        """Add what was counted here to the figures of the location, unless another thread does; or that waits."""
        # not one that waits for itself: closed in its own transaction, as a finalizer may do
        if not self._adding.acquire(blocking=False):
            return
        try:
            self._turn += 1
            kept = self._counters.unwritten()
            most_rows = min(self._evictor.budget.max_bytes // BYTES_FOR_A_ROW, MOST_ROWS)
            if kept and self._write(NOTE, lambda old, n: _fitting(self._figures(old, kept).pack(most_rows), n)):
                self._counters.written(kept)
        finally:
            self._turn += 1
            self._adding.release()

    def history(self) -> History:
        """How the location was used, what is not written yet included. Raises `StorageError`."""
        for _ in range(ATTEMPTS):
            turn = self._turn
            with self._backend.view() as view:
                note = view.note(NOTE)
            kept = self._counters.unwritten()
            if turn == self._turn and turn % 2 == 0:
                break
            # what is being saved is in both, or in neither
            time.sleep(PAUSE_SECONDS)
        return self._figures(note, kept)

    def _figures(self, note: bytes | None, kept: Kept) -> History:
        """The figures of a note, and what was counted here."""
        history, budget = History.of(note), self._evictor.budget
        history.add(kept)
        history.models |= self._models
        if self._notes_budget:
            history.max_bytes, history.max_entries = budget.max_bytes, budget.max_entries
        return history

    def _is_due(self, name: bytes, n: int, least: int, seconds: float, closing: bool) -> bool:
        """Whether so much has happened since a note was saved, and long enough ago; if so, it is saved now."""
        now = self._clock()
        at, n_before = self._saved.get(name, (self._started, 0))
        if n < n_before + least or (not closing and now < at + seconds):
            return False
        self._saved[name] = now, n
        return True

    def _write(self, name: bytes, pack: Callable[[bytes | None, int], bytes]) -> bool:
        """Write a note: what `pack` makes of the one that is there, and of the bytes it may take. Whether it is there.

        Nothing is written if that is empty.
        """
        try:
            return self._replace(name, pack)
        except StorageError as error:
            log.warning("a note of the engine was not saved: %s", error)
            return False

    @retried
    def _replace(self, name: bytes, pack: Callable[[bytes | None, int], bytes]) -> bool:
        max_bytes = self._evictor.budget.max_bytes
        with self._catalog.update(self._backend) as transaction:
            old = transaction.note(name)
            new = pack(old, int(max_bytes * PART_OF_BUDGET))
            if new and new != old:
                Space(self._evictor, transaction).shrink(max_bytes - len(new) + len(old or b""))
                transaction.put_note(name, new)
        return bool(new)


def _fitting(note: bytes, at_most: int) -> bytes:
    return note if len(note) <= at_most else b""
