"""Shrinks the payload table of a PostgreSQL store while others read and write.

A vacuum cuts off the free end of a table, but deletions free space anywhere in it. So all payloads are written again, a
few at a time. The server puts them where space is free, and looks for it from the beginning of the table after each
vacuum; so the end becomes free, and the next vacuum cuts it off. Where a payload lies is not known, since only
superusers may read the table of its chunks. So most of the free space is given back, but not all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixstore.backends.sql.postgresql import PostgreSQL

__all__ = ["compact"]

# pieces of payloads that are written again in one transaction, for which other writers wait
AT_ONCE = 32
# What is written between two vacuums: such a part of the free space, so that the table need not grow for it; and never
# less than so many bytes, since a vacuum takes its time.
PART, LEAST_BYTES = 8, 32 << 20
# as long as such a part of the tables is free, this goes on
WORTH = 1 / 8

# a value that is written as it is would stay where it is
_REWRITE = """
WITH chosen AS (
    SELECT key, piece FROM prefixstore_payloads
    WHERE (key, piece) > (%(key)s::bytea, %(piece)s) ORDER BY key, piece LIMIT %(count)s
)
UPDATE prefixstore_payloads AS stored SET data = stored.data || ''::bytea
FROM chosen WHERE stored.key = chosen.key AND stored.piece = chosen.piece
RETURNING stored.key, stored.piece, octet_length(stored.data)
"""


def compact(database: PostgreSQL, vacuum: Callable[[], object]) -> None:
    """Rewrite each payload of a store, as long as that is worth it; `vacuum` is called to vacuum its tables."""
    vacuum()
    place: tuple[bytes, int] | None = b"", 0
    largest: int | None = None
    while place is not None:
        size = database.disk_bytes()
        with database.view() as view:
            free = size - view.used
        left = max(free // PART, LEAST_BYTES)
        largest = largest or size + left
        # if it grows, another process reads an older state, so that what was rewritten is not free yet; or others write
        if free <= max(size * WORTH, LEAST_BYTES) or size > largest:
            return
        while place is not None and left > 0:
            place, n_bytes = _step(database, place)
            left -= n_bytes
        vacuum()


def _step(database: PostgreSQL, after: tuple[bytes, int]) -> tuple[tuple[bytes, int] | None, int]:
    """Rewrite the pieces after this one, some of them; the last one, or None at the end, and their bytes."""
    # writers take turns: so none of them waits for one that waits for it
    with database.turn() as (driver, _), database.translated():
        given = {"key": after[0], "piece": after[1], "count": AT_ONCE}
        rows = driver.execute(_REWRITE, given, binary=True).fetchall()
    return max(((key, piece) for key, piece, _ in rows), default=None), sum(size for _, _, size in rows)
