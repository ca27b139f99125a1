"""Records in a location how it was used: adds the counts of this process to those of others, with commits."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from prefixstore.backends.threads import handed_over
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import retried
from prefixstore.engine.part import Part, Shared
from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.figure_note import NOTE, FigureNote
from prefixstore.format.figures import LONGEST_NAME, Described, History, Writer
from prefixstore.format.namespace import Namespace
from prefixstore.stats import Ledger, short

__all__ = ["FigureKeeper", "read_history"]

log = logging.getLogger("prefixstore")

# Figures alone are worth a transaction after so many seconds, and when a store is flushed or closed.
ALONE_SECONDS = 60.0
# Where the location is a server, its writers may conflict over the note: they write it less often.
REMOTE_SECONDS = 10.0
# until the note is written again, a second passes for so many of its bytes
BYTES_PER_SECOND = 32768
# a server may have more tenants than there is room for
MOST_DESCRIBED = 4096
# the note takes at most this part of the budget, but may take 4 KiB
PART_OF_BUDGET, SMALLEST, LARGEST = 1 / 1024, 4096, 1 << 20


class _Sent(NamedTuple):
    """What a transaction writes into the note, and whether it was asked to."""

    ledger: Ledger
    hurried: bool


class FigureKeeper(Part):
    """Writes the counts of an engine into the location. Only the thread with the transaction calls `write`.

    Nothing depends on it: what cannot be written waits, and is lost with the process.

    Parameters
    ----------
    shared
        Of the engine.
    waiting
        How many pages, and how many bytes, wait to be written.
    housekeeping
        Whether the budget is kept with the figures: not that of an `Archive`, which serves no prompts.
    clock
        Seconds since the epoch.

    Attributes
    ----------
    is_on
        Whether anything is written: a measurement is no use of the location.
    """

    is_on = True

    def __init__(
        self,
        shared: Shared,
        waiting: Callable[[], tuple[int, int]],
        *,
        housekeeping: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(shared)
        self._waiting = waiting
        self._notes_budget = housekeeping and not shared.read_only
        self._clock = clock
        self._writer = os.urandom(8).hex()
        self._limit = min(LARGEST, max(int(self._budget.max_bytes * PART_OF_BUDGET), SMALLEST))
        # by the short name of the namespace
        self._described: dict[str, Described] = {}
        # those that are described, and whose pages were stored since the last commit with figures
        self._stored: set[str] = set()
        # held where counts that wait become counts that are sent
        self._lock = threading.Lock()
        # what a transaction writes, until it is committed
        self._sent: _Sent | None = None
        self._tried_at = time.monotonic()
        self._pause = 0.0 if self._backend.is_local else REMOTE_SECONDS
        self._hurries = False
        self._has_warned = False

    def describe(self, namespace: Namespace, names: Mapping[str, str | None] | None = None) -> None:
        """Have the settings and names of a namespace written when something is counted, or a page stored, in it."""
        one = Described.of(namespace, names)
        if names or one.namespace not in self._described:
            if len(self._described) >= MOST_DESCRIBED:
                # most of the others are in the location by now
                self._described = dict(list(self._described.items())[MOST_DESCRIBED // 2 :])
            self._described[one.namespace] = one

    def succeed(self, parent: FigureKeeper) -> None:
        """Take over the namespaces known to the parent process, after a fork."""
        self._described = dict(parent._described)

    @property
    def is_due(self) -> bool:
        """Whether what was counted is worth a transaction of its own."""
        return self.has_unwritten and (self.hurries or time.monotonic() >= self._tried_at + ALONE_SECONDS)

    @property
    def has_unwritten(self) -> bool:
        """Whether something is not in the location yet, as far as is known."""
        return self.is_on and (self._counters.has_unwritten or self._sent is not None or bool(self._stored))

    def hurry(self) -> None:
        """Have what was counted written with the next commit, even if it is the only thing to write."""
        self._hurries = True

    @property
    def hurries(self) -> bool:
        """Whether the next commit writes what was counted, however short ago it was written last."""
        return self._hurries

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(
        self,
        transaction: Transaction,
        pages: int = 0,
        n_bytes: int = 0,
        namespaces: Iterable[bytes] = (),
        *,
        is_wanted: bool = True,
    ) -> None:
        """Add what was counted to the note. If the transaction is committed, call `committed`.

        Parameters
        ----------
        transaction
            Of the commit.
        pages, n_bytes
            What the commit writes, which waits no more.
        namespaces
            Keys of the namespaces of these pages.
        is_wanted
            Whether to add anything.

        Raises
        ------
        StorageError
            If the location fails, and with it the transaction.
        """
        self._take_back()
        self._stored |= {short(key) for key in namespaces} & self._described.keys()
        waits = not self.hurries and time.monotonic() < self._tried_at + self._pause
        if not is_wanted or waits or not self.has_unwritten:
            return
        note, is_written = _readable(transaction, self._warn), False
        try:
            is_written = self._write(transaction, note, pages, n_bytes)
        except StorageError:
            raise
        except Exception:  # a fault of the store must not cost the pages of the batch
            log.exception("figures were not written")
        if not is_written:
            self._take_back()

    @handed_over
    def write_alone(self) -> None:
        """Write what was counted, for an engine without housekeeping. What cannot be written is lost."""
        self.hurry()
        try:
            if self.has_unwritten and not self._read_only:
                with self._backend.update() as transaction:
                    self.write(transaction)
                self.committed()
        except StorageError as error:
            log.warning("figures were not written: %s", error)

    def committed(self) -> None:
        """Note that what `write` wrote is committed."""
        with self._lock:
            if self._sent is not None:
                self._stored.clear()
            self._sent = None

    def conflicted(self) -> None:
        """Note that another process was first, so that what `write` wrote is not committed: hurry again."""
        self._hurries |= self._sent is not None and self._sent.hurried

    def _take_back(self) -> None:
        """Have what a transaction was to write wait again, if no answer came that it is committed."""
        with self._lock:
            sent, self._sent = self._sent, None
            if sent is not None:
                self._counters.give_back(sent.ledger)

    def _write(self, transaction: Transaction, note: FigureNote, pages: int, n_bytes: int) -> bool:
        """Add what was counted to the note and write it, if there is room for it; whether there is."""
        now, waiting = self._clock(), self._waiting()
        with self._lock:
            ledger = self._counters.take()
            self._sent = _Sent(ledger, self._hurries)
        self._hurries, self._tried_at = False, time.monotonic()
        note.add(ledger)
        note.writers.pop(self._writer, None)
        note.writers[self._writer] = Writer(
            self._writer, round(now, 3), max(waiting[0] - pages, 0), max(waiting[1] - n_bytes, 0)
        )
        counted_in = {name for rows in ledger.periods.values() for name, _ in rows}
        for name in sorted((counted_in | self._stored) & self._described.keys()):
            note.describe(self._described[name])
        if self._notes_budget:
            note.max_bytes, note.max_entries = self._budget.max_bytes, self._budget.max_entries
        note.forget_old(now)
        packed, before = note.pack(self._limit), transaction.note(NOTE)
        if packed is None:
            return False
        if self._backend.is_local:
            self._pause = len(packed) / BYTES_PER_SECOND
        transaction.put_note(NOTE, packed)
        if transaction.used.bytes <= self._budget.max_bytes:
            return True
        # nothing is evicted for figures
        transaction.put_note(NOTE, before)
        return False

    # -- reading ------------------------------------------------------------------------------------------------------

    @handed_over
    def read(self) -> History:
        """How the location was used, by all processes, with what is not written yet. Raises `StorageError`."""
        while True:
            with self._lock:
                sent, waiting = self._sent, self._counters.unwritten()
            with self._backend.view() as view:
                note = _readable(view, self._warn)
            if sent is self._sent:
                break
            # what was sent may be in the note already
        if sent is not None:
            note.add(sent.ledger)
        note.add(waiting)
        history = note.history(self._clock())
        if history.max_bytes is None and self._notes_budget:
            history = replace(history, max_bytes=self._budget.max_bytes, max_entries=self._budget.max_entries)
        return replace(history, described={**self._described, **history.described})

    def _warn(self, error: StorageError) -> None:
        """Say once that something cannot be read."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("figures kept in %s cannot be used: %s", self._backend.location, error)

    @retried
    def forget(self, namespaces: Collection[bytes] | None, tenant: str | None = None) -> None:
        """Forget what these namespaces, and those of a tenant, are, or all figures (None). Raises `StorageError`.

        What was counted in them stays, without names.
        """
        with self._backend.view() as view:
            if view.note(NOTE) is None:
                return
        with self._backend.update() as transaction:
            if namespaces is None:
                transaction.put_note(NOTE, None)
                return
            note = _readable(transaction, self._warn)
            gone = {short(key) for key in namespaces} & note.described.keys()
            if tenant is not None:
                gone |= {name for name, one in note.described.items() if one.tenant == tenant[:LONGEST_NAME]}
            for name in gone:
                del note.described[name]
            if gone:
                transaction.put_note(NOTE, note.pack(LARGEST))


def read_history(view: View, now: float) -> History:
    """How a location was used. If that cannot be read, nothing is known, with a warning."""
    return _readable(view, lambda error: log.warning("figures cannot be used: %s", error)).history(now)


def _readable(view: View, warn: Callable[[StorageError], None]) -> FigureNote:
    """The note; an empty one if it is damaged, or another version wrote it."""
    try:
        return FigureNote.parse(view.note(NOTE))
    except CorruptError as error:
        warn(error)
        return FigureNote()
