"""How an engine ends: by a caller, by the garbage collector, or by its write thread."""

from __future__ import annotations

import _thread
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress

from prefixstore.backends.handle_lock import release_interrupted_frames
from prefixstore.backends.threads import Threads, handed_over
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.engine.pages import Pages
from prefixstore.engine.queue import WriteQueue
from prefixstore.engine.ram import RamTier
from prefixstore.engine.saved_notes import SavedNotes
from prefixstore.engine.source import Fetcher
from prefixstore.engine.tap import Tap
from prefixstore.errors import MisuseError, StorageError

__all__ = ["Closing"]

log = logging.getLogger("prefixstore")


class Closing(ABC):
    """Writes what is left, and releases the location; see `Engine`, which has the parts."""

    read_only: bool
    tap: Tap | None
    threads: Threads
    _backend: Pages
    _breaker: CircuitBreaker
    _closed: bool
    _ending: AbstractContextManager[bool]
    _fetcher: Fetcher
    _notes: SavedNotes
    _queue: WriteQueue
    _ram: RamTier

    @abstractmethod
    def sync(self) -> None:
        """Return when everything committed so far is durable."""

    def close(self) -> None:
        """Write what is queued and deferred, make it durable, and release the backend.

        The write thread has another one do that, and waits for nothing. While another thread closes the engine, a
        second call waits for it.

        Raises
        ------
        StorageError
            If something cannot be written, or made durable. The engine is closed all the same.
        MisuseError
            If the calling thread is in the block of a view or of `fetching`.
        """
        if self._has_lent():
            # `with store:` was interrupted: what it has is referred to by the exception that it handles
            release_interrupted_frames()
            if self._has_lent():
                raise MisuseError("this thread is in the block of a view, or of a restore; leave it first")
        self._close()

    def _has_lent(self) -> bool:
        """Whether the calling thread is in the block of a view or of `fetching`."""
        return self.threads.has_lent()

    @handed_over
    def _close(self) -> None:
        if self._queue.is_here:
            self.close_soon()
            return
        with self._ending:
            # a write thread that no caller waits for releases the backend when it ends
            if self._closed or self._queue.is_on_its_own:
                return
            try:
                self._queue.close()
                if not self.read_only and not self._queue.is_on_its_own:
                    self._notes.save(closing=True)
                    self.sync()
            finally:
                if not self._queue.is_on_its_own:
                    self._release()

    def close_soon(self) -> None:
        """As `close`, in a thread of its own, at the latest at the end of the process; for the garbage collector.

        That may run in any thread at any moment: inside a view, in the write thread, while a lock is held. So this
        takes no lock and waits for nothing. `Thread.start` does both.
        """
        # keeps the engine until it is closed
        at_exit = weakref.finalize(self, self.close)
        with suppress(RuntimeError):  # no more threads, or the interpreter is shutting down
            _thread.start_new_thread(self._start_closing, (at_exit,))

    def _start_closing(self, at_exit: weakref.finalize[[], Closing]) -> None:
        # not a daemon: the end of the process waits for it
        thread = threading.Thread(target=self._close_collected, args=(at_exit,), name="prefixstore-close", daemon=False)
        with suppress(RuntimeError):
            thread.start()

    def _close_collected(self, at_exit: weakref.finalize[[], Closing]) -> None:
        try:
            self.close()
        except StorageError as error:
            log.warning("a garbage-collected store could not be closed: %s", error)
        finally:
            # not before: the end of the process waits for this thread in `close`
            at_exit.detach()

    def _end(self) -> None:
        """The rest of `close`, by the write thread, if no caller waits for it."""
        try:
            if not self.read_only:
                self.sync()
        except StorageError as error:
            log.warning("written pages could not be made durable: %s", error)
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        self._breaker.close()
        try:
            # waits for the views that are open: a restore that has begun ends first
            self._backend.close()
        finally:
            self._fetcher.close()
            self._ram.clear()
            self.threads.close()
            if self.tap is not None:
                self.tap.close()
