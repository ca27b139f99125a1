"""Keeps what this process knows of a location up to date, and runs the transactions of this process.

What is known has a generation. `Follower.refresh` reads all changes since then, whoever made them. A transaction begins
with a refresh, so its changes are never overwritten by what another thread has read before. While a transaction of this
process is open, and until its outcome is known, nothing else may change what it has changed: see `Follower.update`.

Each method takes the lock briefly, `Follower.update` at its steps. The lock is never held while the backend is
called, or while bytes are copied or packed: a completion may wait for it. A thread in a transaction may use the
catalog, not the other way round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias, TypeVar

from prefixstore.engine.bookmark import note_name
from prefixstore.engine.contents import Contents
from prefixstore.engine.index import Page
from prefixstore.engine.journal import Journal
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import Entry, View
from prefixstore.engine.pages import Pages
from prefixstore.engine.ram import RamTier
from prefixstore.engine.relatives import with_ancestors
from prefixstore.errors import StorageError
from prefixstore.stats import Counters

__all__ = ["Follower", "Lock", "LockT"]

log = logging.getLogger("prefixstore")

# Seconds that a lookup waits at most for a transaction of this process that is committed to end: it takes microseconds,
# unless the connection to a server is lost at that moment.
LONGEST_END = 1.0

Lock: TypeAlias = AbstractContextManager[object]
LockT = TypeVar("LockT", bound=AbstractContextManager[object])


class _Unfinished:
    """Does something if the block that it surrounds is left in the middle; not for errors of a location."""

    def __init__(self, react: Callable[[], None]) -> None:
        self._react = react

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, StorageError):
            self._react()


class Follower:
    """Keeps what is known of the location up to date: the lowest part of the catalog.

    Parameters
    ----------
    counters
        Counts what is dropped.
    ram
        Drops pages that were deleted from the location.
    """

    def __init__(self, counters: Counters, ram: RamTier) -> None:
        self._ram = ram
        self._lock: Lock = threading.RLock()
        # around each change: what is left in the middle, by an interrupt or a fault, is not used any more
        self._guard: Lock = _Unfinished(self._start_over)
        self._counters = counters
        self._contents = Contents(counters, ram)
        # pages for which there was no space
        self._refused: set[bytes] = set()
        self._generation = -1
        self._trusted = False
        self._epoch = 0
        # taken by one transaction of this process at a time
        self._turn = threading.Lock()

    def wrap_lock(self, wrap: Callable[[Lock], LockT]) -> LockT:
        """Use what `wrap` makes of the lock; see `Engine.wrap_lock`."""
        self._lock = wrapped = wrap(self._lock)
        return wrapped

    # -- keeping up with the backend ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Changes when a transaction of this process ends: a view opened before that may lack its changes."""
        return self._epoch

    def refresh(self, view: View, *, newest: bool = False) -> int:
        """Bring what is known up to the generation of the view, unless it is newer already.

        Every transaction begins with this, so what a transaction changes here is never undone by what another thread
        has read before.

        Parameters
        ----------
        view
            Of the backend.
        newest
            Whether the view is of the latest commit. A catalog that is ahead of it describes a store that was replaced.

        Returns
        -------
        int
            How many records were read.
        """
        generation = view.generation
        n_records = 0
        while True:
            with self._lock, self._guard:
                if newest and generation < self._generation:
                    self._distrust()
                if not self._is_news(generation):
                    return n_records
                known = self._generation if self._trusted else None
                needed = self._needed()
            changed = view.changes(known) if known is not None else None
            if changed is None:
                found = with_ancestors(view, needed)
            else:
                found = {key: Entry(key, *one) for key, one in view.records(list(dict.fromkeys(changed))).items()}
            n_records += len(found)
            with self._lock, self._guard:
                if not self._is_news(generation):
                    return n_records  # another thread was faster
                if changed is not None and not self._trusted:
                    continue  # found to be wrong meanwhile: the changes alone are not enough any more
                if changed is None:
                    self._contents.forget_stored()
                    self._contents.rebuild(found)
                    self._ram.drop(set(self._ram.keys()) - found.keys())
                else:
                    for key in dict.fromkeys(changed):
                        self._contents.refresh_page(key, found.get(key))
                    self._ram.drop(key for key in changed if key not in found)
                self._refused.clear()
                self._generation, self._trusted = generation, True
                return n_records

    def _needed(self) -> set[bytes]:
        """What has to be known even if all else is forgotten: pending pages and what they follow, states in RAM."""
        index = self._contents.index
        needed = set(self._ram.keys())
        for new in self._contents.pending.values():
            page: Page | None = new.page
            while page is not None and page.key not in needed:
                needed |= {page.key, page.parent} - {page.namespace}
                page = index.get(page.parent)
        return needed

    def _is_news(self, generation: int) -> bool:
        """Whether a view of this generation may change what is known.

        One that was opened before the last refresh has nothing new. And while a transaction of this process is open, or
        just ends, no other one has changed anything since it began, and what it has changed itself is known and may
        have to be taken back.
        """
        is_known = generation < self._generation or (generation == self._generation and self._trusted)
        return not is_known and self._contents.journal is None

    def _distrust(self) -> None:
        """What is known describes nothing that is stored any more: the next refresh starts over."""
        self._generation, self._trusted = -1, False

    def _start_over(self) -> None:
        """Forget all but what waits for a commit: a change of it was not finished."""
        log.warning("the index was left in the middle of a change; reloading it")
        self._distrust()
        self._contents.forget_stored()

    @contextmanager
    def update(self, backend: Pages, on_commit: Callable[[], None] | None = None) -> Iterator[Transaction]:
        """A transaction, with the catalog up to date. If it fails, its changes here are undone.

        At its end it drops the settings of namespaces that it has left without pages.

        Parameters
        ----------
        backend
            The location.
        on_commit
            Called when the transaction is committed, before any other thread learns from the location what has happened
            since.
        """
        # Until the outcome is known here, the next transaction of this process waits: before it has the backend, and
        # with nothing to be interrupted between taking the turn and being sure to pass it on.
        with self._turn:
            try:
                with backend.update() as transaction:
                    with self._lock, self._guard:
                        if self._contents.journal is not None:
                            # left by a thread that was interrupted while it ended its transaction
                            self._contents.journal, self._trusted = None, False
                    self.refresh(transaction, newest=True)
                    with self._lock, self._guard:
                        self._contents.journal = Journal()
                    yield transaction
                    self._drop_empty_namespaces(transaction)
                if on_commit is not None:
                    on_commit()
            except BaseException as error:
                self._end_journal(error)
                raise
            else:
                self._end_journal(None, transaction.began)

    def _end_journal(self, error: BaseException | None, began: int = 0) -> None:
        journal = self._contents.journal
        try:
            self._enter_outcome(error, began)
        finally:
            if journal is not None:
                journal.ended.set()

    def _wait_for_outcome(self) -> None:
        """A view is newer than what is known: its transaction, of this process, is committed, and just ends."""
        journal = self._contents.journal
        if journal is not None:
            journal.ended.wait(LONGEST_END)

    def _enter_outcome(self, error: BaseException | None, began: int) -> None:
        with self._lock, self._guard:
            journal, self._contents.journal = self._contents.journal, None
            self._epoch += 1
            if error is not None and not isinstance(error, StorageError):
                # interrupted anywhere, maybe in the middle of a change
                self._trusted = False
            if journal is not None and error is None:
                journal.commit()
                # or the generations of another location that was empty, too, would seem to follow those of this one
                self._generation = max(self._generation, began)
                self._counters.count("frees", len(journal.deleted))
            elif journal is not None:
                trusted, self._trusted = self._trusted, False
                # if it was committed in spite of the error, the log of changes says so at the next refresh
                journal.roll_back()
                self._trusted = trusted

    def _drop_empty_namespaces(self, transaction: Transaction) -> None:
        """Drop the settings of namespaces from which the transaction has deleted the last page."""
        with self._lock:
            journal, sweeps = self._contents.journal, self._contents.sweeps
            emptied = set(journal.deleted_from) if journal is not None else set()
            if journal is None or not (emptied or sweeps):
                return
            if sweeps:
                journal.after_commit(self._swept)
        if sweeps:
            emptied = set(transaction.namespaces())
        for namespace in emptied - transaction.followed(sorted(emptied)):
            transaction.drop_namespace(namespace)
            if transaction.note(note_name(namespace)) is not None:
                transaction.put_note(note_name(namespace), None)

    def _swept(self) -> None:
        self._contents.sweeps = False

    def sweep(self) -> None:
        """Have the next transaction look for settings of namespaces that have no pages."""
        with self._lock:
            self._contents.sweeps = True

    def contradict(self, page: Page, generation: int) -> None:
        """A page is not in a view of this generation. If the catalog covers that generation, the store was replaced.

        Not if the page was deleted, and captured again since: then the index has another node for it.
        """
        with self._lock:
            is_here = self._contents.index.get(page.key) is page and page.key not in self._contents.pending
            if is_here and generation <= self._generation:
                log.warning("the index does not match the location; reloading it")
                self._distrust()
