"""Notes that an engine saves in its location: what its policy has learned, and figures.

All processes share one note of each kind. A note that cannot be read is ignored, and what cannot be saved is lost: that
costs hits, or figures, and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from prefixstore.counters import Kept
from prefixstore.engine.budget import PART_FOR_A_NOTE
from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.page_view import PageView
from prefixstore.engine.pages import retried
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.space import Evictor, Space
from prefixstore.errors import StorageError
from prefixstore.format.figures import NOTE, History

log = logging.getLogger("prefixstore")

# what the policy has learned is saved after this many seconds at the earliest, and after this many lookups
POLICY_SECONDS, POLICY_LOOKUPS = 600.0, 50
# figures are saved after this many seconds at the earliest, with at most one row for this many bytes of the budget,
# and no more than `MOST_ROWS`
FIGURE_SECONDS, BYTES_FOR_A_ROW, MOST_ROWS = 10.0, 1 << 16, 2048
# how many seconds to wait while another thread saves figures
PATIENCE = 1.0
# the note with the name of the eviction policy
POLICY_NOTE = b"policy"


def note_policy(transaction: PageUpdate, name: str) -> None:
    """Note the name of the policy in a location, for commands that open it without the store's parameters."""
    if name and transaction.note(POLICY_NOTE) != name.encode():
        transaction.put_note(POLICY_NOTE, name.encode())


def noted_policy(view: PageView) -> str | None:
    """The policy of the store that was the last to write pages; None if unknown."""
    note = view.note(POLICY_NOTE)
    return note.decode("ascii", "replace") if note is not None else None


class SavedNotes(Part):
    """Saves notes at intervals, if enough has happened, and at the end. Each takes a small part of the budget.

    The names of `models` are saved with the figures; so is the budget, if `notes_budget`: not that of an `Archive`,
    which serves no prompts.
    """

    def __init__(self, shared: Shared, evictor: Evictor, models: Mapping[str, str], *, notes_budget: bool) -> None:
        super().__init__(shared)
        self._evictor = evictor
        self._models = models
        self._notes_budget = notes_budget
        # held while figures are added to the note, so that nothing is counted twice
        self._adding = threading.Lock()
        # when the policy and the figures were saved last, and after how many lookups the policy was
        self._learned_at = self._figures_at = time.monotonic()
        self._n_lookups = 0

    def save(self, *, closing: bool = False) -> None:
        """Save what is due; when the engine is closing, all that has changed."""
        now, n_lookups = time.monotonic(), self._catalog.n_lookups
        name = self._catalog.policy.note if self._evictor.has_loaded else None
        is_due = closing or now >= self._learned_at + POLICY_SECONDS
        if name is not None and is_due and n_lookups >= self._n_lookups + POLICY_LOOKUPS:
            self._learned_at, self._n_lookups = now, n_lookups
            self._write(name, lambda _: self._learned())
        if closing or self.figures_are_due:
            self._figures_at = now
            self.save_figures()

    def _learned(self) -> bytes:
        with self._catalog.lock:
            return self._catalog.policy.save()

    @property
    def figures_are_due(self) -> bool:
        """Whether something was counted, and the last save was long enough ago."""
        return time.monotonic() >= self._figures_at + FIGURE_SECONDS and bool(self._counters.unwritten())

    def save_figures(self) -> None:
        """Add what was counted here to the figures of the location."""
        # a bounded wait: a finalizer may close a store inside this very method, and would wait for itself
        if not self._adding.acquire(timeout=PATIENCE):
            return
        try:
            kept = self._counters.unwritten()
            most_rows = min(self._budget.max_bytes // BYTES_FOR_A_ROW, MOST_ROWS)
            if kept and self._write(NOTE, lambda old: self._figures(old, kept).pack(most_rows)):
                self._counters.written(kept)
        finally:
            self._adding.release()

    def history(self) -> History:
        """How the location was used, figures not written yet included. Raises `StorageError`."""
        has_waited = self._adding.acquire(timeout=PATIENCE)
        try:
            with self._backend.view() as view:
                note = view.note(NOTE)
            return self._figures(note, self._counters.unwritten())
        finally:
            if has_waited:
                self._adding.release()

    def _figures(self, note: bytes | None, kept: Kept) -> History:
        """The figures of a note, with what was counted here."""
        history, budget = History.of(note), self._budget
        history.add(kept)
        history.models |= self._models
        if self._notes_budget:
            history.max_bytes, history.max_entries = budget.max_bytes, budget.max_entries
        return history

    def _write(self, name: bytes, pack: Callable[[bytes | None], bytes]) -> bool:
        """Replace a note by what `pack` makes of it; False if that is too large, or fails."""
        try:
            return self._replace(name, pack)
        except StorageError as error:
            log.warning("a note of the engine was not saved: %s", error)
            return False

    @retried
    def _replace(self, name: bytes, pack: Callable[[bytes | None], bytes]) -> bool:
        max_bytes = self._budget.max_bytes
        with self._catalog.update(self._backend) as transaction:
            old = transaction.note(name)
            new = pack(old)
            if len(new) > max_bytes * PART_FOR_A_NOTE:
                return False
            if new != old:
                Space(self._evictor, transaction).shrink(max_bytes - len(new) + len(old or b""))
                transaction.put_note(name, new)
        return True
