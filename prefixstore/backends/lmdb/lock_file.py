"""Reads from LMDB's lock file which process holds the write lock.

LMDB has no call for this, nor one that waits for the lock with a limit. On Linux the lock is a robust mutex of the C
library in the file, which holds the id of the thread that has it. It is read without a lock, and used for waiting and
for messages only: the process that it names may end at any time.

In a copy of the file, and after a loss of power, these bytes are stale. But a process that uses a lock file has also
locked a byte of it: LMDB sets a POSIX lock at the offset that is the process id, before the first transaction. So that
lock is checked as well. (A lock file that is not locked is initialised again when it is next opened.)

A process that has the store open must not call this: closing a file drops all POSIX locks of the process on it, and
LMDB tells by them whether others use the file.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["writer_of"]

MAGIC = 0xBEEFC0DE
# magic, format; the mutex of the readers, which ends with the counters in one line of 64 bytes
HEAD = struct.Struct("<II")
# of glibc: the thread and two flags, how often it has locked, the thread again
MUTEX = struct.Struct("<III")
MUTEX_AT = 64
THREAD_MASK = 0x3FFFFFFF
# struct flock: type, whence, start, length, process
FLOCK = struct.Struct("@hhqqi0q")


def writer_of(path: Path) -> int | None:
    """The process that holds the write lock in this lock file; None if none does, or if it cannot be known."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        with path.open("rb") as file:
            found = file.read(MUTEX_AT + MUTEX.size)
            if len(found) < MUTEX_AT + MUTEX.size or HEAD.unpack_from(found)[0] != MAGIC:
                return None
            lock, _, owner = MUTEX.unpack_from(found, MUTEX_AT)
            thread = lock & THREAD_MASK
            if not thread or thread != owner:
                return None
            # of a thread of this machine, in this process namespace
            status = Path(f"/proc/{thread}/status").read_text(errors="replace")  # the name may be no text
            tgid = next((line.split()[1] for line in status.splitlines() if line.startswith("Tgid:")), "")
            pid = int(tgid) if tgid.isdecimal() else 0
            return pid if pid and pid != os.getpid() and _uses(pid, file.fileno()) else None
    except (OSError, ValueError):
        return None


def _uses(pid: int, lock_file: int) -> bool:
    """Whether a process has this lock file locked as LMDB does: at the offset of its id."""
    wanted = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, pid, 1, 0)
    kind, _, _, _, holder = FLOCK.unpack(fcntl.fcntl(lock_file, fcntl.F_GETLK, wanted))
    return bool(kind != fcntl.F_UNLCK and holder == pid)
