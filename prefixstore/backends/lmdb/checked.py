"""Records the last state in which an LMDB file was found sound, so that opening it need not walk it again.

A file that was sound stays so while only LMDB writes to it. So when nothing has been written for a moment, the process
that has it open notes its newest transaction in a file beside it, with the size, the times and the inode number of the
data file. The next process that opens it walks it only if one of these differs: after anything else has written to it,
in a copy or a restored backup, and after a process was killed before it could note what it had written. The note needs
no protection: a process that can write it can write the data as well. A note that is damaged or cannot be read is
ignored.

File systems record times in steps of some milliseconds. A note is made only when the last write is older than that, so
anything written after it has another time. The note is not flushed: LMDB flushes the pages of a state before it
writes the number of its transaction, so the state that a note names is complete whenever it is the newest in the file.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG, S_IWOTH
from typing import NamedTuple

import xxhash

__all__ = ["NOTE", "CheckedFile"]

# the name of the note
NOTE = "checked"
MAGIC = b"pfxcheck"
# magic; inode number, size, time of the last write and of the last change, nanoseconds; the transaction
STATE = struct.Struct("<8sQQQQQ")
SEAL = struct.Struct("<Q")
# the longest step of a clock of a file system, and of one that counts seconds, in nanoseconds
STEP = 20_000_000
STEP_OF_SECONDS = 2_500_000_000


class _State(NamedTuple):
    """The file as a transaction has left it."""

    inode: int
    size: int
    written: int
    changed: int
    transaction: int

    @classmethod
    def of(cls, found: os.stat_result, transaction: int) -> _State:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, transaction)

    @property
    def is_settled(self) -> bool:
        """Whether the next write to the file will have another time."""
        last = max(self.written, self.changed)
        return time.time_ns() - last >= (STEP if last % 10**9 else STEP_OF_SECONDS)


class CheckedFile:
    """What this process knows about one data file; see the module.

    Parameters
    ----------
    path
        The file.
    read_only
        Whether the process must not write beside it.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._path = path
        self._read_only = read_only
        # the newest state that is known to be sound, and the one that was noted
        self._known: _State | None = None
        self._noted: _State | None = None

    def is_sound(self, transaction: int) -> bool:
        """Whether the file was found sound as it is now. The caller reads at this transaction, the newest."""
        found = self.state(transaction)
        if found is not None and found != self._known and found == self._read():
            self._known = self._noted = found
        return found is not None and found == self._known

    def state(self, transaction: int) -> _State | None:
        """The file as this transaction has left it, the newest; None if there is none."""
        try:
            return _State.of(self._path.stat(), transaction)
        except OSError:
            return None

    def found_sound(self, state: _State | None) -> None:
        """The file was walked after it had this state, and was found sound."""
        self._known = state

    def begin(self, transaction: int) -> _State | None:
        """A transaction of this number begins to write; the state before it, if that is sound."""
        found, known = self.state(transaction - 1), self._known
        if found is None or known is None:
            return None
        # the commits of other processes change the file; if there were none, nothing else may have
        is_sound = found == known or (known.transaction < found.transaction and known.inode == found.inode)
        self._known = found if is_sound else None
        return self._known

    def end(self, transaction: int) -> None:
        """A transaction has ended that began at a sound state; this one is the newest now.

        Whatever the ended one has written, committed or not, it has written through LMDB.
        """
        self._known = self.state(transaction)

    def forget(self) -> None:
        """Something in the file is damaged: delete the note, so that the next opening walks it. Readers do so, too."""
        self._known = self._noted = None
        with suppress(OSError):
            self._path.with_name(NOTE).unlink(missing_ok=True)

    def note(self, found: os.stat_result) -> None:
        """Note the known state, if nothing has been written for a moment. `found` is the file as it is now."""
        known = self._known
        if known is None or known == self._noted or self._read_only:
            return
        if _State.of(found, known.transaction) == known and known.is_settled:
            self._noted = known
            self._write(known)

    def close(self) -> None:
        """Note the state that is known, even if that takes a moment."""
        known = self._known
        if known is None or known == self._noted or self._read_only:
            return
        if not known.is_settled:
            time.sleep(STEP / 1e9)
        with suppress(OSError):
            self.note(self._path.stat())

    def _read(self) -> _State | None:
        """The state that was noted last."""
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            handle = os.open(self._path.with_name(NOTE), flags)
            try:
                found = os.fstat(handle)
                stored = os.read(handle, STATE.size + SEAL.size + 1)
            finally:
                os.close(handle)
        except OSError:
            return None
        body, seal = stored[: STATE.size], stored[STATE.size :]
        if not S_ISREG(found.st_mode) or found.st_mode & S_IWOTH or seal != _seal(body):
            return None
        magic, *values = STATE.unpack(body)
        return _State(*values) if magic == MAGIC else None

    def _write(self, state: _State) -> None:
        """Replace the note as a whole. If that fails, the old one stays, which is of another state."""
        body = STATE.pack(MAGIC, *state)
        new = self._path.with_name(f".{NOTE}.{os.getpid()}.new")
        with suppress(OSError):
            new.unlink(missing_ok=True)
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
            try:
                os.write(handle, body + _seal(body))
                if os.name == "posix":
                    # a user who may read the data may read the note
                    os.fchmod(handle, S_IMODE(self._path.stat().st_mode) & 0o640)
            finally:
                os.close(handle)
            new.replace(self._path.with_name(NOTE))
        with suppress(OSError):
            new.unlink(missing_ok=True)


def _seal(body: bytes) -> bytes:
    return SEAL.pack(xxhash.xxh3_64_intdigest(body))
