"""Knows whether an LMDB file was sound and only LMDB has written to it since; if not, it is verified first.

Processes that have the store open hold a shared lock on the data. A writer removes the file `checked` beside them when
it opens the store, and when it closes it notes there the inode number, size and times of the data. So a process that
opens the store verifies the data unless another one has them open, or what was noted is what they still show: then
nothing has written to them since. They are verified after any other program has written to them, in a copy or a
restored backup, and if a process was killed, or has crashed, before it closed the store.

File systems record times in steps of some milliseconds. So what was noted counts only if it has a later time than the
data: whatever is written to them after that has another time than was noted. The note needs no protection: who can
write it can write the data as well.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE

from prefixstore.backends.lmdb.walk import verify_file
from prefixstore.errors import CorruptError, UnavailableError

if sys.platform != "win32":
    import fcntl

# the name of the file
NOTE = "checked"
# how often the time of what was written is compared, and seconds between: the clocks of most file systems have gone on
ATTEMPTS, STEP = 5, 0.005


def damaged(path: Path, why: str) -> CorruptError:
    """The error for a file that is not as LMDB writes it."""
    return CorruptError(
        f"{path} is damaged: {why}; stop all processes using it, and delete data.mdb and lock.mdb there: its pages "
        "will be computed again"
    )


def require_sound(path: Path, snapshot: int | None = None) -> bool:
    """As `verify_file`, of a data file. Also raises `UnavailableError` if it cannot be read."""
    try:
        return verify_file(path, snapshot, is_store=path.with_name(NOTE).exists())
    except CorruptError as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        # this process may have changed its user since it opened the store
        raise UnavailableError(f"{path} cannot be read: {error.strerror}") from error


class CheckedFile:
    """What this process knows about one data file; see the module."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._note = path.with_name(NOTE)
        # the open data, which this process has locked
        self._handle: int | None = None
        self._is_sound = True

    @property
    def was_closed(self) -> bool:
        """Whether it is noted that a store has closed it: if LMDB cannot read it now, it was damaged since."""
        return self._note.exists()

    def enter(self, *, is_new: bool) -> None:
        """Before the data are opened: verify them, unless this process has just made them, or it is not necessary.

        Raises as `require_sound` does.
        """
        # who is alone has locked the data exclusively, and who shares the lock has data that were sound
        is_alone = self._lock_it()
        self._is_sound = True
        try:
            if is_alone and not is_new and not self._says_sound():
                require_sound(self._path)
            if self._handle is not None:
                _lock(self._handle, fcntl.LOCK_SH)
        except BaseException:
            self.drop()
            raise

    def _lock_it(self) -> bool:
        """Lock the data; whether exclusively. Waits while another process verifies or replaces them."""
        while True:
            self.drop()
            if sys.platform == "win32":
                return True
            self._handle = handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            is_alone = _lock(handle, fcntl.LOCK_EX)
            if not is_alone:
                fcntl.flock(handle, fcntl.LOCK_SH)
            # those that were replaced meanwhile are not the data any more
            if os.path.samestat(os.fstat(handle), self._path.stat()):
                return is_alone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which no other process has the data open, or can open them. Raises `UnavailableError`."""
        if self._handle is None:
            yield
            return
        # A lock is given up before it becomes another one. So one process at a time tries that: otherwise two could
        # give up theirs, and one be alone while the other still has the data open.
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not _lock(directory, fcntl.LOCK_EX) or not _lock(self._handle, fcntl.LOCK_EX):
                raise UnavailableError(f"{self._path} is open in another process; stop all that use it, and try again")
            yield
        finally:
            # this may wait for a process that verifies the data; nobody waits for the lock of the directory
            fcntl.flock(self._handle, fcntl.LOCK_SH)
            os.close(directory)

    def drop_note(self) -> None:
        """Note nothing of the data: they are about to be written, or damaged."""
        with suppress(OSError):
            self._note.unlink(missing_ok=True)

    def forget(self) -> None:
        """Something in the data is damaged: the next process that opens them verifies them. Readers note that, too."""
        self._is_sound = False
        self.drop_note()

    def leave(self, *, was_written: bool) -> None:
        """The data are closed: note that they are sound if this process may have written them, and found no damage."""
        try:
            if self._is_sound and was_written:
                self._say_sound()
        except OSError:
            pass  # they are verified once more
        finally:
            self.drop()

    def drop(self) -> None:
        """Unlock the data; in a forked child, only the child's own copy of the lock."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _says_sound(self) -> bool:
        try:
            data, note = self._path.stat(), self._note.stat()
            is_later = note.st_mtime_ns > max(data.st_mtime_ns, data.st_ctime_ns)
            return is_later and self._note.read_bytes() == _state(data)
        except OSError:
            return False

    def _say_sound(self) -> None:
        new = self._note.with_name(f".{NOTE}.{os.getpid()}")
        try:
            for _ in range(ATTEMPTS):
                data = self._path.stat()
                new.write_bytes(_state(data))
                # who may use the data may use the note
                new.chmod(S_IMODE(data.st_mode) & 0o660)
                new.replace(self._note)
                if self._says_sound():
                    return
                time.sleep(STEP)
        finally:
            new.unlink(missing_ok=True)


def _state(data: os.stat_result) -> bytes:
    return b"%d %d %d %d\n" % (data.st_ino, data.st_size, data.st_mtime_ns, data.st_ctime_ns)


def _lock(handle: int, kind: int) -> bool:
    """Lock a file, or change the kind of the lock; False if another process keeps it from that."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
