"""Pages in a SQL database.

A page is a row, its payload rows of 1 MiB. A transaction is one transaction of the database, and adds one row to the
table of changes for each key. The number of pages and their bytes are stored with it, so that they need not be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Executable, Row, bindparam, delete, insert, select, update

from prefixstore.backends.base import CHANGES_KEPT, FACTS, Backend, Entry, Transaction, Used, View, facts_of
from prefixstore.backends.sql.children import NEIGHBOR
from prefixstore.backends.sql.counts import REMOVED, SUMMED, Counts, counted, summed
from prefixstore.backends.sql.database import Database, translated
from prefixstore.backends.sql.facts import SELECT_FACTS, facts_of_rows
from prefixstore.backends.sql.news import SELECT_CHANGES, SELECT_NEWS, News, meta_of
from prefixstore.backends.sql.schema import (
    CHANGES,
    META,
    NAMESPACES,
    NOTES,
    PAGES,
    PIECES,
    RECORD_COLUMNS,
    USAGE_COLUMNS,
    pieces_of,
    readable,
    record_of,
    require_format,
    row_of,
    usage_of,
    usage_row,
)
from prefixstore.errors import StorageError
from prefixstore.format.keys import KEY_BYTES, SNAPSHOT
from prefixstore.format.record import Buffer, Record, Usage

__all__ = ["SQLBackend"]

# rows read at a time by a walk through the location, and bytes of payloads
ROWS = 1000
WALK_BYTES = 32 << 20

_META = select(META).where(META.c.id == 1)
_RECORD = select(*RECORD_COLUMNS).where(PAGES.c.key == bindparam("page"))
_USAGE = select(*USAGE_COLUMNS).where(PAGES.c.key == bindparam("page"))
_PIECES = select(PIECES.c.data).where(PIECES.c.page == bindparam("page")).order_by(PIECES.c.number)
_NOTE = select(NOTES.c.value).where(NOTES.c.name == bindparam("note"))
_NAMESPACES = select(NAMESPACES.c.key, NAMESPACES.c.settings)
_NAMESPACE = select(NAMESPACES.c.settings).where(NAMESPACES.c.key == bindparam("namespace"))
_SCAN = select(*RECORD_COLUMNS).where(PAGES.c.key > bindparam("after")).order_by(PAGES.c.key).limit(ROWS)
_PAYLOAD_KEYS = (
    select(PIECES.c.page)
    .where(PIECES.c.page > bindparam("after"), PIECES.c.number == 0)
    .order_by(PIECES.c.page)
    .limit(ROWS)
)
_DELETE = delete(PAGES).where(PAGES.c.key == bindparam("page")).returning(*REMOVED)
_TOUCH = (
    update(PAGES)
    .where(PAGES.c.key == bindparam("page"))
    .values({column.name: bindparam(f"new_{column.name}") for column in USAGE_COLUMNS})
)
_FORGET = delete(CHANGES).where(CHANGES.c.generation <= bindparam("until"))


def _entries_of(rows: Iterable[Row[Any]]) -> list[Entry]:
    """The pages in these rows that can be read, in the order of their tokens."""
    found = ((row, *readable(row)) for row in rows)
    entries = [
        (record.tokens, Entry(bytes(row.key), record, usage))
        for row, record, usage in found
        if isinstance(record, Record)
    ]
    return [entry for _, entry in sorted(entries, key=lambda each: each[0])]


class _View(View):
    def __init__(self, database: Database, connection: Connection, *, retry: bool) -> None:
        self._database = database
        self._connection = connection
        # whether the next read may use another connection, as it does not depend on an earlier one
        self._retry = retry
        self._known: Row[Any] | None = None
        # changes since an earlier generation, if they came with the newest one
        self._news: News | None = None

    def _rows(self, statement: Executable, **parameters: Any) -> Sequence[Row[Any]]:
        return self._database.rows(self._connection, statement, parameters, retry=self._retry)

    def _meta(self) -> Row[Any]:
        """The one row about the whole store; read once."""
        if self._known is None:
            since = self._database.seen
            if since is None or self._database.is_local:
                self._known = require_format(self._rows(_META), self._database.location)
            else:
                # in one round trip: other processes have mostly changed something, and the catalog knows the rest
                rows = self._rows(SELECT_NEWS, since=since)
                self._known = require_format(meta_of(rows), self._database.location)
                self._news = News.of(since, rows)
            self._database.seen = int(self._known.generation)
        return self._known

    @property
    def generation(self) -> int:
        return int(self._meta().generation)

    def changes(self, since: int) -> list[bytes] | None:
        now = self.generation
        if since >= now:
            return [] if since == now else None
        if self._news is not None and self._news.since <= since:
            return self._news.after(since)
        rows = self._rows(SELECT_CHANGES, since=since)
        # each generation changed something: if the first is missing, it was forgotten
        return [bytes(row.key) for row in rows] if rows and rows[0].generation == since + 1 else None

    def _walk(self, statement: Executable, key: str) -> Iterator[Row[Any]]:
        """All rows of a table, by key."""
        if self._retry:
            self._database.fix(self._connection)
            self._retry = False
        after = b""
        while rows := self._rows(statement, after=after):
            yield from rows
            after = bytes(rows[-1]._mapping[key])  # noqa: SLF001 - the public name in SQLAlchemy

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        for row in self._walk(_SCAN, "key"):
            yield bytes(row.key), *readable(row)

    def flaws(self) -> Iterator[tuple[str, bytes, str]]:
        for rule, message in self._database.flaws(self._connection):
            yield rule, b"", message
        for row in self._rows(SUMMED):
            if (known := self._counted(row)) != (found := summed(row)):
                yield "index", b"", f"there are {found}; they were counted as {known}"

    def payload_keys(self) -> Iterator[bytes]:
        return (bytes(row.page) for row in self._walk(_PAYLOAD_KEYS, "page"))

    def stored(self) -> Iterator[tuple[bytes, Record | StorageError, Buffer | StorageError | None]]:
        waiting: dict[bytes, Record] = {}
        n_bytes = 0
        for key, record, _ in self.scan():
            if not isinstance(record, Record):
                yield key, record, None
                continue
            if waiting and (n_bytes + record.stored_bytes > WALK_BYTES or len(waiting) == ROWS):
                yield from self._with_payloads(waiting)
                waiting, n_bytes = {}, 0
            waiting[key] = record
            n_bytes += record.stored_bytes
        yield from self._with_payloads(waiting)

    def _with_payloads(
        self, records: dict[bytes, Record]
    ) -> Iterator[tuple[bytes, Record, Buffer | StorageError | None]]:
        if records:
            for key, payload in self._database.payloads(self._connection, records):
                yield key, records[key], payload

    def record(self, key: bytes) -> Record | None:
        rows = self._rows(_RECORD, page=key)
        return record_of(rows[0]) if rows else None

    def usage(self, key: bytes) -> Usage | None:
        rows = self._rows(_USAGE, page=key)
        return usage_of(rows[0]) if rows else None

    def payload(self, key: bytes) -> Buffer | None:
        pieces = [row.data for row in self._rows(_PIECES, page=key)]
        return b"".join(pieces) if pieces else None

    def records(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Record | StorageError, Usage]]:
        if not keys:
            return {}
        known = self._news.pages if self._news is not None else {}
        if all(key in known for key in keys):
            return {key: page for key in keys if (page := known[key]) is not None}
        rows = self._rows(self._database.RECORDS, **self._database.keys(keys))
        return {bytes(row.key): readable(row) for row in rows}

    def leading(self, keys: Sequence[bytes]) -> list[Entry]:
        # one statement, instead of a bisection of many
        found = self.records(keys)
        return [Entry(key, *found[key]) for key in takewhile(found.__contains__, keys)]

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        rows = self._rows(self._database.NEIGHBORS, parent=parent, tokens=tokens)
        entries = _entries_of(rows)
        # pages that cannot be read do not count: then there may be another one beyond
        return entries if len(entries) == len(rows) else super().neighbors(parent, tokens)

    def beside(self, parent: bytes, tokens: bytes, parents: Sequence[bytes]) -> tuple[list[Entry], list[Entry]]:
        if self._database.BESIDE is None:
            return super().beside(parent, tokens, parents)
        rows = self._rows(
            self._database.BESIDE,
            parent=parent,
            tokens=tokens,
            form=SNAPSHOT,
            count=None,
            **self._database.keys(list(dict.fromkeys(parents))),
        )
        near = [row for row in rows if row.position == NEIGHBOR]
        entries = _entries_of(near)
        snapshots = groupby(sorted(rows, key=attrgetter("position")), key=attrgetter("position"))
        return (
            entries if len(entries) == len(near) else super().neighbors(parent, tokens),
            [entry for position, some in snapshots if position != NEIGHBOR for entry in _entries_of(some)],
        )

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        if not parents:
            return []
        return [
            entry
            for rows in self._database.children(self._rows, list(dict.fromkeys(parents)), form, at_most)
            for entry in _entries_of(rows)
        ]

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        if not keys:
            return set()
        return {bytes(row.key) for row in self._rows(self._database.FOLLOWED, **self._database.keys(keys))}

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        while rows := self._rows(SELECT_FACTS, after=after, count=at_most):
            try:
                return facts_of_rows(rows)
            except (TypeError, ValueError, OverflowError):
                # something in them is damaged: one by one
                keys = [bytes(row.key) for row in rows]
                found = self.records([key for key in keys if len(key) == KEY_BYTES])
                if found:
                    return np.array([facts_of(Entry(key, *found[key])) for key in sorted(found)], FACTS)
                after = keys[-1]
        return np.empty(0, FACTS)

    def fetch(self, keys: Sequence[bytes]) -> Iterator[tuple[Record, Buffer]]:
        return self._database.fetch(self._connection, keys, retry=self._retry, arrived=self._note_arrived)

    def _note_arrived(self, n_bytes: int) -> None:
        self.arrived = n_bytes

    def note(self, name: bytes) -> bytes | None:
        rows = self._rows(_NOTE, note=name)
        return bytes(rows[0].value) if rows else None

    def namespace(self, key: bytes) -> bytes | None:
        rows = self._rows(_NAMESPACE, namespace=key)
        return bytes(rows[0].settings) if rows else None

    def namespaces(self) -> Mapping[bytes, bytes]:
        return {bytes(row.key): bytes(row.settings) for row in self._rows(_NAMESPACES)}

    def _counted(self, meta: Row[Any]) -> Counts:
        """What is counted, by the row about the whole store."""
        return counted(meta)

    @property
    def sizes(self) -> tuple[int, int]:
        known = self._counted(self._meta()).sizes
        return super().sizes if known is None else known

    @property
    def used(self) -> Used:
        counts = self._counted(self._meta())
        return Used(self._database.used(self._connection, counts.entries, counts.bytes), counts.entries)


class _Change(_View, Transaction):
    def __init__(self, database: Database, connection: Connection) -> None:
        super().__init__(database, connection, retry=False)
        # written together, before the next read or at the end
        self._touched: dict[bytes, Usage] = {}
        meta = require_format(self._rows(_META.with_for_update()), database.location)
        self._known = meta
        self._counts = counted(meta)
        if self._counts.sizes is None:
            self._sum()
        self._changed: list[bytes] = []
        self._settings: dict[bytes, bytes | None] = {}

    def _run(self, statement: Executable, rows: list[dict[str, Any]]) -> None:
        with translated(self._database.location):
            self._connection.execute(statement, rows)

    def _rows(self, statement: Executable, **parameters: Any) -> Sequence[Row[Any]]:
        touched, self._touched = self._touched, {}
        if touched:
            self._run(
                _TOUCH,
                [
                    {"page": key} | {f"new_{name}": value for name, value in usage_row(usage).items()}
                    for key, usage in touched.items()
                ],
            )
        return super()._rows(statement, **parameters)

    def usage(self, key: bytes) -> Usage | None:
        # called for page after page, each of which is touched next
        rows = super()._rows(_USAGE, page=key)
        return self._touched.get(key) or usage_of(rows[0]) if rows else None

    def _counted(self, meta: Row[Any]) -> Counts:
        return self._counts

    def cost(self, record: Record, n_bytes: int) -> int:
        return self._database.cost(record, n_bytes)

    def payload(self, key: bytes) -> Buffer | None:
        # a transaction reads payloads to find out whether they are damaged
        self._database.bypass_cache(self._connection)
        return super().payload(key)

    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        self._remove(key)
        self._database.require_space(self._connection, len(payload) + len(record.tokens))
        row = row_of(key, record, usage)
        self._run(insert(PAGES), [row])
        self._run(insert(PIECES), pieces_of(key, payload))
        self._counts = self._counts.with_page(record)
        self._changed.append(key)

    def delete(self, key: bytes) -> bool:
        found = self._remove(key)
        if found:
            self._changed.append(key)
        return found

    def _remove(self, key: bytes) -> bool:
        rows = self._rows(_DELETE, page=key)
        for row in rows:
            self._counts = self._counts.without(row)
        return bool(rows)

    def touch(self, key: bytes, usage: Usage, *, announce: bool = False) -> None:
        self._touched[key] = usage
        self._changed += [key] * announce

    def put_namespace(self, key: bytes, settings: bytes) -> None:
        if key not in self._settings:
            # read once in a transaction: a batch of pages has one namespace
            self._settings[key] = self.namespace(key)
        if self._settings[key] != settings:
            self.drop_namespace(key)
            self._run(insert(NAMESPACES), [{"key": key, "settings": settings}])
            self._settings[key] = settings

    def drop_namespace(self, key: bytes) -> None:
        self._run(delete(NAMESPACES).where(NAMESPACES.c.key == bindparam("namespace")), [{"namespace": key}])
        self._settings[key] = None

    def put_note(self, name: bytes, value: bytes | None) -> None:
        self._run(delete(NOTES).where(NOTES.c.name == bindparam("note")), [{"note": name}])
        if value is not None:
            self._run(insert(NOTES), [{"name": name, "value": value}])

    def finish(self) -> None:
        """Record what changed, and forget changes that are too old."""
        if self._touched:
            self._rows(_META)
        if not self._changed:
            return
        generation = self.generation + 1
        changes = [{"generation": generation, "number": i, "key": key} for i, key in enumerate(self._changed)]
        self._run(insert(CHANGES), changes)
        self._run(_FORGET, [{"until": generation - CHANGES_KEPT}])
        if self._counts.sizes is None:
            # a page whose sizes were damaged was deleted
            self._sum()
        self._put_counts(generation)

    def count_again(self) -> None:
        """Replace what was counted by what there is. Every process starts over: an index may have been wrong."""
        generation = self.generation + 1
        self._run(_FORGET, [{"until": generation}])
        self._sum()
        self._put_counts(generation)

    def _sum(self) -> None:
        self._counts = summed(self._rows(SUMMED)[0])

    def _put_counts(self, generation: int) -> None:
        self._run(update(META).where(META.c.id == 1), [{"generation": generation, **self._counts._asdict()}])


class SQLBackend(Backend):
    """Pages in a SQL database.

    Parameters
    ----------
    database
        Closed with the backend.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def database(self) -> Database:
        """The connections."""
        return self._database

    @property
    def location(self) -> str:
        return self._database.location

    @property
    def is_local(self) -> bool:
        return self._database.is_local

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._database.reading() as connection:
            yield _View(self._database, connection, retry=True)

    @contextmanager
    def update(self) -> Iterator[Transaction]:
        with self._database.writing() as connection:
            change = _Change(self._database, connection)
            yield change
            change.finish()

    def sync(self) -> None:
        self._database.sync()

    def reclaim(self) -> None:
        self._database.reclaim()

    def scrub(self) -> None:
        self._database.scrub()

    def compact(self) -> int:
        before = self._database.disk_bytes()
        self._database.compact()
        return max(before - self._database.disk_bytes(), 0)

    def reindex(self) -> None:
        with self._database.writing() as connection:
            # no other writer holds a lock that this waits for
            change = _Change(self._database, connection)
            self._database.reindex(connection)
            change.count_again()

    def after_fork(self) -> None:
        self._database.after_fork()

    def close(self) -> None:
        self._database.close()
