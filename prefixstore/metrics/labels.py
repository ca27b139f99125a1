"""Keeps the values of labels to a bounded number of plain names."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["MOST_REASONS", "OTHER", "Reasons", "bounded"]

OTHER = "other"
# Reasons are names in the code of prefixstore. The bounds keep a fault there from making a series for each request.
MOST_REASONS = 64
_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")


class Reasons:
    """The first `MOST_REASONS` reasons that are used; all others become `OTHER`."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def label(self, reason: str) -> str:
        """The reason, or `OTHER` if it is not a plain name, or there are too many."""
        # one that is known is found without the lock
        if reason in self._known:
            return reason
        if not _REASON.fullmatch(reason):
            return OTHER
        with self._lock:
            if len(self._known) < MOST_REASONS:
                self._known.add(reason)
            return reason if reason in self._known else OTHER


def bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by reason; reasons that are not plain names, or too many, are counted as `OTHER`."""
    reasons = Reasons()
    found: Counter[str] = Counter()
    for reason, n in counts.items():
        found[reasons.label(reason)] += n
    return dict(found)
