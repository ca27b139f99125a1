"""One source of a fetch: a location, or what this process holds of its pages, and the thread that reads it.

A caller and the thread tell each other this:

    caller                             thread
    start                              open the view, read the first state
    answer: wait                       answer with a state, None at the end, or an error
    the state can be used: ask         verify it and copy it for later, while the caller uses it; read the next one
    end: wait                          close the view; if the caller has given up, keep what has come since
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX
from typing import NamedTuple, TypeAlias

from prefixstore.backends.threads import Answer
from prefixstore.buffers import BufferPool
from prefixstore.engine.index import Page
from prefixstore.engine.page_view import View
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.readers import Found, Look, ReadAhead, ShapeError, for_caller, read_along
from prefixstore.errors import (
    ClosedError,
    CorruptError,
    IncompatibleError,
    PrefixStoreError,
    StorageError,
    UnavailableError,
    UndecryptableError,
)
from prefixstore.format.autocodec import ReadRate

__all__ = ["Fetcher", "Given", "Keep", "LateError", "Source", "SourceReader", "misshapen"]

log = logging.getLogger("prefixstore")

Keep: TypeAlias = Callable[[Page, memoryview], None]
"""Copies a verified state for later, in the thread that reads it, while the caller may read it as well."""


class LateError(UnavailableError):
    """A state has not come within the deadline of the caller."""


class Source(NamedTuple):
    """Some consecutive pages, and what reads them.

    Attributes
    ----------
    fetcher
        Of their location.
    pages
        The pages.
    keep
        Receives each state that the caller has accepted, and those that arrive too late.
    """

    fetcher: Fetcher
    pages: Sequence[Page]
    keep: Keep | None = None


class Given(NamedTuple):
    """What a thread answers.

    Attributes
    ----------
    state
        The next state; None if there is none.
    n_verified
        How many of those before it are verified.
    is_verified
        Whether it is verified, too.
    error
        What has ended the thread.
    """

    state: memoryview | None
    n_verified: int
    is_verified: bool = False
    error: Exception | None = None


class SourceReader:
    """One source of a fetch: the caller's side, and the thread that reads. Parameters as for `fetch`.

    Attributes
    ----------
    fetcher, pages
        Of the source.
    n_given, n_verified
        How many states the caller has accepted, and how many of these are known to be verified.
    """

    def __init__(self, source: Source, *, streamed: bool, along: bool, look: Look | None) -> None:
        self.fetcher, self.pages, self._keep = source
        self.fetcher.check_open()
        self._streamed = streamed
        self._along = along
        self._look = look
        # used by the caller; what has come before it is wanted
        self.n_given = self.n_verified = 0
        self._come: Given | None = None
        self._done: Answer[None] | None = None
        # used by both; whether the caller waits no longer, and what is read, to see how much of a page has arrived
        self._asks: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[Given] = SimpleQueue()
        self._is_left = False
        self._view: View | None = None
        # used by the thread
        self._n_read = self._n_good = 0
        self._in_memory: Mapping[bytes, memoryview] = {}

    # -- the caller ---------------------------------------------------------------------------------------------------

    @property
    def next_page(self) -> Page:
        """The page that is read, or was read last."""
        return self.pages[min(self.n_given, len(self.pages) - 1)]

    def start(self) -> None:
        """Have a thread read, and ask it for the first state."""
        self.ask()
        try:
            self._done = self.fetcher.threads.start(self._run)
        except RuntimeError as error:
            failed = UnavailableError(f"no thread can be started to read pages: {error}")
            self._answers.put(Given(None, 0, error=failed))

    def ask(self, *, more: bool = True) -> None:
        """Ask for the next state, or have the thread end; the last one can be used, or verified at least."""
        self._come = None
        self._asks.put(more)

    def answer(self, left: Callable[[float], float]) -> Given:
        """What the thread has answered to the last question.

        Raises
        ------
        LateError
            If it has not come in time. Nothing comes after that, nor after any other error.
        """
        if self._come is None:
            given = self._in_time(left)
            if isinstance(given.error, StorageError):
                # what is wrong with a page was counted where it was read: this is about the location
                raise UnavailableError(str(given.error))
            if given.error is not None:
                raise given.error
            self._come, self.n_verified = given, given.n_verified
        return self._come

    def _in_time(self, left: Callable[[float], float]) -> Given:
        page, breaker = self.next_page, self.fetcher.breaker
        if self.fetcher.is_local:
            # it can only hang
            with suppress(Empty):
                return self._answers.get(timeout=breaker.patience(page))
            self._is_left = True
            breaker.hangs(page)
            raise LateError("the location does not answer")
        with suppress(Empty):
            return self._answers.get(timeout=_within(left(0.0)))
        # what will be there soon is worth waiting for, once
        arrived = self._view.arrived if self._view is not None else 0
        if arrived and page.stored_bytes:
            with suppress(Empty):
                return self._answers.get(timeout=_within(left(min(arrived / page.stored_bytes, 1.0))))
        self._is_left = True
        raise LateError("the location is slower than computing")

    def end(self, *, is_left: bool) -> None:
        """Have the thread end, and wait for that unless the caller is in a hurry."""
        self._is_left = self._is_left or is_left
        self.ask(more=False)
        if self._done is not None and self._is_left:
            self._done.leave()
        elif self._done is not None:
            self._done.get()
        self.fetcher.count_given(self.pages[: self.n_given])

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Read until the caller has left."""
        try:
            self._in_memory = self.fetcher.in_memory(self.pages)
            with self.fetcher.view() as view:
                self._view = view
                stored = [page for page in self.pages if page.key not in self._in_memory]
                with closing(self.fetcher.reader(view, stored, streamed=self._streamed, along=self._along)) as states:
                    self._serve(states)
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            self._answers.put(Given(None, self._n_good, error=for_caller(error)))

    def _serve(self, states: Iterator[Found]) -> None:
        # what was given last
        last: tuple[Page, Found] | None = None
        while self._asks.get():
            if last is not None:
                self._finish(*last)
            last = None
            if self._n_good < self._n_read or self._n_read == len(self.pages):
                found = None
            else:
                page = self.pages[self._n_read]
                found = self._read(page, states)
            if found is None:
                self._answers.put(Given(None, self._n_good))
                continue
            self._answers.put(Given(found.state, self._n_good, is_verified=found.check is None))
            last = page, found
            self._n_read += 1
            self._n_good += found.check is None
        if last is not None and self._is_left:
            self._finish(*last)

    def _read(self, page: Page, states: Iterator[Found]) -> Found | None:
        """The state of a page; None if there is none, which is counted here."""
        state = self._in_memory.get(page.key)
        found = Found(state) if state is not None else None
        try:
            if found is None:
                with self.fetcher.breaker.asking(page):
                    found = next(states, None)
            # The first one is for the caller to look at, who may learn from it. The bytes that are compared are in no
            # processor's cache yet, so of the others that is done here, while the caller uses the one before.
            if found is not None and self._look is not None and self._n_read and not self._look(page, found.state):
                # a damaged page may have any shape
                if found.check is not None:
                    found.check()
                raise misshapen(page)
        except Exception as raised:
            error = for_caller(raised)
            if not isinstance(error, StorageError):
                raise
            self.fetcher.give_up(page, error)
            return None
        if found is None:
            self.fetcher.give_up(page, None)
        return found

    def _finish(self, page: Page, found: Found) -> None:
        """Verify a state, if that is still to be done, and copy it for later."""
        if found.check is not None:
            try:
                found.check()
            except StorageError as error:
                self.fetcher.give_up(page, error)
                return
            self._n_good += 1
        if self._keep is not None and page.key not in self._in_memory:
            try:
                self._keep(page, found.state)
            except Exception as error:  # what is kept is for later: it must not end a restore
                unexpected = None if isinstance(error, PrefixStoreError) else error
                log.warning("a fetched page was not kept: %s", error, exc_info=unexpected)


