"""Delivers the verified states of pages, in order: from the buffers of pending pages, from RAM, or from the backend.

A thread of the store has the view, so whoever stops waiting leaves both to it: they end when the location answers, or
with its timeout.

    caller                        thread
    enter the block               open the view, read the first state
    next: wait for an answer      NEXT -> answer with the next state, None at the end, or an error; verify it
    the state can be used         KEEP -> copy it for later, while the caller uses it
    the state cannot be used      REFUSED -> count that, unless it is damaged
    verified: wait                VERIFIED -> answer with how many are
    leave the block: wait         END -> close the view; if the caller has given up, keep what has come since
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from enum import Enum
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import NamedTuple, Protocol

from prefixstore.backends.threads import Answer, Lent, Threads
from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.index import Page
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages
from prefixstore.engine.ram import RamTier
from prefixstore.engine.readers import Admit, Look, ReadAhead, ReadAlong, Reader, ShapeError, for_caller
from prefixstore.errors import (
    ClosedError,
    CorruptError,
    IncompatibleError,
    StorageError,
    UnavailableError,
    UndecryptableError,
)
from prefixstore.format.autocodec import ReadRate
from prefixstore.stats import Counters

__all__ = ["Deadline", "Fetcher", "Keep", "LateError", "Shifted", "States"]

log = logging.getLogger("prefixstore")

# How far behind its deadline a location on this machine may be: it may be the machine that has paused.
LOCAL_SECONDS = 0.5


class Deadline(Protocol):
    """How long a caller is willing to wait for states."""

    def left(self, n_given: int, arrived: float = 0.0) -> float:
        """Seconds left for the next state, after `n_given` states, if this share of it has arrived.

        Negative if that is over.
        """


class Shifted:
    """A deadline for the pages after some others, or if `start` is negative, with some more before its own."""

    def __init__(self, deadline: Deadline, start: int) -> None:
        self._deadline = deadline
        self._start = start

    def left(self, n_given: int, arrived: float = 0.0) -> float:
        """As `Deadline.left`."""
        n = self._start + n_given
        return self._deadline.left(max(n, 0), arrived if n >= 0 else 0.0)


class LateError(UnavailableError):
    """A state has not come within the deadline of the caller."""


class Keep(Protocol):
    """Copies the states of one fetch, in the thread that reads them."""

    def opened(self, view: View) -> None:
        """The pages will be read from this view; nothing is read yet. Raises `StorageError`."""

    def keep(self, page: Page, state: memoryview) -> None:
        """Copy a verified state, while the caller may read it as well."""


class _Ask(Enum):
    """What the caller tells the thread.

    After a state that is not verified, the caller says at once what it wants next: the thread verifies that state while
    the caller copies it, and then reads the next one.
    """

    NEXT = "next"
    KEEP = "keep"
    REFUSED = "refused"
    VERIFIED = "verified"
    END = "end"


class _Given(NamedTuple):
    """What the thread answers.

    Attributes
    ----------
    state
        The next state; None if there is none.
    n_verified
        How many of those before it are verified.
    is_verified
        Whether it is verified, too.
    is_shape_known
        Whether it was found to have a shape that the caller can use.
    error
        What has ended the thread.
    """

    state: memoryview | None
    n_verified: int
    is_verified: bool = True
    is_shape_known: bool = False
    error: Exception | None = None


class _Talk:
    """What a caller and the thread that reads for it share.

    Attributes
    ----------
    is_left
        Whether the caller no longer waits.
    view
        What is read, to see how much of a page has arrived; None before it is open.
    """

    def __init__(self) -> None:
        self.asks: SimpleQueue[_Ask] = SimpleQueue()
        self.answers: SimpleQueue[_Given] = SimpleQueue()
        self.is_left = False
        self.view: View | None = None


class States(Iterator[memoryview]):
    """The states of some pages, in order, up to the first page that is gone or damaged.

    Attributes
    ----------
    n_given
        How many states were returned.
    n_verified
        How many of them are verified so far; `verified` waits until all are.
    """

    n_given: int
    n_verified: int

    def verified(self) -> int:
        """How many returned states are verified; if fewer than all, the last one is bad."""
        raise NotImplementedError


class _Fetched(Lent, States, AbstractContextManager[States]):
    """States that a thread reads while the block is open.

    Whoever is interrupted on the way into the block, or out of it, loses this, and the thread ends then.

    Parameters
    ----------
    fetcher
        Reads them.
    pages
        The wanted pages.
    streamed, along, look, deadline, keep
        As for `Fetcher.fetching`.
    refused
        The page whose size the caller does not accept, if there is one: the iteration ends there.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        pages: Sequence[Page],
        *,
        streamed: bool,
        along: bool,
        look: Look | None,
        refused: Page | None,
        deadline: Deadline | None,
        keep: Keep | None,
    ) -> None:
        super().__init__()
        self._talk = _Talk()
        self._fetcher = fetcher
        self._pages = pages
        self._look = look
        self._refused = refused
        self._deadline = deadline
        self._keeps = keep is not None
        admitted = pages if refused is None else pages[: pages.index(refused)]
        self._delivery = _Delivery(fetcher, admitted, self._talk, streamed=streamed, along=along, look=look, keep=keep)
        self._done: Answer[None] | None = None
        self._is_asked = self._ended = False
        # what was asked for, and has come before the caller wanted it
        self._ahead: _Given | None = None
        self._error: Exception | None = None
        self.n_given = self.n_verified = 0

    def __enter__(self) -> States:
        if self._delivery.pages:
            self._fetcher.threads.lend(self)
            self._ask(_Ask.NEXT)
            self._is_asked = True
            try:
                self._done = self._fetcher.threads.start(self._delivery.run)
            except RuntimeError as error:
                failed = UnavailableError(f"no thread can be started to read pages: {error}")
                self._talk.answers.put(_Given(None, 0, error=failed))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended, self.is_open = True, False
        # a Ctrl-C does not wait for the location
        self._talk.is_left = self._talk.is_left or not (kind is None or issubclass(kind, Exception))
        self._ask(_Ask.END)
        if self._done is not None and self._talk.is_left:
            self._done.leave()
        elif self._done is not None:
            self._done.get()

    def __del__(self) -> None:
        with suppress(AttributeError):  # its making was interrupted
            self._ask(_Ask.END)

    def _ask(self, ask: _Ask) -> None:
        self._talk.asks.put(ask)

    def __next__(self) -> memoryview:
        if self._error is not None:
            raise self._error
        if self._ended:
            raise StopIteration
        if self.n_given == len(self._pages):
            self.verified()
            raise StopIteration
        page = self._pages[self.n_given]
        try:
            state = self._next(page)
        except StorageError as error:
            self._end(page, error)
            state = None
        if state is None:
            self._ended = True
            raise StopIteration
        return state

    def _next(self, page: Page) -> memoryview | None:
        """The next state, of this page; None if there is none, which was counted where it was read."""
        is_late = self._fetcher.is_local and self._left() < -LOCAL_SECONDS
        if page is self._refused or is_late:
            if self.verified() < self.n_given:
                return None
            if is_late:
                raise LateError("the location is slower than computing")
            raise ShapeError(f"page {page.key.hex()} claims a state of {page.raw_bytes} bytes, more than possible")
        if not self._is_asked:
            self._ask(_Ask.NEXT)
        given, self._ahead = self._ahead or self._answer(page), None
        self._is_asked = False
        self.n_verified = given.n_verified
        if given.state is None:
            return None
        if self._look is not None and not given.is_shape_known and not self._look(page, given.state):
            self._ask(_Ask.REFUSED)
            return None
        if self._keeps:
            self._ask(_Ask.KEEP)
        self.n_given += 1
        self.n_verified += given.is_verified
        if not given.is_verified:
            self._ask(_Ask.NEXT if self.n_given < len(self._delivery.pages) else _Ask.VERIFIED)
            self._is_asked = True
        return given.state

    def verified(self) -> int:
        if self._error is not None:
            raise self._error
        if self.n_verified < self.n_given and not self._ended:
            page = self._pages[self.n_verified]
            try:
                # it was asked for when the last state was given
                self._ahead = self._ahead or self._answer(page)
                self.n_verified = self._ahead.n_verified
            except StorageError as error:
                self._end(page, error)
            self._ended = self._ended or self.n_verified < self.n_given
        return self.n_verified

    def _left(self, arrived: float = 0.0) -> float:
        """Seconds that are left for the next state, if this share of it has arrived."""
        return self._deadline.left(self.n_given, arrived) if self._deadline is not None else TIMEOUT_MAX

    def _answer(self, page: Page) -> _Given:
        """What the thread answers; this page is what it reads.

        Raises
        ------
        LateError
            If it has not come in time. Nothing comes after that, nor after any other error.
        """
        given = self._fetcher.in_time(self._talk, page, self._left)
        if isinstance(given.error, StorageError):
            # what is wrong with a page was counted where it was read: this is about the location
            raise UnavailableError(str(given.error))
        if given.error is not None:
            self._error = given.error
            raise given.error
        return given

    def _end(self, page: Page, error: StorageError) -> None:
        self._ended = True
        self._fetcher.give_up(page, error)


