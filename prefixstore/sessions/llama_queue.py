"""The queue for a ``Llama``: one user at a time, in the order of arrival, threads and asyncio tasks alike."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar

from prefixstore.errors import MisuseError

T = TypeVar("T")
# Seconds between two looks of a waiting ticket: nothing tells it that the one before it was garbage-collected.
LOOK = 1.0


class Ticket:
    """The place of a thread or task in the queue. Only its owner keeps it alive: once collected, the place is free.

    Attributes
    ----------
    loop
        The event loop of the task that waits; None if a thread waits.
    gate, told
        Released, or set, once it is the turn of this ticket: `gate` for a thread, `told` for a task.
    """

    def __init__(self, *, is_async: bool = False) -> None:
        self.thread = threading.current_thread()
        self.loop = asyncio.get_running_loop() if is_async else None
        task = asyncio.current_task() if is_async else None
        self.task = weakref.ref(task) if task is not None else None
        self.gate, self.told = threading.Lock(), asyncio.Event()
        self.gate.acquire()

    @property
    def is_orphaned(self) -> bool:
        """Whether its owner will never run again."""
        return self.loop is not None and self.loop.is_closed()

    def tell(self) -> None:
        """Tell the owner that it is its turn. May be called twice."""
        with suppress(RuntimeError):  # the gate is open, or the loop is closed
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.told.set)
            else:
                self.gate.release()

    def blocks(self, other: Ticket) -> bool:
        """Whether the owner of the other ticket cannot go on while this one waits."""
        both_are_tasks = self.loop is not None and other.loop is not None
        return self.thread is other.thread and (not both_are_tasks or self.task == other.task)


class Queue:
    """Tickets in the order of arrival; the first has the ``Llama``.

    Each method repairs what an interrupted call has left behind, and may be called again. The thread that uses the
    ``Llama`` holds the lock `in_use`.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start empty, as in a forked child: whoever waits, or has the ``Llama``, is in the parent."""
        # held for a few steps in memory, and never while someone waits
        self._lock, self.in_use = threading.Lock(), threading.RLock()
        self._tickets: deque[weakref.ref[Ticket]] = deque()

    def __len__(self) -> int:
        """How many tickets wait for the ``Llama`` or have it."""
        return sum(weak() is not None for weak in list(self._tickets))

    def enter(self, ticket: Ticket) -> None:
        """Take the last place. Raises `MisuseError` if the same thread, or task, would wait for itself."""
        with self._lock:
            others = [other for weak in self._tickets if (other := weak()) is not None and not other.is_orphaned]
            if any(ticket.blocks(other) for other in others):
                raise MisuseError(
                    "this thread (or task) already has a session, or a task of its event loop has one or awaits one, "
                    "so it would wait for itself; leave its block, or release() it, before you admit another one; in "
                    "tasks, use aadmit()"
                )
            self._tickets.append(weakref.ref(ticket))

    def leave(self, ticket: Ticket) -> None:
        """Give up a place, and tell the next ticket if it is its turn now. A second call does nothing."""
        with self._lock:
            with suppress(ValueError):
                self._tickets.remove(weakref.ref(ticket))
            self._first()

    def look(self) -> Ticket | None:
        """Tell the ticket whose turn it is, and return it."""
        with self._lock:
            return self._first()

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        """Wait, in a thread, until it is the turn of a ticket; False if it is not within `timeout` seconds."""
        until = _until(timeout)
        while self.look() is not ticket:
            left = min(until - time.monotonic(), LOOK)
            if left <= 0:
                return False
            ticket.gate.acquire(timeout=left)
        return True

    async def wait_async(self, ticket: Ticket, timeout: float | None) -> bool:
        """As `wait`, in a task."""
        until = _until(timeout)
        while self.look() is not ticket:
            left = min(until - time.monotonic(), LOOK)
            if left <= 0:
                return False
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ticket.told.wait(), left)
        return True

    def _first(self) -> Ticket | None:
        """Remove tickets whose owners are gone, tell the first one that it is its turn, and return it."""
        while self._tickets:
            first = self._tickets[0]()
            if first is not None and not first.is_orphaned:
                first.tell()
                return first
            self._tickets.popleft()
        return None


def _until(timeout: float | None) -> float:
    return float("inf") if timeout is None else time.monotonic() + timeout


_queues: weakref.WeakKeyDictionary[object, Queue] = weakref.WeakKeyDictionary()


def queue_of(llm: object) -> Queue:
    """The queue of a ``Llama``, whichever store is attached to it."""
    return _queues.setdefault(llm, Queue())


def between_calls(llm: object) -> AbstractContextManager[object]:
    """A block in which no other thread uses the ``Llama`` for a session; waits until that is so."""
    queue = None
    with suppress(TypeError):  # not a Llama
        queue = _queues.get(llm)
    return queue.in_use if queue is not None else nullcontext()


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, and wait for its end, even if this task is cancelled meanwhile.

    In the executor of the loop, all threads may be waiting for what this work does.
    """
    executor = ThreadPoolExecutor(1, "prefixstore-session")
    done = asyncio.get_running_loop().run_in_executor(executor, work)
    executor.shutdown(wait=False)
    is_cancelled = False
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        done.exception()  # retrieved, or asyncio logs it
        raise asyncio.CancelledError
    return done.result()
