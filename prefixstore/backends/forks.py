"""What must be quiet while the process forks, and be renewed in the child.

A child inherits memory, locks and file descriptors, but only the thread that forked: a lock that another thread held is
never released there, and a file handle still belongs to the parent. So each participant is held before a fork, and
released after it in the parent and in the child.

`os.fork` reports an exception in one of these hooks and forks nevertheless. So one that could not be held, as when a
Ctrl-C ends the wait for it, does not keep the others from their turn, and is released and renewed like them.
"""

from __future__ import annotations

# Imported for its fork hooks: hooks before a fork run in reverse order, so this one takes its lock after that of
# prefixstore has waited for threads that use a handle. Such a thread may log, and needs the lock.
import logging  # noqa: F401
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from weakref import ref

# numpy imports it at the first `np.unique`: a child that is forked while another thread does that would wait forever
# for the lock of the module.
import numpy.ma  # noqa: F401

__all__ = ["ForkLevel", "ForkLock", "register_at_fork"]


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
    """A lock under which handles are opened and closed; no other thread holds it during a fork.

    Attributes
    ----------
    held
        To be used as ``with lock.held:``. A thread does not fork inside that.
    """

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
