"""The file of a SQLite store: how it is created, and how it is told from other files.

It is created under a temporary name and linked to its own when it is complete, so no process ever sees half of one. A
file of another application is recognized by the application id in its header, which is read before anything is written.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from prefixstore.backends.files import absolute, make_directory, publish
from prefixstore.backends.location import without_password
from prefixstore.backends.sql.database import APPLICATION_ID, parse_url, translate
from prefixstore.backends.trusted import require_trusted_directory, require_trusted_files
from prefixstore.errors import CorruptError, IncompatibleError, InvalidParameterError, LocationError

__all__ = [
    "BUSY_SECONDS",
    "PAGE_BYTES",
    "READ_SECONDS",
    "connect",
    "create",
    "path_of_url",
    "read_mode",
    "recognize",
    "require_trusted",
]

PAGE_BYTES = 16 << 10
# a writer waits for others, a completion that reads does not
BUSY_SECONDS = 60.0
READ_SECONDS = 1.0


def path_of_url(location: str) -> Path:
    """The file that a SQLite URL names.

    Raises
    ------
    InvalidParameterError
        If it does not name a file, or has options.
    """
    url = parse_url(location)
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise InvalidParameterError(f"location={without_password(location)!r}: unknown driver; pass sqlite:////path")
    if url.query:
        raise InvalidParameterError(f"location={without_password(location)!r}: options in the URL are not supported")
    if url.host or not url.database or url.database == ":memory:":
        raise InvalidParameterError(
            f'location={without_password(location)!r} names no file; pass "sqlite:////absolute/path.db" or '
            '"sqlite:///relative.db"; for a store in memory pass "memory:"'
        )
    return absolute(url.database)


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection that begins no transactions by itself; `mode` is what SQLite takes in a URI."""
    return sqlite3.connect(
        f"file:///{quote(os.fsencode(path.as_posix().lstrip('/')))}?{mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )


def create(path: Path, statements: Sequence[str]) -> None:
    """Create a store by these statements under a temporary name, and give it its own unless another has it by then."""
    try:
        make_directory(path.parent)
        # mode 0600
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
        os.close(handle)
    except OSError as error:
        raise LocationError(f"{path} cannot be created: {error.strerror}; choose another location") from error
    new = Path(name)
    try:
        with closing(connect(new, "mode=rw")) as driver:
            for statement in statements:
                driver.execute(statement)
        publish(new, path)
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{new}{suffix}").unlink(missing_ok=True)


def require_trusted(path: Path) -> None:
    """Refuse a file that others could have created or changed, or such a log or index of it."""
    require_trusted_directory(path.parent, sticky=True)
    require_trusted_files(path, *(Path(f"{path}{suffix}") for suffix in ("-wal", "-shm", "-journal")))


def read_mode(path: Path) -> str:
    """What SQLite takes in a URI to read a store: without a lock where nothing can be written and there is no log.

    Raises
    ------
    LocationError
        If SQLite would have to create files that it cannot create.
    """
    has_log = any(Path(f"{path}{suffix}").exists() for suffix in ("-wal", "-shm"))
    if has_log or os.access(path.parent, os.W_OK):
        return "mode=ro"
    if hasattr(os, "statvfs") and os.statvfs(path).f_flag & os.ST_RDONLY:
        return "mode=ro&immutable=1"
    raise LocationError(
        f"{path.parent} cannot be written by this user: to read, SQLite has to create {path.name}-shm there, so that "
        "no writer changes pages that are being read; allow that, or read a copy of the file"
    )


def recognize(path: Path) -> None:
    """Refuse a file of another application. Immutable: takes no lock, reads no log, creates and repairs nothing.

    Only SQLite opens the file: closing it otherwise would drop the locks of other connections of this process.
    """
    foreign = f"{path} is not a store of prefixstore; choose another location"
    try:
        with closing(connect(path, "mode=ro&immutable=1")) as connection:
            # the log is not read: until it was moved into a file that has grown, the header promises more pages than
            # there are, which SQLite calls malformed unless it is told so
            connection.execute("PRAGMA writable_schema=ON")
            found = connection.execute("PRAGMA application_id").fetchone()[0]
    except sqlite3.Error as error:
        translation = translate(error, str(path))
        if isinstance(translation, (IncompatibleError, CorruptError)):
            raise IncompatibleError(f"{foreign} ({error})") from error
        raise translation from error
    if found != APPLICATION_ID:
        raise IncompatibleError(foreign)
