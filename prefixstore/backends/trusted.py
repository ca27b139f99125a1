"""Whether files can be trusted: who owns them, and who else can write to them.

A user who can write to a store decides what is restored from it, and a file or link that is planted in its place
decides what is read and overwritten. So files that belong to another user, or that everyone can write to, are refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from prefixstore.errors import LocationError


def require_trusted_directory(path: Path, *, sticky: bool = False) -> None:
    """Refuse a directory in which others can plant files, with the command that fixes it: raises `LocationError`.

    One that does not exist is not refused. A link stands for what it points to. With `sticky`, everyone may write to it
    if users cannot replace each other's files, as in ``/tmp``.
    """
    try:
        found = path.stat()
    except OSError:
        return  # opening it says why
    if sticky and found.st_mode & stat.S_ISVTX:
        return
    _require(path, found)


def require_trusted_files(*paths: Path) -> None:
    """Refuse files that others created or can change, and anything but regular files; a missing file is accepted.

    Raises `LocationError`, with the command that fixes it.
    """
    for path in paths:
        try:
            found = path.lstat()
        except OSError:
            continue
        if stat.S_ISLNK(found.st_mode):
            raise LocationError(f"{path} is a symbolic link, which is not followed; pass its target")
        if not stat.S_ISREG(found.st_mode):
            # opening a pipe would wait for its other end
            raise LocationError(f"{path} is not a regular file; choose another location")
        _require(path, found)


def _require(path: Path, found: os.stat_result) -> None:
    if os.name != "posix":
        return
    if found.st_mode & stat.S_IWOTH:
        raise LocationError(
            f"{path} can be written by every user, who could forge what is restored; if its contents are yours, run: "
            f"chmod o-w '{path}', or choose another location"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise LocationError(
            f"{path} belongs to another user (uid {found.st_uid}); choose another location, run as that user (a "
            f"container: docker run --user {found.st_uid}), or run: chown -R {os.geteuid()} '{path}'"
        )
