"""The most used prefixes of a location."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prefixstore.engine.facts import FACTS
from prefixstore.engine.page_view import View
from prefixstore.format.keys import PAGE

__all__ = ["Hot", "hottest"]

# pages among which prefixes are looked for: those of a long prefix are used together
CONSIDERED = 4096
SLICE = 10_000


@dataclass(frozen=True)
class Hot:
    """A stored prefix that is used much.

    Attributes
    ----------
    page, namespace
        Keys of its last page, and of its namespace, as hexadecimal digits.
    n_tokens
        Its length.
    uses
        How often it was used since that page was stored, by warming jobs too.
    last_used
        Nanoseconds since the epoch.
    """

    page: str
    namespace: str
    n_tokens: int
    uses: int
    last_used: int


def hottest(view: View, n: int, stop: Callable[[], bool] = lambda: False) -> list[Hot]:
    """The `n` prefixes that are used most, each as long as it is used as often.

    It looks at all pages, in slices; `stop` is called after each, and ends that if it returns True.
    """
    best = np.empty(0, FACTS)
    after = b""
    while not stop() and len(facts := view.facts(after, SLICE)):
        after = facts["key"][-1].tobytes()
        used = facts[facts["is_readable"] & (facts["hits"] > 0) & (facts["form"] == PAGE)]
        best = np.concatenate([best, used])
        order = np.lexsort((best["start"], -best["hits"].astype(np.int64)))
        best = best[order[:CONSIDERED]]
    # a page that is used as often as one that continues it is a part of that prefix
    continued = {(one["parent"].tobytes(), int(one["hits"])) for one in best}
    ends = [one for one in best if (one["key"].tobytes(), int(one["hits"])) not in continued]
    ends.sort(key=lambda one: (-int(one["hits"]), -int(one["start"])))
    return [
        Hot(
            one["key"].tobytes().hex(),
            one["namespace"].tobytes().hex(),
            int(one["start"]) + int(one["n_tokens"]),
            int(one["hits"]),
            int(one["last_used"]),
        )
        for one in ends[:n]
    ]
