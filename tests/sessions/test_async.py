"""Sessions in an event loop: it goes on, and a task that is cancelled leaves the `Llama` to the next one."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from llama_cpp import LogitsProcessorList

from prefixstore import BusyError, MisuseError
from tests.sessions.conftest import SMALL
from tests.support.models import answer, prompt
from tests.support.timeouts import wait_for


async def turn(sessions, name, tokens, **options):
    """A completion in a session, computed in a thread."""
    async with sessions.aadmit(name) as session:
        complete = partial(session.create_completion, tokens, max_tokens=5, temperature=0, **options)
        return (await asyncio.to_thread(complete))["choices"][0]["text"]


def test_many_tasks_have_their_own_conversations(llama, store, sessions):
    alone = llama(**SMALL)
    prompts = [prompt(40, seed=i) for i in range(8)]
    expected = [answer(alone, tokens, 5) for tokens in prompts]

    async def main():
        for _ in range(2):
            jobs = (turn(sessions, f"session {i}", tokens) for i, tokens in enumerate(prompts))
            assert await asyncio.gather(*jobs) == expected

    asyncio.run(main())
    assert sessions.stats().store == 8
    assert store.check() == []


def test_tasks_and_threads_wait_in_one_queue_and_the_loop_goes_on(sessions):
    served, threads = [], []

    def in_thread(i):
        with sessions.admit(f"session {i}"):
            served.append(i)

    async def in_task(i):
        async with sessions.aadmit(f"session {i}"):
            served.append(i)

    async def main():
        alice, tasks = await asyncio.to_thread(sessions.admit, "alice"), []
        for i in range(6):
            if i % 2:
                tasks.append(asyncio.create_task(in_task(i)))
            else:
                threads.append(threading.Thread(target=in_thread, args=(i,)))
                threads[-1].start()
            await asyncio.to_thread(wait_for, lambda n=i + 2: len(sessions.queue) == n, "its place")
        sessions.release(alice)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    for thread in threads:
        thread.join()
    assert served == list(range(6))


def test_a_task_gives_up_in_time(sessions):
    async def main():
        alice = await asyncio.to_thread(sessions.admit, "alice")
        for timeout in (0, 0.001):
            with pytest.raises(BusyError):
                async with sessions.aadmit("bob", timeout=timeout):
                    pass
        sessions.release(alice)
        async with sessions.aadmit("bob", timeout=0):
            with pytest.raises(MisuseError, match="would wait for itself"):
                async with sessions.aadmit("carol"):
                    pass

    asyncio.run(main())
    assert len(sessions.queue) == 0


def test_a_cancelled_task_ends_with_its_call_and_the_next_one_is_admitted(llama, sessions):
    expected = answer(llama(**SMALL), prompt(50), 5)
    begun, go, steps = threading.Event(), threading.Event(), []

    def processor(_, scores):
        begun.set()
        go.wait()
        steps.append("computed")
        return scores

    async def main():
        task = asyncio.create_task(
            turn(sessions, "alice", prompt(40), logits_processor=LogitsProcessorList([processor]))
        )
        await asyncio.to_thread(begun.wait)
        following = asyncio.create_task(turn(sessions, "bob", prompt(50)))
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        # its call is under way: the Llama is not free
        assert not following.done()
        assert len(sessions.queue) == 2
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(steps) == 5
        assert await following == expected

    asyncio.run(main())
    assert "alice" not in sessions
    assert "bob" in sessions


@pytest.mark.slow
def test_a_task_is_cancelled_at_any_step(sessions):
    """After so many steps of the loop each time: while it waits, is admitted, computes, or leaves."""

    async def main():
        for n_steps in range(40):
            task = asyncio.create_task(turn(sessions, "alice", prompt(20 + n_steps)))
            for _ in range(n_steps):
                await asyncio.sleep(0)
                # so that threads have their turn as well
                await asyncio.to_thread(lambda: None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert len(sessions.queue) == 0
        assert await turn(sessions, "bob", prompt(30))

    asyncio.run(main())
