"""Ranges of bytes in a file: overwritten with zeros, or given back to the disk."""

from __future__ import annotations

import ctypes
import os
import sys

from prefixstore.errors import UnavailableError

__all__ = ["overwrite", "punch"]

ZEROS = bytes(1 << 20)
# of fallocate(2)
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02


def overwrite(handle: int, start: int, end: int) -> int:
    """Overwrite a range of a file with zeros where it holds anything else; returns the bytes written."""
    written = 0
    for at in range(start, end, len(ZEROS)):
        found = os.pread(handle, min(len(ZEROS), end - at), at)
        # what is zero already may be a hole, which stays one
        if found != ZEROS[: len(found)]:
            written += os.pwrite(handle, ZEROS[: len(found)], at)
    return written


def punch(handle: int, start: int, end: int) -> int:
    """Punch a hole into a file, which then reads as zeros; returns the freed bytes.

    Raises
    ------
    UnavailableError
        If the operating system or the file system does not support it.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if sys.platform == "linux" else None
    if fallocate is None:
        raise UnavailableError("this system cannot free parts of a file; copy the store and delete the old one")
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    if fallocate(handle, PUNCH_HOLE | KEEP_SIZE, start, end - start) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise UnavailableError(f"the file system cannot free parts of a file ({reason}); copy the store instead")
    return end - start
