"""One HTTP request of a client and the answer to it, with the limits that aiohttp lacks."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from aiohttp import ClientConnectionResetError, web

from prefixstore.server.refused import KINDS, OTHER_KIND, RefusedError
from prefixstore.server.upstream import Headers

log = logging.getLogger("prefixstore.server")

T = TypeVar("T")

# How long a client may neither read nor send: a request that waits for it may hold a slot.
CLIENT_SECONDS: Final = 60.0
# Bytes of an answer that wait for its client: a slot is given back while the end of its answer is still being read.
ROOM: Final = 1 << 20
# The server goes on when this many of them were read.
READ: Final = 1 << 16
# With more fields in a head, or longer lines, llama-server closes the connection, mostly before its answer is read.
MAX_FIELDS: Final = 90
MAX_LINE: Final = 8000
RETRY_SECONDS: Final = "2"
# It tells each fault of a client with a traceback.
aiohttp_log = logging.getLogger("prefixstore.server.aiohttp")
aiohttp_log.setLevel(logging.CRITICAL + 1)


def server_of(answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> web.Server:
    """What has aiohttp answer requests, with the limits that it has itself."""
    return web.Server(
        answer,
        # if the client goes away
        handler_cancellation=True,
        # a target may contain secrets
        access_log=None,
        auto_decompress=False,
        # also for the first head
        keepalive_timeout=CLIENT_SECONDS,
        logger=aiohttp_log,
        max_field_size=MAX_LINE,
        max_headers=MAX_FIELDS,
        max_line_size=MAX_LINE,
    )


class BodyBudget:
    """The limit for the bodies of all requests together, in bytes. Used in the event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def check(self, n: int) -> None:
        """Raise `RefusedError` if this many bytes would exceed the limit now."""
        if self.used + n > self.limit:
            raise RefusedError(f"the requests at present have more than {self.limit} bytes (--max-bodies)", 503)

    def take(self, n: int) -> None:
        """Take this many bytes. Raises `RefusedError`."""
        self.check(n)
        self.used += n

    def give_back(self, n: int) -> None:
        """Give back bytes that were taken."""
        self.used -= n


class Exchange:
    """A request and its answer. If the client goes away, aiohttp cancels the task that answers.

    `target` is as it was sent, and `path` is decoded. The answer says in the header ``x-prefixstore`` what the store
    did for the prompt (`told`). A body may have `max_body` bytes, and the bodies of all requests what `budget` allows.
    """

    def __init__(self, request: web.BaseRequest, max_body: int, budget: BodyBudget) -> None:
        self._request, self._max_body, self._budget = request, max_body, budget
        # aiohttp forgets it when it closes it, and what is left for a client then is still in its memory
        self._transport = request.transport
        self._n_taken = 0
        # a fragment is for clients only, and the server would leave it out
        target = request.raw_path.partition("#")[0]
        self.method = request.method
        self.target = target.encode(errors="surrogateescape")
        self.path = unquote(target.partition("?")[0])
        self.headers: Headers = request.headers
        self.has_begun = False
        self.told: str | None = None
        self._response: web.StreamResponse = web.Response(status=500)
        # how long the server has waited for the client to read
        self._waited = 0.0

    # -- the request ---------------------------------------------------------------------------------------------------

    @property
    def has_body(self) -> bool:
        """Whether the request has a body."""
        return self._request.body_exists

    async def body(self) -> bytes:
        """The whole body.

        Raises
        ------
        RefusedError
            If it is longer than allowed, or those of all requests are.
        web.RequestPayloadError
            If it is not sent as HTTP wants it.
        """
        length, content = self._request.content_length, self._request.content
        if length is not None:
            self._check_size(length)
            self._budget.check(length)
        if self.headers.get("expect", "").lower() == "100-continue" and not content.is_eof():
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunks: list[bytes] = []
        while not content.at_eof():
            chunk = content.read_nowait() or await self._in_time(content.readany(), CLIENT_SECONDS)
            self._budget.take(len(chunk))
            self._n_taken += len(chunk)
            self._check_size(self._n_taken)
            chunks.append(chunk)
        return b"".join(chunks)

    def _check_size(self, n: int) -> None:
        if n > self._max_body:
            raise RefusedError(f"the body has more than {self._max_body} bytes (--max-body)", 413)

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status line and the headers of an answer whose body is written in parts."""
        self.has_begun = True
        response = web.StreamResponse(status=status, headers=headers)
        if self.told is not None:
            response.headers["x-prefixstore"] = self.told
        self._use(response)
        await self._response.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        """Send a part of the answer; wait only if the client leaves too much of it unread, and for a minute in all.

        It must not keep a slot by reading a little now and then. After the end of its answer it may.
        """
        n_left = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if n_left + len(chunk) < ROOM - READ:
            await self._response.write(chunk)
            return
        began = time.monotonic()
        await self._in_time(self._response.write(chunk), CLIENT_SECONDS - self._waited)
        self._waited += time.monotonic() - began

    def answer(self, status: int, content: bytes, content_type: str, **headers: str) -> None:
        """Set the whole answer, which `finish` sends."""
        listed = {name.replace("_", "-"): value for name, value in headers.items()}
        self._use(
            web.Response(
                status=status, body=content, headers={"content-type": content_type, "server": "prefixstore", **listed}
            )
        )

    def refuse(self, status: int, message: str, **headers: str) -> None:
        """Answer with an error, in the form of llama-server; an answer that has begun is cut."""
        if self.has_begun:
            log.warning("an answer is cut short: %s", message)
            self.cut()
            return
        error = {"error": {"code": status, "message": message, "type": KINDS.get(status, OTHER_KIND)}}
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
            headers["retry_after"] = RETRY_SECONDS
        # a page of another origin may read it, as it may read llama-server's errors
        headers["access_control_allow_origin"] = "*"
        self.answer(status, json.dumps(error).encode(), "application/json; charset=utf-8", **headers)

    def cut(self) -> None:
        """End an answer that has no end: the client gets what has come of it, and sees that it is cut."""
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """Release the memory of the body."""
        self._budget.give_back(self._n_taken)
        self._n_taken = 0

    async def finish(self) -> web.StreamResponse:
        """Send what is left of the answer, and return it for aiohttp."""
        if self._transport is not None and not self._transport.is_closing():
            await self._response.prepare(self._request)
            await self._response.write_eof()
        return self._response

    def _use(self, response: web.StreamResponse) -> None:
        self._response = response
        named = self._request.headers
        if self.method == "CONNECT" or "transfer-encoding" in named or "upgrade" in named:
            # What follows the chunks of a body, or an offer of another protocol, is read by aiohttp as the head of the
            # next request, or is lost. It could name another tenant.
            response.force_close()
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.set_write_buffer_limits(ROOM, ROOM - READ)
        connection = self._transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Linux itself disconnects a client that takes nothing of what is left for it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * CLIENT_SECONDS))

    async def _in_time(self, step: Coroutine[Any, Any, T], seconds: float) -> T:
        """What a step returns that waits for the client, which is disconnected if it takes too long."""
        try:
            return await asyncio.wait_for(step, seconds)
        except asyncio.TimeoutError:
            log.warning("a client keeps its request from going on: disconnecting it")
            if self._transport is not None:
                self._transport.abort()
            raise ClientConnectionResetError from None
