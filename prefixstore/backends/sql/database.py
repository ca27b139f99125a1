"""What the two SQL databases have in common: connections, turns, retries, and the translation of their errors."""

from __future__ import annotations

import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Executable, FromClause, Row, exists, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from prefixstore.backends import refusals
from prefixstore.backends.handle_lock import HandleLock
from prefixstore.backends.sql.schema import PAGES, RECORD_COLUMNS
from prefixstore.errors import (
    CorruptError,
    FullError,
    IncompatibleError,
    InvalidParameterError,
    LocationError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.record import Buffer, Record

__all__ = ["Database", "again", "parse_url", "translate", "translated"]

T = TypeVar("T")
# a connection that the server has closed is known to be dead within so many seconds
AT_ONCE = 1.0
# SQLSTATE of PostgreSQL, or the beginning of one
_STATES: tuple[tuple[str, type[StorageError]], ...] = (
    ("53100", FullError),
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
    ("Could not decode", CorruptError),  # text where bytes were written
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


class Database(ABC):
    """Connections to one store, and the statements that differ from database to database.

    All connections are in autocommit mode; a transaction begins with a BEGIN that is sent here. So everything that is
    sent is visible here: the drivers would begin transactions of their own otherwise.
    """

    # what begins a transaction that writes
    BEGIN: str
    # `Backend.is_local`
    is_local = False
    # records and usage of those of the wanted pages that are stored
    RECORDS: Executable
    # those of the wanted pages after which anything is stored
    FOLLOWED: Executable
    # what builds the indexes of the pages again
    REINDEX: str
    # `children.neighbors`
    NEIGHBORS: Executable
    # `children.beside`, where one statement is faster than several
    BESIDE: Executable | None = None
    # the newest generation that a view has read
    seen: int | None = None

    def __init_subclass__(cls) -> None:
        wanted = cls.wanted()
        cls.RECORDS = select(*RECORD_COLUMNS).where(PAGES.c.key.in_(select(wanted.c.key)))
        cls.FOLLOWED = select(wanted.c.key).where(exists().where(PAGES.c.parent == wanted.c.key))

    def __init__(self, location: str, *, read_only: bool) -> None:
        self.location = location
        self.read_only = read_only
        self._closed = False
        self._handle_lock = HandleLock()
        self._writing = threading.Lock()
        self._engine = self.connect()

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

    @abstractmethod
    def reading(self) -> AbstractContextManager[Connection]:
        """A connection for a view."""

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
                # SQLite has done that itself, unless it is `require_space` that has raised
                with suppress(SQLAlchemyError):
                    connection.exec_driver_sql("ROLLBACK")
                self.after_full(connection)
                raise

    def begin(self, connection: Connection) -> None:
        """Begin a transaction that writes."""
        connection.exec_driver_sql(self.BEGIN)

    def require_space(self, connection: Connection, n_bytes: int) -> None:  # noqa: B027 - a server knows its disk
        """Raise `FullError` if the disk has no space for so many bytes, and for deletions afterwards."""

    def after_full(self, connection: Connection) -> None:  # noqa: B027 - most databases have nothing to do
        """Free disk space after a transaction that found none."""

    def rows(
        self,
        connection: Connection,
        statement: Executable,
        parameters: Mapping[str, Any] | None = None,
        *,
        retry: bool = False,
    ) -> Sequence[Row[Any]]:
        """What a statement returns. With `retry` it may be sent again on another connection."""
        with translated(self.location):
            if not retry:
                return connection.execute(statement, parameters).all()
            return again(connection, lambda: connection.execute(statement, parameters).all())

    @staticmethod
    @abstractmethod
    def wanted() -> FromClause:
        """A table with the columns ``key`` and ``position`` (from 0) out of the parameters that `keys` makes.

        So many keys are one parameter: a list of thousands takes longer to bind than to look up.
        """

    @staticmethod
    def keys(keys: Sequence[bytes]) -> dict[str, Any]:
        """The parameters for `wanted`; at least one key."""
        return {"keys": b"".join(keys), "last": len(keys) - 1}

    @abstractmethod
    def children(
        self, rows_of: Callable[..., Sequence[Row[Any]]], parents: Sequence[bytes], form: int, at_most: int | None
    ) -> Iterable[Sequence[Row[Any]]]:
        """The rows of the children of each parent that has any, as `View.children` orders them; at least one parent.

        `rows_of` takes a statement and its parameters.
        """

    @abstractmethod
    def fix(self, connection: Connection) -> None:
        """Have all further reads of a view see one moment."""

    @abstractmethod
    def fetch(
        self, connection: Connection, keys: Sequence[bytes], *, retry: bool, arrived: Callable[[int], None]
    ) -> Iterator[tuple[Record, Buffer]]:
        """`View.fetch`; `arrived` may be told how many bytes of the next payload are there."""

    @abstractmethod
    def payloads(
        self, connection: Connection, records: Mapping[bytes, Record]
    ) -> Iterator[tuple[bytes, Buffer | StorageError | None]]:
        """The payload of each of these pages, or why it cannot be read, or None if it is missing.

        Valid until the next one is requested. All of them may be in memory at a time.
        """

    def bypass_cache(self, connection: Connection) -> None:  # noqa: B027 - a server has no such cache
        """Read next from shared storage, not from a cache of this connection."""

    @abstractmethod
    def used(self, connection: Connection, entries: int, n_bytes: int) -> int:
        """Bytes that the location uses with so many pages of so many bytes (payloads and tokens)."""

    @abstractmethod
    def cost(self, record: Record, n_bytes: int) -> int:
        """`Transaction.cost`."""

    @abstractmethod
    def sync(self) -> None:
        """`Backend.sync`."""

    @abstractmethod
    def reclaim(self) -> None:
        """`Backend.reclaim`."""

    @abstractmethod
    def scrub(self) -> None:
        """`Backend.scrub`."""

    def flaws(self, connection: Connection) -> Sequence[tuple[str, str]]:
        """Rules and messages of `View.flaws`. A server checks its own files."""
        return ()

    def reindex(self, connection: Connection) -> None:
        """Rebuild the indexes of the pages, in a writing transaction."""
        with translated(self.location):
            connection.exec_driver_sql(self.REINDEX)

    def compact(self) -> None:
        """`Backend.compact`."""
        # a full rewrite leaves nothing free
        self.scrub()

    @abstractmethod
    def disk_bytes(self) -> int:
        """The size of the files or tables."""

    @abstractmethod
    def after_fork(self) -> None:
        """`Backend.after_fork`."""

    def close(self) -> None:
        """Close all connections once none is in use."""
        with self._handle_lock.exclusive():
            self._closed = True
            self._engine.dispose()
