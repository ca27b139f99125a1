"""Facts of many pages at once, from the columns that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Row, bindparam, func, select

from prefixstore.backends.base import FACTS
from prefixstore.backends.sql.schema import PAGES
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, TOKEN_BYTES
from prefixstore.format.record import FORMAT_VERSION

__all__ = ["SELECT_FACTS", "facts_of_rows"]

_KEYS = ("key", "parent", "namespace")
_NUMBERS = [name for name in FACTS.names or () if name not in (*_KEYS, "is_readable")]

# key after `after`, at most `count`; the tokens are not read
SELECT_FACTS = (
    select(
        *(PAGES.c[name] for name in _KEYS),
        *(
            PAGES.c[name] if name != "n_tokens" else func.length(PAGES.c.tokens).label(name)  # in bytes
            for name in _NUMBERS
        ),
        PAGES.c.version,
    )
    .where(PAGES.c.key > bindparam("after"))
    .order_by(PAGES.c.key)
    .limit(bindparam("count"))
)


def facts_of_rows(rows: Sequence[Row[Any]]) -> npt.NDArray[np.void]:
    """The facts in rows of `SELECT_FACTS`.

    Raises
    ------
    TypeError, ValueError, OverflowError
        If a column holds what it cannot have.
    """
    facts = np.zeros(len(rows), FACTS)
    if not rows:
        return facts
    columns = dict(zip((*_KEYS, *_NUMBERS, "version"), zip(*rows, strict=True), strict=True))
    for name in _KEYS:
        if set(map(len, columns[name])) != {KEY_BYTES}:
            raise ValueError(f"a {name} has a wrong length")
        facts[name] = np.frombuffer(b"".join(columns[name]), FACTS[name])
    for name in _NUMBERS:
        facts[name] = np.array(columns[name], FACTS[name])
    facts["n_tokens"] //= TOKEN_BYTES
    facts["is_readable"] = True
    is_foreign = (np.array(columns["version"]) != FORMAT_VERSION) | ~np.isin(facts["form"], (PAGE, SNAPSHOT))
    if is_foreign.any():
        bare = np.zeros(int(is_foreign.sum()), FACTS)
        bare["key"] = facts["key"][is_foreign]
        facts[is_foreign] = bare
    return facts
