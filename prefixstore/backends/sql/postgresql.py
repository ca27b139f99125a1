"""A store in a PostgreSQL database.

A view sends nothing until it is read, and each read is one statement that commits by itself. An update reads in its
transaction, in which nobody else writes, and receives payloads by another connection. It sends its changes at its end.
"""

from __future__ import annotations

import selectors
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy.dialects.postgresql.psycopg import dialect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from prefixstore.backends.contract import Draft, View
from prefixstore.backends.location import require_plain_password, without_password
from prefixstore.backends.sql.database import APPLICATION_ID, TABLES, Database
from prefixstore.backends.sql.migrations import VERSION_TABLE
from prefixstore.backends.sql.postgresql_rows import COSTS, COUNT_AGAIN, META_ROW, PostgreSQLView, write_to_postgresql
from prefixstore.errors import IncompatibleError, InvalidParameterError, LocationError

LOCK_SECONDS = 30
# a process that stops in the middle of a transaction blocks the others no longer than this
IDLE_SECONDS = 60
CONNECT_SECONDS = 5
# A server that works answers a reader, or a writer that may wait for a lock, within this many seconds. Otherwise the
# connection is dropped; TCP alone would wait for a quarter of an hour, or forever.
SILENT_READING = 5.0
SILENT_WRITING = 60.0
# How often psycopg looks whether something has arrived. This is counted, and not the time: a process that was stopped,
# or had no core, has heard nothing meanwhile.
POLLS_PER_SECOND = 10
# it needs no file descriptor of its own, of which there may be none left; Windows has no poll
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
# of the advisory lock under which the schema changes
UPGRADE_LOCK = APPLICATION_ID


_NAMED = ", ".join(f"'{name}'" for name in (*TABLES, VERSION_TABLE))

# Sent on each new connection: all tables are in the first schema of the search path. The server looks into pg_catalog
# before it; temporary tables come last, or they would hide those of the store.
_SET_SEARCH_PATH = (
    "SELECT pg_catalog.set_config('search_path', "
    "pg_catalog.concat_ws(', ', pg_catalog.quote_ident(pg_catalog.current_schema()), 'pg_temp'), false)"
)

# The tables of the schema that is on the search path: name, owner, and whether that owner is trusted: who could change
# them anyway, of whose role this one is a member (but a superuser is one of every role), or who owns a schema that was
# named. "$user", which is used unless another is named, may have been created by anyone. Whoever owns a table sees what
# is stored, may change it, and may have code run with the rights of its user: so this is asked before anything is read
# from a table. All names are qualified with ``pg_catalog``, so no other schema can provide a function.
_TABLES = f"""
SELECT c.relname::pg_catalog.text, owner.rolname::pg_catalog.text,
    owner.rolsuper OR c.relowner IN (me.oid, d.datdba)
        OR (NOT me.rolsuper AND pg_catalog.pg_has_role(me.oid, c.relowner, 'MEMBER'))
        OR (c.relowner = n.nspowner AND n.nspname <> me.rolname)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles AS owner ON owner.oid = c.relowner
JOIN pg_catalog.pg_roles AS me ON me.rolname = current_user
JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
WHERE n.nspname = ANY (pg_catalog.current_schemas(false)) AND c.relname IN ({_NAMED})
"""  # noqa: S608 - constants


class _Connection(psycopg.Connection[Any]):
    """A connection that is closed when the server is silent for too long."""

    silence: float | None = SILENT_READING

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        return super().wait(gen if self.silence is None else self._heard(gen, self.silence), *arguments, **options)

    def _heard(self, gen: Generator[Any, Any, Any], seconds: float) -> Generator[Any, Any, Any]:
        """The I/O generator of psycopg, failing if nothing arrives for so long."""
        n_silent = 0
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                n_silent = 0 if ready else n_silent + 1
                if n_silent > seconds * POLLS_PER_SECOND:
                    self.close()
                    raise psycopg.OperationalError(f"the server has not answered for {seconds:.0f} s")
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def _is_over(driver: _Connection) -> bool:
    """Whether the server has closed an idle connection: there is something to read where nothing was asked."""
    with _Selector() as selector:
        selector.register(driver, selectors.EVENT_READ)
        return bool(selector.select(0))


