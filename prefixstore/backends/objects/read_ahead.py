"""Reads and writes objects: several requests at a time, in bounded memory.

Concurrent requests share the link, and pages are used in order, each with a deadline. So the next page is requested
when little of those before it is outstanding: on a slow link the first page takes as long as if it were alone, and on a
fast one many are requested at once.
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

# payloads that are read at a time, and bytes that payloads may hold, beside one of any size
AT_ONCE = 8
HELD_BYTES = 64 << 20
# as many as that of rows, and of what is written: what takes time then is the way to the server and back
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


class ReadWindow:
    """How many bytes may be in transit when the next payload is requested, as learned from the requests so far.

    For the threads of one process, without a lock: what is lost of it is learned again. The clock counts seconds.
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
        if not size or not is_full or now - seconds < self._changed:
            # it says nothing about the present window
            return
        if rate >= FREE * fastest:
            self._learned, self._changed = min(2 * self.bytes, HELD_BYTES), now
        elif rate < CROWDED * fastest:
            self._learned, self._changed = max(self.bytes // 2, LEAST_BYTES), now


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
    sizes: Sequence[int], read: Callable[[int, Arrived], R], window: ReadWindow, told: Arrived = lambda _: None
) -> Generator[R, None, None]:
    """Read payloads of these sizes ahead of the one in use, and yield them in order. An error is raised in its turn.

    `read` gets the number of a payload. `told` hears how many bytes of the one that is waited for are there. Closing
    this waits for nothing: requests that have begun end with the next bytes that arrive.
    """
    threads, answers, is_closed = Threads(NAME, AT_ONCE), deque[Answer[R]](), False
    # from the threads: bytes of a payload that have arrived, None at its end
    news = SimpleQueue[tuple[int, "int | None"]]()
    to_come, done, n_asked = list(sizes), set[int](), 0

    def arrived(number: int, n_bytes: int) -> None:
        if is_closed:
            raise UnavailableError("this payload is no longer needed")
        news.put((number, n_bytes))

    def work(number: int) -> R:
        started = time.perf_counter()
        try:
            arrived(number, 0)
            found = read(number, partial(arrived, number))
            is_full = number > 0 and n_asked < len(sizes)
            window.received(sizes[number], time.perf_counter() - started, is_full=is_full)
            return found
        finally:
            news.put((number, None))

    def may_ask(first: int) -> bool:
        asked, most = slice(first, n_asked), window.bytes if first else window.before_first(sizes[0])
        held = sum(sizes[asked]) + sizes[n_asked]
        return n_asked == first or (n_asked - first < AT_ONCE and sum(to_come[asked]) <= most and held <= HELD_BYTES)

    window.begin()
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
