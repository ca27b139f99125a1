"""Locks on open handles, and what must be quiet while the process forks, and be renewed in the child.

A child inherits memory, locks and file descriptors, but only the thread that forked: a lock that another thread held is
never released there, and a file handle still belongs to the parent. So each participant is held before a fork, and
released after it in the parent and in the child.

`os.fork` reports an exception in one of these hooks and forks nevertheless. So one that could not be held, as when a
Ctrl-C ends the wait for it, does not keep the others from their turn, and is released and renewed like them.

An open handle is shared by the threads that use it, and held alone by the one that replaces or closes it, or forks. A
thread of the store holds it for its caller, so a caller that holds it and asks for more does not wait for itself. The
state of its lock is two dicts, which change in single steps. A thread first announces itself in one of them and then
looks into the other, so of two threads at least one sees the other.
"""

from __future__ import annotations

# Imported for its fork hooks: hooks before a fork run in reverse order, so this one takes its lock after that of
# prefixstore has waited for threads that use a handle. Such a thread may log, and needs the lock.
import logging  # noqa: F401
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from weakref import ref

# numpy imports it at the first `np.unique`: a child that is forked while another thread does that would wait forever
# for the lock of the module.
import numpy.ma  # noqa: F401

from prefixstore.backends.threads import Caller, caller
from prefixstore.errors import MisuseError

__all__ = ["ForkLevel", "ForkLock", "HandleLock", "register_at_fork", "release_interrupted_frames"]

# how often a thread that waits looks again; it waits rarely
POLL_SECONDS = 0.001


class ForkLevel(IntEnum):
    """The order of participants: before a fork from the last level to the first, after it from the first to the last.

    So outer locks are taken before inner ones, and in a child everything that a participant is built on
    has been renewed when its turn comes.
    """

    HANDLE = 0
    """An open handle: a file, a pool of connections, pages in memory."""
    OPENING = 1
    """A lock under which handles are opened and closed."""
    ENGINE = 2
    """What is built on a backend."""


# held by the thread that forks, from before the fork until after it
_forking = threading.RLock()
_levels: dict[ref[object], ForkLevel] = {}


def register_at_fork(participant: object, level: ForkLevel) -> None:
    """Hold this participant during each fork, for as long as it lives; the registry does not keep it alive.

    Those of these methods are called that it has. One that fails does not keep the others from their turn.

    - ``before_fork()`` waits until no other thread is in the middle of something, and lets none begin.
    - ``after_fork_in_parent()`` undoes that, or what it has done before it failed; nothing if it was not called.
    - ``after_fork_in_child()`` drops what belongs to the parent, also if `before_fork` has failed.

    Participants of one level are held in no particular order. Handles are opened under a `ForkLock`, so none is
    while the process forks.
    """
    _levels[ref(participant, _forget)] = level


def _forget(gone: ref[object], levels: dict[ref[object], ForkLevel] = _levels) -> None:
    levels.pop(gone, None)


class ForkLock:
    """A lock under which handles are opened and closed: ``with lock.held:``. Nobody holds it during a fork."""

    def __init__(self) -> None:
        self.held = threading.RLock()
        register_at_fork(self, ForkLevel.OPENING)

    def before_fork(self) -> None:
        self.held.acquire()

    def after_fork_in_parent(self) -> None:
        # unless an interrupt has ended the wait for it
        with suppress(RuntimeError):
            self.held.release()

    def after_fork_in_child(self) -> None:
        self.held = threading.RLock()


def _each(levels: Iterable[ForkLevel], method: str) -> None:
    """Call this method of all that live, level by level, and raise the first error in the end."""
    failures: list[BaseException] = []
    for level in levels:
        # in one step: the garbage collector, and other threads, change the dictionary
        for weak in list(_levels):
            participant = weak()
            if _levels.get(weak) == level and hasattr(participant, method):
                try:
                    getattr(participant, method)()
                except BaseException as error:  # noqa: BLE001 - raised when all are done
                    failures.append(error)
    if failures:
        raise failures[0]


def _before_fork() -> None:
    _forking.acquire()
    _each(reversed(ForkLevel), "before_fork")


def _after_fork_in_parent() -> None:
    # not if an interrupt has ended the wait for another thread that forks
    if not _forking._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as `threading.Condition` does
        return
    try:
        _each(ForkLevel, "after_fork_in_parent")
    finally:
        _forking.release()


def _after_fork_in_child() -> None:
    global _forking
    _forking = threading.RLock()
    _each(ForkLevel, "after_fork_in_child")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


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
        """Wait until no thread is inside, and let none in until `release_exclusive` of this hold. May be nested.

        Raises `MisuseError` if this thread holds it shared.
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
