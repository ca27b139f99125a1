"""A store in one SQLite file.

A forked child must not have connections of its parent: SQLite remembers locks by process, and a child that inherits
this memory believes that it holds them. So the connections are closed before a fork, once none is in use.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from sqlalchemy import (
    Connection,
    Engine,
    FromClause,
    LargeBinary,
    Row,
    bindparam,
    create_engine,
    func,
    literal_column,
    select,
)
from sqlalchemy.dialects import sqlite as dialect
from sqlalchemy.exc import SQLAlchemyError

from prefixstore.backends import refusals
from prefixstore.backends.files import sync_path
from prefixstore.backends.forks import ForkLevel, ForkLock, register_at_fork
from prefixstore.backends.sql.children import children_of_one, neighbors
from prefixstore.backends.sql.database import Database, translated
from prefixstore.backends.sql.idle_pool import IdlePool
from prefixstore.backends.sql.migrations import is_head, require_head, revision_of, sql_between, upgrade_connection
from prefixstore.backends.sql.schema import (
    APPLICATION_ID,
    PAGES,
    PIECE_BYTES,
    PIECES,
    readable,
)
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
from prefixstore.buffers import BufferPool
from prefixstore.errors import (
    CorruptError,
    FullError,
    LocationError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import Buffer, Record

__all__ = ["SQLite"]

# a store without a page in it, and some space for more tables
EMPTY_BYTES = 21 * PAGE_BYTES
# the most that SQLite maps, unless it was built with another limit; the rest is read
MAP_BYTES = 0x7FFF0000
LOG_BYTES = 64 << 20
# What is in the log is moved into the file after so many bytes. If the disk is full before that, neither can grow.
CHECKPOINT_BYTES = 1 << 20
# what deletions may write on a disk that is full for everything else
RESERVE_BYTES = 4 << 20
OLDEST = (3, 35, 0)

_PIECES = str(
    select(PIECES.c.data)
    .where(PIECES.c.page == bindparam("key"))
    .order_by(PIECES.c.number)
    .compile(dialect=dialect.dialect())
)
_ROWS = str(
    select(literal_column("rowid"))
    .select_from(PIECES)
    .where(PIECES.c.page == bindparam("key"))
    .order_by(PIECES.c.number)
    .compile(dialect=dialect.dialect())
)
_CHILDREN = children_of_one()
_SIZES = (
    "SELECT page_count, freelist_count, page_size FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
)

# held while a file is created, recognized or upgraded
_opening = ForkLock()
# pools whose file is gone, or whose connections are a parent's
_abandoned: list[Engine] = []


class SQLite(Database):
    """Connections to a SQLite file.

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
    REINDEX = f"REINDEX {PAGES.name}"
    NEIGHBORS = neighbors(by_prefix=False)
    is_local = True

    def __init__(self, location: str, *, read_only: bool) -> None:
        self.path = path_of_url(location)
        super().__init__(f"sqlite:///{self.path}", read_only=read_only)
        if sqlite3.sqlite_version_info < OLDEST:
            raise LocationError(f"SQLite {sqlite3.sqlite_version} is too old; 3.35 is needed")
        self._buffers = BufferPool(limit=None)
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
                "foreign_keys=ON",
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
    def reading(self) -> Iterator[Connection]:
        with self.connection() as connection:
            with translated(self.location):
                wait_for_locks(connection, READ_SECONDS)
                connection.exec_driver_sql("BEGIN")
            yield connection

    def begin(self, connection: Connection) -> None:
        wait_for_locks(connection, BUSY_SECONDS)
        super().begin(connection)

    def require_space(self, connection: Connection, n_bytes: int) -> None:
        with translated(self.location):
            pages, free, size = connection.exec_driver_sql(_SIZES).one()
        try:
            log = Path(f"{self.path}-wal")
            growth = max((pages - free) * size + n_bytes - self.path.stat().st_size, 0)
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

    @staticmethod
    def wanted() -> FromClause:
        # not every SQLite has generate_series
        first = select(literal_column("0").label("position")).cte("positions", recursive=True)
        position = first.c.position
        positions = first.union_all(select(position + 1).where(position < bindparam("last")))
        key = func.substr(
            bindparam("keys", type_=LargeBinary), positions.c.position * KEY_BYTES + 1, KEY_BYTES, type_=LargeBinary
        )
        return select(positions.c.position, key.label("key")).subquery("wanted")

    def children(
        self, rows_of: Callable[..., Sequence[Row[Any]]], parents: Sequence[bytes], form: int, at_most: int | None
    ) -> Iterable[Sequence[Row[Any]]]:
        count = -1 if at_most is None else at_most
        return (rows_of(_CHILDREN, parent=parent, form=form, count=count) for parent in parents)

    def fix(self, connection: Connection) -> None:
        """Nothing to do: a read transaction sees one moment."""

    def bypass_cache(self, connection: Connection) -> None:
        # each connection has its own cache, in which a page that is damaged on disk may still be intact
        with translated(self.location):
            connection.exec_driver_sql("PRAGMA shrink_memory")

    def fetch(
        self, connection: Connection, keys: Sequence[bytes], *, retry: bool, arrived: Callable[[int], None]
    ) -> Iterator[tuple[Record, Buffer]]:
        # copies are the cost here, not round trips: pieces are copied one by one, while they are in the CPU cache
        rows = {bytes(row.key): row for row in self.rows(connection, self.RECORDS, self.keys(keys))} if keys else {}
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        for key in keys:
            if key not in rows:
                return
            record, _ = readable(rows[key])
            if isinstance(record, StorageError):
                raise record
            payload = self._payload(driver, key, record)
            if payload is None:
                raise CorruptError(f"page {key.hex()} has no payload")
            yield record, payload

    def payloads(
        self, connection: Connection, records: Mapping[bytes, Record]
    ) -> Iterator[tuple[bytes, Buffer | StorageError | None]]:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        for key, record in records.items():
            payload: Buffer | StorageError | None
            try:
                payload = self._payload(driver, key, record)
            except CorruptError as error:
                payload = error
            yield key, payload

    def _payload(self, driver: sqlite3.Connection, key: bytes, record: Record) -> Buffer | None:
        with translated(self.location), closing(_pieces(driver, key)) as pieces:
            first = next(pieces, None)
            if first is None:
                return None
            if len(first) == record.stored_bytes:
                return first
            payload, filled = self._lend(record.stored_bytes), 0
            for piece in chain((first,), pieces):
                end = filled + len(piece)
                if end > len(payload):
                    raise CorruptError(f"page {key.hex()}: more bytes stored than the {len(payload)} written")
                # NumPy copies without holding the GIL
                payload[filled:end] = np.frombuffer(piece, np.uint8)
                filled = end
            return cast("Buffer", payload[:filled].data)

    def _lend(self, size: int) -> npt.NDArray[np.uint8]:
        """A buffer, which is reused once nothing refers to it: fresh memory is slower by half."""
        try:
            buffer = self._buffers.acquire(size, wait=True)
        except (MemoryError, ValueError) as error:
            raise UnavailableError(f"{self.location}: no memory for a payload of {size} bytes") from error
        assert buffer is not None, "it waits until there is one"
        array = np.asarray(buffer.view)
        weakref.finalize(array, buffer.release).atexit = False
        return array

    def used(self, connection: Connection, entries: int, n_bytes: int) -> int:
        with translated(self.location):
            pages, free, size = connection.exec_driver_sql(_SIZES).one()
            # the pages that even empty trees have are counted as if nothing fitted into them
            return max(int((pages - free) * size), EMPTY_BYTES + n_bytes)

    def cost(self, record: Record, n_bytes: int) -> int:
        # a row larger than a page has overflow pages besides the part that stays in the tree; and each of the
        # trees (pages, children, pieces, changes, namespaces, and their keys) may split a leaf and the branch above it
        usable = PAGE_BYTES - 4
        pieces = n_bytes // PIECE_BYTES + 1
        return (-(-n_bytes // usable) + 2 * pieces + 2 * -(-len(record.tokens) // usable) + 16) * PAGE_BYTES

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

    def reclaim(self) -> None:
        """Nothing to do: what a transaction deletes is free for what it writes next."""

    def flaws(self, connection: Connection) -> Sequence[tuple[str, str]]:
        with translated(self.location):
            messages = connection.exec_driver_sql(f"PRAGMA integrity_check({PAGES.name})").scalars().all()
        return [("index" if "index" in each else "file", each) for each in messages if each != "ok"]

    def disk_bytes(self) -> int:
        with self.connection():
            try:
                return self.path.stat().st_size
            except OSError as error:
                raise UnavailableError(f"{self.location} cannot be read: {error.strerror}") from error

    def scrub(self) -> None:
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

    def after_fork(self) -> None:
        self._writing = threading.Lock()
        self._buffers = BufferPool(limit=None)

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


def wait_for_locks(connection: Connection, seconds: float) -> None:
    """Set how long the statements of a connection wait for locks."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.execute(f"PRAGMA busy_timeout={seconds * 1000:.0f}")


def _pieces(driver: sqlite3.Connection, key: bytes) -> Generator[bytes, None, None]:
    """The pieces of a payload."""
    if sys.version_info >= (3, 11):
        # a selected value is copied once more
        for (row,) in driver.execute(_ROWS, (key,)).fetchall():
            with driver.blobopen(PIECES.name, "data", row, readonly=True) as piece:
                yield piece.read()
    else:
        with closing(driver.execute(_PIECES, (key,))) as selected:
            for (data,) in selected:
                yield data
