"""A stand-in for a location that could not be reached when the store was opened: a later request opens it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from prefixstore.backends.contract import Backend, Update, View
from prefixstore.errors import ClosedError, PrefixStoreError, StorageError, UnavailableError

__all__ = ["LazyBackend"]

log = logging.getLogger("prefixstore")


class LazyBackend(Backend):
    """A backend that is opened when it is first used, and again after each failure: the circuit breaker makes pauses.

    Parameters
    ----------
    location
        As it is shown while it is not open.
    open_it
        Opens it.
    """

    def __init__(self, location: str, open_it: Callable[[], Backend]) -> None:
        self._location = location
        self._open_it = open_it
        self._backend: Backend | None = None
        self._closed = False
        self._opening = threading.Lock()

    def _opened(self) -> Backend:
        """The backend.

        Raises
        ------
        ClosedError
            If it was closed.
        UnavailableError
            If it cannot be opened now, or another thread is trying.
        """
        if self._backend is not None:
            return self._backend
        if not self._opening.acquire(blocking=False):
            raise UnavailableError(f"{self._location} is being opened")
        try:
            if self._closed:
                raise ClosedError("the store is closed; open a new PrefixStore")
            if self._backend is None:
                self._backend = self._open()
                self.is_local = self._backend.is_local
                log.warning("%s is reachable now", self._location)
            return self._backend
        finally:
            self._opening.release()

    def _open(self) -> Backend:
        try:
            return self._open_it()
        except StorageError:
            raise
        except PrefixStoreError as error:
            raise UnavailableError(f"{self._location} cannot be opened: {error}") from error

    @property
    def location(self) -> str:
        return self._backend.location if self._backend is not None else self._location

    def view(self) -> AbstractContextManager[View]:
        return self._opened().view()

    def update(self) -> AbstractContextManager[Update]:
        return self._opened().update()

    def sync(self) -> None:
        self._opened().sync()

    def compact(self, *, erase: bool = False) -> int:
        return self._opened().compact(erase=erase)

    def check(self) -> None:
        self._opened().check()

    def reclaim(self) -> None:
        self._opened().reclaim()

    def after_fork(self) -> None:
        self._opening = threading.Lock()
        if self._backend is not None:
            self._backend.after_fork()

    def close(self) -> None:
        self._closed = True
        # what is being opened is closed when that ends
        with self._opening:
            if self._backend is not None:
                self._backend.close()
