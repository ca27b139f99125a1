"""Creates files and directories that survive a power loss: a name is durable once its directory is flushed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from prefixstore.backends.location import path_of, scheme_of
from prefixstore.errors import LocationError


def local_path(location: str) -> Path | None:
    """The directory or the file of a location; None for one that is not in a file."""
    return absolute(path_of(location)) if scheme_of(location) in ("lmdb", "sqlite") else None


def place_of(location: str) -> str:
    """A location, or the file behind it, whatever it is called."""
    path = local_path(location)
    return location if path is None else os.path.realpath(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """A path as an absolute one, with ``~`` expanded. Raises `LocationError`."""
    try:
        found = Path(path).expanduser().absolute()
        # as the libraries of the backends take it
        str(found).encode()
    except UnicodeEncodeError as error:
        raise LocationError(f"{path!r} has bytes that are not valid UTF-8; choose another path") from error
    except (OSError, RuntimeError) as error:
        raise LocationError(f"{path} cannot be made an absolute path: {error}; pass one") from error
    return found


def expanded(path: str | os.PathLike[str]) -> str:
    """A path with ``~`` expanded, for where no shell does that; that of an unknown user is left as it is."""
    return os.path.expanduser(path)  # noqa: PTH111 - the one of pathlib raises for an unknown user


def make_directory(path: Path) -> None:
    """Create a directory that only its owner can read, and its missing parents. Raises `OSError`."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    for made in missing:
        with suppress(PermissionError):
            # a directory that may be written but not read cannot be flushed
            sync_path(made.parent)


def publish(new: Path, path: Path) -> None:
    """Rename a complete and flushed file to its final name, unless that is taken. Raises `OSError`."""
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    except OSError:
        # a file system without links
        if not path.exists():
            new.rename(path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Flush a file or a directory that is not locked."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
