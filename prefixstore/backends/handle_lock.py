"""A lock on a handle: shared by the threads that use it, exclusive to the thread that replaces or closes it.

A thread of the store holds it for its caller, so a caller that holds it and asks for more does not wait for itself. Its
state is two dicts, which change in single steps. A thread first announces itself in one of them and then looks into the
other, so of two threads at least one sees the other.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from prefixstore.backends.threads import Caller, caller
from prefixstore.errors import MisuseError

__all__ = ["HandleLock", "release_interrupted_frames"]

# how often a thread that waits looks again; it waits rarely
POLL_SECONDS = 0.001


class HandleLock:
    """A lock that threads share to use a handle; a thread that replaces the handle holds it exclusively."""

    def __init__(self) -> None:
        # for whom each entry is
        self._inside: dict[object, Caller] = {}
        # for whom each hold is, in the order in which they came: the first thread is alone once no other is inside
        self._alone: dict[object, Caller] = {}

    @property
    def is_held(self) -> bool:
        """Whether this thread holds it, shared or exclusive."""
        me = caller().key
        return me in _keys(self._inside) or me in _keys(self._alone)

    def is_exclusive(self, hold: object) -> bool:
        """Whether this hold has the handle exclusively; not while it still waits for others to leave."""
        return hold in self._alone and not self._inside

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it shared. Waits while another thread waits for exclusive use, unless this thread holds it already."""
        is_held, entry, me = self.is_held, object(), caller()
        try:
            self._inside[entry] = me
            # a thread that waits to be alone comes first, or it would wait forever
            while self._alone and not is_held:
                self._inside.pop(entry, None)
                _wait(lambda: not self._alone)
                self._inside[entry] = me
            yield
        finally:
            self._inside.pop(entry, None)

    def acquire_exclusive(self, hold: object) -> None:
        """Wait until no thread is inside, and let none in until `release_exclusive`. May be nested, with other holds.

        Parameters
        ----------
        hold
            By what it is released.

        Raises
        ------
        MisuseError
            If this thread holds it shared.
        """
        me = caller()
        # a thread that is alone already may be inside as well
        is_alone = me.key in _keys(self._alone)
        if not is_alone and me.key in _keys(self._inside):
            # it would wait for itself
            raise MisuseError("this thread is inside a view or a transaction of the location; leave it first")
        self._alone[hold] = me
        try:
            if not is_alone:
                _wait(lambda: not self._inside and _keys(self._alone)[:1] == [me.key])
        except BaseException:
            self.release_exclusive(hold)
            raise

    def release_exclusive(self, hold: object) -> None:
        """Undo `acquire_exclusive`. A second call does nothing."""
        self._alone.pop(hold, None)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold it exclusive."""
        hold = object()
        try:
            self.acquire_exclusive(hold)
            yield
        finally:
            self.release_exclusive(hold)

    def renew(self) -> None:
        """In a forked child: drop what belongs to threads of the parent. This thread must not be inside."""
        self._inside.clear()
        self._alone.clear()


def _keys(holders: Mapping[object, Caller]) -> list[object]:
    """The callers that hold these now; a thread whose caller has stopped waiting counts for itself."""
    return [each.key for each in list(holders.values())]


def _wait(is_over: Callable[[], bool]) -> None:
    while not is_over():
        time.sleep(POLL_SECONDS)


def release_interrupted_frames() -> None:
    """Release what a traceback keeps from being released.

    An interrupt may come after a ``with`` block, before the first step of ``__exit__``. What it would have released is
    then referred to by the traceback only: of the exception that this thread handles, or of the last one that nobody
    handled, which an interactive session keeps.
    """
    waiting = [sys.exc_info()[1], getattr(sys, "last_exc", None), getattr(sys, "last_value", None)]
    seen: set[int] = set()
    while waiting:
        error = waiting.pop()
        if isinstance(error, BaseException) and id(error) not in seen:
            seen.add(id(error))
            with suppress(RuntimeError):  # a frame that still runs
                traceback.clear_frames(error.__traceback__)
            waiting += [error.__context__, error.__cause__]
