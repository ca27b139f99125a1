"""Backends that fail or are slow on purpose: wrappers of any other, to test what is built on it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from prefixstore.engine.pages import Pages
from prefixstore.errors import StorageError, UnavailableError
from prefixstore.format.record import Buffer, Record
from tests.support import PATIENCE

Operation: TypeAlias = Literal["view", "record", "payload", "update", "put", "delete", "commit", "sync"]


# what happens in which calls; in those of many pages, once for each call
OPERATIONS: dict[str, Operation] = {
    **{name: name for name in ("view", "record", "payload", "update", "put", "delete", "commit", "sync")},
    **dict.fromkeys(("records", "leading", "neighbors", "beside", "children", "followed"), "record"),
}


class Seam:
    """Pages, a view or a transaction, with something that happens before each use of it, by its name."""

    def __init__(self, inner: Any, before: Callable[[str], None]) -> None:
        self.inner = inner
        self.before = before

    def __getattr__(self, name: str) -> Any:
        self.before(name)
        return getattr(self.inner, name)

    def _inside(self, view: Any) -> Any:
        return Seam(view, self.before)

    @contextmanager
    def view(self) -> Iterator[Any]:
        self.before("view")
        with self.inner.view() as view:
            yield self._inside(view)

    @contextmanager
    def update(self) -> Iterator[Any]:
        self.before("update")
        with self.inner.update() as transaction:
            yield self._inside(transaction)
            # an error here rolls the transaction back
            self.before("commit")
        # the location has committed, and its answer is lost
        self.before("committed")


class _PageByPage(Seam):
    """A view whose pages come one by one."""

    def fetch(self, keys: Sequence[bytes]) -> Generator[tuple[Record, Buffer], None, None]:
        for key in keys:
            self.before("record")
            self.before("payload")
            found = list(self.inner.fetch([key]))
            if not found:
                return
            yield from found


class _Remote(Seam):
    """Pages of another machine, so to speak, with something that happens before each operation."""

    is_local = False

    def __init__(self, backend: Pages) -> None:
        super().__init__(backend, lambda name: self._before(OPERATIONS[name]) if name in OPERATIONS else None)

    def _before(self, operation: Operation) -> None:
        """Called before each operation."""
        raise NotImplementedError

    def _inside(self, view: Any) -> Any:
        return _PageByPage(view, self.before)


class FaultyBackend(_Remote):
    """A backend whose operations fail on purpose.

    Parameters
    ----------
    backend
        Does the work; closed with this one.
    operation
        What fails: ``"view"``, ``"record"``, ``"payload"``, ``"update"``, ``"put"``, ``"delete"``,
        ``"commit"`` (nothing of the transaction stays) or ``"sync"``.
    error
        What is raised; `UnavailableError` by default.
    at
        The first call that fails, counted from 1.
    times
        How many calls fail; None for all that follow.

    Attributes
    ----------
    calls
        How often each operation was called.
    failures
        How many calls have failed.
    """

    def __init__(
        self,
        backend: Pages,
        operation: Operation,
        error: StorageError | None = None,
        *,
        at: int = 1,
        times: int | None = 1,
    ) -> None:
        super().__init__(backend)
        self._operation = operation
        self._error = error if error is not None else UnavailableError(f"{operation} fails on purpose")
        self._failing = range(at, at + times) if times is not None else range(at, 2**62)
        self._lock = threading.Lock()
        self.calls: dict[Operation, int] = {}
        self.failures = 0

    def _before(self, operation: Operation) -> None:
        with self._lock:
            self.calls[operation] = self.calls.get(operation, 0) + 1
            fails = operation == self._operation and self.calls[operation] in self._failing
            self.failures += fails
        if fails:
            raise self._error


class FlakyBackend(_Remote):
    """A backend whose operations are slow, or fail, as a test says while it is used.

    Attributes
    ----------
    seconds
        How much longer each of the `slow` operations takes.
    slow
        Which these are.
    fails
        Whether all of them fail, once they have taken their time.
    gate
        As long as it is not set, they wait for it.
    asked
        How often each thread has begun an operation.
    sleep
        Lets the time pass that a slow operation takes; a test may have a clock of its own.
    """

    def __init__(self, backend: Pages, *slow: Operation) -> None:
        super().__init__(backend)
        self.seconds = 0.0
        self.slow: tuple[Operation, ...] = slow or ("view", "payload", "record", "update", "put", "delete", "sync")
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()
        self.asked: Counter[str] = Counter()
        self.sleep: Callable[[float], object] = time.sleep

    def _before(self, operation: Operation) -> None:
        self.asked[threading.current_thread().name] += 1
        if operation not in self.slow:
            return
        self.gate.wait(PATIENCE)
        self.sleep(self.seconds)
        if self.fails:
            raise UnavailableError(f"{operation} fails on purpose")

    def asked_by_completions(self) -> int:
        """How often a completion has waited for the location."""
        return sum(n for thread, n in self.asked.items() if thread.startswith(("MainThread", "prefixstore-read")))

    def let_through(self, n: int) -> threading.Semaphore:
        """From now on only so many payloads come, and more as the semaphore is released."""
        passes = threading.Semaphore(n)
        self.slow, self.sleep = ("payload",), lambda _: passes.acquire(timeout=PATIENCE)
        return passes


class Until:
    """A deadline: so many pages come in time."""

    def __init__(self, n: int) -> None:
        self.n = n

    def left(self, n_given: int, arrived: float = 0.0) -> float:
        return 60.0 if n_given < self.n else -60.0
