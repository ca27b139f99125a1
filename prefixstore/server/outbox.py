"""The part of a response that has arrived from the server, and that the client has not read yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["ClientGoneError", "Outbox"]

Message = MutableMapping[str, Any]

log = logging.getLogger("prefixstore.server")

# Bytes of an answer that wait for its client: a slot is given back while the end of its answer is still being read.
ROOM = 1 << 20
# bytes that a message takes in memory besides its content
MESSAGE_BYTES = 512


class ClientGoneError(Exception):
    """The client has closed the connection, or was too slow."""


class Outbox:
    """Sends messages in its own task, so that a slow client does not hold the slot of its response.

    Parameters
    ----------
    send
        Sends a message; returns when the client has taken most of what was sent before.
    patience
        Seconds that one message may take. While the outbox is full, the client may take as long in all, and not for
        each message: it must not keep a slot by reading a little now and then.
    room
        Bytes that may wait.
    """

    def __init__(self, send: Callable[[Message], Awaitable[None]], *, patience: float, room: int = ROOM) -> None:
        self._send, self._patience, self._room = send, patience, room
        self._left = patience
        self._messages: deque[tuple[Message, int]] = deque()
        self._size = 0
        self._filled, self._taken = asyncio.Event(), asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        # when the message began that is being sent; a timer for each of them would take as long as sending it
        self._began: float | None = None

    async def put(self, message: Message, size: int = 0) -> None:
        """Queue a message of so many bytes; wait only if the outbox is full.

        The first call is made by the task that answers: it is cancelled if the client does not take what is sent.

        Raises
        ------
        ClientGoneError
            If the client takes too long.
        """
        if self._sender is None:
            self._sender = asyncio.ensure_future(self._run_in_time())
            owner = asyncio.current_task()
            assert owner is not None
            self._sender.add_done_callback(lambda sender: _end(sender, owner))
        while self._size and self._size + size > self._room:
            await self._wait_for_room()
        self._messages.append((message, size))
        self._size += size
        self._filled.set()

    async def _wait_for_room(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        before = len(self._messages)
        while len(self._messages) == before:
            self._taken.clear()
            self._check()
            try:
                await asyncio.wait_for(self._taken.wait(), max(self._left - (loop.time() - began), 0.001))
            except asyncio.TimeoutError:
                log.warning("a client reads its answer too slowly: disconnecting it")
                raise ClientGoneError from None
        self._left -= loop.time() - began

    def _check(self) -> None:
        if self._sender is not None and self._sender.done():
            raise ClientGoneError

    async def emptied(self) -> None:
        """Return when everything was sent.

        Raises
        ------
        ClientGoneError
            If the client takes too long for a message.
        """
        while self._messages:
            self._taken.clear()
            self._check()
            await self._taken.wait()

    async def close(self) -> None:
        """Send nothing more."""
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _run_in_time(self) -> None:
        """Send, until a message takes too long."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        timer: asyncio.TimerHandle | None = None
        is_late = False

        def look() -> None:
            nonlocal is_late, timer
            now = loop.time()
            ends = (now if self._began is None else self._began) + self._patience
            if now < ends:
                timer = loop.call_at(ends, look)
                return
            is_late = True
            log.warning("a client has read none of its answer for %.0f s: disconnecting it", self._patience)
            task.cancel()

        look()
        try:
            await self._run(loop)
        except asyncio.CancelledError:
            if is_late:
                raise ClientGoneError from None
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._taken.set()

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            while not self._messages:
                self._filled.clear()
                await self._filled.wait()
            message, size = self._messages[0]
            self._began = loop.time()
            await self._send(message)
            self._began = None
            self._messages.popleft()
            self._size -= size
            self._taken.set()


def _end(sender: asyncio.Task[None], owner: asyncio.Task[Any]) -> None:
    """The sender has ended: if not by `close`, the rest of the answer is not read."""
    with contextlib.suppress(asyncio.CancelledError):
        if sender.exception() is not None:
            owner.cancel()
