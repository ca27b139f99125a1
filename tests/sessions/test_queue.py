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
