"""An event loop whose clock goes on only when nobody has anything to do, and then to the moment for which one waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc] - one of several classes
    """Does not wait for a moment: it tells how long that would have been."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else 0)
        if not found and timeout is not None:
            self.waited += max(timeout, 0.0)
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.waited


def run(scene: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in a loop for which a second takes no time, and a pause of the machine none either."""
    loop = _Loop()
    try:
        return loop.run_until_complete(scene)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
