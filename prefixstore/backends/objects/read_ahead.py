"""Reads and writes objects: several requests at a time, in bounded memory.

Concurrent requests share the link, and pages are used in order. So the next page is requested when little of those
before it is outstanding: on a slow link the first page takes as long as if it were alone, and on a fast one many are
requested at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

from prefixstore.backends.threads import Answer, Threads
from prefixstore.errors import UnavailableError

__all__ = ["AT_ONCE", "HELD_BYTES", "SMALL_AT_ONCE", "Arrived", "Window", "ahead", "at_once"]

# requests at a time, and bytes of payloads that they may hold, beside one payload of any size
AT_ONCE = 8
HELD_BYTES = 64 << 20
# as many as that where they are mostly small, or written: what takes time then is the way to the server and back
SMALL_AT_ONCE = 32
# of the threads
NAME = "prefixstore-objects"

# The window of a new location, and for how long what was learned of a link is trusted.
LEAST_BYTES = 1 << 20
FIRST_BYTES = 256 << 10
LEARNED_SECONDS = 60.0
# payloads that arrive this soon delay nothing
SOON = 0.05
# A request beside others that is as fast as this share of the fastest one says that more at a time are faster; one that
# is slower than that share, that they only wait for each other.
FREE, CROWDED = 0.8, 0.6

T = TypeVar("T")
R = TypeVar("R")

Arrived: TypeAlias = Callable[[int], None]
"""Told how many more bytes of a payload are there; raises if the rest is not wanted."""


class Window:
    """How many bytes may be in transit when the next payload is requested, as learned from the requests so far.

    For the threads of one process, without a lock: what is lost of it is learned again.

    Parameters
    ----------
    clock
        Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._forget()

    def _forget(self) -> None:
        self._learned = LEAST_BYTES
        # bytes per second of the fastest request, by the magnitude of the size: small ones are slower
        self._fastest: dict[int, float] = {}
        self._since = self._changed = self._clock()

    def begin(self) -> None:
        """Called before payloads are read: forget old measurements."""
        if not 0 <= self._clock() - self._since <= LEARNED_SECONDS:
            self._forget()

    @property
    def bytes(self) -> int:
        """The window."""
        soon = SOON * max(self._fastest.values(), default=0.0)
        return min(max(self._learned, int(soon)), HELD_BYTES)

    def before_first(self, size: int) -> int:
        """The window while the first payload is in transit: no work can start before it arrives."""
        return self.bytes if self.bytes >= 2 * size else FIRST_BYTES

    def received(self, size: int, seconds: float, *, is_full: bool = True) -> None:
        """Learn from a request that has just ended: its bytes and its duration.

        Without `is_full`, fewer requests were in transit than the window allows.
        """
        now, rate, magnitude = self._clock(), size / max(seconds, 1e-6), size.bit_length()
        fastest = self._fastest[magnitude] = max(self._fastest.get(magnitude, 0.0), rate)
        if not is_full or now - seconds < self._changed:
            # it says nothing about the present window
            return
        if rate >= FREE * fastest:
            self._learned, self._changed = min(2 * self.bytes, HELD_BYTES), now
        elif rate < CROWDED * fastest:
            self._learned, self._changed = max(self.bytes // 2, LEAST_BYTES), now


def at_once(
    items: Sequence[T],
    work: Callable[[T], R],
    size_of: Callable[[T], int],
) -> list[R]:
    """Do work on items, several at a time, and return the results; none is being worked on when this ends, or fails."""
    if len(items) < 2:
        return [work(item) for item in items]
    threads, held, found = Threads(NAME, SMALL_AT_ONCE), 0, list[R]()
    waiting: deque[tuple[T, Answer[R]]] = deque()
    has_failed = False

    def unless_failed(item: T) -> R:
        if has_failed:
            raise UnavailableError("another one has failed")
        return work(item)

    def take() -> int:
        item, answer = waiting.popleft()
        found.append(answer.get())
        return size_of(item)

    try:
        for item in items:
            held += size_of(item)
            while held > HELD_BYTES and waiting:
                held -= take()
            waiting.append((item, threads.start_or_run(unless_failed, item)))
        while waiting:
            take()
        return found
    finally:
        has_failed = True
        for _, answer in waiting:
            with suppress(Exception):
                answer.get()
        threads.close()


@dataclass(eq=False)
class _Request(Generic[T]):
    """A payload that was asked for, and how much of it is still to come."""

    item: T
    size: int
    to_come: int
    is_first: bool
    is_done: bool = False


def ahead(
    items: Iterable[T],
    size_of: Callable[[T], int],
    read: Callable[[T, Arrived], R],
    window: Window,
    told: Arrived = lambda _: None,
) -> Generator[tuple[T, R], None, None]:
    """Read items ahead of the one in use, and yield them in order. An error is raised in its turn.

    `told` hears how many bytes of the one that is waited for are there.
    """
    requests = _Requests(items, size_of, read, window, told)
    try:
        while (first := requests.wait_for_first()) is not None:
            request, answer = first
            found = answer.get()
            yield request.item, found
            del first, found, answer
    finally:
        requests.close()


class _Requests(Generic[T, R]):
    """What was asked for, in order. Parameters as for `ahead`."""

    def __init__(
        self,
        items: Iterable[T],
        size_of: Callable[[T], int],
        read: Callable[[T, Arrived], R],
        window: Window,
        told: Arrived,
    ) -> None:
        self._size_of, self._read, self._window, self._told = size_of, read, window, told
        self._left = iter(items)
        self._next: list[T] = []
        self._waiting: deque[tuple[_Request[T], Answer[R]]] = deque()
        self._held = 0
        # from the threads: bytes that have arrived, None at the end
        self._news: SimpleQueue[tuple[_Request[T], int | None]] = SimpleQueue()
        self._is_first, self._is_over, self._is_closed = True, False, False
        self._readers = Threads(NAME, AT_ONCE)
        window.begin()

    def wait_for_first(self) -> tuple[_Request[T], Answer[R]] | None:
        """The next request, when it is done; None if there is none left."""
        self._ask()
        while self._waiting and not (first := self._waiting[0][0]).is_done:
            self._told(first.size - first.to_come)
            request, n_bytes = self._news.get()
            request.is_done = n_bytes is None
            request.to_come = 0 if n_bytes is None else max(request.to_come - n_bytes, 0)
            self._ask()
        if not self._waiting:
            return None
        self._is_first = False
        found = self._waiting.popleft()
        self._held -= found[0].size
        return found

    def _ask(self) -> None:
        """Send as many requests as may be on their way."""
        while not self._is_over and len(self._waiting) < AT_ONCE:
            if not self._next:
                self._next = list(islice(self._left, 1))
            self._is_over = not self._next
            if self._is_over or not self._may_ask(size := self._size_of(self._next[0])):
                return
            request = _Request(self._next.pop(), size, size, self._is_first and not self._waiting)
            self._held += size
            self._waiting.append((request, self._readers.start_or_run(self._work, request)))

    def _may_ask(self, size: int) -> bool:
        if not self._waiting:
            return True
        window, first = self._window, self._waiting[0][0]
        most = window.before_first(first.size) if self._is_first else window.bytes
        to_come = sum(request.to_come for request, _ in self._waiting)
        return to_come <= most and self._held + size <= HELD_BYTES

    def _work(self, request: _Request[T]) -> R:
        started = time.perf_counter()
        try:
            self._arrived(request, 0)
            found = self._read(request.item, partial(self._arrived, request))
            seconds = time.perf_counter() - started
            self._window.received(request.size, seconds, is_full=not (request.is_first or self._is_over))
            return found
        finally:
            self._news.put((request, None))

    def _arrived(self, request: _Request[T], n_bytes: int) -> None:
        if self._is_closed:
            raise UnavailableError("this payload is no longer needed")
        self._news.put((request, n_bytes))

    def close(self) -> None:
        """Wait for nothing: requests that have begun end with the next bytes that arrive."""
        self._is_closed = True
        self._readers.close()
