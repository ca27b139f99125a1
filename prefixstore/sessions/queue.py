"""The queue for a ``Llama``: one user at a time, in the order of arrival, threads and asyncio tasks alike."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from prefixstore.backends.forks import ForkLevel, register_at_fork
from prefixstore.errors import MisuseError

__all__ = ["AsyncTicket", "Queue", "Ticket", "between_calls", "queue_of"]

# A waiting thread looks so often whether it is its turn, in seconds, should it not have been told: a Ctrl-C may stop
# the thread that was about to do that.
LOOK = 1.0


class Ticket:
    """The place of a thread in the queue. The owner keeps the ticket: once it is garbage, the place is free.

    Attributes
    ----------
    owner
        The waiting thread or task. An owner that already has the ``Llama`` would wait for ever.
    thread
        The thread in which it was made.
    task
        The asyncio task that has run in it, if there was one.
    loop
        The event loop that runs in its thread, if there is one.
    is_begun
        Whether its owner has the ``Llama``.
    is_block
        Whether that ends with a ``with`` block of its thread.
    is_abandoned
        Whether the place is no longer needed, as if it had been left.
    end
        Ends the lease of an owner who cannot do that any more.
    """

    def __init__(self) -> None:
        self.loop = _running_loop()
        self.task = _current_task() if self.loop is not None else None
        self.thread = _this_thread()
        self.owner: object = self.thread
        self.is_begun = self.is_block = self.is_abandoned = False
        self.end: Callable[[], Callable[[], None] | None] = lambda: None
        # open once it is the turn of this ticket
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def is_orphaned(self) -> bool:
        """Whether its owner will never run again."""
        return False

    def tell(self) -> bool:
        """Tell the owner that it is its turn; false if there is no owner any more. May be called twice."""
        with suppress(RuntimeError):
            self._gate.release()
        return True

    def wait(self, seconds: float) -> None:
        """Wait until the owner is told, or so long."""
        self._gate.acquire(timeout=seconds)

    def waits_for_itself(self, first: Ticket) -> bool:
        """Whether the owner would wait for itself, if this is the first ticket."""
        return first.owner == self.owner


class AsyncTicket(Ticket):
    """A place in the queue, of a task of the running event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.owner = self.task
        self.told: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_orphaned(self) -> bool:
        """Whether the loop is closed."""
        return self._loop.is_closed()

    def tell(self) -> bool:
        """As `Ticket.tell`; there is no owner any more if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            return False
        return True

    def _set(self) -> None:
        if not self.told.done():
            self.told.set_result(None)

    def waits_for_itself(self, first: Ticket) -> bool:
        """As `Ticket.waits_for_itself`; also for a lease that this task, or the code that runs the loop, has."""
        if first.task is not None:
            return first.task == self.owner
        return first.is_block and first.thread is self.thread


class Queue:
    """Tickets in the order of arrival; the first has the ``Llama``.

    Every method repairs what an interrupted one has left, and may be called again after that was interrupted.

    Attributes
    ----------
    in_use
        Held by the thread that uses the ``Llama`` just now.
    """

    def __init__(self) -> None:
        # held for a few steps in memory, and never while someone waits
        self._lock = threading.Lock()
        self._tickets: deque[weakref.ref[Ticket]] = deque()
        self._told: weakref.ref[Ticket] | None = None
        self.in_use = threading.RLock()
        register_at_fork(self, ForkLevel.ENGINE)

    def before_fork(self) -> None:
        """Nothing to hold: in the child, no thread waits."""

    def after_fork_in_parent(self) -> None:
        """Nothing to release."""

    def after_fork_in_child(self) -> None:
        """Start over: those who wait, or have the ``Llama``, are in the parent."""
        self._lock, self.in_use, self._told = threading.Lock(), threading.RLock(), None
        self._tickets.clear()

    def __len__(self) -> int:
        """How many wait, or have the ``Llama``."""
        return len(self._waiting())

    @contextmanager
    def unless_in_use(self) -> Generator[bool]:
        """A ``with`` block during which no other thread uses the ``Llama``; whether none does now."""
        is_free = self.in_use.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self.in_use.release()

    def enter(self, ticket: Ticket) -> bool:
        """Take the last place; whether that is the first one.

        Raises
        ------
        MisuseError
            If the same owner has the ``Llama``, or if a thread would block the event loop that must make progress
            first.
        """
        self.look()
        with self._lock:
            first = self._settle()
            if first is not None and ticket.waits_for_itself(first):
                raise MisuseError(
                    "this thread (or task) already has a session, and would wait for itself; leave its block, "
                    "or release() it, "
                    "before you admit another one"
                )
            loops = [other.loop for other in self._waiting()]
            if not isinstance(ticket, AsyncTicket) and ticket.loop is not None and ticket.loop in loops:
                raise MisuseError(
                    "a task of this event loop has a session, or waits for one, and admit() would stop the loop; "
                    "use aadmit()"
                )
            self._tickets.append(weakref.ref(ticket))
            return self._settle() is ticket

    def begin(self, ticket: Ticket) -> bool:
        """Take the ``Llama`` until `leave`, if it is this ticket's turn; false if it is not."""
        with self._lock:
            if self._settle() is not ticket:
                return False
            ticket.is_begun = True
            return True

    def leave(self, ticket: Ticket) -> None:
        """Give up a place; the next ticket is told if it is its turn. Does nothing the second time."""
        with self._lock:
            with suppress(ValueError):
                self._tickets.remove(weakref.ref(ticket))
            self._settle()

    def look(self) -> None:
        """Admit the next ticket, if that was not done yet; end a lease whose owner can no longer end it."""
        with self._lock:
            first = self._settle()
        end = first.end() if first is not None and first.is_begun and first.is_orphaned else None
        if end is not None:
            end()

    def is_first(self, ticket: Ticket) -> bool:
        """Whether it is the turn of a ticket."""
        self.look()
        with self._lock:
            return self._settle() is ticket

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        """Wait, in a thread, until it is the turn of a ticket; false if it is not after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_first(ticket):
            left = LOOK if until is None else min(until - time.monotonic(), LOOK)
            if left <= 0:
                return False
            ticket.wait(left)
        return True

    async def wait_async(self, ticket: AsyncTicket, timeout: float | None) -> bool:
        """As `wait`, in a task."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_first(ticket):
            left = LOOK if until is None else min(until - time.monotonic(), LOOK)
            if left <= 0 or ticket.told.done():
                return self.is_first(ticket)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(ticket.told), left)
        return True

    def _waiting(self) -> list[Ticket]:
        found = [weak() for weak in list(self._tickets)]
        return [ticket for ticket in found if ticket is not None and not ticket.is_abandoned]

    def _settle(self) -> Ticket | None:
        """Tell the first ticket that it is its turn, unless that was done; which one it is."""
        while self._tickets:
            weak = self._tickets[0]
            first = weak()
            if first is not None and not first.is_abandoned:
                # not one that was told, and whose loop was closed before it went on
                if self._told is weak and (first.is_begun or not first.is_orphaned):
                    return first
                if self._told is not weak and first.tell():
                    self._told = weak
                    return first
            self._tickets.popleft()
        self._told = None
        return None


_queues: weakref.WeakKeyDictionary[object, Queue] = weakref.WeakKeyDictionary()


def queue_of(llm: object) -> Queue:
    """The queue of a ``Llama``: the same one for all stores that are attached to it in turn."""
    return _queues.setdefault(llm, Queue())


def between_calls(llm: object) -> AbstractContextManager[object]:
    """A ``with`` block that waits until no other thread uses the ``Llama`` for a session, and keeps it so."""
    queue = None
    with suppress(TypeError):  # not a Llama
        queue = _queues.get(llm)
    return queue.in_use if queue is not None else nullcontext()


_threads = threading.local()


def _this_thread() -> object:
    """Stands for this thread, and for no later one that has the same number."""
    try:
        me: object = _threads.me
    except AttributeError:
        me = _threads.me = object()
    return me


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _current_task() -> weakref.ref[asyncio.Task[object]] | None:
    task = asyncio.current_task()
    return weakref.ref(task) if task is not None else None
