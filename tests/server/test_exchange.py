"""Requests as aiohttp reads them, and their answers: slow clients, bodies, heads without end, connections that end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from prefixstore.server import exchange as exchange_module
from prefixstore.server.exchange import (
    MAX_FIELDS,
    MAX_LINE,
    BodyBudget,
    Exchange,
    server_of,
)
from prefixstore.server.prompts import LARGE, aside
from prefixstore.server.refused import RefusedError

BODY = b'{"prompt":"a"}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"3\r\n" + BODY[:3] + b"\r\nb\r\n" + BODY[3:] + b"\r\n0\r\nX-Tenant: b\r\n\r\n"
PLAIN = b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n"

Answer = Callable[[Exchange], Awaitable[None]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _tell(exchange: Exchange) -> None:
    """Answer with what has come of a request."""
    body = await exchange.body()
    names = sorted({name.lower() for name in exchange.headers})
    content = json.dumps([exchange.method, exchange.path, body.decode(), names]).encode()
    exchange.answer(200, content, "application/json")


def _with_server(
    use: Callable[[Callable[[], Awaitable[Streams]]], Awaitable[None]],
    answer: Answer = _tell,
    budget: BodyBudget | None = None,
    max_body: int = 1 << 20,
) -> None:
    budget = budget or BodyBudget(1 << 30)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        exchange = Exchange(request, max_body, budget)
        try:
            await answer(exchange)
        finally:
            exchange.close()
        return await exchange.finish()

    async def run() -> None:
        runner = web.ServerRunner(server_of(handle), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        writers: list[asyncio.StreamWriter] = []

        async def connect() -> Streams:
            # what the sockets take of an answer is little, and known
            near = socket.socket()
            near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            near.setblocking(False)
            await asyncio.get_running_loop().sock_connect(near, runner.addresses[0])
            reader, writer = await asyncio.open_connection(sock=near, limit=1 << 16)
            writers.append(writer)
            return reader, writer

        try:
            await asyncio.wait_for(use(connect), 120)
        finally:
            for writer in writers:
                writer.close()
            await runner.cleanup()

    asyncio.run(run())


async def _answer(reader: asyncio.StreamReader) -> Any:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
    return json.loads(await reader.readexactly(int(length)))


# -- what is read -----------------------------------------------------------------------------------------------------


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAA\r\nUpgrade: %s\r\n"


@pytest.mark.parametrize(
    ("offer", "framing", "sent"),
    [
        *((UPGRADE % name, *body) for name in (b"h2c", b"websocket") for body in ((LENGTH, BODY), (CHUNKED, CHUNKS))),
        (b"", CHUNKED, CHUNKS),
    ],
)
@pytest.mark.parametrize("n_parts", [1, 2, 10_000])
def test_what_follows_a_body_in_chunks_or_with_an_offer_of_another_protocol_is_part_of_no_other_request(
    offer: bytes, framing: bytes, sent: bytes, n_parts: int
):
    """It could be another tenant's name, and aiohttp has it in the head of the next request on the connection."""
    head = b"POST /a%20b?c HTTP/1.1\r\nHost: x\r\n" + offer + framing
    parts = {1: [head + sent + PLAIN], 2: [head, sent + PLAIN]}.get(n_parts, [bytes([one]) for one in head + sent])

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        with suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        *told, names = await _answer(reader)
        assert (told, "x-tenant" in names) == (["POST", "/a b", BODY.decode()], False)
        # it is the last one on its connection: aiohttp may lose what comes next
        assert await reader.read() == b""

    _with_server(use)


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"GET / HTTP/1.1\r\nX: ", b"a" * 1024),
        (b"GET /", b"a" * 1024),
        (b"GET / HTTP/1.1\r\n", b"x: a\r\n" * 128),
        (b"POST / HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"1\r\na\r\n0\r\nX: ", b"a" * 1024),
    ],
)
def test_a_head_without_end_ends_the_connection(
    head: bytes, part: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    # what follows a body is read for as long as a client may send nothing of that
    monkeypatch.setattr(exchange_module, "CLIENT_SECONDS", 0.5)

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        _, writer = await connect()
        writer.write(head)
        # what is still on its way then may cost the client the answer
        with suppress(ConnectionError):
            for _ in range(64 * MAX_FIELDS * MAX_LINE // len(part)):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            pytest.fail("it takes all of it")

    _with_server(use)
    # aiohttp would tell each with a traceback
    assert [record.name for record in caplog.records] in ([], ["prefixstore.server"])


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"{"])
def test_a_client_that_sends_nothing_more_is_disconnected(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange_module, "CLIENT_SECONDS", 0.2)

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(sent)
        with suppress(ConnectionError):
            assert await reader.read() == b""

    _with_server(use)


