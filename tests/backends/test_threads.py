"""Jobs of threads, and what is waited for: in order, once, and whatever step a Ctrl-C comes at."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest

from prefixstore.backends import threads
from prefixstore.backends.threads import Job, Outcome, Signal, Threads
from tests.support import in_thread
from tests.support.ctrl_c import interrupted, places_in
from tests.support.interrupts import in_own_thread, steps_of
from tests.support.interrupts import interrupted as interrupted_before
from tests.support.timeouts import wait_for

SECONDS = 30
NAME = "prefixstore-test"


def alive():
    """The threads that have begun, or that the end of the process waits for."""
    return [
        thread for thread in threading.enumerate() if thread.name == NAME and (thread.is_alive() or not thread.daemon)
    ]


@pytest.fixture
def pool():
    made = Threads(2, NAME)
    yield made
    made.close()
    wait_for(lambda: not alive(), "the threads have ended")


def result_of(pool, work, *args):
    job = Job(work, *args)
    pool.submit(job)
    assert job.wait(SECONDS)
    return job.result()


def both_work(pool):
    """Two jobs, each of which needs the other: neither is lost, and both threads are there."""
    meeting = threading.Barrier(2, timeout=SECONDS)
    jobs = [Job(meeting.wait) for _ in range(2)]
    for job in jobs:
        pool.submit(job)
    assert all(job.wait(SECONDS) for job in jobs)
    assert sorted(job.result() for job in jobs) == [0, 1]


def test_threads_are_started_as_they_are_needed_and_used_again(pool):
    assert alive() == []
    for number in range(20):
        assert result_of(pool, lambda number=number: -number) == -number
    assert len(alive()) == 1
    both_work(pool)
    assert len(alive()) == 2


def test_no_more_threads_are_started_than_allowed_and_all_jobs_are_done(pool):
    going = threading.Event()
    jobs = [Job(going.wait, SECONDS) for _ in range(9)]
    for job in jobs:
        pool.submit(job)
    assert len(alive()) == 2
    assert not jobs[8].wait(0.01)
    going.set()
    assert all(job.wait(SECONDS) for job in jobs)
    both_work(pool)
    assert len(alive()) == 2


def test_an_error_is_raised_each_time_it_is_asked_for_and_does_not_end_the_thread(pool):
    def fail(error):
        raise error

    for error in (ZeroDivisionError(), SystemExit(), MemoryError()):
        job = Job(fail, error)
        pool.submit(job)
        assert job.error() is error
        for _ in range(2):
            with pytest.raises(type(error)):
                job.result()
    assert result_of(pool, lambda: 7) == 7
    assert len(alive()) == 1


def test_what_a_job_has_used_is_released_without_the_garbage_collector(pool):
    class Large:
        def use(self, fails):
            if fails:
                raise ZeroDivisionError

    gc.disable()
    try:
        for fails in (False, True):
            large = Large()
            gone = weakref.ref(large)
            job = Job(large.use, fails)
            pool.submit(job)
            with suppress(ZeroDivisionError):
                job.result()
            del job, large
            wait_for(lambda gone=gone: gone() is None, "the thread has forgotten it")
    finally:
        gc.enable()


def test_a_cancelled_job_is_not_done_and_one_that_has_begun_is_waited_for(pool):
    begun, going, done = threading.Event(), threading.Event(), []

    def work(number):
        begun.set()
        assert going.wait(SECONDS)
        done.append(number)

    jobs = [Job(work, number) for number in range(4)]
    for job in jobs[:3]:
        pool.submit(job)
    assert begun.wait(SECONDS)
    wait_for(lambda: not pool._jobs.qsize() > 1, "two have begun")
    for job in jobs[2:]:
        assert job.cancel()
        assert job.cancel()
        job.end()
    assert not jobs[0].cancel()
    ending = in_thread(jobs[0].end)
    assert not done
    going.set()
    ending.join(SECONDS)
    jobs[1].end()
    both_work(pool)
    assert sorted(done) == [0, 1]


def test_a_job_that_comes_after_the_end_is_refused_and_never_done(pool):
    assert result_of(pool, lambda: 7) == 7
    pool.close()
    job = Job(pytest.fail, "it was done")
    with pytest.raises(RuntimeError, match="ended"):
        pool.submit(job)
    assert job.cancel()


def test_jobs_that_were_submitted_before_the_end_are_done():
    pool = Threads(2, NAME)
    going = threading.Event()
    jobs = [Job(going.wait, SECONDS) for _ in range(9)]
    for job in jobs:
        pool.submit(job)
    pool.close()
    going.set()
    assert all(job.wait(SECONDS) for job in jobs)
    wait_for(lambda: not alive(), "the threads have ended")


def test_threads_end_when_nobody_can_give_them_jobs_any_more():
    pool = Threads(2, NAME)
    both_work(pool)
    del pool
    wait_for(lambda: not alive(), "the threads have ended")


def test_without_a_thread_a_job_is_refused_or_done_here(pool, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(Job(pytest.fail, "it was done"))
        here = Job(threading.current_thread)
        pool.submit_or_run(here)
        assert here.result() is threading.current_thread()
    both_work(pool)


def test_several_threads_wait_for_a_signal_with_and_without_a_limit():
    signal = Signal()
    assert not signal.wait(0.0)
    assert not signal.wait(0.01)
    told = []
    waiting = [in_thread(lambda limit=limit: told.append(signal.wait(limit))) for limit in (SECONDS, -1.0, SECONDS)]
    signal.set()
    signal.set()
    for thread in waiting:
        thread.join(SECONDS)
    assert told == [True] * 3
    assert signal.wait()


# -- interrupted -------------------------------------------------------------------------------------------------------


def another_thread(work):
    """Do something in another thread; it must end."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def used(pool):
    """Everything that a caller does with threads."""
    first, second = Job(lambda: 1), Job(lambda: 2)
    pool.submit(first)
    pool.submit(second)
    assert first.result() == 1
    assert second.wait(SECONDS)
    assert second.error() is None
    first.end()