class PostgreSQL(Database):
    """Rows in a PostgreSQL database. Options of libpq may follow a question mark in the URL."""

    ERROR = psycopg.Error
    DIALECT = "postgresql"

    def __init__(self, location: str, *, read_only: bool) -> None:
        require_plain_password(location)
        try:
            url = make_url(location)
        except (ArgumentError, ValueError):
            # not repeated: it may hold a password
            raise InvalidParameterError(
                'location is not a valid database URL; pass "postgresql+psycopg://user@host/db"'
            ) from None
        if url.drivername not in ("postgresql", "postgres", "postgresql+psycopg", "postgres+psycopg"):
            raise InvalidParameterError("location: unknown driver; pass postgresql+psycopg://user@host/db (psycopg 3)")
        url = url.set(drivername="postgresql+psycopg")
        super().__init__(without_password(url.render_as_string(hide_password=True)), read_only=read_only)
        settings = {
            "lock_timeout": f"{LOCK_SECONDS}s",
            "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
            "default_transaction_read_only": "on" if read_only else "off",
        }
        given = dialect().create_connect_args(url)[1]  # type: ignore[no-untyped-call] # SQLAlchemy does not annotate it
        defaults = {"connect_timeout": CONNECT_SECONDS, "application_name": "prefixstore", "options": ""}
        self._options: dict[str, Any] = defaults | given
        self._options["options"] += "".join(f" -c {name}={value}" for name, value in settings.items())

    # -- the schema ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.require_head(self.revision())

    def tables(self, driver: _Connection) -> Collection[str]:
        """Our tables that there are.

        Raises `IncompatibleError` if one has an owner who need not be trusted. Nothing has been read from it.
        """
        found = driver.execute(_TABLES).fetchall()
        for name, owner, is_trusted in found:
            if not is_trusted:
                raise IncompatibleError(
                    f"{self.location}: the table {name} belongs to the role {owner}, which could change what is "
                    "stored; if that role is trusted, make it the owner of the schema or of the database, else choose "
                    "another database or schema"
                )
        return [name for name, _, _ in found]

    def upgrade(self) -> None:
        with self.writing() as driver:
            driver.execute(f"SELECT pg_catalog.pg_advisory_xact_lock({UPGRADE_LOCK})")
            driver.silence = None
            self.migrate(driver)

    # -- connections --------------------------------------------------------------------------------------------------

    def connect(self) -> _Connection:
        driver = _Connection.connect(autocommit=True, **self._options)
        try:
            # it finds names in one schema only
            driver.execute(_SET_SEARCH_PATH)
        except BaseException:
            driver.close()
            raise
        return driver

    def take(self) -> _Connection:
        driver: _Connection = super().take()
        while _is_over(driver):
            driver.close()
            driver = super().take()
        # the one that used it before may have accepted more
        driver.silence = SILENT_READING
        return driver

    def ask(self, statement: str, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """The rows that a statement returns."""
        with self.connection() as driver:
            return list(driver.execute(statement, parameters, binary=True).fetchall())

    def begin(self, driver: _Connection) -> None:
        driver.execute("BEGIN")
        # what follows may wait for a lock
        driver.silence = SILENT_WRITING

    @contextmanager
    def turn(self) -> Iterator[tuple[_Connection, int]]:
        """A transaction in which nobody else writes, and what all rows weigh."""
        with self.writing() as driver:
            meta = driver.execute(f"{META_ROW} FOR UPDATE").fetchall()
            self.require_format(meta)
            yield driver, meta[0][0]

    # -- the contract of a backend ------------------------------------------------------------------------------------

    @contextmanager
    def view(self) -> Iterator[View]:
        self.require_open()
        yield PostgreSQLView(self)

    @contextmanager
    def update(self) -> Iterator[Draft]:
        with self.turn() as (driver, total):
            draft = Draft(PostgreSQLView(self, driver, total), COSTS)
            yield draft
            write_to_postgresql(driver, draft.changes)

    def sync(self) -> None:
        """The server flushes commits, unless configured not to; then one flushed commit flushes those before it."""
        if self.read_only:
            return
        with self.connection() as driver:
            driver.silence = SILENT_WRITING
            # a transaction that has written nothing is not flushed, whatever number it has
            driver.execute(
                "BEGIN; SET LOCAL synchronous_commit = on; "
                "SELECT pg_catalog.pg_logical_emit_message(true, 'prefixstore'::text, ''::text); COMMIT"
            )

    def compact(self, *, erase: bool = False) -> int:
        """Have the server rewrite all tables, while all others wait; its log and its backups are not covered.

        Only the owner of the tables can do that. First what was counted is counted again.
        """
        with self.turn() as (driver, _):
            driver.silence = None
            driver.execute(COUNT_AGAIN)
        before = self.disk_bytes()
        if warnings := self._vacuum("VACUUM FULL"):
            raise LocationError(
                f"{self.location}: no space was returned, and deleted data is still in the files, since the server "
                f"says: {warnings[0]}; compact as the owner of the tables"
            )
        return max(before - self.disk_bytes(), 0)

    def disk_bytes(self) -> int:
        """The size of the tables."""
        sizes = " + ".join(f"pg_catalog.pg_total_relation_size('{name}'::regclass)" for name in TABLES)
        return int(self.ask(f"SELECT {sizes}")[0][0])

    def reclaim(self) -> None:
        self.require_writable()
        self._vacuum("VACUUM")

    def _vacuum(self, command: str) -> list[str]:
        """Vacuum all tables; the warnings of the server, which skips a table that it may not vacuum."""
        warnings: list[str] = []

        def note(diagnostic: psycopg.errors.Diagnostic) -> None:
            if diagnostic.severity_nonlocalized == "WARNING":
                warnings.append(str(diagnostic.message_primary))

        with self.connection() as driver:
            driver.silence = None
            driver.add_notice_handler(note)
            try:
                driver.execute(f"{command} {', '.join(TABLES)}")
            finally:
                driver.remove_notice_handler(note)
        return warnings