def test_a_body_is_asked_for_if_the_client_waits_for_that():
    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n" + LENGTH)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await _answer(reader))[2] == BODY.decode()

    _with_server(use)


def test_the_bodies_of_all_requests_have_a_limit_together_and_give_it_back():
    budget, errors = BodyBudget(250), list[int]()
    held = asyncio.Event()

    async def hold(exchange: Exchange) -> None:
        try:
            assert len(await exchange.body()) == 100
        except RefusedError as error:
            errors.append(error.status)
        else:
            await held.wait()
        exchange.answer(200, b"{}", "application/json")

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        first = [await connect() for _ in range(2)]
        for _, writer in first:
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"x" * 100)
        while budget.used < 200:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        for sent in (
            # said in advance: nothing is read
            b"Content-Length: 100\r\n\r\n",
            # found out while reading
            b"Transfer-Encoding: chunked\r\n\r\n64\r\n" + b"x" * 100 + b"\r\n",
            b"Content-Length: 2000\r\n\r\n",
        ):
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + sent)
            await _answer(reader)
        assert budget.used == 200
        held.set()
        for reader, _ in first:
            await _answer(reader)

    _with_server(use, hold, budget, max_body=1000)
    assert errors == [503, 503, 413]
    assert budget.used == 0


def test_a_body_that_is_too_large_is_taken_in_so_that_its_refusal_can_be_read():
    async def refuse(exchange: Exchange) -> None:
        with pytest.raises(RefusedError) as raised:
            await exchange.body()
        exchange.refuse(raised.value.status, str(raised.value))

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        size = 8 << 20
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (size, b"x" * size)
        for head, body in ((b"Content-Length: %d\r\n\r\n" % size, b"x" * size), (CHUNKED, chunks)):
            reader, writer = await connect()
            # as a client does that reads nothing before it has sent all
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + head + body)
            await writer.drain()
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            writer.close()

    _with_server(use, refuse, max_body=1 << 20)


def test_others_go_on_while_a_large_body_is_read():
    async def scene() -> None:
        began, goes_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> str:
            loop.call_soon_threadsafe(began.set)
            asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(120)
            return "done"

        task = asyncio.create_task(aside(LARGE, work))
        await began.wait()
        goes_on.set()
        assert await task == "done"
        assert await aside(1, lambda: "at once") == "at once"

    asyncio.run(asyncio.wait_for(scene(), 120))


# -- what is answered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_takes_too_little_does_not_hold_the_answer_for_ever(monkeypatch: pytest.MonkeyPatch, reads: bool):
    """One that takes nothing is disconnected by Linux, also while the answer waits for the server."""
    monkeypatch.setattr(exchange_module, "CLIENT_SECONDS", 0.5)
    if not reads:
        # more than the sockets take, and less than would be waited for
        monkeypatch.setattr(exchange_module, "ROOM", 16 << 20)
    ended = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        try:
            await exchange.begin(200, {})
            if not reads:
                await exchange.write(b"x" * (8 << 20))
                await asyncio.Event().wait()
            while True:
                await exchange.write(b"x" * 10_000)
        finally:
            ended.set()

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(PLAIN)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while reads:
                await reader.readexactly(1 << 16)
                await asyncio.sleep(0.02)
        await ended.wait()

    _with_server(use, stream)