def misshapen(page: Page) -> ShapeError:
    """That a page has not the shape of one."""
    return ShapeError(f"page {page.key.hex()} does not have the shape of a page")


class Fetcher(Part):
    """What it takes to read the pages of a location.

    Parameters
    ----------
    shared
        Of the engine.
    read_rate
        Learns how fast the location delivers bytes.

    Attributes
    ----------
    is_local
        Whether the location is on this machine.
    """

    def __init__(self, shared: Shared, read_rate: ReadRate) -> None:
        super().__init__(shared)
        self._read_rate = read_rate
        self.is_local = shared.backend.is_local
        self.buffers = BufferPool(limit=None)
        self._closed = False

    def close(self) -> None:
        """Begin no more."""
        self._closed = True

    def check_open(self) -> None:
        """Raise `ClosedError` if no more may begin."""
        if self._closed:
            raise ClosedError("the store was closed while it was read; open a new PrefixStore")

    def source(self, pages: Sequence[Page]) -> Source:
        """These pages, from this location; what is read is kept in RAM."""
        return Source(self, pages, self._ram.keep if self._ram.lacks(pages) else None)

    def in_memory(self, pages: Sequence[Page]) -> Mapping[bytes, memoryview]:
        """States that need not be read. Asked before a view is opened, so what is committed meanwhile is in either."""
        found = self._catalog.states(pages)
        for page in pages:
            if page.key not in found and (state := self._ram.state(page)) is not None:
                found[page.key] = state
        return found

    @contextmanager
    def view(self) -> Iterator[View]:
        """A view, guarded by the breaker while it opens."""
        with ExitStack() as stack:
            with self.breaker.asking():
                view = stack.enter_context(self._backend.view())
            yield view

    def reader(
        self, view: View, pages: Sequence[Page], *, streamed: bool, along: bool
    ) -> ReadAhead | Generator[Found, None, None]:
        """Reads the others."""
        if streamed and along and all(page.stored_bytes == page.raw_bytes for page in pages):
            return read_along(view, pages, self._read_rate)
        return ReadAhead(self.threads, self.buffers, view, pages, self._read_rate, streamed=streamed)

    def count_given(self, pages: Sequence[Page]) -> None:
        """Count pages that a caller has got."""
        self._counters.count("given_pages", len(pages))
        self._counters.count("given_bytes", sum(page.raw_bytes for page in pages))

    def give_up(self, page: Page, error: StorageError | None) -> None:
        """Log and count why a page ended a fetch, and have it deleted if it is damaged."""
        if error is None:
            self._counters.count("unreadable:vanished")
        elif isinstance(error, LateError):
            log.info("a restore continues without the pages that have not arrived: %s", error)
            self._counters.count("late")
        elif isinstance(error, CorruptError):
            log.warning("a damaged page will be deleted: %s", error)
            if not isinstance(error, UndecryptableError):  # that is counted where it is found
                self._counters.count("unreadable:corrupt")
            self._catalog.mark_damaged(page)
        elif isinstance(error, ShapeError):
            log.warning("a page was not used: %s", error)
            self._counters.count("unreadable:shape")
        elif isinstance(error, IncompatibleError):
            log.warning("a page that needs a newer version was not used: %s", error)
            self._counters.count("unreadable:incompatible")
        else:
            log.warning("a page cannot be read: %s", error)
            self._counters.count("unreadable:unavailable")


def _within(seconds: float) -> float:
    # what has come already is used, however late it is
    return min(max(seconds, 0.001), TIMEOUT_MAX)
