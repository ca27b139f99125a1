"""The one server behind the proxy, to which requests are passed on."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeAlias

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from prefixstore.server.refused import RefusedError

# a name: it listens on a socket
SERVER_URL: Final = "http://llama-server"
# as aiohttp reads them: what is not UTF-8 has surrogates
Headers: TypeAlias = Mapping[str, str]

# Between two neighbours only (RFC 9110, 7.6.1); and what the next connection says itself.
HOP_BY_HOP: Final = (
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)
# by which the server authenticates a client
CREDENTIALS: Final = ("authorization", "x-api-key")
# What aiohttp would add to what a client has sent.
ADDED: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
CONNECT_SECONDS: Final = 5.0
ASK_SECONDS: Final = 5.0
# Bytes of a line of the head of an answer.
LONGEST_LINE: Final = 1 << 16


class UpstreamError(RefusedError):
    """The server did not respond, or not completely: the connection broke, or what came was not HTTP."""

    def __init__(self, message: str = "the server does not answer; it may be restarting", status: int = 503) -> None:
        super().__init__(message, status)


class UpstreamTimeoutError(UpstreamError):
    """The server was silent for too long."""

    def __init__(self) -> None:
        super().__init__("the server has not answered in time", 504)


@dataclass(frozen=True)
class Reply:
    """A complete response."""

    status: int
    content_type: str
    content: bytes

    @property
    def is_ok(self) -> bool:
        """Whether the status is 200."""
        return self.status == HTTPStatus.OK

    def json(self) -> Any:
        """The content. Raises `ValueError` if it is not JSON."""
        return json.loads(self.content)


class Upstream:
    """Passes requests on, unbuffered, and asks the server itself. Nothing in a request leads to another server.

    The server listens on `socket`; `timeout` is how many seconds it waits for its next byte.
    """

    def __init__(self, socket: Path, *, timeout: float) -> None:
        self.socket, self._timeout = socket, timeout
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        # made in the event loop
        if self._opened is None:
            # llama-server closes some connections after a streamed answer without having said so, and the next request
            # on one of them would fail; one that is kept open keeps one of its threads
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self.socket), force_close=True, limit=0),
                # proxies of the environment would see the prompts
                trust_env=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=ADDED,
                max_line_size=LONGEST_LINE,
                max_field_size=LONGEST_LINE,
            )
        return self._opened

    async def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.close()

    @staticmethod
    def credentials(headers: Headers) -> dict[str, str]:
        """The headers by which the server authenticates a client."""
        return {name: headers[name] for name in CREDENTIALS if name in headers}

    @contextlib.asynccontextmanager
    async def send(
        self, method: str, target: bytes, headers: Headers, content: bytes | None, *, timeout: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; of the response only the head has been read. After the block its connection is closed.

        So the server sees that a client has gone away: its task is cancelled, and leaves the block. With a `timeout`,
        all of the answer must have come after this many seconds.

        Raises
        ------
        UpstreamError
            If the server does not answer.
        RefusedError
            If the target, the method or a header cannot be sent.
        """
        kept = end_to_end(headers, ("expect", "content-length", "host"))
        # as a file: what is large is written in parts
        data = None if content is None else io.BytesIO(content)
        silent = self._timeout if timeout is None else None
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS, sock_read=silent)
        with _translated():
            url = URL(SERVER_URL + target.decode("ascii"), encoded=True)
            response = await self._session.request(
                method, url, headers=kept, data=data, allow_redirects=False, timeout=limit
            )
        try:
            yield response
        finally:
            response.close()

    async def ask(
        self,
        path: str,
        headers: Headers | None = None,
        content: bytes | None = None,
        *,
        timeout: float = ASK_SECONDS,
    ) -> Reply:
        """Send the server a small request; with content, by POST as JSON.

        Raises
        ------
        UpstreamError
            If the server does not answer, or not to the end in time.
        """
        method, kept = "GET" if content is None else "POST", dict(headers or {})
        if content is not None:
            kept["content-type"] = "application/json"
        async with self.send(method, path.encode(), kept, content, timeout=timeout) as answer:
            text = b"".join([chunk async for chunk in chunks_of(answer)])
        return Reply(answer.status, answer.headers.get("content-type", ""), text)

    async def is_healthy(self) -> bool:
        """Whether it answers that it is."""
        with contextlib.suppress(UpstreamError):
            return (await self.ask("/health")).is_ok
        return False


async def chunks_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body of a response as it comes. Raises `UpstreamError` if it breaks off."""
    with _translated():
        async for chunk in response.content.iter_any():
            yield chunk


def end_to_end(headers: Headers, without: Sequence[str] = ()) -> CIMultiDict[str]:
    """The headers without those for one connection, and without others, as they can be sent."""
    kept = CIMultiDict((name, _sendable(value)) for name, value in headers.items())
    named = [token.strip() for value in kept.getall("connection", ()) for token in value.split(",")]
    for name in (*HOP_BY_HOP, *named, *without):
        kept.popall(name, None)
    return kept


def _sendable(value: str) -> str:
    """A value that aiohttp sends, which leaves out surrogates: then one key could become another."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode(errors="surrogateescape").decode("latin-1")
    return value


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except asyncio.TimeoutError as error:
        raise UpstreamTimeoutError from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamError from error
    except ValueError as error:
        # a target, a method or a header that cannot be sent
        raise RefusedError("the request is not valid in HTTP") from error
