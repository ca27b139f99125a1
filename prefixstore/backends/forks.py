"""Locks on open handles, none of which is in use while the process forks, and what is renewed in the child.

A child inherits memory, locks and file descriptors, but only the thread that forked: a lock that another thread held is
never released there, and a file handle still belongs to the parent. So whoever uses, opens or closes a handle is inside
of a gate, and the process forks when no thread is; the child opens its own handles.

An open handle is shared by the threads that use it, and held alone by the one that replaces or closes it; so is the
gate. A thread of the store holds them for its caller, so a caller that is inside and asks for more does not wait for
itself: who uses one handle may open or use another one, also while a thread waits to fork. The state of a lock is two
dicts, which change in single steps. A thread first announces itself in one of them and then looks into the other, so of
two threads at least one sees the other.
"""

from __future__ import annotations

import ctypes

# Imported for its fork hooks: hooks before a fork run in reverse order, so this one takes its lock after that of
# prefixstore has waited for threads that use a handle. Such a thread may log, and needs the lock.
import logging  # noqa: F401
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from weakref import WeakKeyDictionary

# numpy imports it at the first `np.unique`: a child that is forked while another thread does that would wait forever
# for the lock of the module.
import numpy.ma  # noqa: F401

from prefixstore.backends.threads import Caller, caller
from prefixstore.errors import MisuseError

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
        return bool(self._inside or self._alone) and self._holds(caller())

    def _holds(self, me: Caller, n_own: int = 0) -> bool:
        """Whether this caller has more entries than its own one."""
        return (_keys(self._inside) + _keys(self._alone)).count(me.key) > n_own

    def shared(self) -> AbstractContextManager[None]:
        """Hold it shared. Waits while another thread waits for exclusive use, unless this thread holds it already."""
        return self._held(self.enter)

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold it exclusive, once no other thread is inside. May be nested.

        Raises `MisuseError` if this thread holds it shared.
        """
        return self._held(self.enter_alone)

    @contextmanager
    def _held(self, enter: Callable[[object], None]) -> Iterator[None]:
        entry = object()
        try:
            _gate.enter(entry)
            enter(entry)
            yield
        finally:
            self.leave(entry)
            _gate.leave(entry)

    def enter(self, entry: object) -> None:
        """Begin to hold it shared, under this name."""
        self._inside[entry] = me = caller()
        # a thread that waits to be alone comes first, or it would wait forever
        while self._alone and not self._holds(me, n_own=1):
            self.leave(entry)
            _wait(lambda: not self._alone)
            self._inside[entry] = me

    def enter_alone(self, entry: object) -> None:
        """Begin to hold it exclusive."""
        me = caller()
        # a thread that is alone already may be inside as well
        is_alone = me.key in _keys(self._alone)
        if not is_alone and me.key in _keys(self._inside):
            # it would wait for itself
            raise MisuseError("this thread is inside a view or a transaction of the location; leave it first")
        self._alone[entry] = me
        if not is_alone:
            _wait(lambda: not self._inside and _keys(self._alone)[:1] == [me.key])

    def leave(self, entry: object) -> None:
        """Hold it no more, or not wait for it. A second call does nothing."""
        self._inside.pop(entry, None)
        self._alone.pop(entry, None)

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


_gate = HandleLock()
_adding = threading.RLock()
# whether the thread that forks is alone in the gate
_is_quiet = False
# what takes part in forks, in the order in which it was registered, and the lock of a handle
_participants: WeakKeyDictionary[object, HandleLock | None] = WeakKeyDictionary()


@contextmanager
def adding() -> Iterator[None]:
    """A block of steps in memory that one thread at a time takes, and none while the process forks."""
    with _gate.shared(), _adding:
        yield


def register_at_fork(participant: object, lock: HandleLock | None = None) -> None:
    """Have something take part in each fork, for as long as it lives; the registry does not keep it alive.

    In the child its ``after_fork()`` is called; those of handles, which have a `lock`, before others. A handle
    also has ``before_fork()``.
    """
    with adding():
        _participants[participant] = lock


def is_quiet() -> bool:
    """In a forked child: whether no handle was in use. `os.fork` forks also if a Ctrl-C ends the wait for that."""
    return _is_quiet


def abandon(one: object) -> None:
    """Never destroy this, also not when the interpreter ends: it would take something from the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _handles() -> dict[object, HandleLock]:
    return {one: lock for one, lock in _participants.items() if lock is not None}


def _call(method: str, participants: Iterable[object]) -> None:
    """Call this method of all; one that fails does not keep the others from their turn."""
    failures: list[BaseException] = []
    for one in participants:
        try:
            getattr(one, method)()
        except BaseException as error:  # noqa: BLE001 - raised when all is done: `os.fork` reports it, and forks
            failures.append(error)
    if failures:
        raise failures[0]


def _fork() -> object:
    """The entry of this thread while it forks; another one may fork at the same time."""
    return "fork", threading.get_ident()


def _before_fork() -> None:
    global _is_quiet
    _gate.enter_alone(_fork())
    _is_quiet = True
    _call("before_fork", _handles())


def _after_fork_in_parent() -> None:
    global _is_quiet
    _is_quiet = False
    _gate.leave(_fork())


def _after_fork_in_child() -> None:
    global _adding, _is_quiet
    _adding = threading.RLock()
    handles = _handles()
    for lock in (_gate, *handles.values()):
        lock.renew()
    try:
        _call("after_fork", {**handles, **_participants})
    finally:
        _is_quiet = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


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
