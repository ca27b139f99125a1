"""What the two SQL databases have in common: connections, turns, the revision, the translation of errors."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from prefixstore.backends import refusals
from prefixstore.backends.contract import Backend, Change, ConflictError
from prefixstore.backends.forks import abandon
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.sql import migrations
from prefixstore.backends.sql.migrations import VERSION_TABLE
from prefixstore.errors import (
    CorruptError,
    FullError,
    IncompatibleError,
    LocationError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.record import FORMAT_VERSION

MAGIC = "prefixstore"
# of a SQLite file, in its header: "pfxs"
APPLICATION_ID = 0x70667873
# their names begin with ``prefixstore_``, because a PostgreSQL database may hold the tables of others as well
META, PAYLOADS, ROWS = TABLES = ("prefixstore_meta", "prefixstore_payloads", "prefixstore_rows")
# a payload is stored in pieces of this size: no row is huge, and a piece stays in the CPU's cache while it is copied
PIECE_BYTES = 1 << 20
# this many connections are kept open while they are not used
IDLE = 5

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
    ("Could not decode to UTF-8", CorruptError),
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


def sql_error(error: Exception, where: str) -> StorageError:
    """Translate an error of a driver into a prefixstore error."""
    text = " ".join(str(error).split())
    state = getattr(error, "sqlstate", None) or ""
    for beginning, kind in _STATES:
        if state.startswith(beginning):
            return kind(f"{where}: {text}")
    if not state:
        for part, kind in _TEXTS:
            if part in text:
                return kind(f"{where}: {text}")
    return UnavailableError(f"{where}: {text}")


def pieces_of(changes: Sequence[Change]) -> Iterator[tuple[bytes, int, memoryview]]:
    """Key, number and bytes of each piece of the payloads that are written; an empty payload has none."""
    for change in changes:
        if change.payload is not None:
            view = memoryview(change.payload).cast("B")
            for piece, start in enumerate(range(0, len(view), PIECE_BYTES)):
                yield change.key, piece, view[start : start + PIECE_BYTES]


class Database(Backend):
    """Rows in one database, and the connections to it.

    All connections are in autocommit mode; a transaction begins with a BEGIN that is sent here. So everything that is
    sent is visible here: the drivers would begin transactions of their own otherwise.
    """

    # what the driver raises
    ERROR: ClassVar[type[Exception]]
    # as Alembic calls the database
    DIALECT: ClassVar[str]

    def __init__(self, location: str, *, read_only: bool) -> None:
        self._location = location
        self.read_only = read_only
        self._closed = False
        self._writing = threading.Lock()
        # for payloads that consist of several pieces
        self.memory = ReceivedMemory()
        # the one that was used last is taken first: its caches are warm
        self.idle: deque[Any] = deque()

    @property
    def location(self) -> str:
        return self._location

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the database errors of the block into prefixstore errors."""
        try:
            yield
        except self.ERROR as error:
            raise sql_error(error, self.location) from error

    # -- the schema ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Make sure that there is a store that this version can read."""

    @abstractmethod
    def tables(self, driver: Any) -> Collection[str]:
        """The names of the tables that there are; others than `TABLES` may be missing."""

    def revision(self) -> str | None:
        """The revision of the schema; None if there is no store yet."""
        with self.connection() as driver:
            return self.revision_of(driver)

    def revision_of(self, driver: Any) -> str | None:
        """The revision that a connection sees.

        Raises `IncompatibleError` if the tables are another application's, or of a newer version.
        """
        if {VERSION_TABLE, META}.isdisjoint(self.tables(driver)):
            return None
        foreign = refusals.foreign(self.location, "tables")
        try:
            found = driver.execute(f"SELECT version_num, magic, format FROM {VERSION_TABLE}, {META}").fetchall()  # noqa: S608 - constants
        except self.ERROR as error:
            # an unreachable server or a lock says nothing about the tables
            if isinstance(sql_error(error, self.location), IncompatibleError):
                raise foreign from None
            raise
        if [magic for _, magic, _ in found] != [MAGIC]:
            raise foreign
        revision = str(found[0][0])
        # refuses one that it does not know
        migrations.statements(revision, self.DIALECT, self.location)
        self.require_format(found)
        return revision

    @abstractmethod
    def upgrade(self) -> None:
        """Bring the schema to the newest revision, under a lock; create the store if there is none."""

    def migrate(self, driver: Any) -> None:
        """The same, in the transaction that is open on a connection."""
        # another process may have been faster
        for statement in migrations.statements(self.revision_of(driver), self.DIALECT, self.location):
            driver.execute(statement)

    def require_head(self, revision: str | None) -> None:
        """Raise the error that names the command to run, if this is not the revision that is needed.

        Raises `LocationError` if there is no store and `IncompatibleError` if its schema is older.
        """
        where = self.location
        if revision is None:
            raise LocationError(f'{where} holds no store; create one with: prefixstore migrate "{where}"')
        if revision != migrations.HEAD:
            raise IncompatibleError(
                f"{where} has schema {revision}, this prefixstore needs {migrations.HEAD}; stop all writers and run: "
                f'prefixstore migrate "{where}"'
            )

    def require_format(self, meta: Sequence[Any]) -> None:
        """The last column of the row about the whole store, which must exist, has to be the format of this version.

        Raises `IncompatibleError` if it is not.
        """
        if len(meta) != 1 or not isinstance(meta[0][-1], int):
            raise refusals.foreign(self.location, "tables")
        if meta[0][-1] != FORMAT_VERSION:
            raise refusals.other_format(self.location, meta[0][-1], FORMAT_VERSION)

    # -- connections --------------------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> Any:
        """A new connection."""

    def take(self) -> Any:
        """An idle connection, or a new one."""
        with suppress(IndexError):
            return self.idle.pop()
        return self.connect()

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """A connection, whose errors are translated.

        Unless the block ends without an error, and without a transaction, it is closed: that rolls back. After an error
        of the database so are the idle ones, which may be lost as well.
        """
        self.require_open()
        idle = self.idle
        with self.translated():
            driver = self.take()
            try:
                yield driver
            except BaseException as error:
                driver.close()
                if isinstance(error, self.ERROR):
                    self.close_idle()
                raise
        # not where the idle connections were closed, or left alone, since it was taken
        if idle is self.idle and len(idle) < IDLE and not self._closed:
            idle.append(driver)
        else:
            driver.close()

    def require_open(self) -> None:
        """Raise `UnavailableError` if the location was closed."""
        if self._closed:
            raise refusals.closed(self.location)

    def require_writable(self) -> None:
        """Refuse to write to a location that was opened read-only. Raises `UnavailableError`."""
        if self.read_only:
            raise refusals.read_only(self.location)

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """A connection in a transaction, one at a time in this process; committed unless the block raises."""
        self.require_writable()
        with self._writing, self.connection() as driver:
            self.begin(driver)
            yield driver
            driver.execute("COMMIT")

    @abstractmethod
    def begin(self, driver: Any) -> None:
        """Begin a transaction that writes."""

    def after_fork(self) -> None:
        self._writing = threading.Lock()
        self.abandon_idle()

    def abandon_idle(self) -> None:
        """Use the idle connections no more, but leave them open: closing them would do harm."""
        abandon(self.idle)
        self.idle = deque()

    def close_idle(self) -> None:
        """Close the connections that nobody uses."""
        # those of a new deque are new; other threads may take the old ones meanwhile
        old, self.idle = self.idle, deque()
        with suppress(IndexError):
            while True:
                old.pop().close()

    def close(self) -> None:
        """Close the idle connections, and each of the others when it is no longer used."""
        self._closed = True
        self.close_idle()
