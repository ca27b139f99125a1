"""Reads and writes objects: several requests at a time, in bounded memory.

Concurrent requests share the link, and pages are used in order. So the first page is requested alone, and then twice as
many at a time after each one that has arrived: where a link is slow, the first one does not wait for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from prefixstore.backends.threads import Answer, Threads
from prefixstore.errors import UnavailableError

__all__ = ["AT_ONCE", "HELD_BYTES", "SMALL_AT_ONCE", "Arrived", "ahead", "at_once"]

# requests at a time, and bytes of payloads that they may hold, beside one payload of any size
AT_ONCE = 8
HELD_BYTES = 64 << 20
# as many as that where they are mostly small, or written: what takes time then is the way to the server and back
SMALL_AT_ONCE = 32
# of the threads
NAME = "prefixstore-objects"

T = TypeVar("T")
R = TypeVar("R")

Arrived: TypeAlias = Callable[[int], None]
"""Told how many more bytes of a payload are there; raises if the rest is not wanted."""


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
class _Request(Generic[R]):
    """A payload that was asked for, and how much of it is there."""

    size: int
    n_bytes: int = 0
    answer: Answer[R] | None = None


def ahead(
    items: Iterable[T], size_of: Callable[[T], int], read: Callable[[T, Arrived], R], told: Callable[[int], None]
) -> Generator[R, None, None]:
    """Read items ahead of the one in use, and yield the results in order. An error is raised in its turn.

    `told` hears how many bytes of the one that is waited for are there. When this is closed, nothing is waited for:
    requests that have begun end with the next bytes that arrive.
    """
    left, threads, most, is_closed = deque(items), Threads(NAME, AT_ONCE), 1, False
    waiting: deque[_Request[R]] = deque()

    def receive(item: T, request: _Request[R]) -> R:
        def arrived(n_bytes: int) -> None:
            if is_closed:
                raise UnavailableError("this payload is no longer needed")
            request.n_bytes += n_bytes
            if waiting and waiting[0] is request:
                told(request.n_bytes)

        arrived(0)
        return read(item, arrived)

    def ask() -> None:
        while left and len(waiting) < most:
            size = size_of(left[0])
            if waiting and size + sum(request.size for request in waiting) > HELD_BYTES:
                return
            request: _Request[R] = _Request(size)
            waiting.append(request)
            request.answer = threads.start_or_run(receive, left.popleft(), request)

    try:
        ask()
        while waiting:
            first = waiting[0]
            told(first.n_bytes)
            assert first.answer is not None
            found = first.answer.get()
            waiting.popleft()
            most = min(2 * most, AT_ONCE)
            ask()
            yield found
            # nothing here keeps its memory while the next one is waited for
            del first, found
    finally:
        is_closed = True
        threads.close()
