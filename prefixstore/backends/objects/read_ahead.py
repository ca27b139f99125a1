"""Reads and writes objects: several requests at a time, in bounded memory.

Concurrent requests share the link, and pages are used in order. So the next page is requested when what is outstanding
will soon be there: on a slow link each page takes about as long as if it were alone, and on a fast one many are
requested at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from prefixstore.backends.threads import Answer, Threads
from prefixstore.errors import UnavailableError

__all__ = ["AT_ONCE", "HELD_BYTES", "SMALL_AT_ONCE", "Arrived", "Pace", "ahead", "at_once"]

# payloads that are read at a time, and bytes that payloads may hold, beside one of any size
AT_ONCE = 8
HELD_BYTES = 64 << 20
# as many as that of rows, and of what is written: what takes time then is the way to the server and back
SMALL_AT_ONCE = 32
# of the threads
NAME = "prefixstore-objects"
# what arrives this soon delays nothing, and neither do so few bytes
SOON_SECONDS = 0.1
SOON_BYTES = 256 << 10
# for how long what was measured of a link is trusted
LEARNED_SECONDS = 60.0

T = TypeVar("T")
R = TypeVar("R")

Arrived: TypeAlias = Callable[[int], None]
"""Told how many more bytes of a payload are there; raises if the rest is not wanted."""


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

    @property
    def soon(self) -> int:
        """The bytes that arrive soon."""
        return max(int(self._rate * SOON_SECONDS), SOON_BYTES)

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


def ahead(
    sizes: Sequence[int], read: Callable[[int, Arrived], R], pace: Pace, told: Arrived = lambda _: None
) -> Generator[R, None, None]:
    """Read payloads of these sizes ahead of the one in use, and yield them in order. An error is raised in its turn.

    `read` gets the number of a payload. `told` hears how many bytes of the one that is waited for are there. Closing
    this waits for nothing: requests that have begun end with the next bytes that arrive.
    """
    threads, answers, is_closed = Threads(NAME, AT_ONCE), deque[Answer[R]](), False
    # from the threads: bytes of a payload that have arrived, None at its end
    news = SimpleQueue[tuple[int, "int | None"]]()
    to_come, done, n_asked = list(sizes), set[int](), 0
    # those that a thread is reading
    running = set[int]()

    def arrived(number: int, n_bytes: int) -> None:
        if is_closed:
            raise UnavailableError("this payload is no longer needed")
        news.put((number, n_bytes))

    def work(number: int) -> R:
        started = time.perf_counter()
        running.add(number)
        try:
            arrived(number, 0)
            found = read(number, partial(arrived, number))
            pace.received(sizes[number], time.perf_counter() - started, len(running))
            return found
        finally:
            running.discard(number)
            news.put((number, None))

    def may_ask(first: int) -> bool:
        asked = slice(first, n_asked)
        held = sum(sizes[asked]) + sizes[n_asked]
        return n_asked == first or (
            n_asked - first < AT_ONCE and held <= HELD_BYTES and sum(to_come[asked]) <= pace.soon
        )

    pace.begin()
    try:
        for first, size in enumerate(sizes):
            while True:
                while n_asked < len(sizes) and may_ask(first):
                    answers.append(threads.start_or_run(work, n_asked))
                    n_asked += 1
                if first in done:
                    break
                told(size - to_come[first])
                number, n_bytes = news.get()
                if n_bytes is None:
                    done.add(number)
                to_come[number] = 0 if n_bytes is None else max(to_come[number] - n_bytes, 0)
            yield answers.popleft().get()
    finally:
        is_closed = True
        threads.close()
