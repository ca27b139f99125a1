"""Whose turn it is: in order, one at a time, for threads and tasks, whatever happens to those who wait."""

from __future__ import annotations

import asyncio
import threading

from prefixstore.sessions.queue import Queue, Ticket


class Other(Ticket):
    """A ticket of someone else."""

    def __init__(self):
        super().__init__()
        self.thread, self.loop, self.task = object(), None, None


def test_a_place_that_was_abandoned_is_passed_over():
    queue, first, last = Queue(), Ticket(), Other()
    queue.enter(first)
    queue.enter(last)
    del first
    mine = Ticket()  # of the same owner as the first
    queue.enter(mine)
    assert queue.look() is last
    queue.leave(last)
    assert queue.wait(mine, 0)


def test_tasks_and_threads_wait_in_one_queue():
    queue, first, served = Queue(), Other(), []
    queue.enter(first)

    async def task(i):
        ticket = Ticket(is_async=True)
        queue.enter(ticket)
        assert await queue.wait_async(ticket, None)
        served.append(i)
        queue.leave(ticket)

    def wait(i):
        ticket = Ticket()
        queue.enter(ticket)
        entered.set()
        queue.wait(ticket, None)
        served.append(i)
        queue.leave(ticket)

    async def main():
        nonlocal entered
        waiting = []
        for i in range(0, 6, 2):
            waiting.append(asyncio.create_task(task(i)))
            await asyncio.sleep(0)
            entered = threading.Event()
            threads.append(threading.Thread(target=wait, args=(i + 1,)))
            threads[-1].start()
            entered.wait()
        queue.leave(first)
        await asyncio.gather(*waiting)

    entered, threads = threading.Event(), []
    asyncio.run(main())
    for thread in threads:
        thread.join()
    assert served == list(range(6))


def test_a_cancelled_task_loses_its_place_even_if_it_was_just_told():
    queue = Queue()

    async def main():
        first, last = Other(), Other()
        queue.enter(first)

        async def wait():
            ticket = Ticket(is_async=True)
            queue.enter(ticket)
            try:
                await queue.wait_async(ticket, None)
            finally:
                queue.leave(ticket)

        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.enter(last)
        tasks[1].cancel()
        queue.leave(first)  # the first task is told
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, True, False]
        assert queue.look() is last

    asyncio.run(main())
