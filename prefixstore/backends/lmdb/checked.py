"""Knows whether an LMDB file was sound and only LMDB has written to it since; if not, a child process walks it first.

A file beside it, `checked`, says so. Processes that have the store open hold a shared lock on it. A writer notes
in it that it has opened the store, and when it closes the store the inode number, size and times of the data. So
a process that opens the store does not walk the data if another one has it open, or if what was written is what the
data still shows: then nothing has written to them since. It does walk them after any other program has written to them,
in a copy or a restored backup, and if a process was killed, or has crashed, before it closed the store.

File systems record times in steps of some milliseconds. So what was written counts only if it has a later time than the
data: whatever is written to them after that has another time than was noted. The file needs no protection: who can
write it can write the data as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.spawn import get_executable
from pathlib import Path
from stat import S_IMODE

import lmdb
import numpy as np

from prefixstore.backends.lmdb.walk import DAMAGED, SOUND
from prefixstore.backends.trusted import require_trusted_files
from prefixstore.errors import CorruptError, LocationError, UnavailableError

if sys.platform != "win32":
    import fcntl

__all__ = ["NOTE", "CheckedFile", "damaged", "require_sound"]

# the name of the file
NOTE = "checked"
# what it begins with while a writer has the store open
IN_USE = b"in use"
# what ends a process that follows a wrong pointer; other signals come from outside
CRASHES = {-signal.SIGSEGV, -getattr(signal, "SIGBUS", signal.SIGSEGV), -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL}
# how long a store waits for another process that walks the data
WALK_SECONDS = 60.0
# how often the time of what was written is compared, and seconds between: the clocks of most file systems have gone on
ATTEMPTS, STEP = 5, 0.005

# run by the child: finds LMDB and NumPy without the start-up files of the packages
SCRIPT = (
    "import os, runpy, sys\n"
    "sys.path += sys.argv[1].split(os.pathsep)\n"
    "del sys.argv[:2]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)


def damaged(path: Path, why: str) -> CorruptError:
    """The error for a file that is not as LMDB writes it."""
    return CorruptError(
        f"{path} is damaged: {why}; stop all processes using it, and delete data.mdb and lock.mdb there: its pages "
        "will be computed again"
    )


def require_sound(path: Path, databases: Iterable[bytes]) -> None:
    """Have a child process walk a data file.

    Raises
    ------
    CorruptError
        If the file is damaged.
    UnavailableError
        If it could not be walked.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        # this process may have changed its user since it opened the store
        raise UnavailableError(f"{path} cannot be read: {error.strerror}") from error
    packages = {str(Path(module.__file__ or "").parents[1]) for module in (lmdb, np)}
    walk = Path(__file__).with_name("walk.py")
    command = [get_executable() or sys.executable or "", "-I", "-S", "-c", SCRIPT, os.pathsep.join(packages)]
    command += [str(walk), str(path.parent)]
    command += [name.decode() for name in databases]
    try:
        # in a session of its own: the signals of a terminal are not for it
        done = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, start_new_session=True
        )
    except OSError as error:
        raise UnavailableError(f"{path} cannot be checked: {error}") from error
    if done.returncode == DAMAGED:
        raise damaged(path, done.stdout.decode(errors="replace"))
    if done.returncode in CRASHES:
        raise damaged(path, f"a process that read it was ended by signal {-done.returncode}")
    # it has to say so: another program, or a system that does not keep exit codes for this process, says nothing
    if done.returncode or done.stdout != SOUND:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = last or f"{os.fsdecode(command[0])!r} ended with {done.returncode}, and has not said that it is sound"
        raise UnavailableError(f"{path} cannot be checked: {why}")


class CheckedFile:
    """What this process knows about one data file; see the module.

    Parameters
    ----------
    path
        The file.
    read_only
        Whether the process must not write beside it.

    Attributes
    ----------
    was_noted
        Whether it was a store's when it was entered.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._path = path
        self._note = path.with_name(NOTE)
        self._read_only = read_only
        # the open note, which this process has locked
        self._handle: int | None = None
        self._is_sound = True
        # whether a store has noted anything before
        self.was_noted = False

    def enter(self, databases: Iterable[bytes], *, is_new: bool) -> None:
        """Before the data are opened: walk them if necessary. Raises as `require_sound` does.

        Parameters
        ----------
        databases
            Those to walk.
        is_new
            Whether this process has just created the data.
        """
        self.drop()
        self._is_sound = True
        self._handle = handle = self._open()
        self.was_noted = handle is not None and os.fstat(handle).st_size > 0
        try:
            # who has locked it exclusively is alone, and who shares the lock has data that were sound
            is_alone = handle is None or self._locked(handle)
            if is_alone and not is_new and not (handle is not None and self._says_sound(handle)):
                require_sound(self._path, databases)
            if handle is not None:
                if not self._read_only:
                    # not truncated: some file systems wait for the disk then
                    os.pwrite(handle, IN_USE, 0)
                _lock(handle, fcntl.LOCK_SH)
        except BaseException:
            self.drop()
            raise

    def _locked(self, handle: int) -> bool:
        """Lock the note; whether exclusively."""
        deadline = time.monotonic() + WALK_SECONDS
        while time.monotonic() < deadline:
            if _lock(handle, fcntl.LOCK_EX):
                return True
            if _lock(handle, fcntl.LOCK_SH):
                return False
            time.sleep(0.02)
        raise UnavailableError(f"{self._path} is being checked by another process; try again")

    def forget(self) -> None:
        """Something in the data is damaged: the next process that opens them walks them. Readers note that, too."""
        self._is_sound = False
        with suppress(OSError):
            self._note.unlink(missing_ok=True)

    def refuse(self) -> None:
        """The data cannot be opened: leave nothing beside those of another application."""
        if self._handle is not None and not self.was_noted and not self._read_only:
            with suppress(OSError):
                self._note.unlink(missing_ok=True)
        self.drop()

    def leave(self) -> None:
        """The data are closed: say that they are sound."""
        try:
            if self._handle is not None and self._is_sound and not self._read_only:
                self._say_sound(self._handle)
        except OSError:
            pass  # they are walked once more
        finally:
            self.drop()

    def drop(self) -> None:
        """Unlock the note; in a forked child, only the child's own copy of the lock."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _open(self) -> int | None:
        """Open the note; None if it cannot be used."""
        flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        flags |= os.O_RDONLY if self._read_only else os.O_RDWR | os.O_CREAT
        if sys.platform == "win32":
            return None
        try:
            require_trusted_files(self._note)
            handle = os.open(self._note, flags, 0o600)
        except (LocationError, OSError):
            return None
        if not self._read_only:
            # who may use the data may use the note
            with suppress(OSError):
                os.fchmod(handle, S_IMODE(self._path.stat().st_mode) & 0o660)
        return handle

    def _says_sound(self, handle: int) -> bool:
        data, note = self._path.stat(), os.fstat(handle)
        return os.pread(handle, 200, 0) == _state(data) and note.st_mtime_ns > max(data.st_mtime_ns, data.st_ctime_ns)

    def _say_sound(self, handle: int) -> None:
        for _ in range(ATTEMPTS):
            os.pwrite(handle, _state(self._path.stat()), 0)
            if self._says_sound(handle):
                return
            time.sleep(STEP)


def _state(data: os.stat_result) -> bytes:
    return b"%20d %20d %20d %20d\n" % (data.st_ino, data.st_size, data.st_mtime_ns, data.st_ctime_ns)


def _lock(handle: int, kind: int) -> bool:
    """Lock a file, or change the kind of the lock; False if another process keeps it from that."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
