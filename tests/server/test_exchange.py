"""A request and its answer: slow clients, and how much the bodies of all requests may take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from prefixstore.server.bodies import LARGE, BodiesFullError, BodyBudget, aside
from prefixstore.server.exchange import BodyTooLargeError, Exchange
from prefixstore.server.outbox import ClientGoneError, Outbox
from tests.support import virtual_time

Message = MutableMapping[str, Any]


class Client:
    """Takes messages when it is told to."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.reads = asyncio.Event()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.taken.append(message)


def test_the_answer_of_a_client_that_does_not_read_is_kept_for_it():
    async def scene() -> None:
        client = Client()
        outbox = Outbox(client.send, patience=60, room=100)
        for i in range(10):
            await outbox.put({"n": i}, 10)
        assert client.taken == []
        client.reads.set()
        await outbox.emptied()
        assert [message["n"] for message in client.taken] == list(range(10))
        await outbox.close()

    asyncio.run(asyncio.wait_for(scene(), 120))


def test_a_message_larger_than_the_room_is_sent_alone():
    async def scene() -> None:
        client = Client()
        client.reads.set()
        outbox = Outbox(client.send, patience=60, room=10)
        for i in range(3):
            await outbox.put({"n": i}, 1000)
        await outbox.emptied()
        assert len(client.taken) == 3
        await outbox.close()

    asyncio.run(asyncio.wait_for(scene(), 120))


def test_a_client_that_reads_a_little_now_and_then_does_not_hold_the_answer_for_ever():
    """Each message is taken in time, and all of them together take longer than a client may."""

    async def send(_: Message) -> None:
        await asyncio.sleep(0.05)

    async def scene() -> None:
        outbox = Outbox(send, patience=0.3, room=10)

        async def answer() -> None:
            for _ in range(1000):
                await outbox.put({}, 10)

        with pytest.raises(ClientGoneError):
            await answer()
        await outbox.close()

    virtual_time.run(scene())


def test_a_client_that_takes_nothing_ends_the_task_that_answers_even_while_that_waits_for_the_server():
    async def scene() -> None:
        outbox = Outbox(Client().send, patience=0.05)

        async def answer() -> None:
            await outbox.put({}, 1)
            await asyncio.Event().wait()

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(answer())
        await outbox.close()

    virtual_time.run(scene())


def exchange(parts: list[bytes], budget: BodyBudget, *, length: int | None = None, max_body: int = 1000) -> Exchange:
    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    scope = {"method": "POST", "path": "/completion", "headers": headers, "query_string": b""}
    send: Callable[[Message], Awaitable[None]] = Client().send
    return Exchange(scope, receive, send, max_body, budget)


def test_the_bodies_of_all_requests_have_a_limit_together_and_give_it_back():
    async def scene() -> None:
        budget = BodyBudget(250)
        held = [exchange([b"x" * 50, b"x" * 50], budget) for _ in range(2)]
        for one in held:
            assert len(await one.body()) == 100
        assert budget.used == 200
        # said in advance: nothing is read
        with pytest.raises(BodiesFullError):
            await exchange([], budget, length=100).body()
        # found out while reading
        late = exchange([b"x" * 40, b"x" * 40], budget)
        with pytest.raises(BodiesFullError):
            await late.body()
        await late.close()
        assert budget.used == 200
        for one in held:
            await one.close()
            await one.close()
        assert budget.used == 0
        with pytest.raises(BodyTooLargeError):
            await exchange([], budget, length=2000).body()

    asyncio.run(asyncio.wait_for(scene(), 120))


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
