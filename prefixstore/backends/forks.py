"""What must be quiet while the process forks, and be renewed in the child.

A child inherits memory, locks and file descriptors, but only the thread that forked: a lock that another thread held is
never released there, and a file handle still belongs to the parent. So each participant is held before a fork, and
released after it in the parent and in the child.
"""

from __future__ import annotations

# Imported for their fork hooks: hooks before a fork run in reverse order, so these two take their locks after ours has
# waited for threads that use a handle. Such a thread may start a job in an executor, or log, and needs these locks.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from typing import Protocol
from weakref import WeakKeyDictionary

__all__ = ["ForkLevel", "ForkLock", "ForkParticipant", "register_at_fork"]


class ForkParticipant(Protocol):
    """Something that must be quiet while the process forks. Each method may do nothing."""

    def before_fork(self) -> None:
        """Wait until no other thread is in the middle of something, and let none begin."""

    def after_fork_in_parent(self) -> None:
        """Undo `before_fork`."""

    def after_fork_in_child(self) -> None:
        """Undo `before_fork`, and drop what belongs to the parent. No other thread runs."""


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


# one thread forks at a time: another must not release what this one holds
_forking = threading.Lock()
# held while participants are added or listed, and during the fork itself
_registering = threading.RLock()
_levels: WeakKeyDictionary[ForkParticipant, ForkLevel] = WeakKeyDictionary()
# by the thread that forks, in the order in which they were held
_held: list[ForkParticipant] = []


def register_at_fork(participant: ForkParticipant, level: ForkLevel) -> None:
    """Hold this participant during each fork, for as long as it lives; the registry does not keep it alive.

    Participants of one level are held in no particular order. A participant is called only if its `before_fork` has
    returned, so what another thread creates or closes during a fork is either held as a whole or not at all.
    """
    with _registering:
        _levels[participant] = level


class ForkLock:
    """A lock under which handles are opened and closed; no other thread holds it during a fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        register_at_fork(self, ForkLevel.OPENING)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        self._lock.release()


def _before_fork() -> None:
    _forking.acquire()
    _registering.acquire()
    # A thread that registers a participant may hold another one: so never wait for one while registering is locked, and
    # read the list again until it has no new ones.
    tried: set[ForkParticipant] = set()
    while new := [(level, participant) for participant, level in _levels.items() if participant not in tried]:
        tried.update(participant for _, participant in new)
        _registering.release()
        # an error in one does not keep the others from being held; os.fork reports it, and forks
        with ExitStack() as stack:
            stack.callback(_registering.acquire)
            for _, participant in sorted(new, key=lambda pair: pair[0]):
                stack.callback(_hold, participant)


def _hold(participant: ForkParticipant) -> None:
    participant.before_fork()
    _held.append(participant)


def _after_fork(call: Callable[[ForkParticipant], None]) -> None:
    # the last one held comes first; an error in one does not keep the others from their turn
    with ExitStack() as stack:
        stack.callback(_forking.release)
        stack.callback(_registering.release)
        stack.callback(_held.clear)
        for participant in _held:
            stack.callback(call, participant)


def _after_fork_in_parent() -> None:
    _after_fork(lambda participant: participant.after_fork_in_parent())


def _after_fork_in_child() -> None:
    _after_fork(lambda participant: participant.after_fork_in_child())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
