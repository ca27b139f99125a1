"""How connections of clients are read where httptools is installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from prefixstore.server.client_protocol import MAX_HEAD, ClientProtocol

BODY = b'{"prompt":"a"}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"3\r\n" + BODY[:3] + b"\r\nb\r\n" + BODY[3:] + b"\r\n0\r\nX-Tenant: b\r\n\r\n"


async def _tell(scope: Any, receive: Any, send: Any) -> None:
    """Answer with what has come of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = sorted({name.decode() for name, _ in scope["headers"]})
    content = json.dumps([scope["method"], scope["path"], body.decode(), names]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


def _with_server(
    use: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], app: Any = _tell
) -> None:
    async def run() -> None:
        config = uvicorn.Config(app, ws="none", log_config=None, http=ClientProtocol)
        config.load()
        assert config.http_protocol_class is ClientProtocol
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: ClientProtocol(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            await asyncio.wait_for(use(reader, writer), 120)
        finally:
            writer.close()
            server.close()

    asyncio.run(run())


async def _answer(reader: asyncio.StreamReader) -> Any:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
    return json.loads(await reader.readexactly(int(length)))


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize(("framing", "sent"), [(LENGTH, BODY), (CHUNKED, CHUNKS)])
@pytest.mark.parametrize("n_parts", [1, 2, 10_000])
def test_the_body_of_a_request_that_offers_another_protocol_is_read(
    offer: bytes, framing: bytes, sent: bytes, n_parts: int
):
    head = b"POST /a%20b?c HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer
    head += b"\r\nHTTP2-Settings: AAMAAABkAA\r\n" + framing
    parts = {1: [head + sent], 2: [head, sent]}.get(n_parts, [bytes([one]) for one in head + sent])

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # the connection stays, and both kinds may follow each other on it
        for _ in range(2):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            method, path, body, names = await _answer(reader)
            assert (method, path, body) == ("POST", "/a b", BODY.decode())
            # neither the offer, nor what follows the body, which could be another tenant's name
            assert "host" in names
            assert not {"upgrade", "x-tenant"} & set(names)
            writer.write(b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await _answer(reader) == ["GET", "/plain", "", ["host"]]

    _with_server(use)


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"GET / HTTP/1.1\r\nX: ", b"a" * 1024),
        (b"GET / HTTP/1.1\r\n", b"x: a\r\n" * 128),
        (b"POST / HTTP/1.1\r\n" + CHUNKED + b"1\r\na\r\n0\r\nX: ", b"a" * 1024),
        (b"POST / HTTP/1.1\r\n" + CHUNKED + b"1;", b"a" * 1024),
    ],
)
def test_a_head_without_end_ends_the_connection(head: bytes, part: bytes, caplog: pytest.LogCaptureFixture):
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        # what is still on its way then may cost the client the answer
        with suppress(ConnectionError):
            for _ in range(64 * MAX_HEAD // len(part)):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            pytest.fail("it takes all of it")

    _with_server(use)
    assert [record.message for record in caplog.records] == ["The head of the request is too large."]


def test_a_large_body_is_no_large_head():
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (4 * MAX_HEAD))
        writer.write(b"a" * 4 * MAX_HEAD)
        assert len((await _answer(reader))[2]) == 4 * MAX_HEAD

    _with_server(use)


def test_a_tunnel_is_refused():
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n")
        assert await reader.read(12) == b"HTTP/1.1 400"

    _with_server(use)


def test_all_requests_of_a_client_that_goes_away_end():
    ended = asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/first"
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"a" * 1000, "more_body": True})
                await asyncio.sleep(0.001)

        writing = asyncio.ensure_future(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        ended.set()

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readexactly(1000)
        writer.transport.abort()
        await ended.wait()

    _with_server(use, stream)
