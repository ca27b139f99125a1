"""Whether files can be trusted: who owns them, and who else can write to them.

A user who can write to a store decides what is restored from it, and a file or link that is planted in its place
decides what is read and overwritten. So files that belong to another user, or that everyone can write to, are refused.
A group is trusted if it may write: then sharing was intended. Read permission says nothing, since files get it by
default (umask 022).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from prefixstore.errors import LocationError

__all__ = ["require_trusted_directory", "require_trusted_files"]


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
    if found.st_uid in (os.geteuid(), 0):
        return
    if _is_shared(found) or (_is_in_shared_directory(path) and _is_ours(found) and found.st_mode & stat.S_IRGRP):
        return
    raise LocationError(
        f"{path} belongs to another user (uid {found.st_uid}); choose another location, run as that user (a container: "
        f"docker run --user {found.st_uid}), or run: chown -R {os.geteuid()} '{path}'. A group of this user may share "
        "it, after: chmod g+rw (of the directory: g+rwx)"
    )


def _is_ours(found: os.stat_result) -> bool:
    return found.st_gid in {os.getegid(), *os.getgroups()}


def _is_shared(found: os.stat_result) -> bool:
    """Whether a group of this user may write to it: sharing was meant."""
    return _is_ours(found) and found.st_mode & (stat.S_IRGRP | stat.S_IWGRP) == stat.S_IRGRP | stat.S_IWGRP


def _is_in_shared_directory(path: Path) -> bool:
    """Whether the group that is trusted with the directory could replace the file anyway."""
    try:
        found = path.parent.stat()
    except OSError:
        return False
    return _is_shared(found) and not found.st_mode & stat.S_IWOTH
