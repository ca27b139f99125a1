"""An engine whose queue a test may close while it still looks at the store."""

from __future__ import annotations

from typing import Any

from prefixstore.engine.engine import Engine

__all__ = ["Writer"]


class Writer:
    """The writing side of an engine: everything that the engine has, and a `close` that leaves the backend open."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        self.engine._queue.close()
        if not self.engine.read_only:
            self.engine.sync()
