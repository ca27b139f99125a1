"""The store's own threads: they do all work on a location, and a caller waits for the answer.

Python raises KeyboardInterrupt in the main thread only, which is none of these. So a Ctrl-C ends a wait, never the
work: that ends by itself, and cleans up after itself. A caller whose time is over does the same: it waits no longer.
"""

from __future__ import annotations

import _thread
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from prefixstore.errors import StorageError

log = logging.getLogger("prefixstore")

P = ParamSpec("P")
T = TypeVar("T")


class Caller:
    """A thread that waits while another one works for it. It may itself be working for another."""

    def __init__(self, of: Caller | None = None) -> None:
        self._of = of
        self._thread = threading.get_ident()
        # it waits no longer: then the other one works for itself
        self.is_left = False

    @property
    def key(self) -> object:
        """Equal for all that work for each other now."""
        if self.is_left:
            return self
        return self._thread if self._of is None else self._of.key


class _Here(threading.local):
    """What a thread knows of itself: whether it is one of the store's, and for which thread it works."""

    is_own = False

    def __init__(self) -> None:
        self.caller = Caller()


_here = _Here()


def is_own() -> bool:
    """Whether this is one of the store's threads, which calls directly what others hand over."""
    return _here.is_own


def caller() -> Caller:
    """The thread for which this one works: itself, if it does not work for another one."""
    return _here.caller


class Answer(Generic[T]):
    """What a thread will have found, for one other thread, which takes it once."""

    def __init__(self) -> None:
        self.caller = Caller(caller())
        # it has no lock that an interrupted wait could leave taken
        self._found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    @property
    def is_there(self) -> bool:
        """Whether it can be taken without waiting."""
        return not self._found.empty()

    def put(self, result: T) -> None:
        """Give a result."""
        self._found.put((result, None))

    def fail(self, error: BaseException) -> None:
        """Give an error, which `get` raises."""
        self._found.put((None, error))

    def get(self, seconds: float | None = None) -> T:
        """Take the result, or raise the error. Raises `queue.Empty` if neither comes in this many seconds."""
        try:
            result, error = self._found.get(timeout=seconds)
        except BaseException:
            self.leave()
            raise
        if error is None:
            return result  # type: ignore[no-any-return]  # what `put` was given
        try:
            raise error
        finally:
            # the traceback refers to this frame, and would keep what this refers to
            del self, error

    def leave(self) -> None:
        """Wait no longer: the thread works for itself from now on."""
        self.caller.is_left = True


class _Job(NamedTuple):
    answer: Answer[Any]
    work: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self, before_told: Callable[[], object]) -> None:
        """Do the work; `before_told` is called before the answer is given."""
        answer, before = self.answer, _here.caller
        _here.caller = answer.caller
        try:
            result = self.work(*self.args)
        except BaseException as error:  # noqa: BLE001 - raised by `Answer.get`
            # it may keep this frame
            del self
            before_told()
            answer.fail(error)
        else:
            del self
            before_told()
            answer.put(result)
        finally:
            _here.caller = before


