"""A store in one SQLite file.

It is created under a temporary name and linked to its own when it is complete, so no process ever sees half of one. A
file of another application is recognized by the application id in its header, which is read before anything is written.

A forked child must not have connections of its parent: SQLite remembers locks by process, and a child that inherits
this memory believes that it holds them. So the connections are closed before a fork, once none is in use.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from prefixstore.backends import refusals
from prefixstore.backends.contract import Change, Draft, View
from prefixstore.backends.files import absolute, make_directory, publish, sync_path
from prefixstore.backends.forks import HandleLock, register_at_fork
from prefixstore.backends.location import path_of
from prefixstore.backends.sql import migrations
from prefixstore.backends.sql.database import APPLICATION_ID, META, ROWS, Database, sql_error
from prefixstore.backends.sql.sqlite_rows import COSTS, PAGE_BYTES, SQLiteView, write_to_sqlite
from prefixstore.backends.trusted import require_trusted_directory, require_trusted_files
from prefixstore.errors import (
    CorruptError,
    IncompatibleError,
    LocationError,
    UnavailableError,
)

# a writer waits for others, a completion that reads does not
BUSY_SECONDS = 60.0
READ_SECONDS = 1.0
# the most that SQLite maps, unless it was built with another limit; the rest is read
MAP_BYTES = 0x7FFF0000
LOG_BYTES = 64 << 20
# what is in the log is moved into the file after this many bytes
CHECKPOINT_BYTES = 1 << 20
OLDEST = (3, 35, 0)

# before the tables of a new file are created, and after that
OF_A_FILE = f"PRAGMA page_size={PAGE_BYTES}", f"PRAGMA application_id={APPLICATION_ID}"
WAL = "PRAGMA journal_mode=WAL"


class SQLite(Database):
    """Rows in a SQLite file. It is created, for its owner only, if it is not there, and so is its directory."""

    ERROR = sqlite3.Error
    DIALECT = "sqlite"
    is_local = True

    def __init__(self, location: str, *, read_only: bool) -> None:
        self.path = absolute(path_of(location))
        super().__init__(f"sqlite:///{self.path}", read_only=read_only)
        if sqlite3.sqlite_version_info < OLDEST:
            raise LocationError(f"SQLite {sqlite3.sqlite_version} is too old; 3.35 is needed")
        self._handle_lock = HandleLock()
        self._identity: tuple[int, int] | None = None
        # how long the file was when a transaction began
        self._size = 0
        register_at_fork(self, self._handle_lock)

    # -- the file -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        if not self.read_only:
            self.upgrade()
            return
        revision = self.revision()
        if revision is None:
            raise refusals.no_store(self.path) if self._exists() else refusals.missing(self.path, "a SQLite file")
        self.require_head(revision)

    def revision(self) -> str | None:
        if not self._exists():
            return None
        with self._handle_lock.shared():
            recognize(self.path)
        return super().revision()

    def tables(self, driver: sqlite3.Connection) -> Collection[str]:
        return [name for (name,) in driver.execute("SELECT name FROM sqlite_master")]

    def upgrade(self) -> None:
        if not self._exists():
            with self._handle_lock.shared(), self.translated():
                tables = migrations.statements(None, self.DIALECT, self.location)
                create(self.path, [*OF_A_FILE, "BEGIN", *tables, "COMMIT", WAL])
        if self.revision() != migrations.HEAD:
            with self.writing() as driver:
                self.migrate(driver)
        with self.connection() as driver:
            # set when the file was created, unless something else has changed it
            driver.execute(WAL).fetchall()

    def _exists(self) -> bool:
        """Whether there is a file, which can be read and trusted."""
        require_trusted(self.path)
        try:
            found = self.path.exists()
        except OSError as error:
            raise LocationError(f"{self.path} cannot be read: {error.strerror}; choose another location") from error
        if found and not os.access(self.path, os.R_OK):
            raise LocationError(
                f"{self.path} is not readable for this user; run as its owner, or choose another location"
            )
        return found

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
        """Reconnect if the file was deleted, replaced or truncated.

        No other process would see what is written into a file that was replaced. Its connections stay open: closing
        them would delete the log of the new one, which has the same name.

        A file that has become shorter was compacted, or truncated by another program. The old connections map its
        former length, and reading beyond the end would kill the process. New ones map the present length, and report
        what is missing as damage. Threads that are reading keep their old connections.
        """
        if self._identity is None or self._closed:
            return
        found, size = self._found()
        if found != self._identity:
            with self._handle_lock.exclusive():
                if self._found()[0] != self._identity:
                    self._identity, self._size = None, 0
                    self.abandon_idle()
            self.open()
            return
        if size < self._size:
            self.close_idle()
        # last: a thread that finds nothing to do must not take an old connection
        self._size = size

    # -- connections --------------------------------------------------------------------------------------------------

    def connect(self) -> sqlite3.Connection:
        found, _ = self._found()
        if self._identity not in (None, found):
            raise sqlite3.OperationalError("the file was replaced")
        self._identity = found
        driver = connect(self.path, read_mode(self.path) if self.read_only else "mode=rw")
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
                driver.execute(f"PRAGMA {pragma}")
        except UnicodeDecodeError as error:
            driver.close()
            # what SQLite has said of a damaged schema
            raise sqlite3.DatabaseError("the schema is malformed") from error
        except BaseException:
            driver.close()
            raise
        return driver

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        with self._used(), super().connection() as driver:
            yield driver

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        # who waits for the other writers does not use connections, but keeps the process from forking
        with self._used(), super().writing() as driver:
            yield driver

    @contextmanager
    def _used(self) -> Iterator[None]:
        if not self._handle_lock.is_held:
            self._follow_the_file()
        with self._handle_lock.shared():
            yield

    # -- the contract of a backend ------------------------------------------------------------------------------------

    @contextmanager
    def view(self) -> Iterator[View]:
        with self.connection() as driver:
            wait_for_locks(driver, READ_SECONDS)
            driver.execute("BEGIN")
            yield SQLiteView(self, driver)
            driver.execute("COMMIT")

    @contextmanager
    def update(self) -> Iterator[Draft]:
        with self.writing() as driver:
            self.require_format(driver.execute(f"SELECT format FROM {META}").fetchall())  # noqa: S608 - a constant

            def apply(changes: Sequence[Change]) -> None:
                with self.translated():
                    write_to_sqlite(driver, changes)

            draft = Draft(SQLiteView(self, driver, is_cached=False), COSTS, apply)
            yield draft
            draft.flush()

    def begin(self, driver: sqlite3.Connection) -> None:
        wait_for_locks(driver, BUSY_SECONDS)
        driver.execute("BEGIN IMMEDIATE")

    def sync(self) -> None:
        if self.read_only:
            return
        with self.connection() as driver:
            driver.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            try:
                # what readers prevent from moving into the file is safe in the log
                with suppress(FileNotFoundError):
                    sync_path(Path(f"{self.path}-wal"))
                sync_path(self.path.parent)
            except OSError as error:
                raise UnavailableError(f"{self.location} cannot be flushed: {error.strerror}") from error

    def check(self) -> None:
        with self.connection() as driver:
            ((message,), *_) = driver.execute(f"PRAGMA integrity_check({ROWS})")
        if message != "ok":
            raise CorruptError(f"{self.location}: {message}")

    def compact(self, *, erase: bool = False) -> int:
        """Rewrite the whole file without its free pages; needs as much disk space again while it runs."""
        self.require_writable()
        with self._used(), self._writing, self.connection() as driver:
            before = self._found()[1]
            # the connection may have read before, and have waited less
            wait_for_locks(driver, BUSY_SECONDS)
            driver.execute("VACUUM")
            # other writers wait while this waits for readers
            wait_for_locks(driver, READ_SECONDS)
            ((busy, _, _),) = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if busy:
            raise UnavailableError(f"{self.location}: a reader still sees deleted pages; try again, or stop it first")
        return max(before - self._found()[1], 0)

    def close(self) -> None:
        """Close all connections once none is in use."""
        with self._handle_lock.exclusive():
            super().close()

    def before_fork(self) -> None:
        self.close_idle()


def wait_for_locks(driver: sqlite3.Connection, seconds: float) -> None:
    """Set how long the statements of a connection wait for locks."""
    driver.execute(f"PRAGMA busy_timeout={seconds * 1000:.0f}")


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

    Raises `LocationError` if SQLite would have to create files that it cannot create.
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
        translation = sql_error(error, str(path))
        if isinstance(translation, (IncompatibleError, CorruptError)):
            raise IncompatibleError(f"{foreign} ({error})") from error
        raise translation from error
    if found != APPLICATION_ID:
        raise IncompatibleError(foreign)
