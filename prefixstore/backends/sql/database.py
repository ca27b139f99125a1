"""What the two SQL databases have in common: connections, turns, retries, memory, and the translation of errors."""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from sqlalchemy import URL, Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from prefixstore.backends import refusals
from prefixstore.backends.contract import Backend, ConflictError
from prefixstore.backends.handle_lock import HandleLock
from prefixstore.buffers import BufferPool
from prefixstore.errors import (
    CorruptError,
    FullError,
    IncompatibleError,
    InvalidParameterError,
    LocationError,
    StorageError,
    UnavailableError,
)

__all__ = ["Database", "again", "parse_url", "translate", "translated"]

T = TypeVar("T")
# a connection that the server has closed is known to be dead within so many seconds
AT_ONCE = 1.0
# SQLSTATE of PostgreSQL, or the beginning of one
_STATES: tuple[tuple[str, type[StorageError]], ...] = (
    ("53100", FullError),
    ("40001", ConflictError),
    ("40P01", ConflictError),
    ("XX001", CorruptError),
    ("XX002", CorruptError),
    ("42501", LocationError),  # no privilege
    ("28", LocationError),  # no such user, wrong password
    ("3D", LocationError),  # no such database
    ("3F", LocationError),  # no such schema
    ("42", IncompatibleError),  # tables or columns that are not as they should be
)
# what SQLite says (it has codes from Python 3.11 on only), and libpq where it has no state: while it connects
_TEXTS: tuple[tuple[str, type[StorageError]], ...] = (
    ("is full", FullError),
    ("is not a database", IncompatibleError),
    ("malformed", CorruptError),
    ("cannot open value", CorruptError),  # something else where bytes were written
    ("unable to open", LocationError),
    ("readonly", LocationError),
    ("no such table", IncompatibleError),
    ("no such column", IncompatibleError),
    ("unsupported file format", IncompatibleError),
    ("authentication failed", LocationError),
    ("no password supplied", LocationError),
    ('" does not exist', LocationError),
)


def parse_url(location: str) -> URL:
    """The URL of a location.

    Raises
    ------
    InvalidParameterError
        If it is not valid. The message does not repeat it: it may hold a password.
    """
    try:
        return make_url(location)
    except (ArgumentError, ValueError):
        raise InvalidParameterError(
            'location is not a valid database URL; pass "sqlite:////var/cache/kv.db" or "postgresql+psycopg://user@host/db"'
        ) from None


def translate(error: Exception, where: str) -> StorageError:
    """Translate a database error into a prefixstore error."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = " ".join(str(cause).split())
    state = getattr(cause, "sqlstate", None) or ""
    for beginning, kind in _STATES:
        if state.startswith(beginning):
            return kind(f"{where}: {text}")
    if not state:
        for part, kind in _TEXTS:
            if part in text:
                return kind(f"{where}: {text}")
    return UnavailableError(f"{where}: {text}")


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Translate the database errors of the block into prefixstore errors."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise translate(error, where) from error


def again(connection: Connection, work: Callable[[], T]) -> T:
    """Do the first work on this connection; if the connection turns out to be dead, do it again on a new one.

    Not if that took long to find out: a caller waits, and the next connection would not answer either.
    """
    started = time.monotonic()
    try:
        return work()
    except DBAPIError as error:
        if not error.connection_invalidated or time.monotonic() - started > AT_ONCE:
            raise
    # the server closed it while it was idle, or was restarted: SQLAlchemy reconnects
    connection.rollback()
    return work()


class Database(Backend):
    """Rows in one database, and the connections to it.

    All connections are in autocommit mode; a transaction begins with a BEGIN that is sent here. So everything that is
    sent is visible here: the drivers would begin transactions of their own otherwise.
    """

    # what begins a transaction that writes
    BEGIN: str

    def __init__(self, location: str, *, read_only: bool) -> None:
        self._location = location
        self.read_only = read_only
        self._closed = False
        self._handle_lock = HandleLock()
        self._writing = threading.Lock()
        self._buffers = BufferPool(limit=None)
        self._engine = self.connect()

    @property
    def location(self) -> str:
        return self._location

    @abstractmethod
    def connect(self) -> Engine:
        """A new pool of connections."""

    @property
    def engine(self) -> Engine:
        """The pool of connections."""
        return self._engine

    def open(self) -> None:
        """Make sure that there is a store that this version can read. Closes everything if there is not."""
        try:
            self.prepare()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def prepare(self) -> None:
        """`open`, without cleanup on failure."""

    @abstractmethod
    def revision(self) -> str | None:
        """The revision of the schema; None if there is no store yet."""

    @abstractmethod
    def upgrade(self) -> None:
        """Bring the schema to the newest revision, under a lock; create the store if there is none."""

    @abstractmethod
    def statements(self, revision: str | None) -> str:
        """What `upgrade` runs on a schema of this revision, as text; empty if there is nothing to do."""

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection out of the pool; what is not committed on it when the block ends is rolled back."""
        with self._handle_lock.shared():
            if self._closed:
                raise refusals.closed(self.location)
            with translated(self.location):
                connection = self._engine.connect()
            try:
                yield connection
            finally:
                with translated(self.location):
                    connection.close()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A connection in a transaction, one at a time in this process; committed unless the block raises."""
        if self.read_only:
            raise refusals.read_only(self.location)
        with self.connection() as connection, self._writing:
            try:
                with translated(self.location):
                    self.begin(connection)
                yield connection
                with translated(self.location):
                    connection.exec_driver_sql("COMMIT")
            except FullError:
                # SQLite has mostly done that itself
                with suppress(SQLAlchemyError):
                    connection.exec_driver_sql("ROLLBACK")
                self.after_full(connection)
                raise

    def begin(self, connection: Connection) -> None:
        """Begin a transaction that writes."""
        connection.exec_driver_sql(self.BEGIN)

    def after_full(self, connection: Connection) -> None:
        """Free disk space after a transaction that found none."""

    def memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Reused memory for a payload: it is free once nothing refers to it. Fresh memory is slower by half.

        Raises
        ------
        UnavailableError
            If there is none.
        """
        try:
            buffer = self._buffers.acquire(size, wait=True)
        except (MemoryError, ValueError) as error:
            raise UnavailableError(f"{self.location}: no memory for a payload of {size} bytes") from error
        assert buffer is not None, "it waits until there is one"
        array = np.asarray(buffer.view)
        weakref.finalize(array, buffer.release).atexit = False
        return array

    @abstractmethod
    def disk_bytes(self) -> int:
        """The size of the files or tables."""

    def compact(self, *, erase: bool = False) -> int:
        before = self.disk_bytes()
        self.rewrite(erase=erase)
        return max(before - self.disk_bytes(), 0)

    @abstractmethod
    def rewrite(self, *, erase: bool) -> None:
        """`compact`, without the number of bytes."""

    def after_fork(self) -> None:
        self._writing = threading.Lock()
        self._buffers = BufferPool(limit=None)

    def close(self) -> None:
        """Close all connections once none is in use."""
        with self._handle_lock.exclusive():
            self._closed = True
            self._engine.dispose()