@pytest.mark.slow
@pytest.mark.parametrize("is_warm", [True, False])
def test_after_an_interrupt_before_any_bytecode_all_threads_do_their_work(is_warm):
    @in_own_thread
    def at(step):
        pool = Threads(2, NAME)
        if is_warm:
            both_work(pool)
        with suppress(KeyboardInterrupt):
            interrupted_before(partial(used, pool), [threads], step)
        both_work(pool)
        with suppress(KeyboardInterrupt):
            interrupted_before(pool.close, [threads], step)
        pool.close()

    pool = Threads(2, NAME)
    for step in range(1, steps_of(partial(used, pool), [threads]) + 20):
        at(step)
    pool.close()
    wait_for(lambda: not alive(), "the threads have ended")


@pytest.mark.parametrize("is_warm", [True, False])
def test_after_a_ctrl_c_at_any_place_also_of_threading_all_threads_do_their_work(is_warm):
    def new():
        pool = Threads(2, NAME)
        if is_warm:
            both_work(pool)
        return pool

    pool = new()
    n = places_in(partial(used, pool))
    for at in range(1, n + 1):
        pool.close()
        pool = new()
        interrupted(partial(used, pool), at)
        another_thread(partial(both_work, pool))
    pool.close()
    wait_for(lambda: not alive(), "no thread is left that the end of the process waits for")


def test_an_outcome_is_there_after_an_interrupt_before_any_bytecode_of_a_wait():
    @in_own_thread
    def at(step):
        outcome = Outcome()
        # in the middle of the wait
        teller = threading.Timer(0.002, outcome.set_result, [7])
        teller.start()
        with suppress(KeyboardInterrupt):
            interrupted_before(lambda: outcome.wait(SECONDS) and outcome.result(), [threads], step)
        assert outcome.wait(SECONDS)
        assert outcome.result() == 7
        teller.join()

    for step in range(1, 80):
        at(step)


class Holder:
    """Keeps a job that is one of its own methods, as readers do."""

    def __init__(self):
        self.job = Job(self.work, bytearray(1))

    def work(self, data):
        return len(data)


@pytest.mark.parametrize("ends", ["it is done", "it is cancelled"])
def test_a_job_that_is_over_keeps_nothing_of_what_it_was_to_do(ends, pool):
    """Buffers would live until the next collection of garbage."""
    holder = Holder()
    if ends == "it is done":
        pool.submit(holder.job)
        assert holder.job.result() == 1
    else:
        assert holder.job.cancel()
    gc.disable()
    try:
        is_there = weakref.ref(holder)
        del holder
        wait_for(lambda: is_there() is None, "the end of what has kept the job")
    finally:
        gc.enable()
