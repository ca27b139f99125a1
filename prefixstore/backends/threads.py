"""Threads that do jobs for others, and results to wait for: a Ctrl-C at any step leaves nothing locked.

A Ctrl-C is raised in the main thread, after any call that it makes. The methods of a `threading.Condition`, and so of
an `Event`, a `Semaphore`, a `Future` and an executor, make calls while they hold a lock: one that ends there leaves the
lock taken, and other threads wait for it forever. The state here changes in single calls of C only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

__all__ = ["Job", "Outcome", "Signal", "Threads"]

T = TypeVar("T")


class Signal:
    """An event that happens once, like a `threading.Event` that is never cleared.

    Of several threads that wait, one that is interrupted may leave the others waiting for as long as they wanted to.

    Attributes
    ----------
    is_set
        Whether it has happened.
    """

    def __init__(self) -> None:
        self.is_set = False
        # open when it has happened
        self._gate = Lock()
        self._gate.acquire()

    def set(self) -> None:
        """It has happened. A second call does nothing."""
        # first: one who was interrupted after passing the gate does not come to it again
        self.is_set = True
        try:  # noqa: SIM105 - with another call in between, a Ctrl-C could come in between
            self._gate.release()
        except RuntimeError:
            pass  # it is open

    def wait(self, seconds: float = -1.0) -> bool:
        """Wait until it has happened, or so long; without `seconds`, as long as it takes. Whether it has happened."""
        if not self.is_set and self._gate.acquire(timeout=seconds):
            # for the next one who waits
            self.set()
        return self.is_set


class Outcome(Generic[T]):
    """A result or an error of one thread, which another one waits for."""

    def __init__(self) -> None:
        self._is_there = Signal()
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is known."""
        return self._is_there.is_set

    def set_result(self, result: T) -> None:
        """Set the result."""
        self._result = result
        self._is_there.set()

    def set_error(self, error: BaseException) -> None:
        """Set the error, which `result` raises."""
        self._error = error
        self._is_there.set()

    def wait(self, seconds: float = -1.0) -> bool:
        """Wait until it is known, or so long. Whether it is known."""
        return self._is_there.wait(seconds)

    def error(self) -> BaseException | None:
        """The error, if it is one, when it is known."""
        self.wait()
        return self._error

    def result(self) -> T:
        """The result, when it is known. Raises the error."""
        self.wait()
        error, result = self._error, self._result
        if error is None:
            return result  # type: ignore[return-value]  # None is a result, too
        try:
            raise error
        finally:
            # the traceback refers to this frame, and would keep what this refers to
            del self, error


class Job(Outcome[T]):
    """Work for a thread. One other thread waits for it.

    It is made first, kept where it will be found, and submitted then: one that has begun is never lost to a Ctrl-C.

    Parameters
    ----------
    work
        What to do.
    args
        Its arguments.
    """

    def __init__(self, work: Callable[..., T], *args: Any) -> None:
        super().__init__()
        self._work, self._args = work, args
        # has one entry as soon as it is decided: whether it is cancelled, or runs
        self._fate: dict[None, bool] = {}

    def cancel(self) -> bool:
        """Keep the job from starting; false if it has started. A second call returns the same."""
        is_cancelled = self._fate.setdefault(None, True)
        if is_cancelled:
            self._forget_work()
        return is_cancelled

    def _forget_work(self) -> None:
        # it often refers to what keeps this job: buffers would live until the next collection of garbage
        self._work, self._args = _nothing, ()

    def end(self) -> None:
        """Return when the job can do nothing more: when it has ended, or at once if it has not started."""
        if not self.cancel():
            self.wait()

    def run(self, before_told: Callable[[], object] = lambda: None) -> None:
        """Do the work, unless it was cancelled; `before_told` is called before the outcome is set."""
        is_there = self._is_there
        try:
            if not self._fate.setdefault(None, False):
                try:
                    self._result = self._work(*self._args)
                finally:
                    self._forget_work()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
            # as in `result`
            del self
        try:
            before_told()
        finally:
            is_there.set()


def _nothing(*_: Any) -> Any:
    """The work of a job that is done, or never will be."""


class Threads:
    """Threads that do jobs; started as needed, and kept waiting for more. They do not keep the process alive.

    Parameters
    ----------
    most
        How many there are at most. More jobs than that wait.
    name
        Of each.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        # An entry for each thread that is going to take one more job. Whoever is interrupted after taking one, or while
        # a thread starts, leaves an extra thread, which does jobs as well.
        self._idle: SimpleQueue[None] = SimpleQueue()
        self._started: list[Thread] = []
        self._is_closed = False

    def submit(self, job: Job[Any]) -> None:
        """Have a thread do a job.

        Raises
        ------
        RuntimeError
            If these threads are to end, or none can be started. The job will not be done.
        """
        try:
            self._idle.get_nowait()
        except Empty:
            if len(self._started) < self._most:
                self._start()
        self._jobs.put(job)
        # one that was put before the end, which `close` puts after setting this, is done
        if self._is_closed and job.cancel():
            raise RuntimeError("the threads have ended")

    def submit_or_run(self, job: Job[Any]) -> None:
        """Have a thread do a job, or do it here if none can start, as at the end of the process. Not after `close`."""
        try:
            self.submit(job)
        except RuntimeError:
            job.run()

    def _start(self) -> None:
        # Nobody waits for a daemon at the end of the process: one who uses a store has closed it then.
        thread = Thread(target=_run, args=(self._jobs, self._idle), name=self._name, daemon=True)
        try:
            self._started.append(thread)
            thread.start()
        except BaseException:
            # interrupted: it may have been started
            with suppress(ValueError):
                self._started.remove(thread)
            raise

    def close(self) -> None:
        """End the threads, each when the jobs that were submitted are done; not waited for."""
        self._is_closed = True
        self._jobs.put(None)

    def __del__(self) -> None:
        with suppress(AttributeError):  # its making was interrupted
            self._jobs.put(None)


def _run(jobs: SimpleQueue[Job[Any] | None], idle: SimpleQueue[None]) -> None:
    is_idle = partial(idle.put, None)
    while (job := jobs.get()) is not None:
        # before it is told: whoever waits for it may have the next job for this thread
        job.run(is_idle)
        # not for as long as there is no other
        del job
    # for the next thread
    jobs.put(None)
