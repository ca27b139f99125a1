"""Has commands that write much keep freed memory, instead of returning it to the system each time."""

from __future__ import annotations

import ctypes
from contextlib import suppress

__all__ = ["keep_freed_memory"]

# parameters of mallopt in glibc; 32 MiB is the largest threshold that it accepts
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_FROM_HEAP = 32 << 20
# more than a transaction of an import holds
KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Have malloc keep the memory that is freed, as far as the C library can (glibc).

    LMDB holds what a transaction writes in memory of malloc, which otherwise goes back to the system after each one:
    page faults then take half of the system's time for an import. It holds for the whole process, so only commands do
    this.
    """
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
