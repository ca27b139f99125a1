"""What must be quiet while the process forks, and be renewed in the child.

A child inherits memory, locks and file descriptors, but only the thread that forked: a lock that another thread held is
never released there, and a file handle still belongs to the parent. So each participant is held before a fork, and
released after it in the parent and in the child.

`os.fork` reports an exception in one of these hooks and forks nevertheless. So a participant that could not be held, as
when a Ctrl-C ends the wait for it, is released and renewed like all others.
"""

from __future__ import annotations

# Imported for their fork hooks: hooks before a fork run in reverse order, so these two take their locks after that of
# prefixstore has waited for threads that use a handle. Such a thread may start a job in an executor, or log, and needs
# these locks.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Protocol
from weakref import ref

# numpy imports it at the first `np.unique`: a child that is forked while another thread does that would wait forever
# for the lock of the module.
import numpy.ma  # noqa: F401

__all__ = ["ForkLevel", "ForkLock", "ForkParticipant", "register_at_fork"]


class ForkParticipant(Protocol):
    """Something that must be idle while the process forks. Each method may do nothing."""

    def before_fork(self) -> None:
        """Wait until no other thread is in the middle of something, and let none begin."""

    def after_fork_in_parent(self) -> None:
        """Undo `before_fork`, or what it has done before it failed."""

    def after_fork_in_child(self) -> None:
        """Drop what belongs to the parent, also if `before_fork` has failed. No other thread runs."""


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
# those whose `before_fork` it has called, in this order
_asked: list[ForkParticipant] = []
_levels: dict[ref[ForkParticipant], ForkLevel] = {}


def register_at_fork(participant: ForkParticipant, level: ForkLevel) -> None:
    """Hold this participant during each fork, for as long as it lives; the registry does not keep it alive.

    Participants of one level are held in no particular order. Handles are opened under a `ForkLock`, so none is
    while the process forks.
    """
    _levels[ref(participant, _forget)] = level


def _forget(gone: ref[ForkParticipant], levels: dict[ref[ForkParticipant], ForkLevel] = _levels) -> None:
    levels.pop(gone, None)


def _participants(level: ForkLevel) -> list[ForkParticipant]:
    """Those of a level that live."""
    # in one step: the garbage collector, and other threads, change the dictionary
    found = list(_levels)
    return [one for weak in found if _levels.get(weak) == level and (one := weak()) is not None]


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


def _before_fork() -> None:
    _forking.acquire()
    failures: list[BaseException] = []
    for level in sorted(ForkLevel, reverse=True):
        for participant in _participants(level):
            _asked.append(participant)
            _call(participant.before_fork, failures)
    if failures:
        raise failures[0]


def _after_fork_in_parent() -> None:
    # not if an interrupt has ended the wait for another thread that forks
    if not _forking._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as `threading.Condition` does
        return
    failures: list[BaseException] = []
    while _asked:
        # it may be released twice, and is, if this is interrupted
        release = _asked[-1].after_fork_in_parent
        if not _call(release, failures):
            _call(release, failures)
        _asked.pop()
    _forking.release()
    if failures:
        raise failures[0]


def _after_fork_in_child() -> None:
    global _forking
    failures: list[BaseException] = []
    for level in sorted(ForkLevel):
        for participant in _participants(level):
            _call(participant.after_fork_in_child, failures)
    _asked.clear()
    _forking = threading.RLock()
    if failures:
        raise failures[0]


def _call(work: Callable[[], None], failures: list[BaseException]) -> bool:
    """Do this; an error in it, or an interrupt, does not keep the others from their turn. `os.fork` reports it."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - raised when all are done
        failures.append(error)
        return False
    return True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
    # what an interrupt has kept the first one from
    os.register_at_fork(after_in_parent=_after_fork_in_parent)
