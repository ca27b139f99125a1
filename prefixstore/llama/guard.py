"""Keeps faults of the store out of completions."""

from __future__ import annotations

import logging
from types import TracebackType

from prefixstore.errors import PrefixStoreError, StorageError
from prefixstore.stats import Counters

__all__ = ["Guard"]

log = logging.getLogger("prefixstore")


class Guard:
    """Keeps faults of the store from breaking a completion: an exception ends the block, is logged, and is counted.

    Parameters
    ----------
    counters
        Of the engine.
    fault
        The count of an exception.
    unavailable
        The count of a `StorageError`, where one is to be expected.
    namespace
        Key of the namespace for which it is counted, if that is known.

    Attributes
    ----------
    counted
        What was counted; None without an exception.
    """

    def __init__(
        self, counters: Counters, fault: str, unavailable: str | None = None, namespace: bytes | None = None
    ) -> None:
        self._counters = counters
        self._fault = fault
        self._unavailable = unavailable
        self._namespace = namespace
        self.counted: str | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._unavailable is not None and isinstance(error, StorageError):
            self.counted = self._unavailable
            self._counters.count(self._unavailable, namespace=self._namespace)
            log.warning("a lookup failed: %s", error)
            return True
        self.counted = self._fault
        self._counters.count(self._fault, namespace=self._namespace)
        log.warning(
            "the completion continues without the store: %s",
            error,
            exc_info=None if isinstance(error, PrefixStoreError) else error,
        )
        return True
