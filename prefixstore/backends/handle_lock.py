"""A lock on a handle: shared by the threads that use it, exclusive to the thread that replaces or closes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefixstore.errors import MisuseError

__all__ = ["HandleLock"]

# How often a thread that waits for the others checks without being notified: a Ctrl-C may prevent that.
RECHECK_SECONDS = 0.5


class HandleLock:
    """Shared by the threads that use a handle; one that wants to replace it waits until it has it alone."""

    def __init__(self) -> None:
        # The thread of each entry. A dict and not a counter: adding and removing are single operations, and removing
        # twice is harmless, so an interrupt leaves no stale entry.
        self._inside: dict[object, int] = {}
        # threads that want to be alone, including the one that is
        self._n_waiting = 0
        # the thread that is alone, and how often it has locked
        self._alone: int | None = None
        self._n_locks = 0
        # entered by itself: entering a condition may be interrupted after it took its lock
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)

    @property
    def is_held(self) -> bool:
        """Whether this thread holds it, shared or exclusive."""
        me = threading.get_ident()
        return me == self._alone or me in list(self._inside.values())

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it shared. Waits while another thread wants it exclusive, unless this thread holds it already."""
        entry = object()
        try:
            with self._lock:
                # a thread that waits to be alone comes first, or it would wait forever
                self._condition.wait_for(lambda: not self._n_waiting or self.is_held)
                self._inside[entry] = threading.get_ident()
            yield
        finally:
            self._inside.pop(entry, None)
            # a thread that wants it exclusive raises _n_waiting before it reads _inside: one of the two sees the other
            if self._n_waiting:
                with self._lock:
                    self._condition.notify_all()

    def acquire_exclusive(self) -> None:
        """Wait until no thread holds it, and let no other in until `release_exclusive`. May be nested.

        Raises
        ------
        MisuseError
            If this thread holds it shared.
        """
        me = threading.get_ident()
        if self._alone != me and me in list(self._inside.values()):
            # it would wait for itself
            raise MisuseError("this thread is inside a view or a transaction of the location; leave it first")
        self._lock.acquire()
        self._n_waiting += 1
        try:
            while self._inside:
                self._condition.wait(RECHECK_SECONDS)
        except BaseException:
            self._let_in()
            raise
        self._alone = me
        self._n_locks += 1

    def release_exclusive(self) -> None:
        """Undo one `acquire_exclusive`."""
        self._n_locks -= 1
        if not self._n_locks:
            self._alone = None
        self._let_in()

    def _let_in(self) -> None:
        self._n_waiting -= 1
        self._condition.notify_all()
        self._lock.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold it exclusive."""
        self.acquire_exclusive()
        try:
            yield
        finally:
            self.release_exclusive()
