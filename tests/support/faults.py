"""Backends that fail or are slow on purpose: wrappers of any other, to test what is built on it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from prefixstore.engine.pages import Pages
from prefixstore.errors import UnavailableError
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


class FlakyBackend(Seam):
    """Pages of another machine, so to speak, that are slow, or fail, as a test says while they are used.

    Parameters
    ----------
    backend
        Does the work; closed with this one.
    slow
        Which operations are concerned; all but commits, if none is named.
    error
        What they raise when they fail, instead of `UnavailableError`.
    failing
        Which calls of them fail, counted from 1.

    Attributes
    ----------
    seconds
        How much longer each of them takes.
    fails
        Whether all of them fail, once they have taken their time.
    gate
        As long as it is not set, they wait for it.
    asked
        How often each thread has begun an operation.
    sleep
        Lets the time pass that a slow operation takes; a test may have a clock of its own.
    n_failed
        How many calls have failed.
    """

    is_local = False

    def __init__(
        self, backend: Pages, *slow: Operation, error: Exception | None = None, failing: Container[int] = ()
    ) -> None:
        super().__init__(backend, lambda name: self._before(OPERATIONS[name]) if name in OPERATIONS else None)
        self.slow: tuple[Operation, ...] = slow or ("view", "payload", "record", "update", "put", "delete", "sync")
        self._error, self._failing, self._calls, self._lock = error, failing, itertools.count(1), threading.Lock()
        self.seconds = 0.0
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()
        self.asked: Counter[str] = Counter()
        self.sleep: Callable[[float], object] = time.sleep
        self.n_failed = 0

    def _inside(self, view: Any) -> Any:
        return _PageByPage(view, self.before)

    def _before(self, operation: Operation) -> None:
        self.asked[threading.current_thread().name] += 1
        if operation not in self.slow:
            return
        self.gate.wait(PATIENCE)
        self.sleep(self.seconds)
        with self._lock:
            fails = next(self._calls) in self._failing or self.fails
            self.n_failed += fails
        if fails:
            raise self._error or UnavailableError(f"{operation} fails on purpose")

    def asked_by_completions(self) -> int:
        """How often a completion has waited for the location."""
        return sum(n for thread, n in self.asked.items() if thread.startswith(("MainThread", "prefixstore-work")))

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
