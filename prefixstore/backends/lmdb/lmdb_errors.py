"""What LMDB and the file system say when something fails, as errors of prefixstore that say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import lmdb

from prefixstore.backends import refusals
from prefixstore.backends.files import make_directory
from prefixstore.errors import (
    CorruptError,
    FullError,
    IncompatibleError,
    LocationError,
    StorageError,
    UnavailableError,
)

# a disk with less free space than this counts as full
SMALLEST_DISK = 32 << 20


def lmdb_error(error: lmdb.Error, path: Path) -> StorageError:
    """The prefixstore error for an LMDB error."""
    if isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError)):
        why = "the file has reached the limit that follows from max_bytes, and no gap in it is large enough"
        # whatever the disk has
        return FullError(f"{path}: {why}; raise max_bytes", available=0)
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        free = None  # the directory is gone
    # LMDB reports a write that it could not complete as an I/O error
    is_cut = os.strerror(errno.EIO) in str(error) and free is not None and free < SMALLEST_DISK
    if isinstance(error, lmdb.DiskError) or is_cut:
        return FullError(f"{path}: {error}", available=free)
    if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadTxnError)):
        return CorruptError(f"{path}: {error}")
    if isinstance(error, (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.IncompatibleError)):
        return IncompatibleError(
            f"{path} is not an LMDB environment that this version can read: {error}; choose another "
            "location, or, if it is a store, delete data.mdb and lock.mdb there"
        )
    return UnavailableError(f"{path}: {error}")


def prepare_directory(path: Path, *, read_only: bool) -> None:
    """Create the directory, unless it is there, or say why it cannot be used."""
    try:
        if not read_only:
            make_directory(path)
        if not path.exists():
            raise refusals.missing(path, "an LMDB directory")
        if not path.is_dir():
            raise NotADirectoryError
    except (FileExistsError, NotADirectoryError):
        raise LocationError(
            f"{path} is a file, and an LMDB store is a directory; for SQLite pass sqlite:///{path}"
        ) from None
    except OSError as error:
        done = "read" if read_only else "created"
        raise LocationError(f"{path} cannot be {done}: {error.strerror}; choose another location") from error
    advice = "run as its owner, or choose another location"
    if not os.access(path, os.R_OK | os.X_OK):
        raise LocationError(f"{path} is not readable for this user; {advice}")
    if not (read_only or os.access(path, os.W_OK)):
        raise LocationError(
            f"{path} is not writable for this user; {advice}. To read, read_only=True is enough, "
            "as for prefixstore ls, show, check and export"
        )


def not_opened(error: Exception, path: Path, map_size: int, *, read_only: bool) -> StorageError:
    """The prefixstore error for an environment that could not be opened."""
    lock = path / "lock.mdb"
    if isinstance(error, lmdb.MemoryError):
        return LocationError(
            f"{path}: this system cannot map a file of {map_size:,} bytes into memory; lower max_bytes"
        )
    if read_only and _is_denied(error, lock):
        return LocationError(
            f"{lock} cannot be written by this user: LMDB registers readers there, so that no writer "
            f"overwrites their pages; run as its owner, have the owner run: chmod g+rw '{lock}' (to write as "
            f"well: chmod -R g+rwX '{path}'), or read a copy of the directory"
        )
    if isinstance(error, lmdb.InvalidParameterError):
        error = lmdb.InvalidError(f"{error}: a page size that no LMDB has")
    if isinstance(error, lmdb.Error) and type(error) not in (lmdb.Error, lmdb.ReadonlyError):
        return lmdb_error(error, path)
    return LocationError(f"{path} cannot be opened: {error}; choose another location")


def _is_denied(error: Exception, lock: Path) -> bool:
    return os.strerror(errno.EACCES) in str(error) and not os.access(lock if lock.exists() else lock.parent, os.W_OK)
