"""A store in one SQLite file.

A forked child must not have connections of its parent: SQLite remembers locks by process, and a child that inherits
this memory believes that it holds them. So the connections are closed before a fork, once none is in use.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, select
from sqlalchemy.exc import SQLAlchemyError

from prefixstore.backends import refusals
from prefixstore.backends.contract import Change, Draft, View
from prefixstore.backends.files import sync_path
from prefixstore.backends.forks import ForkLevel, ForkLock, register_at_fork
from prefixstore.backends.sql.database import Database, translated
from prefixstore.backends.sql.idle_pool import IdlePool
from prefixstore.backends.sql.migrations import is_head, require_head, revision_of, sql_between, upgrade_connection
from prefixstore.backends.sql.schema import APPLICATION_ID, META, ROWS, require_format
from prefixstore.backends.sql.sqlite_file import (
    BUSY_SECONDS,
    PAGE_BYTES,
    READ_SECONDS,
    connect,
    create,
    path_of_url,
    read_mode,
    recognize,
    require_trusted,
)
from prefixstore.backends.sql.sqlite_rows import COSTS, SQLiteView, space_of, write
from prefixstore.errors import CorruptError, FullError, LocationError, UnavailableError

__all__ = ["SQLite"]

# the most that SQLite maps, unless it was built with another limit; the rest is read
MAP_BYTES = 0x7FFF0000
LOG_BYTES = 64 << 20
# What is in the log is moved into the file after so many bytes. If the disk is full before that, neither can grow.
CHECKPOINT_BYTES = 1 << 20
# what deletions may write on a disk that is full for everything else
RESERVE_BYTES = 4 << 20
OLDEST = (3, 35, 0)

_META = select(META.c.format).where(META.c.id == 1)

# held while a file is created, recognized or upgraded
_opening = ForkLock()
# pools whose file is gone, or whose connections are a parent's
_abandoned: list[Engine] = []


class SQLite(Database):
    """Rows in a SQLite file.

    Parameters
    ----------
    location
        ``"sqlite:////absolute/path.db"``. The file is created, for its owner only, if it is not there, and so is its
        directory.
    read_only
        Open an existing store and never write to it.

    Raises
    ------
    LocationError
        If there is no such file, or it cannot be opened.
    IncompatibleError
        If another program has made it, or it is of another version.
    """

    BEGIN = "BEGIN IMMEDIATE"
    is_local = True

    def __init__(self, location: str, *, read_only: bool) -> None:
        self.path = path_of_url(location)
        super().__init__(f"sqlite:///{self.path}", read_only=read_only)
        if sqlite3.sqlite_version_info < OLDEST:
            raise LocationError(f"SQLite {sqlite3.sqlite_version} is too old; 3.35 is needed")
        self._identity: tuple[int, int] | None = None
        # how long the file was when a transaction began
        self._size = 0
        register_at_fork(self, ForkLevel.HANDLE)

    def connect(self) -> Engine:
        return create_engine("sqlite+pysqlite://", creator=self._new, poolclass=IdlePool, isolation_level="AUTOCOMMIT")

    def _new(self) -> sqlite3.Connection:
        found, _ = self._found()
        if self._identity not in (None, found):
            raise sqlite3.OperationalError("the file was replaced")
        self._identity = found
        connection = connect(self.path, read_mode(self.path) if self.read_only else "mode=rw")
        try:
            for pragma in (
                "synchronous=NORMAL",
                f"mmap_size={MAP_BYTES}",
                f"journal_size_limit={LOG_BYTES}",
                f"wal_autocheckpoint={CHECKPOINT_BYTES // PAGE_BYTES}",
                # Debian's SQLite writes zeros over everything that is deleted
                "secure_delete=OFF",
                "trusted_schema=OFF",
                f"query_only={self.read_only:d}",
            ):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection

    # -- the file -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        if not self.read_only:
            self.upgrade()
            return
        revision = self.revision()
        if revision is None:
            if not self._exists():
                raise refusals.missing(self.path, "a SQLite file")
            raise refusals.no_store(self.path)
        require_head(revision, self.location)

    def revision(self) -> str | None:
        with _opening.held:
            if not self._exists():
                return None
            require_trusted(self.path)
            recognize(self.path)
            with self.connection() as connection, translated(self.location):
                return revision_of(connection, self.location)

    def upgrade(self) -> None:
        with _opening.held:
            if not self._exists():
                require_trusted(self.path)
                create(self.path)
            if not is_head(self.revision()):
                with self.writing() as connection, translated(self.location):
                    # another process may have been faster
                    if not is_head(revision_of(connection, self.location)):
                        upgrade_connection(connection)
            with self.connection() as connection, translated(self.location):
                # set when the file was created, unless something else has changed it
                connection.exec_driver_sql("PRAGMA journal_mode=WAL").all()

    def statements(self, revision: str | None) -> str:
        text = sql_between(revision, "sqlite")
        if revision is not None:
            return text
        return (
            f"PRAGMA page_size={PAGE_BYTES};\nPRAGMA application_id={APPLICATION_ID};\n{text}PRAGMA journal_mode=WAL;\n"
        )

    def _exists(self) -> bool:
        try:
            if self.path.exists() and not self.path.is_file():
                raise LocationError(f"{self.path} is not a regular file; a SQLite store is one file")
            found = self.path.exists()
            if found and not os.access(self.path, os.R_OK):
                # that it is another user's file matters more
                require_trusted(self.path)
                raise LocationError(
                    f"{self.path} is not readable for this user; run as its owner, or choose another location"
                )
            return found
        except OSError as error:
            raise LocationError(f"{self.path} cannot be read: {error.strerror}; choose another location") from error

    def _found(self) -> tuple[tuple[int, int] | None, int]:
        """Which file is there now, and how long it is; None for none."""
        try:
            found = os.stat(self.path)  # noqa: PTH116 - a microsecond for each view
        except FileNotFoundError:
            return None, 0
        except OSError:
            return self._identity, self._size  # the open connections still work
        return (found.st_dev, found.st_ino), found.st_size

    def _follow_the_file(self) -> None:
        """Reconnect if the file was deleted or replaced: no other process would see what is written into the old one.

        Its connections stay open. Closing them would delete the log of the new one, which has the same name.
        """
        if self._identity is None:
            return
        found, size = self._found()
        if found == self._identity:
            self._follow_size(size)
            return
        with self._handle_lock.exclusive():
            if self._found()[0] != self._identity:
                self._identity, self._size = None, 0
                _abandoned.append(self._engine)
                self._engine = self.connect()
        self.prepare()

    def _follow_size(self, size: int) -> None:
        """Reconnect if the file has become shorter: it was compacted, or truncated by another program.

        The old connections map its former length, and reading beyond the end would kill the process. New ones map the
        present length, and report what is missing as damage. Threads that are reading keep their old connections.
        """
        if size < self._size:
            old, self._engine = self._engine, self.connect()
            # second: a thread that finds nothing to do must not take an old connection
            self._size = size
            old.dispose()
        else:
            self._size = size

    # -- the contract of Database -------------------------------------------------------------------------------------

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        self._follow_the_file()
        with super().connection() as connection:
            yield connection

    @contextmanager
    def view(self) -> Iterator[View]:
        with self.connection() as connection:
            with translated(self.location):
                wait_for_locks(connection, READ_SECONDS)
                connection.exec_driver_sql("BEGIN")
            yield SQLiteView(_driver(connection), self.location, self.memory)

    @contextmanager
    def update(self) -> Iterator[Draft]:
        with self.writing() as connection:
            with translated(self.location):
                require_format(connection.execute(_META).all(), self.location)
            driver = _driver(connection)

            def apply(changes: Sequence[Change]) -> None:
                with translated(self.location):
                    write(driver, changes, lambda n_bytes: self._require_space(driver, n_bytes))

            draft = Draft(SQLiteView(driver, self.location, self.memory, is_cached=False), COSTS, apply)
            yield draft
            draft.flush()

    def begin(self, connection: Connection) -> None:
        wait_for_locks(connection, BUSY_SECONDS)
        super().begin(connection)

    def _require_space(self, driver: sqlite3.Connection, n_bytes: int) -> None:
        """Raise `FullError` if the disk has no space for so many bytes, and for deletions afterwards."""
        if not n_bytes:
            return
        used, _ = space_of(driver)
        try:
            log = Path(f"{self.path}-wal")
            growth = max(used + n_bytes - self.path.stat().st_size, 0)
            log_bytes = log.stat().st_size if log.exists() else 0
            left = shutil.disk_usage(self.path.parent).free
        except OSError:
            return  # deleted; the next transaction finds out
        log_growth = max(n_bytes - log_bytes, 0)
        # Deletions, and what replaces deleted pages, need space in the log only, which is used again and again. So the
        # log that this leaves is a part of the reserve; but while another process reads an older state, it has to grow.
        in_log = log_bytes + log_growth if growth else RESERVE_BYTES
        reserve = max(RESERVE_BYTES - in_log, RESERVE_BYTES // 2)
        if growth + log_growth and left < growth + log_growth + reserve:
            raise FullError(
                f"{self.location}: the disk is nearly full; free some space, or evict pages",
                asked=n_bytes,
                available=left,
            )

    def after_full(self, connection: Connection) -> None:
        with suppress(SQLAlchemyError):
            wait_for_locks(connection, READ_SECONDS)
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()

    def sync(self) -> None:
        if self.read_only:
            return
        with self.connection() as connection:
            with translated(self.location):
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").all()
            try:
                # what readers prevent from moving into the file is safe in the log
                with suppress(FileNotFoundError):
                    sync_path(Path(f"{self.path}-wal"))
                sync_path(self.path.parent)
            except OSError as error:
                raise UnavailableError(f"{self.location} cannot be flushed: {error.strerror}") from error

    def check(self) -> None:
        with self.connection() as connection, translated(self.location):
            messages = connection.exec_driver_sql(f"PRAGMA integrity_check({ROWS.name})").scalars().all()
        if messages != ["ok"]:
            raise CorruptError(f"{self.location}: {messages[0]}")

    def disk_bytes(self) -> int:
        with self.connection():
            try:
                return self.path.stat().st_size
            except OSError as error:
                raise UnavailableError(f"{self.location} cannot be read: {error.strerror}") from error

    def rewrite(self, *, erase: bool) -> None:
        """Rewrite the whole file without its free pages; needs as much disk space again while it runs."""
        if self.read_only:
            raise refusals.read_only(self.location)
        with self.connection() as connection, self._writing, translated(self.location):
            # the connection may have read before, and have waited less
            wait_for_locks(connection, BUSY_SECONDS)
            connection.exec_driver_sql("VACUUM")
            # other writers wait while this waits for readers
            wait_for_locks(connection, READ_SECONDS)
            busy = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[0]
        if busy:
            raise UnavailableError(f"{self.location}: a reader still sees deleted pages; try again, or stop it first")

    def before_fork(self) -> None:
        """Close all connections, when none is used."""
        self._handle_lock.acquire_exclusive(self)
        self._engine.dispose()

    def after_fork_in_parent(self) -> None:
        self._handle_lock.release_exclusive(self)

    def after_fork_in_child(self) -> None:
        if not self._handle_lock.is_exclusive(self):
            # interrupts kept the fork from closing the connections
            _abandoned.append(self._engine)
            self._engine = self.connect()
        self._handle_lock.renew()


def _driver(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def wait_for_locks(connection: Connection, seconds: float) -> None:
    """Set how long the statements of a connection wait for locks."""
    _driver(connection).execute(f"PRAGMA busy_timeout={seconds * 1000:.0f}")
