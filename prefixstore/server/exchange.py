"""One HTTP request of a client and the response to it, in ASGI's terms."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.datastructures import Headers

from prefixstore.server.bodies import BodyBudget
from prefixstore.server.outbox import MESSAGE_BYTES, ClientGoneError, Message, Outbox

__all__ = ["CUT", "BodyTooLargeError", "Exchange"]

# How long a client may neither read nor send: a request that waits for it may hold a slot.
CLIENT_SECONDS: Final = 60.0
# How long what has come of an answer is passed on after the server has failed.
FLUSH_SECONDS: Final = 5.0
# Where the scope of a request has what closes its connection in the middle of the answer.
CUT: Final = "prefixstore.cut"


class BodyTooLargeError(Exception):
    """The body of a request is longer than allowed."""


class Exchange:
    """A request and its response.

    Parameters
    ----------
    scope, receive, send
        As ASGI gives them.
    max_body
        Bytes that the body of the request may have.
    budget
        Bytes that the bodies of all requests may have together.

    Attributes
    ----------
    has_begun
        Whether the answer has begun.
    has_ended
        Whether its end is being sent: the client closes the connection after that as it likes.
    """

    def __init__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
        max_body: int,
        budget: BodyBudget,
    ) -> None:
        self._cut: Callable[[], None] | None = scope.get(CUT)
        self._receive, self._max_body, self._budget = receive, max_body, budget
        self._outbox = Outbox(self._sent(send), patience=CLIENT_SECONDS)
        self._n_taken = 0
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers = Headers(scope=scope)
        query = scope["query_string"]
        self.target: bytes = scope.get("raw_path", self.path.encode()) + (b"?" + query if query else b"")
        self.has_begun = self.has_ended = False
        self._is_read = asyncio.Event()

    @property
    def has_body(self) -> bool:
        """Whether the request has a body."""
        return self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it comes.

        Raises
        ------
        BodyTooLargeError
            If it is longer than allowed.
        BodiesFullError
            If those of all requests are.
        ClientGoneError
            If the client closes the connection before its end, or sends nothing for a minute.
        """
        size = 0
        while True:
            try:
                message = await asyncio.wait_for(self._receive(), CLIENT_SECONDS)
            except asyncio.TimeoutError:
                raise ClientGoneError from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > self._max_body:
                raise BodyTooLargeError
            self._budget.take(len(chunk))
            self._n_taken += len(chunk)
            if chunk:
                yield chunk
            if not message.get("more_body", False):
                self._is_read.set()
                return

    async def body(self) -> bytes:
        """The whole body. Raises as `chunks`."""
        length = self.headers.get("content-length", "")
        if length.isdecimal():
            if int(length) > self._max_body:
                raise BodyTooLargeError
            self._budget.check(int(length))
        return b"".join([chunk async for chunk in self.chunks()])

    async def disconnected(self) -> None:
        """Return when the client has closed the connection. The body must be read, by this or by others."""
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def nothing_to_read(self) -> None:
        """Note that the body will not be read."""
        self._is_read.set()

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Have the status line and the headers of the response sent."""
        self.has_begun = True
        await self._outbox.put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes, *, more: bool = True) -> None:
        """Have a part of the response sent; wait only if the client leaves too much of it unread.

        Raises
        ------
        ClientGoneError
            If it reads too slowly.
        """
        await self._outbox.put(
            {"type": "http.response.body", "body": chunk, "more_body": more}, MESSAGE_BYTES + len(chunk)
        )

    async def emptied(self) -> None:
        """Return when the client has read all of the response so far; if it does not, its task is cancelled."""
        await self._outbox.emptied()

    async def flush(self) -> None:
        """Send, for a moment, what has arrived of a response that will not be completed."""
        with contextlib.suppress(asyncio.TimeoutError, ClientGoneError):
            await asyncio.wait_for(self._outbox.emptied(), FLUSH_SECONDS)

    async def cut(self) -> None:
        """Send what has come of an answer that has no end, and close the connection: the client sees that it is cut.

        Raises
        ------
        ConnectionAbortedError
            If the connection cannot be closed otherwise.
        """
        await self.flush()
        if self._cut is None:
            raise ConnectionAbortedError
        self._cut()

    async def close(self) -> None:
        """Send nothing more, and release the memory of the body."""
        self._budget.give_back(self._n_taken)
        self._n_taken = 0
        await self._outbox.close()

    def _sent(self, send: Callable[[Message], Awaitable[None]]) -> Callable[[Message], Awaitable[None]]:
        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.body":
                self.has_ended = not message["more_body"]
            await send(message)

        return pass_on

    async def answer(self, status: int, content: bytes, content_type: str, **headers: str) -> None:
        """Send a complete response."""
        listed = [(b"content-type", content_type.encode()), (b"content-length", str(len(content)).encode())]
        listed += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self.begin(status, listed)
        await self.write(b"" if self.method == "HEAD" else content, more=False)

    async def refuse(self, status: int, kind: str, message: str, **headers: str) -> None:
        """Answer with an error, in the form of llama-server."""
        error = {"error": {"code": status, "message": message, "type": kind}}
        await self.answer(status, json.dumps(error).encode(), "application/json; charset=utf-8", **headers)
