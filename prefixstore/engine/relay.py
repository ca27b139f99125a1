"""Reads states in a thread, for a caller with a deadline.

A thread that waits for a location cannot be stopped, and the view it reads cannot be closed meanwhile. So the thread
opens the view, and a caller who gives up abandons both: they end when the location answers, or with its timeout.

    caller                        thread
    start                         open the view, read the first state
    next: wait for an answer      NEXT -> answer with the next state, None at the end, or an error
    keep: the state is good       KEEP -> copy it for later, while the caller uses it
    close: wait for the thread    END  -> close the view; if the caller has given up, keep what has come since
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from prefixstore.backends.threads import Job
from prefixstore.engine.fetch import Deadline, Fetcher, LateError, States
from prefixstore.engine.index import Page
from prefixstore.engine.page_view import View
from prefixstore.engine.readers import Admit, Look, ReaderPool, ShapeError, check_shape
from prefixstore.errors import StorageError, UnavailableError

__all__ = ["Keep", "Relays"]

log = logging.getLogger("prefixstore")


class Keep(Protocol):
    """Copies the states of one fetch, in another thread."""

    def opened(self, view: View) -> None:
        """The pages will be read from this view; nothing is read yet. Raises `StorageError`."""

    def keep(self, page: Page, state: memoryview) -> None:
        """Copy a verified state, while the caller may read it as well."""


class _Ask(Enum):
    """What the caller tells the thread."""

    NEXT = "next"
    KEEP = "keep"
    END = "end"


class _Relay:
    """One fetch, in a thread. The first state is read at once, each further one when it is asked for.

    Parameters
    ----------
    fetcher
        Reads the states.
    pages
        The wanted pages.
    streamed
        As for `Fetcher.fetching`.
    keep
        Is given the states that the caller finds good, and one that comes too late.
    """

    def __init__(self, fetcher: Fetcher, pages: Sequence[Page], *, streamed: bool, keep: Keep | None) -> None:
        self._fetcher = fetcher
        self._pages = pages
        self._streamed = streamed
        self._keep = keep
        self._asks: SimpleQueue[_Ask] = SimpleQueue()
        self._answers: SimpleQueue[memoryview | BaseException | None] = SimpleQueue()
        self._asks.put(_Ask.NEXT)
        self._is_asked = True
        self._is_late = False
        self._job = Job(self._run)
        self._view: View | None = None

    def start(self, pool: ReaderPool) -> None:
        """Start the thread. Raises `ClosedError`; if no thread can start, `next` raises."""
        try:
            if self._pages:
                pool.submit(self._job)
        except UnavailableError as error:
            self._answers.put(error)

    def next(self, page: Page, left: Callable[[float], float] | None) -> memoryview | None:
        """The next state, of this page; None if there is none.

        Parameters
        ----------
        page
            The page.
        left
            Seconds that are left for it, if this share of it has arrived; None for no limit.

        Raises
        ------
        LateError
            If it has not come in time. There is no next state then.
        StorageError
            If the location fails. There is no next state then, either.
        """
        if not self._is_asked:
            self._asks.put(_Ask.NEXT)
            self._is_asked = True
        answer = self._answers.get() if left is None else self._in_time(page, left)
        self._is_asked = False
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _in_time(self, page: Page, left: Callable[[float], float]) -> memoryview | BaseException | None:
        """The answer, unless it is late."""
        with suppress(Empty):
            return self._answers.get(timeout=_within(left(0.0)))
        # what will be there soon is worth waiting for, once
        arrived = self._view.arrived if self._view is not None else 0
        if arrived and page.stored_bytes:
            with suppress(Empty):
                return self._answers.get(timeout=_within(left(min(arrived / page.stored_bytes, 1.0))))
        self._is_late = True
        raise LateError("the location is slower than computing")

    def keep(self) -> None:
        """Note that the caller has found the last state good."""
        if self._keep is not None:
            self._asks.put(_Ask.KEEP)

    def leave(self) -> None:
        """Have `close` not wait for the thread."""
        self._is_late = True

    def close(self) -> None:
        """Return when the thread has ended, or at once if it is late. The states are not used any more.

        May be called again.
        """
        self._asks.put(_Ask.END)
        if not self._job.cancel() and not self._is_late:
            self._job.wait()

    def _run(self) -> None:
        try:
            with self._fetcher.fetching(
                self._pages, streamed=self._streamed, along=False, opened=self._opened
            ) as states:
                self._serve(iter(self._pages), states)
        except BaseException as error:  # noqa: BLE001 - raised by `next`
            self._answers.put(error)

    def _opened(self, view: View) -> None:
        self._view = view
        if self._keep is not None:
            self._keep.opened(view)

    def _serve(self, pages: Iterator[Page], states: States) -> None:
        page: Page | None = None
        state: memoryview | None = None
        while True:
            ask = self._asks.get()
            if ask is _Ask.NEXT:
                page, state = next(pages, None), next(states, None)
                self._answers.put(state)
            elif page is not None and state is not None and (ask is _Ask.KEEP or self._is_late):
                self._keep_one(page, state)
                state = None
            if ask is _Ask.END:
                return

    def _keep_one(self, page: Page, state: memoryview) -> None:
        if self._keep is None:
            return
        try:
            self._keep.keep(page, state)
        except StorageError as error:
            log.warning("a fetched page was not kept: %s", error)
        except Exception:  # what is kept is for later: it must not end a restore
            log.exception("a fetched page was not kept")


def _within(seconds: float) -> float:
    # what has come already is used, however late it is
    return min(max(seconds, 0.001), threading.TIMEOUT_MAX)


class _RelayedStates(States):
    """States that come from a thread; each is verified when it is given out."""

    def __init__(
        self,
        pages: Sequence[Page],
        relay: _Relay,
        give_up: Callable[[Page, StorageError | None], None],
        look: Look | None,
        refused: Page | None,
        deadline: Deadline | None,
    ) -> None:
        self._pages = pages
        self._relay = relay
        self._give_up = give_up
        self._look = look
        self._refused = refused
        self._deadline = deadline
        self._ended = False
        self.n_given = 0
        self.n_verified = 0

    def __next__(self) -> memoryview:
        if self._ended or self.n_given == len(self._pages):
            raise StopIteration
        page = self._pages[self.n_given]
        try:
            if page is self._refused:
                raise ShapeError(f"page {page.key.hex()} claims a state of {page.raw_bytes} bytes, more than possible")
            left = partial(self._deadline.left, self.n_given) if self._deadline is not None else None
            state = self._relay.next(page, left)
            if state is not None:
                check_shape(self._look, page, state)
        except (LateError, ShapeError) as error:
            self._end(page, error)
            raise StopIteration from None
        except StorageError as error:
            # what is wrong with a page was counted where it was read: this is about the location
            self._end(page, UnavailableError(str(error)))
            raise StopIteration from None
        if state is None:
            # why it ended was counted where it was read
            self._ended = True
            raise StopIteration
        self._relay.keep()
        self.n_given += 1
        self.n_verified = self.n_given
        return state

    def verified(self) -> int:
        return self.n_verified


class Relays:
    """Fetches that may be given up in the middle, from one location.

    Parameters
    ----------
    fetcher
        Reads.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        # not that of the readers: each of these threads waits for some of those
        self._pool = ReaderPool()

    def close(self) -> None:
        """Begin no more; those that run end by themselves."""
        self._pool.close()

    @contextmanager
    def fetching(
        self,
        pages: Sequence[Page],
        *,
        streamed: bool,
        look: Look | None,
        admit: Admit | None,
        deadline: Deadline | None,
        keep: Keep | None,
    ) -> Iterator[States]:
        """As `Fetcher.fetching`, with states that are verified when they are given out, and no longer than a deadline.

        Parameters
        ----------
        pages, streamed, look, admit
            As for `Fetcher.fetching`; `look` is called in the calling thread.
        deadline
            How long the caller waits; None for no limit.
        keep
            Receives each state that the caller has accepted, and those that arrive too late.
        """
        self._pool.check_open()
        refused = next((page for page in pages if admit is not None and not admit(page)), None)
        admitted = pages if refused is None else pages[: pages.index(refused)]
        relay = _Relay(self._fetcher, admitted, streamed=streamed, keep=keep)
        try:
            try:
                relay.start(self._pool)
                yield _RelayedStates(pages, relay, self._fetcher.give_up, look, refused, deadline)
            except BaseException:
                # a Ctrl-C does not wait for the location
                relay.leave()
                raise
            finally:
                relay.close()
        except BaseException:
            # again, should a Ctrl-C have come just before: a thread that is not told keeps its view open
            relay.leave()
            relay.close()
            raise
