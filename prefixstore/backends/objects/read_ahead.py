"""Reads and writes objects: several requests at a time, in bounded memory.

Concurrent requests share the link, and pages are used in order. So on a slow link the next page is requested with the
one that is waited for, and on a fast one many are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import TypeVar

from prefixstore.backends.threads import Answer, Threads
from prefixstore.errors import UnavailableError

__all__ = ["AT_ONCE", "HELD_BYTES", "SMALL_AT_ONCE", "Pace", "ahead", "at_once"]

# payloads that are read at a time, and bytes that payloads may hold, beside one of any size
AT_ONCE = 8
HELD_BYTES = 64 << 20
# as many as that of rows, and of what is written: what takes time then is the way to the server and back
SMALL_AT_ONCE = 32
# of the threads
NAME = "prefixstore-objects"
# what arrives this soon delays nothing
SOON_SECONDS = 0.3
# for how long what was measured of a link is trusted
LEARNED_SECONDS = 60.0

T = TypeVar("T")
R = TypeVar("R")


class Pace:
    """How fast payloads arrive. Any thread may use it, without a lock: what is lost of it is learned again.

    If more at a time are faster together, the rate grows, and with it their number; if they only share the link, it
    does not. The clock counts seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # bytes per second of all requests together, at best
        self._rate, self._since = 0.0, clock()

    def begin(self) -> None:
        """Called before payloads are read: forget an old rate."""
        if not 0 <= self._clock() - self._since <= LEARNED_SECONDS:
            self._rate, self._since = 0.0, self._clock()

    def n_at_once(self, size: int) -> int:
        """How many payloads of this size to request at a time: one, one behind it, and what arrives soon."""
        return min(2 + int(self._rate * SOON_SECONDS / max(size, 1)), AT_ONCE)

    def received(self, size: int, seconds: float, n_at_once: int) -> None:
        """Learn from a request that has just ended: its bytes, its duration, and how many there were at its end."""
        self._rate = max(self._rate, n_at_once * size / max(seconds, 1e-6))


def at_once(items: Sequence[T], work: Callable[[T], R], most: int = SMALL_AT_ONCE) -> list[R]:
    """Do work on items, several at a time, and return the results; none is being worked on when this ends, or fails."""
    if len(items) < 2:
        return [work(item) for item in items]
    threads, has_failed = Threads(NAME, min(most, SMALL_AT_ONCE)), False

    def unless_failed(item: T) -> R:
        if has_failed:
            raise UnavailableError("another one has failed")
        return work(item)

    waiting: deque[Answer[R]] = deque()
    try:
        waiting.extend(threads.start_or_run(unless_failed, item) for item in items)
        return [waiting.popleft().get() for _ in items]
    finally:
        has_failed = True
        for answer in waiting:
            with suppress(Exception):
                answer.get()
        threads.close()


def ahead(sizes: Sequence[int], read: Callable[[int], R], pace: Pace) -> Generator[R, None, None]:
    """Read payloads of these sizes ahead of the one in use, and yield them in order. An error is raised in its turn.

    `read` gets the number of a payload. Closing this waits for nothing: requests that have begun end by themselves.
    """
    threads, answers, n_asked, is_closed = Threads(NAME, AT_ONCE), deque[Answer[R]](), 0, False
    # those that a thread is reading
    running = set[int]()

    def work(number: int) -> R:
        if is_closed:
            raise UnavailableError("this payload is no longer needed")
        started = time.perf_counter()
        running.add(number)
        try:
            found = read(number)
            pace.received(sizes[number], time.perf_counter() - started, len(running))
            return found
        finally:
            running.discard(number)

    pace.begin()
    try:
        for first, size in enumerate(sizes):
            until = min(first + pace.n_at_once(size), len(sizes))
            while n_asked == first or (n_asked < until and sum(sizes[first : n_asked + 1]) <= HELD_BYTES):
                answers.append(threads.start_or_run(work, n_asked))
                n_asked += 1
            yield answers.popleft().get()
    finally:
        is_closed = True
        threads.close()
