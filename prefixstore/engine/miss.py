"""Why nothing was restored: nothing is stored, the caller bypasses the store, or the store has failed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from prefixstore.counters import Counters
from prefixstore.engine.engine import Engine
from prefixstore.errors import PrefixStoreError, StorageError
from prefixstore.format.keys import Tokens, page_key

log = logging.getLogger("prefixstore")

# the reason in ``stats()``
BYPASSED = "bypassed"

# the engines that the running code bypasses; each thread and each asyncio task has its own set
_bypassed: ContextVar[frozenset[Engine]] = ContextVar("prefixstore_bypassed", default=frozenset())


def miss_reason(
    engine: Engine, namespace: bytes, tokens: Tokens, page_tokens: int, *, n_matched: int, min_tokens: int
) -> str:
    """The reason to count if fewer than `min_tokens` tokens are found; `tokens` are those that may be restored.

    ``"short"`` if it has so few tokens itself, ``"evicted"`` if this process has evicted its first page, ``"diverged"``
    if some tokens are found, and otherwise ``"not_found"``. The location is not asked.
    """
    if len(tokens) < max(min_tokens, 1):
        return "short"
    if engine.evictor.has_evicted(page_key(namespace, tokens[:page_tokens].tobytes())):
        return "evicted"
    return "diverged" if n_matched else "not_found"


@contextmanager
def bypassing(engine: Engine) -> Iterator[None]:
    """A block in which prompts are neither looked up nor captured; blocks may be nested."""
    before = _bypassed.set(_bypassed.get() | {engine})
    try:
        yield
    finally:
        _bypassed.reset(before)


def is_bypassed(engine: Engine) -> bool:
    """Whether this thread or asyncio task is inside a block of `bypassing`."""
    return engine in _bypassed.get()


class Guard:
    """A block whose exceptions do not break a completion: one ends the block, and is logged and counted.

    It is counted as `fault`; a `StorageError` as `unavailable`, if that is given. The name that was `counted` is None
    without an exception.
    """

    def __init__(
        self, counters: Counters, fault: str, unavailable: str | None = None, namespace: bytes | None = None
    ) -> None:
        self._counters, self._namespace = counters, namespace
        self._fault, self._unavailable = fault, unavailable
        self.counted: str | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        name, message = self._fault, "the completion continues without the store: %s"
        if self._unavailable is not None and isinstance(error, StorageError):
            name, message = self._unavailable, "a lookup failed: %s"
        self.counted = name
        self._counters.count(name, namespace=self._namespace)
        log.warning(message, error, exc_info=None if isinstance(error, PrefixStoreError) else error)
        return True