class _Delivery:
    """Reads states in a thread. Parameters as for `_Fetched`, and what it shares with that."""

    def __init__(
        self,
        fetcher: Fetcher,
        pages: Sequence[Page],
        talk: _Talk,
        *,
        streamed: bool,
        along: bool,
        look: Look | None,
        keep: Keep | None,
    ) -> None:
        self.pages = pages
        self._fetcher = fetcher
        self._talk = talk
        self._streamed = streamed
        self._along = along
        self._look = look
        self._keep = keep
        self._n_given = self._n_verified = 0
        self._in_memory: Mapping[bytes, memoryview] = {}

    def run(self) -> None:
        """Read until the caller has left."""
        try:
            with self._fetcher.held(self.pages) as held, self._fetcher.view() as view:
                self._talk.view = view
                if self._keep is not None:
                    with self._fetcher.breaker.asking():
                        self._keep.opened(view)
                self._in_memory = self._fetcher.in_memory(self.pages, held)
                stored = [page for page in self.pages if page.key not in self._in_memory]
                reader = self._fetcher.reader(view, stored, streamed=self._streamed, along=self._along)
                try:
                    self._serve(reader)
                finally:
                    reader.close()
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            self._talk.answers.put(_Given(None, self._n_verified, error=for_caller(error)))

    def _serve(self, reader: Reader) -> None:
        # what was given last, as long as it may be kept
        last: _Coming | None = None
        while (ask := self._talk.asks.get()) is not _Ask.END:
            if ask is _Ask.KEEP and last is not None:
                self._keep_one(last)
                last = None
                continue
            if last is not None and not last.is_verified and self._n_verified < self._n_given:
                self._verify(reader, last.page)
            if ask is _Ask.NEXT:
                last = self._give(self._read(reader))
            elif ask is _Ask.REFUSED and last is not None and self._n_verified == self._n_given:
                # a damaged page may have any shape
                self._fetcher.give_up(last.page, _misshapen(last.page))
            elif ask is _Ask.VERIFIED:
                self._talk.answers.put(_Given(None, self._n_verified))
        if last is not None and self._talk.is_left:
            self._keep_one(last)

    def _read(self, reader: Reader) -> _Coming:
        """The next state, or why there is none."""
        if self._n_verified < self._n_given or self._n_given == len(self.pages):
            return _Coming(self.pages[-1], None, None, is_counted=True)
        page = self.pages[self._n_given]
        if (state := self._in_memory.get(page.key)) is not None:
            return _Coming(page, state)
        # The first one is for the caller to look at, who may learn from it. The bytes that are compared are in no
        # processor's cache yet, so of the others that is done here, while the caller uses the one before.
        look = self._look if self._n_given > 0 and not reader.verifies_first else None
        try:
            with self._fetcher.breaker.asking(page):
                state = reader.next()
            if look is not None and state is not None and not look(page, state):
                # a damaged page may have any shape
                reader.verify()
                raise _misshapen(page)
        except Exception as raised:
            error = for_caller(raised)
            if not isinstance(error, StorageError):
                raise
            return _Coming(page, None, error)
        return _Coming(page, state, is_verified=reader.verifies_first, is_shape_known=look is not None)

    def _give(self, coming: _Coming) -> _Coming | None:
        """Answer with a state; it, if there is one."""
        page, state, error = coming.page, coming.state, coming.error
        if state is None and not coming.is_counted:
            self._fetcher.give_up(page, error)
        self._talk.answers.put(_Given(state, self._n_verified, coming.is_verified, coming.is_shape_known))
        if state is None:
            return None
        self._n_given += 1
        self._n_verified += coming.is_verified
        return coming

    def _verify(self, reader: Reader, page: Page) -> None:
        """Find out whether the state that was given last is what was written."""
        try:
            reader.verify()
        except StorageError as error:
            self._fetcher.give_up(page, error)
        else:
            self._n_verified += 1

    def _keep_one(self, last: _Coming) -> None:
        if self._keep is None or last.state is None or last.page.key in self._in_memory:
            return
        try:
            self._keep.keep(last.page, last.state)
        except StorageError as error:
            log.warning("a fetched page was not kept: %s", error)
        except Exception:  # what is kept is for later: it must not end a restore
            log.exception("a fetched page was not kept")


