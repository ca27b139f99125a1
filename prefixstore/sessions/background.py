"""Runs work that would block an event loop in a thread of its own, to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Run `work` in a thread, and wait for its end, also if this task is cancelled meanwhile.

    A thread of its own: the executor of the loop may be full of threads that wait for what this one does.

    Parameters
    ----------
    work
        What to do.
    undo
        Called with its result, in a thread as well, if the task was cancelled and the result is not consumed.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        tell: Callable[[], None]
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the task
            failure = error
            tell = lambda: done.set_exception(failure)  # noqa: E731
        else:
            tell = lambda: done.set_result(result)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=run, name="prefixstore-session").start()
    is_cancelled = False
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        if done.exception() is None and undo is not None:
            result = done.result()
            await in_thread(lambda: undo(result))
        raise asyncio.CancelledError
    return done.result()
