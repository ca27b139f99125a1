"""Records in a location how it was used: adds the counts of this process to those of others, with commits.

The current hour is one small note, which is written with every commit that has something to add. When the hour is over,
the next process that writes moves it into larger notes, one for the hours of a day and one for the days of a block.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TypeVar

from prefixstore.engine.budget import Budget
from prefixstore.engine.history import (
    LONGEST_NAME,
    REQUESTS_KEPT,
    days_note,
    described,
    hours_note,
    read_history,
    request_of,
    short,
)
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages, retried
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.figure_notes import ABOUT, NOTE, About, Chunk, Running
from prefixstore.format.figure_rows import Rows, add_rows
from prefixstore.format.figures import DAY, HOUR, MINUTE, Described, History, Writer
from prefixstore.format.namespace import Namespace
from prefixstore.stats import Counters, Ledger

__all__ = ["MINUTES_KEPT", "HistoryKeeper"]

log = logging.getLogger("prefixstore")

_T = TypeVar("_T")

# Figures alone are worth a transaction after so many seconds, and when a store is flushed or closed.
ALONE_SECONDS = 60.0
# Where the location is a server, its writers may conflict over a note: they write it less often.
REMOTE_SECONDS = 10.0
# until it is written again, a second passes for so many bytes of the note beyond the first ones
BYTES_PER_SECOND = 4096
# hours of today and of the last seven days; days of 24 blocks: more than a year
DAYS_KEPT, BLOCKS_KEPT, DAYS_IN_BLOCK = 8, 24, 16
# the running minute is one of them; those of other clocks may be a little ahead
MINUTES_KEPT = 60
MINUTES_AHEAD, WRITERS_KEPT = 2, 16
# a server may have more tenants than there is room for
MOST_DESCRIBED = 4096
# one note takes at most this part of the budget, but may take 2 KiB
PART_OF_BUDGET, SMALLEST, LARGEST = 1 / 2048, 2048, 1 << 20


class HistoryKeeper:
    """Writes the counts of an engine into the location. Only the thread with the transaction calls `write`.

    Nothing depends on it: what cannot be written waits, and is lost with the process.

    Parameters
    ----------
    backend
        Of the engine.
    counters
        Collects what is counted by namespace.
    budget
        What the location may hold.
    waiting
        How many pages, and how many bytes, wait to be written.
    notes_budget
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
        backend: Pages,
        counters: Counters,
        budget: Budget,
        waiting: Callable[[], tuple[int, int]] = lambda: (0, 0),
        *,
        notes_budget: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._counters = counters
        self._budget = budget
        self._waiting = waiting
        self._clock = clock
        self._writer = os.urandom(8).hex()
        self._limit = min(LARGEST, max(int(budget.max_bytes * PART_OF_BUDGET), SMALLEST))
        # by the key of the namespace; what is noted already is in `_noted`
        self._described: dict[str, Described] = {}
        self._noted: set[str] = set()
        # those that are described, but in which nothing may ever be counted here: pages are stored in them
        self._stored: set[str] = set()
        self._notes_budget = notes_budget
        self._has_noted_budget = not notes_budget
        # what the open transaction has written
        self._taken: Ledger | None = None
        self._taken_names: set[str] = set()
        # when that was, as the note has it; and the same of a transaction of which no answer came
        self._taken_at = 0.0
        self._unsure: tuple[Ledger, float] | None = None
        self._n_written = 0
        # held where counts that are committed become counts that are written
        self._confirming = threading.Lock()
        self._tried_at = time.monotonic()
        self._pause = 0.0 if backend.is_local else REMOTE_SECONDS
        self._hurries = False
        # what the open transaction writes, it writes because of that
        self._hurried = False
        self._has_warned = False

    def describe(self, namespace: Namespace, names: Mapping[str, str | None] | None = None) -> None:
        """Have the settings and names of a namespace written when something is counted, or a page stored, in it."""
        one = described(namespace, names)
        known = self._described.get(one.namespace)
        if known is None or (names and known != one):
            if len(self._described) >= MOST_DESCRIBED:
                # most of the others are in the location by now
                self._described = dict(list(self._described.items())[MOST_DESCRIBED // 2 :])
                self._noted &= self._described.keys()
                self._stored &= self._described.keys()
            self._noted.discard(one.namespace)
            self._described[one.namespace] = one

    def succeed(self, parent: HistoryKeeper) -> None:
        """Take over the namespaces known to the parent process, after a fork."""
        self._described = dict(parent._described)

    @property
    def is_due(self) -> bool:
        """Whether what was counted is worth a transaction of its own."""
        if not self._has_unwritten:
            return False
        return self._hurries or time.monotonic() >= self._tried_at + ALONE_SECONDS

    @property
    def _has_unwritten(self) -> bool:
        return self.is_on and (self._counters.has_unwritten or not self._stored <= self._noted)

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
        """Add what was counted to the notes. If the transaction is committed, call `committed`.

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
        if self._taken is not None:
            self._unsure = self._taken, self._taken_at
        self._taken, self._hurried = None, False
        now = time.monotonic()
        self._stored |= {short(key) for key in namespaces} & self._described.keys()
        if not is_wanted or not self._has_unwritten:
            return
        if now < self._tried_at + self._pause and not self._hurries:
            return
        self._hurried, self._hurries, self._tried_at = self._hurries, False, now
        try:
            waiting = self._waiting()
            running = self._running(transaction)
            taken = self._counters.unwritten()
            names = self._write(transaction, running, taken, (max(waiting[0] - pages, 0), max(waiting[1] - n_bytes, 0)))
        except IncompatibleError as error:
            # a newer version has written a note, which stays as it is
            self._warn(error)
            names = None
        except StorageError:
            raise
        except Exception:  # a fault of the store must not cost the pages of the batch
            log.exception("figures were not written")
            names = None
        if names is not None:
            self._taken, self._taken_names = taken, names

    def committed(self) -> None:
        """Note that what `write` wrote is committed."""
        with self._confirming:
            taken, self._taken, self._hurried = self._taken, None, False
            if taken is not None:
                self._n_written += 1
                self._counters.written(taken)
        if taken is not None:
            self._noted |= self._taken_names
            self._has_noted_budget = True

    def conflicted(self) -> None:
        """Note that what `write` wrote is not committed, since another process was first: hurry again."""
        self._taken = None
        self._hurries |= self._hurried

    def _running(self, transaction: Transaction) -> Running:
        """The note. It tells whether a transaction without an answer was committed, which is not repeated then."""
        try:
            running = Running.parse(transaction.note(NOTE))
        except CorruptError as error:
            self._warn(error)
            running = self._recovered(transaction, self._clock())
        if self._unsure is not None:
            (taken, at), self._unsure = self._unsure, None
            mine = running.writers.get(self._writer)
            if mine is not None and mine.at == at:
                self._counters.written(taken)
        return running

    def _write(
        self, transaction: Transaction, running: Running, taken: Ledger, waiting: tuple[int, int]
    ) -> set[str] | None:
        """The namespaces that are described now; None if nothing was written."""
        now = self._clock()
        past = self._merge(running, taken, now)
        self._note_writer(running, waiting, now)
        changes = self._chunks(transaction, running, past, now)
        wanted = ({short(key) for _, key, _ in taken.rows} | self._stored) & self._described.keys() - self._noted
        if wanted or not self._has_noted_budget:
            changes[ABOUT] = self._about(transaction, wanted)
        note = running.pack(self._limit)
        if note is None:
            return None
        changes[NOTE] = note
        if self._backend.is_local:
            self._pause = min(len(note) / BYTES_PER_SECOND - 1, ALONE_SECONDS)
        return wanted if self._put(transaction, changes) else None

    def _merge(self, running: Running, taken: Ledger, now: float) -> dict[int, Rows]:
        """Add what was counted to the running hour; the rows of hours before it."""
        hour, minute = int(now // HOUR), int(now // MINUTE)
        past: dict[int, Rows] = {}
        if running.hour < hour:
            if running.rows:
                past[running.hour] = running.rows
            running.hour, running.rows = hour, {}
        elif running.hour > hour + 1:
            # of a clock that was ahead; one that is ahead a little would be in turns with this one
            running.hour = hour
        for (counted, key, purpose), counts in taken.rows.items():
            # after a jump of the clock, do not write chunks for distant years
            is_past = hour - 24 * (DAYS_KEPT - 1) <= counted < min(hour, running.hour)
            rows = past.setdefault(counted, {}) if is_past else running.rows
            add_rows(rows, {(short(key) if key else "", purpose): counts})
        for one, counts in taken.minutes.items():
            running.minutes.setdefault(min(one, minute), Counter()).update(counts)
        running.minutes = {
            one: counts
            for one, counts in sorted(running.minutes.items())
            if -MINUTES_AHEAD <= minute - one < MINUTES_KEPT
        }
        requests = [*running.requests, *map(request_of, taken.asked)]
        running.requests = sorted(requests, key=lambda each: each.at)[-REQUESTS_KEPT:]
        return past

    def _note_writer(self, running: Running, waiting: tuple[int, int], now: float) -> None:
        running.writers.pop(self._writer, None)
        at = round(now, 3)
        # each one is another one: it says which ledger was the last
        self._taken_at = at if at != self._taken_at else round(at + 1e-3, 3)
        running.writers[self._writer] = Writer(self._writer, self._taken_at, *waiting)
        recent = [one for one in running.writers.values() if abs(now - one.at) < HOUR]
        running.writers = {one.writer: one for one in recent[-WRITERS_KEPT:]}

    def _chunks(
        self, transaction: Transaction, running: Running, past: Mapping[int, Rows], now: float
    ) -> dict[bytes, bytes | None]:
        """The notes of hours and days that change when hours have passed."""
        changed: dict[bytes, Chunk] = {}
        today = int(now // DAY)
        for hour, rows in past.items():
            day = hour * HOUR // DAY
            places = [(hours_note(day), hour), (days_note(day // DAYS_IN_BLOCK), day)]
            running.days.append(day)
            running.blocks.append(day // DAYS_IN_BLOCK)
            for name, number in places:
                if name not in changed:
                    changed[name] = self._chunk(transaction, name)
                try:
                    changed[name].add(number, rows)
                except CorruptError as error:
                    self._warn(error)
                    changed[name] = Chunk()
                    changed[name].add(number, rows)
        packed = {name: chunk.pack(self._limit) for name, chunk in changed.items()}
        running.days, old_days = _nearest(running.days, today, DAYS_KEPT)
        running.blocks, old_blocks = _nearest(running.blocks, today // DAYS_IN_BLOCK, BLOCKS_KEPT)
        return {**packed, **dict.fromkeys([*map(hours_note, old_days), *map(days_note, old_blocks)])}

    def _chunk(self, view: View, name: bytes) -> Chunk:
        try:
            return Chunk(view.note(name))
        except CorruptError as error:
            self._warn(error)
            return Chunk()

    def _recovered(self, view: View, now: float) -> Running:
        """A new note in place of a damaged one: it knows the chunks that there should be."""
        today = int(now // DAY)
        days, blocks = _usual(today)
        return Running(
            days=[day for day in days if view.note(hours_note(day)) is not None],
            blocks=[block for block in blocks if view.note(days_note(block)) is not None],
        )

    def _about(self, transaction: Transaction, wanted: AbstractSet[str]) -> bytes | None:
        try:
            about = About.parse(transaction.note(ABOUT))
        except CorruptError as error:
            self._warn(error)
            about = About()
        if self._notes_budget:
            about.max_bytes, about.max_entries = self._budget.max_bytes, self._budget.max_entries
        known = self._described
        for name in sorted(wanted & known.keys()):
            about.described.pop(name, None)
            about.described[name] = known[name]
        return about.pack(self._limit)

    def _put(self, transaction: Transaction, changes: Mapping[bytes, bytes | None]) -> bool:
        """Write all of these notes, or none of them, if the location has no room for them; whether it had."""
        before: dict[bytes, bytes | None] = {}
        for name, note in changes.items():
            before[name] = transaction.note(name)
            if note != before[name]:
                transaction.put_note(name, note)
        if transaction.used.bytes <= self._budget.max_bytes:
            return True
        for name, note in before.items():
            if note != changes[name]:
                transaction.put_note(name, note)
        return False

    def _warn(self, error: StorageError) -> None:
        """Say once that something cannot be read."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("figures kept in %s cannot be used: %s", self._backend.location, error)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self) -> History:
        """What is recorded in the location, and counts of this process not yet written. Raises `StorageError`."""
        while True:
            with self._confirming:
                before, waiting = self._n_written, self._counters.unwritten()
            with self._backend.view() as view:
                history = read_history(view, self._clock(), waiting)
                with self._confirming:
                    is_current = before == self._n_written
                    unconfirmed = self._unconfirmed(history)
                if is_current and unconfirmed is not None:
                    waiting.take_off(unconfirmed)
                    history = read_history(view, self._clock(), waiting)
            if is_current:
                break
        known = {**self._described, **history.described}
        if history.max_bytes is None and self._notes_budget:
            history = replace(history, max_bytes=self._budget.max_bytes, max_entries=self._budget.max_entries)
        return replace(history, described=known)

    def _unconfirmed(self, history: History) -> Ledger | None:
        """What is in these figures although this process does not know yet that it was committed."""
        written_at = next((one.at for one in history.writers if one.writer == self._writer), None)
        sent = [self._unsure, (self._taken, self._taken_at)]
        return next((one[0] for one in sent if one is not None and one[1] == written_at), None)

    @retried
    def forget(self, namespaces: Collection[bytes] | None, tenant: str | None = None) -> None:
        """Forget what these namespaces, and those of a tenant, are, or all figures (None). Raises `StorageError`.

        What was counted in them stays, without names.
        """
        with self._backend.view() as view:
            if view.note(NOTE) is None and view.note(ABOUT) is None:
                return
        with self._backend.update() as transaction:
            if namespaces is None:
                running = _or_default(Running.parse, transaction.note(NOTE), Running())
                days, blocks = _usual(int(self._clock() // DAY))
                names = {
                    NOTE,
                    ABOUT,
                    *map(hours_note, [*days, *running.days]),
                    *map(days_note, [*blocks, *running.blocks]),
                }
                for name in sorted(names):
                    if transaction.note(name) is not None:
                        transaction.put_note(name, None)
                return
            about = _or_default(About.parse, transaction.note(ABOUT), About())
            gone = {short(key) for key in namespaces} & about.described.keys()
            if tenant is not None:
                gone |= {name for name, one in about.described.items() if one.tenant == tenant[:LONGEST_NAME]}
            for one in gone:
                del about.described[one]
            if gone:
                transaction.put_note(ABOUT, about.pack(LARGEST))


def _usual(today: int) -> tuple[range, range]:
    """The days and blocks of which there are chunks, unless a clock was wrong."""
    block = today // DAYS_IN_BLOCK
    return range(today - DAYS_KEPT + 1, today + 1), range(block - BLOCKS_KEPT + 1, block + 1)


def _nearest(numbers: Iterable[int], today: int, n: int) -> tuple[list[int], list[int]]:
    """The `n` numbers that are nearest to `today`, and the others: a clock that jumped drops one chunk at a time."""
    order = sorted(set(numbers), key=lambda number: abs(number - today))
    return sorted(order[:n]), order[n:]


def _or_default(parse: Callable[[bytes | None], _T], note: bytes | None, default: _T) -> _T:
    try:
        return parse(note)
    except (CorruptError, IncompatibleError):
        return default
