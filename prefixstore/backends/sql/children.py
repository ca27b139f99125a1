"""The statements that find children of a page by their tokens, in time that does not grow with the location.

They use the index `CHILDREN`: on parent, form and tokens in SQLite. An entry of PostgreSQL's indexes has at most some
2,700 bytes, so there it has the first `ORDERED_BYTES` of the tokens; children that share these are compared in full.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CompoundSelect,
    Executable,
    FromClause,
    LargeBinary,
    Select,
    asc,
    bindparam,
    desc,
    func,
    literal_column,
    select,
    true,
    union_all,
)

from prefixstore.backends.sql.schema import ORDERED_BYTES, PAGES, RECORD_COLUMNS
from prefixstore.format.keys import PAGE

__all__ = ["NEIGHBOR", "beside", "children_of_many", "children_of_one", "neighbors", "prefix"]

# the position of a neighbor among the rows of `beside`
NEIGHBOR = -1
_TOKENS = bindparam("tokens", type_=LargeBinary)
_COUNT = bindparam("count", type_=BigInteger)


def prefix(tokens: ColumnElement[Any]) -> ColumnElement[Any]:
    """The part of some tokens that PostgreSQL's index has. Without parameters: the server would not use its index."""
    return func.substr(tokens, literal_column("1"), literal_column(str(ORDERED_BYTES)), type_=LargeBinary)


def neighbors(*, by_prefix: bool) -> CompoundSelect[Any]:
    """The two children of a page between which one with some tokens would be: the last not above, the first above.

    With `by_prefix` the nearest prefix is found first, by a query that the order of the index answers, whatever the
    server believes of the number of children: it would sort all of them otherwise, if it believes that they are few.
    """
    own = PAGES.c.parent == bindparam("parent"), PAGES.c.form == literal_column(str(PAGE))
    mine, wanted = prefix(PAGES.c.tokens), prefix(_TOKENS)
    sides = []
    for is_near, is_beyond, direction in (
        (PAGES.c.tokens <= _TOKENS, mine <= wanted, desc),
        (PAGES.c.tokens > _TOKENS, mine >= wanted, asc),
    ):
        terms = [*own, is_near]
        if by_prefix:
            nearest = select(mine).where(*terms, is_beyond).order_by(direction(mine)).limit(literal_column("1"))
            terms.append(mine == nearest.scalar_subquery())
        found = select(*RECORD_COLUMNS).where(*terms).order_by(direction(PAGES.c.tokens)).limit(literal_column("1"))
        sides.append(select(found.subquery()))
    return union_all(*sides)


def children_of_one() -> Executable:
    """The children of a page that have one form, in the order of their tokens; a negative `count` is no limit."""
    return (
        select(*RECORD_COLUMNS)
        .where(PAGES.c.parent == bindparam("parent"), PAGES.c.form == bindparam("form"))
        .order_by(PAGES.c.tokens)
        .limit(_COUNT)
    )


def children_of_many(wanted: FromClause) -> Select[Any]:
    """The children of the wanted pages that have one form, at most `count` of each, with its ``position``.

    Those of one page are in no particular order. A `count` of None is no limit.
    """
    found = (
        select(*RECORD_COLUMNS)
        .where(PAGES.c.parent == wanted.c.key, PAGES.c.form == bindparam("form"))
        .order_by(prefix(PAGES.c.tokens), PAGES.c.tokens)
        .limit(_COUNT)
        .lateral("found")
    )
    return select(found, wanted.c.position).select_from(wanted.join(found, true())).order_by(wanted.c.position)


def beside(wanted: FromClause) -> Executable:
    """What `neighbors` and `children_of_many` find, with the ``position`` `NEIGHBOR` for the former."""
    near = neighbors(by_prefix=True).subquery()
    snapshots = children_of_many(wanted).order_by(None).subquery()
    names = [column.name for column in RECORD_COLUMNS]
    return union_all(
        select(*(near.c[name] for name in names), literal_column(str(NEIGHBOR)).label("position")),
        select(*(snapshots.c[name] for name in names), snapshots.c.position),
    )