class Threads:
    """Threads that do what others hand over; started as needed, and kept waiting for more.

    They do not keep the process alive. There are `most` of them, None for as many as there are callers: more jobs wait.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self._name = name
        self._most = most
        self._n_started = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # An entry for each thread that is going to take one more job. One who is interrupted after taking it leaves an
        # extra thread.
        self._idle: SimpleQueue[None] = SimpleQueue()
        self._is_closed = False
        self._lent: WeakSet[Lent] = WeakSet()

    def lend(self, lent: Lent) -> None:
        """Note that a caller has something open, until it leaves the block or loses it."""
        self._lent.add(lent)

    def has_lent(self) -> bool:
        """Whether the calling thread has something that is open."""
        while True:
            try:
                found = list(self._lent)
            except RuntimeError:
                # another thread has lent something meanwhile
                continue
            return any(lent.caller.key == caller().key for lent in found if lent.is_open)

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """What a thread finds; this one does the work itself if it is one of the store's, or if no other can."""
        return work(*args) if is_own() else self.answer(work, *args)

    def answer(self, work: Callable[..., T], *args: Any, seconds: float | None = None) -> T:
        """What another thread finds; this one does the work itself if no other can, as at the end of the process.

        Raises `queue.Empty` if it takes longer than `seconds`. The work goes on.
        """
        return self.start_or_run(work, *args).get(seconds)

    @contextmanager
    def lending(self, opened: AbstractContextManager[T]) -> Iterator[T]:
        """A block in which the calling thread has something open, and is known to have it."""
        lent = Lent()
        self.lend(lent)
        try:
            with opened as found:
                yield found
        finally:
            lent.is_open = False

    def start(self, work: Callable[..., T], *args: Any) -> Answer[T]:
        """Have a thread do this. Raises `RuntimeError` if these threads are to end, or none can be started."""
        if self._is_closed:
            raise RuntimeError("the threads have ended")
        answer: Answer[T] = Answer()
        try:
            self._idle.get_nowait()
        except Empty:
            if self._most is None or self._n_started < self._most:
                start_thread(_serve, self._jobs, self._idle, name=self._name)
                self._n_started += 1
        self._jobs.put(_Job(answer, work, args))
        if self._is_closed:
            # perhaps too late for them
            _finish(self._jobs)
        return answer

    def start_or_run(self, work: Callable[..., T], *args: Any) -> Answer[T]:
        """As `start`; done here if no thread can do it."""
        try:
            return self.start(work, *args)
        except RuntimeError:
            job = _Job(Answer(), work, args)
            answer = job.answer
            job.run(lambda: None)
            return answer

    def close(self) -> None:
        """End the threads, each when all is done that was handed over; not waited for."""
        self._is_closed = True
        self._jobs.put(None)

    def __del__(self) -> None:
        with suppress(AttributeError):  # its making was interrupted
            self._jobs.put(None)


class Lent:
    """What a caller has open, as long as it is in the block."""

    def __init__(self) -> None:
        self.caller = caller()
        self.is_open = True


class HasThreads(Protocol):
    """What has threads for its methods."""

    threads: Threads


S = TypeVar("S", bound=HasThreads)


def handed_over(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method whose work is done by a thread: see `Threads.call`."""

    @wraps(method)
    def handing_over(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.threads.call(partial(method, self, *args, **kwargs))

    return handing_over  # type: ignore[return-value]  # of `wraps`: the same


class OwnThread(threading.Thread):
    """One of the store's threads. It does not keep the process alive."""

    def __init__(self, work: Callable[..., object], *args: Any, name: str) -> None:
        super().__init__(target=work, args=args, name=name, daemon=True)

    def run(self) -> None:
        _here.is_own = True
        super().run()


def start_thread(work: Callable[..., object], *args: Any, name: str) -> None:
    """Start one of the store's threads. Raises `RuntimeError` if that is not possible."""
    thread = OwnThread(work, *args, name=name)
    # by another thread: `Thread.start` waits, and an interrupt in the wait would leave a lock taken
    _thread.start_new_thread(_start, (thread,))


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:
        # no more threads than this one
        thread.run()


def _serve(jobs: SimpleQueue[_Job | None], idle: SimpleQueue[None]) -> None:
    def is_idle() -> None:
        idle.put(None)

    while (job := jobs.get()) is not None:
        # before it is told: whoever waits for it may have the next job for this thread
        job.run(is_idle)
        # not for as long as there is no other
        del job
    _finish(jobs)


def _finish(jobs: SimpleQueue[_Job | None]) -> None:
    """Do what is left, and tell the next thread to end."""
    with suppress(Empty):
        while True:
            job = jobs.get_nowait()
            if job is not None:
                job.run(lambda: None)
    jobs.put(None)


class Closes(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Raises `StorageError` if that fails."""


def close_soon(one: Closes) -> None:
    """Close something in a thread of its own, at the latest at the end of the process; for the garbage collector.

    That may run in any thread at any moment: inside a view, in the write thread, while a lock is held. So this takes
    no lock and waits for nothing.
    """
    # keeps it until it is closed: at the end of the process this waits for a thread that is closing it
    at_exit = weakref.finalize(one, one.close)
    with suppress(RuntimeError):  # no more threads, or the interpreter is shutting down
        start_thread(_close_collected, one, at_exit, name="prefixstore-close")


def _close_collected(one: Closes, at_exit: weakref.finalize[[], Closes]) -> None:
    try:
        one.close()
    except StorageError as error:
        log.warning("a garbage-collected store could not be closed: %s", error)
    finally:
        at_exit.detach()
