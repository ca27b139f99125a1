"""What must be quiet while the process forks, and be renewed in the child.

A child inherits memory, locks and file descriptors, but only the thread that forked: a lock that another thread held is
never released there, and a file handle still belongs to the parent. So each participant is held before a fork, and
released after it in the parent and in the child.

`os.fork` reports an exception in one of these hooks and forks nevertheless. So an interrupt (Ctrl-C) may come at any
step of them: each hook is registered twice, and the second call does what is left of the first.
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

from prefixstore.backends.handle_lock import HandleLock

__all__ = ["ForkLevel", "ForkLock", "ForkParticipant", "register_at_fork"]


class ForkParticipant(Protocol):
    """Something that must be idle while the process forks. Each method may do nothing.

    Each method may be interrupted, and is then called again. A participant whose `before_fork` has failed is released,
    too: so each method does what is left to do, and nothing that was done already.
    """

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


# exclusive to the thread that forks: another must not release what this one holds
_forking = HandleLock()
# shared by threads that add a participant, exclusive while participants are listed, and during the fork itself
_registering = HandleLock()
_levels: dict[ref[ForkParticipant], ForkLevel] = {}
# by the thread that forks: those whose `before_fork` was called, in this order, and those that need no second call
_called: dict[ForkParticipant, None] = {}
_held: dict[ForkParticipant, None] = {}
# in a child: its process id, and those that are still to be renewed, the last first
_child: int | None = None
_left: list[ForkParticipant] = []


def register_at_fork(participant: ForkParticipant, level: ForkLevel) -> None:
    """Hold this participant during each fork, for as long as it lives; the registry does not keep it alive.

    Participants of one level are held in no particular order. What another thread creates or closes during a fork is
    either held as a whole or not at all.
    """
    with _registering.shared():
        _levels[ref(participant, _forget)] = level


def _forget(gone: ref[ForkParticipant], levels: dict[ref[ForkParticipant], ForkLevel] = _levels) -> None:
    levels.pop(gone, None)


def _participants() -> list[ForkParticipant]:
    """Those that live, the first level first."""
    while True:
        try:
            found = list(_levels.items())
        except RuntimeError:
            # the garbage collector ran, and a participant has left the dictionary
            continue
        break
    found.sort(key=lambda pair: pair[1])
    return [participant for weak, _ in found if (participant := weak()) is not None]


class ForkLock:
    """A lock under which handles are opened and closed; no other thread holds it during a fork.

    Attributes
    ----------
    held
        To be used as ``with lock.held:``. A thread does not fork inside that.
    """

    def __init__(self) -> None:
        # without methods of this class round it: an interrupt cannot come between acquiring it and entering the block
        self.held = threading.RLock()
        register_at_fork(self, ForkLevel.OPENING)

    def before_fork(self) -> None:
        self.held.acquire()

    def after_fork_in_parent(self) -> None:
        # as often as it was acquired: an interrupt may have come before that was noted
        with suppress(RuntimeError):
            while True:
                self.held.release()

    def after_fork_in_child(self) -> None:
        self.held = threading.RLock()


def _before_fork() -> None:
    me = threading.get_ident()
    _forking.acquire_exclusive(me)
    _registering.acquire_exclusive(me)
    # A thread that registers a participant may hold another one: so never wait for one while registering is locked, and
    # read the list again until it has no new ones.
    tried: set[ForkParticipant] = set()
    failures: list[BaseException] = []
    while new := [one for one in _participants() if one not in tried and one not in _held]:
        tried.update(new)
        _registering.release_exclusive(me)
        for participant in reversed(new):
            _called[participant] = None
            # an error in one does not keep the others from being held; os.fork reports it, and forks
            try:
                participant.before_fork()
            except Exception as error:  # noqa: BLE001 - reported when all are done
                failures.append(error)
            except BaseException as interrupt:  # noqa: BLE001 - raised when all are done
                failures.append(interrupt)
                continue  # once more in the second call
            _held[participant] = None
        _registering.acquire_exclusive(me)
    if failures:
        raise failures[0]


def _after_fork_in_parent() -> None:
    me = threading.get_ident()
    failures: list[BaseException] = []
    # not if it was released before, or if an interrupt came before it was held: the lists may be another thread's then
    if _forking.is_exclusive(me):
        while _called:
            participant = next(reversed(_called))
            _release(participant.after_fork_in_parent, failures)
            _called.pop(participant, None)
        _held.clear()
    _registering.release_exclusive(me)
    _forking.release_exclusive(me)
    if failures:
        raise failures[0]


def _after_fork_in_child() -> None:
    global _child
    if _child != os.getpid():
        # also those that are not held, because interrupts have kept them from it: the parent's handles are theirs, too
        _left[:] = reversed(_participants())
        _child = os.getpid()
    failures: list[BaseException] = []
    while _left:
        _release(_left[-1].after_fork_in_child, failures)
        _left.pop()
    _called.clear()
    _held.clear()
    _registering.renew()
    _forking.renew()
    if failures:
        raise failures[0]


def _release(call: Callable[[], None], failures: list[BaseException]) -> None:
    """Call this; an error in it does not keep the others from their turn. An interrupted call is repeated, once."""
    for _ in range(2):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - reported when all are done
            failures.append(error)
        except BaseException as interrupt:  # noqa: BLE001 - raised when all are done
            failures.append(interrupt)
            continue
        return


if hasattr(os, "register_at_fork"):
    for _ in range(2):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
        )
