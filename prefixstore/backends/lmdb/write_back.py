"""Begins to write a large LMDB commit to disk while its pages are still being copied.

LMDB writes the pages of a transaction into the page cache of the system, then flushes all of them, then writes the page
that makes them count. The disk is idle during the first step. So a thread asks the system meanwhile to begin with
the pages that are there. This changes no order that matters: none of these bytes counts before the flush, and the
system may write them at any time anyway.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import ref

__all__ = ["WriteBack"]

# smaller commits are not worth a thread
LARGE_BYTES = 16 << 20
SECONDS = 0.004
# of sync_file_range: begin to write dirty pages, and do not wait for it
SYNC_FILE_RANGE_WRITE = 2


def _begin_writing() -> Callable[[int], object] | None:
    """A function that has the system begin to write a file, by its handle; None where there is none (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    # 0 bytes from 0 on: all of it
    return lambda handle: function(handle, 0, 0, SYNC_FILE_RANGE_WRITE)


begin_writing = _begin_writing()


class WriteBack:
    """Helps one commit, from `start` to `close`.

    Parameters
    ----------
    file
        The file that it writes to.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, n_bytes: int) -> None:
        """Begin to help with a commit of so many bytes, if it is large."""
        if begin_writing is None or n_bytes < LARGE_BYTES:
            return
        thread = threading.Thread(
            target=_run, args=(ref(self), self._file, self._ended), name="prefixstore-write-back", daemon=True
        )
        with suppress(RuntimeError):  # no more threads, or the interpreter is shutting down
            # first: `close` ends it, even if the caller is interrupted here
            self._thread = thread
            thread.start()

    def close(self) -> None:
        """The commit has ended, or failed."""
        self._ended.set()
        if self._thread is not None and self._thread.ident is not None:
            # if that was interrupted, it ends later
            with suppress(RuntimeError):
                self._thread.join()


def _run(owner: ref[WriteBack], file: str, ended: threading.Event) -> None:
    assert begin_writing is not None
    try:
        handle = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # only its name is gone
    try:
        # a Ctrl-C may keep the owner from saying so
        while owner() is not None and not ended.wait(SECONDS):
            begin_writing(handle)
    finally:
        os.close(handle)
