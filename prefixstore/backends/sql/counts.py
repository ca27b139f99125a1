"""The number of pages and their bytes: running totals in the row of `META`, and sums over all pages, to compare."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Column, ColumnElement, Row, case, cast, func, literal_column, select, true

from prefixstore.backends.sql.schema import META, PAGES
from prefixstore.format.record import Record

__all__ = ["REMOVED", "SUMMED", "Counts", "counted", "summed"]

# No page has more bytes. What is larger, or no number, is damaged: as 0 it does not hide what the others have.
LARGEST_PAGE = 1 << 40


class Counts(NamedTuple):
    """What a store holds.

    Attributes
    ----------
    entries
        Number of pages.
    bytes
        Of payloads as stored, and of tokens.
    stored_bytes, raw_bytes
        Of payloads as stored, and of the states that they stand for.
    """

    entries: int
    bytes: int
    stored_bytes: int
    raw_bytes: int

    def __str__(self) -> str:
        sizes = f"{self.stored_bytes} bytes as stored, {self.raw_bytes} of states"
        return f"{self.entries} pages with {self.bytes} bytes including tokens, {sizes}"

    @property
    def sizes(self) -> tuple[int, int] | None:
        """`View.sizes`; None if these were counted wrongly."""
        return (self.stored_bytes, self.raw_bytes) if min(self.stored_bytes, self.raw_bytes) >= 0 else None

    def with_page(self, record: Record) -> Counts:
        """The counts after a page was put that was not stored."""
        stored, raw = (size if size <= LARGEST_PAGE else 0 for size in (record.stored_bytes, record.raw_bytes))
        return self._plus(1, stored, raw, len(record.tokens))

    def without(self, removed: Row[Any]) -> Counts:
        """The counts after a page was deleted, of which `REMOVED` was returned."""
        return self._plus(-1, -removed.stored_bytes, -removed.raw_bytes, -removed.token_bytes)

    def _plus(self, entries: int, stored_bytes: int, raw_bytes: int, token_bytes: int) -> Counts:
        return Counts(
            self.entries + entries,
            self.bytes + stored_bytes + token_bytes,
            self.stored_bytes + stored_bytes,
            self.raw_bytes + raw_bytes,
        )


def _size(column: Column[int]) -> ColumnElement[int]:
    largest = literal_column(str(LARGEST_PAGE), BigInteger)
    return case((column.between(literal_column("0"), largest), column), else_=literal_column("0", BigInteger))


def _sum(of: ColumnElement[int]) -> ColumnElement[int]:
    return func.coalesce(cast(func.sum(of), BigInteger), literal_column("0", BigInteger))


_TOKENS: ColumnElement[int] = func.length(PAGES.c.tokens)
_STORED, _RAW = _size(PAGES.c.stored_bytes), _size(PAGES.c.raw_bytes)
# what a deletion returns of a page
REMOVED = _STORED.label("stored_bytes"), _RAW.label("raw_bytes"), _TOKENS.label("token_bytes")
_SUMS = (
    select(
        func.count().label("n_pages"),
        _sum(_TOKENS).label("sum_tokens"),
        _sum(_STORED).label("sum_stored"),
        _sum(_RAW).label("sum_raw"),
    )
    .select_from(PAGES)
    .subquery("sums")
)
# what was counted and what there is, both at one moment
SUMMED = select(META, _SUMS).join_from(META, _SUMS, true()).where(META.c.id == 1)


def counted(row: Row[Any]) -> Counts:
    """The running totals in a row of `META`."""
    return Counts(row.entries, row.bytes, row.stored_bytes, row.raw_bytes)


def summed(row: Row[Any]) -> Counts:
    """The sums over all pages, from a row of `SUMMED`."""
    return Counts(row.n_pages, row.sum_stored + row.sum_tokens, row.sum_stored, row.sum_raw)
