"""Reads and writes objects: several requests at a time, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

from prefixstore.backends.threads import Answer, Threads
from prefixstore.errors import UnavailableError

__all__ = ["AT_ONCE", "HELD_BYTES", "SMALL_AT_ONCE", "Arrived", "Requests"]

# payloads that are read at a time at most, and bytes that requests may hold, beside one payload of any size
AT_ONCE = 8
HELD_BYTES = 64 << 20
# as many as that where they are mostly small, or written: what takes time then is the way to the server and back
SMALL_AT_ONCE = 32
# payloads that arrive this soon delay nothing
SOON = 0.05
# A payload that comes beside others as fast as this share of the fastest one says that more at a time are faster; one
# that is slower than that share, that they only wait for each other.
FREE, CROWDED = 0.8, 0.6
# of what is known of the fastest one, with each payload: links change
KEPT = 0.98

T = TypeVar("T")
R = TypeVar("R")

Arrived: TypeAlias = Callable[[int], None]
"""Told how many more bytes of a payload are there; raises if the rest is not wanted."""


class Requests:
    """Several requests of one location at a time. Safe to use from many threads.

    Payloads are used in order, and requests share the link. So there are only as many at a time as make it faster: on a
    slow link each payload comes as soon as if it were alone.

    Attributes
    ----------
    n_ahead
        How many payloads are read at a time. It is changed without a lock: what is lost of it is learned again.
    """

    def __init__(self) -> None:
        self._threads = Threads("prefixstore-objects")
        self.n_ahead = 1
        # bytes per second
        self._fastest = 0.0

    def close(self) -> None:
        """End the threads, when what they do is done."""
        self._threads.close()

    def at_once(self, items: Sequence[T], work: Callable[[T], R], size_of: Callable[[T], int]) -> list[R]:
        """Work on items, and return the results; none is being worked on when this ends, or fails."""
        if len(items) < 2:
            return [work(item) for item in items]
        waiting, found, held, has_failed = deque[tuple[T, Answer[R]]](), list[R](), 0, False

        def unless_failed(item: T) -> R:
            if has_failed:
                raise UnavailableError("another one has failed")
            return work(item)

        try:
            for item in items:
                held += size_of(item)
                while waiting and (held > HELD_BYTES or len(waiting) == SMALL_AT_ONCE):
                    held -= size_of(waiting[0][0])
                    found.append(waiting.popleft()[1].get())
                waiting.append((item, self._threads.start_or_run(unless_failed, item)))
            while waiting:
                found.append(waiting.popleft()[1].get())
            return found
        finally:
            has_failed = True
            for _, answer in waiting:
                with suppress(Exception):
                    answer.get()

    def ahead(
        self,
        items: Sequence[T],
        size_of: Callable[[T], int],
        read: Callable[[T, Arrived], R],
        note: Arrived = lambda _: None,
    ) -> Generator[R, None, None]:
        """Read payloads ahead of the one in use, and yield them in order. An error is raised in its turn.

        Whoever ends early waits for nothing: requests that have begun end with the next bytes that arrive. `note` hears
        how many bytes of the one that is waited for are there.
        """
        waiting, n_given, held, is_over = deque[tuple[int, Answer[R]]](), 0, 0, False

        def work(number: int) -> R:
            n_bytes, started = 0, time.perf_counter()

            def arrived(n_more: int) -> None:
                nonlocal n_bytes
                if is_over:
                    raise UnavailableError("this payload is no longer needed")
                n_bytes += n_more
                if number == n_given:
                    note(n_bytes)

            arrived(0)
            found = read(items[number], arrived)
            self._received(size_of(items[number]), time.perf_counter() - started)
            return found

        def ask() -> None:
            nonlocal held
            while (number := n_given + len(waiting)) < len(items) and len(waiting) < self.n_ahead:
                size = size_of(items[number])
                if waiting and held + size > HELD_BYTES:
                    break
                held += size
                waiting.append((size, self._threads.start_or_run(work, number)))

        try:
            while n_given < len(items):
                ask()
                size, answer = waiting.popleft()
                found = answer.get()
                held -= size
                n_given += 1
                note(0)
                # the next ones come while this is used
                ask()
                yield found
                # nothing here keeps its memory from being used again
                del found, answer
        finally:
            is_over = True

    def _received(self, size: int, seconds: float) -> None:
        """Learn from a payload that has come."""
        rate = size / max(seconds, 1e-6)
        self._fastest = max(KEPT * self._fastest, rate)
        if seconds <= SOON or rate >= FREE * self._fastest:
            self.n_ahead = min(2 * self.n_ahead, AT_ONCE)
        elif rate < CROWDED * self._fastest:
            self.n_ahead = max(self.n_ahead // 2, 1)
