"""The bodies of requests: a limit for their total memory, and parsing of large ones outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["BodiesFullError", "BodyBudget", "aside"]

T = TypeVar("T")

# Smaller inputs are read faster than a thread is asked.
LARGE = 64 << 10
# One: what JSON becomes in memory can be many times as large as its text, and only one such is made at a time.
_reader = ThreadPoolExecutor(1, thread_name_prefix="prefixstore-parse")


class BodiesFullError(Exception):
    """The bodies of the requests in progress have reached their limit."""


class BodyBudget:
    """The limit for the bodies of all requests together, in bytes. Used in the event loop only.

    Parameters
    ----------
    limit
        How many.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def check(self, n: int) -> None:
        """Raise `BodiesFullError` if so many bytes would exceed the limit now."""
        if self.used + n > self.limit:
            raise BodiesFullError

    def take(self, n: int) -> None:
        """Take so many bytes. Raises `BodiesFullError`."""
        self.check(n)
        self.used += n

    def give_back(self, n: int) -> None:
        """Give back bytes that were taken."""
        self.used -= n


async def aside(size: int, work: Callable[[], T]) -> T:
    """Do work on an input of this size, in a thread if it is large, so that other requests continue.

    The parser of JSON itself lets no other thread run; `prompts.parse` bounds how long that may take.
    """
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_reader, work)
