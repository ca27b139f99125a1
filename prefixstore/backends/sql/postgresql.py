"""A store in a PostgreSQL database.

A view sends nothing until it is read, and each read is one statement that commits by itself. As such a read depends on
nothing before it, it is sent again on a new connection if the server has closed the old one.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event

from prefixstore.backends import refusals
from prefixstore.backends.contract import Draft, View
from prefixstore.backends.handle_lock import HandleLock
from prefixstore.backends.location import require_plain_password, without_password
from prefixstore.backends.sql.compaction import Compaction
from prefixstore.backends.sql.database import Database, again, parse_url, translated
from prefixstore.backends.sql.idle_pool import IdlePool
from prefixstore.backends.sql.migrations import is_head, require_head, revision_of, sql_between, upgrade_connection
from prefixstore.backends.sql.postgresql_rows import COSTS, PostgreSQLTurn, PostgreSQLView
from prefixstore.backends.sql.postgresql_tables import SET_SEARCH_PATH, require_our_columns, require_plain_tables
from prefixstore.backends.sql.schema import APPLICATION_ID, METADATA
from prefixstore.backends.sql.streaming import Cursor, StreamedCursor, StreamingConnection
from prefixstore.errors import InvalidParameterError, LocationError

__all__ = ["PostgreSQL"]

LOCK_SECONDS = 30
# a process that stops in the middle of a transaction blocks the others no longer than this
IDLE_SECONDS = 60
CONNECT_SECONDS = 5
# A server that works answers a reader, or a writer that may wait for a lock, within so many seconds. Otherwise the
# connection is dropped; TCP alone would wait for a quarter of an hour, or forever.
SILENT_READING = 5.0
SILENT_WRITING = 60.0
# it is listened to ten times a second; a process that did not listen for longer has paused, and heard nothing
LONGEST_POLL = 0.5
# of the advisory lock under which the schema changes
UPGRADE_LOCK = APPLICATION_ID

# of a forked child's parent: never closed, because that would end the parent's sessions
_inherited: list[Engine] = []


class _Connection(StreamingConnection):
    """A connection that is dropped when the server is silent for too long."""

    silence: float | None = SILENT_READING

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        try:
            return super().wait(_heard(gen, self.silence) if self.silence is not None else gen, *arguments, **options)
        except _SilenceError:
            self.close()
            raise


class _SilenceError(psycopg.OperationalError):
    """The server does not answer."""


def _heard(gen: Generator[Any, Any, Any], silence: float) -> Generator[Any, Any, Any]:
    """The I/O generator of psycopg, failing if the socket stays silent too long; psycopg polls ten times a second."""
    before, silent = time.monotonic(), 0.0
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            now = time.monotonic()
            silent = 0.0 if ready else silent + min(now - before, LONGEST_POLL)
            before = now
            if silent > silence:
                raise _SilenceError(f"the server has not answered for {silence:.0f} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value


def _connected(options: dict[str, Any]) -> _Connection:
    """A new connection, which finds names in one schema only."""
    connection = _Connection.connect(**options)
    connection.server_cursor_factory = StreamedCursor  # type: ignore[assignment] # it takes the same parameters
    try:
        connection.autocommit = True
        connection.execute(SET_SEARCH_PATH)
        connection.autocommit = False
    except BaseException:
        connection.close()
        raise
    return connection


def _driver(connection: Connection) -> _Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, _Connection)
    return driver


def _accept_silence(connection: Connection, seconds: float | None) -> None:
    _driver(connection).silence = seconds


class PostgreSQL(Database):
    """Rows in a PostgreSQL database.

    Parameters
    ----------
    location
        ``"postgresql+psycopg://user@host/db"``. Options of libpq may follow a question mark; passwords belong in
        ``~/.pgpass``.
    read_only
        Never write to it.

    Raises
    ------
    LocationError
        If there is no such database, or no store in it.
    IncompatibleError
        If the store is of another version.
    UnavailableError
        If the server cannot be reached.
    """

    BEGIN = "BEGIN"

    def __init__(self, location: str, *, read_only: bool) -> None:
        require_plain_password(location)
        url = parse_url(location)
        if url.drivername not in ("postgresql", "postgres", "postgresql+psycopg", "postgres+psycopg"):
            raise InvalidParameterError("location: unknown driver; pass postgresql+psycopg://user@host/db (psycopg 3)")
        self._url = url.set(drivername="postgresql+psycopg")
        super().__init__(without_password(self._url.render_as_string(hide_password=True)), read_only=read_only)

    def prepare(self) -> None:
        require_head(self.revision(), self.location)

    def revision(self) -> str | None:
        with self.connection() as connection, translated(self.location):
            return self._revision(connection)

    def _revision(self, connection: Connection) -> str | None:
        """The revision of tables that are as the migrations made them."""
        require_plain_tables(connection, self.location)
        revision = revision_of(connection, self.location)
        if is_head(revision):
            require_our_columns(connection, self.location)
        return revision

    def upgrade(self) -> None:
        with self.writing() as connection, translated(self.location):
            connection.exec_driver_sql(f"SELECT pg_catalog.pg_advisory_xact_lock({UPGRADE_LOCK})").all()
            # another process may have been faster
            if not is_head(self._revision(connection)):
                _accept_silence(connection, None)
                upgrade_connection(connection)

    def statements(self, revision: str | None) -> str:
        return sql_between(revision, "postgresql")

    def connect(self) -> Engine:
        given = self._url.query
        options = given.get("options", "")
        settings = {
            "lock_timeout": f"{LOCK_SECONDS}s",
            "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
            "default_transaction_read_only": "on" if self.read_only else "off",
        }
        ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
        defaults: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, "application_name": "prefixstore"}
        arguments = {name: value for name, value in defaults.items() if name not in given}
        arguments |= {"cursor_factory": Cursor, "options": f"{options} {ours}".strip()}
        engine = create_engine(
            self._url,
            connect_args=arguments,
            isolation_level="AUTOCOMMIT",
            use_native_hstore=False,
            poolclass=IdlePool,
            hide_parameters=True,
        )
        event.listen(engine, "do_connect", lambda _dialect, _record, _, options: _connected(options))
        return engine

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with super().connection() as connection:
            # the one that used it before may have accepted more
            _accept_silence(connection, SILENT_READING)
            try:
                yield connection
            finally:
                if not connection.invalidated and _driver(connection).streamed is not None:
                    # the caller who asked for payloads has lost interest
                    connection.invalidate()

    @contextmanager
    def view(self) -> Iterator[View]:
        with self.connection() as connection:
            yield PostgreSQLView(self, connection)

    @contextmanager
    def update(self) -> Iterator[Draft]:
        with self.writing() as connection:
            turn = PostgreSQLTurn(self, connection)
            draft = Draft(turn, COSTS)
            yield draft
            turn.write(draft.changes)

    def begin(self, connection: Connection) -> None:
        # what follows may wait for a lock
        again(connection, lambda: connection.exec_driver_sql(self.BEGIN))
        _accept_silence(connection, SILENT_WRITING)

    def sync(self) -> None:
        """The server flushes commits, unless configured not to; then one flushed commit flushes those before it."""
        if self.read_only:
            return
        with self.connection() as connection, translated(self.location):
            self.begin(connection)
            connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
            # a transaction that has written nothing is not flushed, whatever number it has
            connection.exec_driver_sql(
                "SELECT pg_catalog.pg_logical_emit_message(true, 'prefixstore'::text, ''::text)"
            ).all()
            connection.exec_driver_sql("COMMIT")

    def reclaim(self) -> None:
        """Have the server vacuum the tables now."""
        self._vacuum("VACUUM")

    def rewrite(self, *, erase: bool) -> None:
        """Rewrite payloads, some at a time, so that a vacuum can cut off the end of the table.

        With `erase` the server rewrites all tables, and all others wait; its log and its backups are not covered. Only
        the owner of the tables can do either. What was counted is counted again.
        """
        if erase:
            self._vacuum_or_fail("VACUUM FULL", "deleted data is still in the files")
        else:
            Compaction(self, lambda: self._vacuum_or_fail("VACUUM", "no space was returned")).run()
        with self.writing() as connection:
            _accept_silence(connection, None)
            PostgreSQLTurn(self, connection).count_again()

    def _vacuum_or_fail(self, command: str, otherwise: str) -> None:
        # the server skips a table that it must not rewrite, and calls that a success
        if warnings := self._vacuum(command):
            raise LocationError(
                f"{self.location}: {otherwise}, since the server says: {warnings[0]}; compact as "
                "the owner of the tables"
            )

    def disk_bytes(self) -> int:
        sizes = " + ".join(f"pg_catalog.pg_total_relation_size('{name}'::regclass)" for name in sorted(METADATA.tables))
        with self.connection() as connection, translated(self.location):
            return int(again(connection, lambda: connection.exec_driver_sql(f"SELECT {sizes}").scalar_one()))

    def _vacuum(self, command: str) -> list[str]:
        """Vacuum all tables; the server's warnings."""
        if self.read_only:
            raise refusals.read_only(self.location)
        tables = ", ".join(sorted(METADATA.tables))
        warnings: list[str] = []

        def note(diagnostic: psycopg.errors.Diagnostic) -> None:
            if diagnostic.severity_nonlocalized == "WARNING":
                warnings.append(str(diagnostic.message_primary))

        def vacuum() -> None:
            # of a new connection too, if the server has closed the old one
            _accept_silence(connection, None)
            driver = _driver(connection)
            driver.add_notice_handler(note)
            try:
                connection.exec_driver_sql(f"{command} {tables}")
            finally:
                driver.remove_notice_handler(note)

        with self.connection() as connection, translated(self.location):
            again(connection, vacuum)
        return warnings

    def after_fork(self) -> None:
        super().after_fork()
        _inherited.append(self._engine)
        self._handle_lock = HandleLock()
        self._engine = self.connect()
