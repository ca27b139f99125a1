"""Requests that bypass a store: they are neither looked up in it nor captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["BYPASSED", "Bypass"]

# the reason in ``stats()``
BYPASSED = "bypassed"

# the marks of the stores that the running code bypasses; each thread and each asyncio task has its own
_marks: ContextVar[frozenset[object]] = ContextVar("prefixstore_bypassed", default=frozenset())


class Bypass:
    """Whether the running code bypasses one store."""

    def __init__(self) -> None:
        self._mark = object()

    @property
    def is_active(self) -> bool:
        """Whether this thread, or this asyncio task, is inside a block of `on`."""
        return self._mark in _marks.get()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Bypass the store in the block. Blocks may be nested; the bypass ends with the outermost one."""
        before = _marks.set(_marks.get() | {self._mark})
        try:
            yield
        finally:
            _marks.reset(before)
