"""A directory in memory that only this user can read, gone when the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["private_directory"]

MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a unique directory for this user only
PREFIX = "prefixstore-"
# locked as long as its process lives: unlike a process id, that is right between containers, too
LOCK = "lock"


@contextmanager
def private_directory(parent: Path | None = None) -> Iterator[Path]:
    """Create the directory, with mode 0700, and remove it with its contents at the end.

    What processes that were killed have left behind is removed first.

    Parameters
    ----------
    parent
        Where to make it; None: ``/dev/shm`` if there is one, else the directory for temporary files.
    """
    if parent is None:
        parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _remove_left_behind(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    new = path / f"{LOCK}.new"
    try:
        with new.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(path / LOCK)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left_behind(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        # without a lock file it is another's, or just being made
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
