"""Reads what others have changed together with the newest generation: one round trip instead of three."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from sqlalchemy import Row, bindparam, select, true

from prefixstore.backends.sql.schema import CHANGES, META, PAGES, RECORD_COLUMNS, readable
from prefixstore.errors import StorageError
from prefixstore.format.record import Record, Usage

__all__ = ["SELECT_CHANGES", "SELECT_NEWS", "News", "meta_of"]

SELECT_CHANGES = (
    select(CHANGES.c.generation, CHANGES.c.key)
    .where(CHANGES.c.generation > bindparam("since"))
    .order_by(CHANGES.c.generation, CHANGES.c.number)
)
# At most so many changes are asked for together with the generation.
MOST_NEWS = 1000
_RECENT = SELECT_CHANGES.add_columns(CHANGES.c.number).limit(MOST_NEWS).subquery()
# the generation, the changes since another one, and what is stored now of the pages that were changed
SELECT_NEWS = (
    select(*META.c, _RECENT.c.generation, _RECENT.c.key, *RECORD_COLUMNS)
    .select_from(META.outerjoin(_RECENT, true()).outerjoin(PAGES, PAGES.c.key == _RECENT.c.key))
    .where(META.c.id == 1)
    .order_by(_RECENT.c.generation, _RECENT.c.number)
)


_META_NAMES = [column.name for column in META.c]
_PAGE_NAMES = [column.name for column in RECORD_COLUMNS]


class News(NamedTuple):
    """Changes of pages since a generation.

    Attributes
    ----------
    since
        The generation.
    changes
        The generation of each change, and the key of the page.
    pages
        What is stored of these pages; None for nothing.
    """

    since: int
    changes: list[tuple[int, bytes]]
    pages: dict[bytes, tuple[Record | StorageError, Usage] | None]

    @classmethod
    def of(cls, since: int, rows: Sequence[Row[Any]]) -> News | None:
        """From what `SELECT_NEWS` returns; None if there may be more."""
        if len(rows) >= MOST_NEWS:
            return None
        changes: list[tuple[int, bytes]] = []
        pages: dict[bytes, tuple[Record | StorageError, Usage] | None] = {}
        for row in rows:
            generation, key, *page = row[len(META.c) :]
            if key is not None:
                changes.append((int(generation), bytes(key)))
                is_stored = page[0] is not None
                pages[bytes(key)] = readable(_row(_PAGE_NAMES, page)) if is_stored else None
        return cls(since, changes, pages)

    def after(self, since: int) -> list[bytes] | None:
        """As `View.changes`, since a generation that is not the newest one."""
        # each generation changed something: if the first is missing, it was forgotten
        found = [(generation, key) for generation, key in self.changes if generation > since]
        return [key for _, key in found] if found and found[0][0] == since + 1 else None


def meta_of(rows: Sequence[Row[Any]]) -> list[Row[Any]]:
    """The row about the whole store, of what `SELECT_NEWS` returns; empty if there is none."""
    return [_row(_META_NAMES, row[: len(META.c)]) for row in rows[:1]]


def _row(names: Sequence[str], values: Sequence[Any]) -> Row[Any]:
    """Columns with these names, as a row of their own: names may occur twice in the whole."""
    return cast("Row[Any]", SimpleNamespace(**dict(zip(names, values, strict=True))))