class _Coming(NamedTuple):
    """A state that was read, or why it was not: an error, None if the page is gone; perhaps that was counted."""

    page: Page
    state: memoryview | None
    error: StorageError | None = None
    is_verified: bool = True
    is_counted: bool = False
    is_shape_known: bool = False


def _misshapen(page: Page) -> ShapeError:
    return ShapeError(f"page {page.key.hex()} does not have the shape of a page")


class Fetcher:
    """Gets the states of pages from the buffers of pending pages, from RAM, or from the backend.

    Parameters
    ----------
    backend, catalog, ram
        Of the engine.
    threads
        Read.
    counters
        Counts pages that cannot be read, by reason.
    read_rate
        Learns how fast the location delivers bytes.
    breaker
        Guards the location.
    """

    def __init__(
        self,
        backend: Pages,
        catalog: Catalog,
        ram: RamTier,
        threads: Threads,
        counters: Counters,
        read_rate: ReadRate,
        breaker: CircuitBreaker,
    ) -> None:
        self._backend = backend
        self._catalog = catalog
        self._ram = ram
        self.threads = threads
        self._counters = counters
        self._read_rate = read_rate
        self.breaker = breaker
        self.buffers = BufferPool(limit=None)
        self._closed = False

    def close(self) -> None:
        """Begin no more."""
        self._closed = True

    @property
    def is_local(self) -> bool:
        """Whether the location is on this machine."""
        return self._backend.is_local

    def fetching(
        self,
        pages: Sequence[Page],
        *,
        streamed: bool = False,
        along: bool = True,
        look: Look | None = None,
        admit: Admit | None = None,
        deadline: Deadline | None = None,
        keep: Keep | None = None,
    ) -> AbstractContextManager[States]:
        """The verified states of `pages`, in order; they end early at a page that is gone, damaged or late.

        Parameters
        ----------
        pages
            The wanted pages, in this order.
        streamed
            A state is valid only until the next one is requested, and its buffer is used again. Otherwise states are
            verified when they are given out, and valid until the block is left.
        along
            If streamed: for callers that can undo a load. They get raw states earlier: before the checksum is known;
            the next state, and `States.verified`, wait for it. Not where states are kept, nor with a deadline for
            another machine.
        look
            Whether a state can be used; a state that it refuses ends the iteration too. It is called with one state at
            a time, in the calling thread; after the first one, in the thread that reads if the caller gets states
            before they are verified.
        admit
            Whether a page may be read, judged by the size of its state; one that may not ends the iteration too. It is
            called before anything is read, in the calling thread.
        deadline
            How long the caller waits. It ends the iteration in the middle of a page if the location is not on this
            machine, else between two.
        keep
            Receives each state that the caller has accepted, and those that arrive too late; by default the RAM tier.

        Raises
        ------
        ClosedError
            If the store was closed. What is wrong with the location ends the iteration, and is counted.
        """
        if self._closed:
            raise ClosedError("the store was closed while it was read; open a new PrefixStore")
        if keep is None and self._ram.lacks(pages):
            keep = self._ram
        refused = next((page for page in pages if admit is not None and not admit(page)), None)
        along = along and keep is None and (deadline is None or self.is_local)
        return _Fetched(
            self,
            pages,
            streamed=streamed,
            along=along,
            look=look,
            refused=refused,
            deadline=deadline,
            keep=keep,
        )

    def in_time(self, talk: _Talk, page: Page, left: Callable[[float], float]) -> _Given:
        """The next answer, unless it is late; this page is what is read."""
        if self.is_local:
            # it can only hang
            with suppress(Empty):
                return talk.answers.get(timeout=self.breaker.patience(page))
            talk.is_left = True
            self.breaker.hangs(page)
            raise LateError("the location does not answer")
        with suppress(Empty):
            return talk.answers.get(timeout=_within(left(0.0)))
        # what will be there soon is worth waiting for, once
        arrived = talk.view.arrived if talk.view is not None else 0
        if arrived and page.stored_bytes:
            with suppress(Empty):
                return talk.answers.get(timeout=_within(left(min(arrived / page.stored_bytes, 1.0))))
        talk.is_left = True
        raise LateError("the location is slower than computing")

    # -- what a thread needs to read ----------------------------------------------------------------------------------

    @contextmanager
    def held(self, pages: Sequence[Page]) -> Iterator[Mapping[bytes, PooledBuffer]]:
        """The buffers of those that are pending. Entered before a view, so what is committed meanwhile is in either."""
        held = self._catalog.hold(pages)
        try:
            yield held
        finally:
            for buffer in held.values():
                buffer.release()

    @contextmanager
    def view(self) -> Iterator[View]:
        """A view, guarded by the breaker while it opens."""
        with ExitStack() as stack:
            with self.breaker.asking():
                view = stack.enter_context(self._backend.view())
            yield view

    def in_memory(self, pages: Sequence[Page], held: Mapping[bytes, PooledBuffer]) -> dict[bytes, memoryview]:
        """States that need not be read."""
        in_memory = {key: buffer.view for key, buffer in held.items()}
        for page in pages:
            if page.key not in in_memory and (state := self._ram.state(page)) is not None:
                in_memory[page.key] = state
        return in_memory

    def reader(self, view: View, pages: Sequence[Page], *, streamed: bool, along: bool) -> Reader:
        """Reads the others."""
        if streamed and along and all(page.stored_bytes == page.raw_bytes for page in pages):
            return ReadAlong(view, pages, self._read_rate)
        return ReadAhead(self.threads, self.buffers, view, pages, self._read_rate, streamed=streamed)

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
