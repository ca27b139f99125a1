"""Shrinks the payload table of a PostgreSQL store while others read and write.

A vacuum cuts off the free end of a table, but deletions free space anywhere in it. So all payloads are written again, a
few at a time. The server puts them where space is free, and looks for it from the beginning of the table after each
vacuum; so the end becomes free, and the next vacuum cuts it off. Where a payload lies is not known, since only
superusers may read the table of its chunks. So most of the free space is given back, but not all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import BigInteger, Integer, LargeBinary, bindparam, cast, func, literal_column, select, tuple_, update

from prefixstore.backends.sql.database import Database, again, translated
from prefixstore.backends.sql.schema import META, PAYLOADS

__all__ = ["Compaction"]

# pieces of payloads that are written again in one transaction, for which other writers wait
AT_ONCE = 32
# What is written between two vacuums: such a part of the free space, so that the table need not grow for it; and never
# less than so many bytes, since a vacuum takes its time.
PART, LEAST_BYTES = 8, 32 << 20
# as long as such a part of the table is free, it is written again; and as long as that frees half as much
WORTH = 1 / 8
ROUNDS = 4
# the most that a piece takes besides its bytes and their chunks: a row and its keys
PIECE_EXTRA = 256

_SPACE = select(
    func.pg_catalog.pg_total_relation_size(func.to_regclass(PAYLOADS.name)).label("size"),
    func.count(PAYLOADS.c.key).label("n_pieces"),
    # the server knows the length of a piece without reading it
    cast(func.coalesce(func.sum(func.octet_length(PAYLOADS.c.data)), 0), BigInteger).label("n_bytes"),
)
_TURN = select(META.c.id).where(META.c.id == 1).with_for_update()
_SOME = (
    select(PAYLOADS.c.key, PAYLOADS.c.piece)
    .where(
        tuple_(PAYLOADS.c.key, PAYLOADS.c.piece)
        > tuple_(bindparam("after_key", type_=LargeBinary), bindparam("after_piece", type_=Integer))
    )
    .order_by(PAYLOADS.c.key, PAYLOADS.c.piece)
    .limit(bindparam("count", type_=Integer))
    .cte("some")
)
# a value that is written as it is would stay where it is
_REWRITE = (
    update(PAYLOADS)
    .where(PAYLOADS.c.key == _SOME.c.key, PAYLOADS.c.piece == _SOME.c.piece)
    .values(data=PAYLOADS.c.data.op("||")(literal_column("''::bytea", LargeBinary)))
    .returning(PAYLOADS.c.key, PAYLOADS.c.piece, func.octet_length(PAYLOADS.c.data).label("size"))
)


class _Space(NamedTuple):
    """How large the table is, and how much of it is free."""

    size: int
    free: int

    @property
    def is_worth_it(self) -> bool:
        return self.free > self.size * WORTH and self.free > LEAST_BYTES


class Compaction:
    """Rewrites all payloads of a store.

    Parameters
    ----------
    database
        The store.
    vacuum
        Vacuums its tables.
    """

    def __init__(self, database: Database, vacuum: Callable[[], object]) -> None:
        self._database = database
        self._vacuum = vacuum

    def run(self) -> None:
        """Rewrite them as long as that frees space."""
        self._vacuum()
        for _ in range(ROUNDS):
            before = self._space()
            if not before.is_worth_it:
                return
            self._round()
            if before.size - self._space().size < before.size * WORTH / 2:
                return

    def _space(self) -> _Space:
        with self._database.connection() as connection, translated(self._database.location):
            row = again(connection, lambda: connection.execute(_SPACE).one())
        # chunks of 1996 bytes, of which 4 are in a page of 8192, and their keys: 4 percent
        needed = row.n_bytes + row.n_bytes // 16 + row.n_pieces * PIECE_EXTRA
        return _Space(row.size, max(row.size - needed, 0))

    def _round(self) -> None:
        """Rewrite each payload once, or until it is no longer worth it."""
        place: tuple[bytes, int] | None = b"", 0
        largest: int | None = None
        while place is not None and (space := self._space()).is_worth_it:
            left = max(space.free // PART, LEAST_BYTES)
            largest = largest or space.size + left
            if space.size > largest:
                # another process reads an older state, so that what was rewritten is not free yet; or others write more
                return
            while place is not None and left > 0:
                place, n_bytes = self._step(place)
                left -= n_bytes
            self._vacuum()

    def _step(self, after: tuple[bytes, int]) -> tuple[tuple[bytes, int] | None, int]:
        """Rewrite the pieces after this one, some of them; the last one, or None at the end, and their bytes."""
        with self._database.writing() as connection, translated(self._database.location):
            # writers take turns by this row: so none of them waits for one that waits for it
            connection.execute(_TURN)
            given = {"after_key": after[0], "after_piece": after[1], "count": AT_ONCE}
            rows = connection.execute(_REWRITE, given).all()
        return max(((bytes(row.key), row.piece) for row in rows), default=None), sum(row.size for row in rows)
