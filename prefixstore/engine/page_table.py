"""Interim."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixstore.backends.base import Entry
from prefixstore.engine.index import Page
from prefixstore.engine.totals import Group, Total
from prefixstore.format.record import Record, Usage, time_of_use


@dataclass(slots=True, eq=False)
class Row:
    key: bytes
    parent: bytes
    namespace: bytes
    start: int
    n_tokens: int
    raw_bytes: int
    stored_bytes: int
    compute_us: int
    created: int
    last_used: int
    hits: int = 0
    pinned: bool = False
    priority: int = 0
    expires: int = 0
    form: int = 0
    codec: int = 0
    policy_data: object = field(default=None, repr=False)

    @property
    def end(self) -> int:
        return self.start + self.n_tokens


Victim = Row


class PageTable:
    """Rows of all stored pages."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.is_loaded = False
        self.is_loading = False
        self.rows: dict[bytes, Row] = {}
        self.n_children: dict[bytes, int] = {}
        self._gone: dict[bytes, Row] = {}
        self.salts: dict[bytes, str | None] = {}

    def begin(self) -> None:
        self.unload()
        self.is_loading = True

    def end(self) -> None:
        self.is_loading, self.is_loaded = False, True

    @property
    def is_on(self) -> bool:
        return self.is_loaded or self.is_loading

    def unload(self) -> None:
        self.is_loaded = self.is_loading = False
        self.rows, self.n_children, self._gone = {}, {}, {}

    def fill(self, facts: Any) -> None:
        for f in facts:
            if f["is_readable"] and bytes(f["key"]) not in self.rows:
                self._add(
                    Row(
                        bytes(f["key"]),
                        bytes(f["parent"]),
                        bytes(f["namespace"]),
                        int(f["start"]),
                        int(f["n_tokens"]),
                        int(f["raw_bytes"]),
                        int(f["stored_bytes"]),
                        int(f["compute_us"]),
                        int(f["created"]),
                        int(f["last_used"]),
                        int(f["hits"]),
                        bool(f["pinned"]),
                        int(f["priority"]),
                        int(f["expires"]),
                        int(f["form"]),
                        int(f["codec"]),
                    )
                )

    def _add(self, row: Row) -> None:
        old = self._drop(row.key)
        if old is not None:
            row.policy_data = old.policy_data
            row.last_used = max(row.last_used, old.last_used)
            row.hits = max(row.hits, old.hits)
        self.rows[row.key] = row
        self.n_children[row.parent] = self.n_children.get(row.parent, 0) + 1

    def _drop(self, key: bytes) -> Row | None:
        row = self.rows.pop(key, None)
        if row is not None:
            self.n_children[row.parent] -= 1
            if not self.n_children[row.parent]:
                del self.n_children[row.parent]
        return row

    def follow(self, key: bytes, entry: Entry | None) -> None:
        if not self.is_on:
            return
        if entry is None or not isinstance(entry.record, Record):
            self._drop(key)
        else:
            page = Page.stored(entry.key, entry.record, entry.usage)
            page.last_used = time_of_use(page.last_used, time.time_ns()) or 1
            self._put(page, entry.record.codec)

    def _put(self, page: Page, codec: int) -> None:
        self._add(
            Row(
                page.key,
                page.parent,
                page.namespace,
                page.start,
                page.n_tokens,
                page.raw_bytes,
                page.stored_bytes,
                page.compute_us,
                page.created,
                page.last_used,
                page.hits,
                page.pinned,
                page.priority,
                page.expires,
                page.form,
                codec,
            )
        )

    def put(self, page: Page, codec: int) -> bool:
        """Whether it is new."""
        if not self.is_on:
            return False
        is_new = page.key not in self.rows
        self._put(page, codec)
        return is_new

    def take_back(self, key: bytes, is_new: bool) -> None:
        if is_new:
            self._drop(key)

    def deleted(self, key: bytes) -> None:
        row = self._drop(key)
        if row is not None:
            self._gone[key] = row

    def restore(self, key: bytes) -> None:
        row = self._gone.pop(key, None)
        if row is not None and key not in self.rows:
            self._add(row)

    def set_pinned(self, key: bytes, *, pinned: bool) -> None:
        if key in self.rows:
            self.rows[key].pinned = pinned

    def set_expiry(self, key: bytes, expires: int) -> None:
        if key in self.rows:
            self.rows[key].expires = expires

    def spare(self, key: bytes, usage: Usage, last_used: int) -> None:
        row = self.rows.get(key)
        if row is not None:
            row.last_used, row.hits = max(last_used, row.last_used), max(usage.hits, row.hits)
            row.pinned, row.expires = usage.pinned, max(usage.expires, row.expires)

    def evicted(self, victim: Row) -> None:
        self.policy.evicted(victim)

    def announced(self, page: Page) -> None:
        pass

    def looked_up(self, namespace: bytes, pages: Sequence[Page]) -> None:
        for page in pages:
            if page.key in self.rows:
                row = self.rows[page.key]
                row.last_used, row.hits, row.expires = page.last_used, page.hits, page.expires

    def victims(self, group: Group = None) -> Generator[Row, None, None]:
        passed: set[bytes] = set()
        while True:
            rows = [r for r in self.rows.values() if self._is_victim(r, group) and r.key not in passed]
            if not rows:
                return
            row = min(rows, key=lambda r: (self.policy.rank(r), r.key))
            passed.add(row.key)
            yield row

    def _is_victim(self, row: Row, group: Group) -> bool:
        if row.pinned or row.key in self.n_children:
            return False
        return self._is_of(row, group)

    def _is_of(self, row: Row, group: Group) -> bool:
        return group is None or (
            row.namespace == group if isinstance(group, bytes) else self.salts.get(row.namespace) == group
        )

    def expiring(self) -> Generator[Row, None, None]:
        passed: set[bytes] = set()
        while True:
            rows = [
                r
                for r in self.rows.values()
                if r.expires and not r.pinned and r.key not in self.n_children and r.key not in passed
            ]
            if not rows:
                return
            row = min(rows, key=lambda r: (r.expires, r.key))
            passed.add(row.key)
            yield row

    def total(self, group: Group = None) -> Total:
        total = Total()
        for row in self.rows.values():
            if self._is_of(row, group):
                n = row.stored_bytes + 4 * row.n_tokens
                total.pages += 1
                total.stored += 1
                total.bytes += n
                if not row.pinned:
                    total.evictable += 1
                    total.evictable_bytes += n
        return total

    @property
    def payload_bytes(self) -> tuple[int, int]:
        return sum(r.stored_bytes for r in self.rows.values()), sum(r.raw_bytes for r in self.rows.values())

    def namespaces_without_salt(self) -> list[bytes]:
        return [n for n in {r.namespace for r in self.rows.values()} if n not in self.salts]

    def set_salt(self, namespace: bytes, salt: str | None) -> None:
        self.salts[namespace] = salt

    def strays(self) -> list[bytes]:
        return [r.key for r in self.rows.values() if r.parent != r.namespace and r.parent not in self.rows]
