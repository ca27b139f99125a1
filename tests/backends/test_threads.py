"""The store's own threads: they do what callers hand over, and a caller who stops waiting does no harm."""

import threading
from contextlib import nullcontext, suppress
from queue import Empty

import pytest

from prefixstore.backends.threads import Threads, caller, is_own
from tests.support import PATIENCE, outcome
from tests.support.timeouts import wait_for

NAME = "of-this-test"


def alive():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def pool():
    threads = Threads(NAME)
    yield threads
    threads.close()
    wait_for(lambda: not alive(), "the end of the threads")


def test_threads_are_started_as_they_are_needed_and_used_again(pool):
    assert [pool.call(lambda: 1) for _ in range(10)] == [1] * 10
    assert len(alive()) == 1
    gate = threading.Event()
    answers = [pool.start(gate.wait, PATIENCE) for _ in range(5)]
    gate.set()
    assert [answer.get() for answer in answers] == [True] * 5
    wait_for(lambda: len(alive()) == 5, "the start of the last one")


def test_a_thread_of_the_store_does_the_work_itself_and_knows_for_whom(pool):
    def nested():
        is_here = pool.call(threading.get_ident) == threading.get_ident()
        return is_own(), caller().key, is_here, pool.start(lambda: caller().key).get()

    me = threading.get_ident()
    assert not is_own()
    assert pool.call(nested) == (True, me, True, me)


def test_an_error_is_raised_where_the_answer_is_taken_and_does_not_end_the_thread(pool):
    def fail():
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            pool.call(fail)
    with pytest.raises(SystemExit):
        pool.call(exit)
    assert pool.call(lambda: 1) == 1
    assert len(alive()) == 1


def test_a_caller_may_wait_for_so_long_only_and_the_work_goes_on(pool):
    gate, done = threading.Event(), threading.Event()
    with pytest.raises(Empty):
        pool.answer(lambda: (gate.wait(PATIENCE), done.set()), seconds=0.01)
    assert not done.is_set()
    gate.set()
    assert done.wait(PATIENCE)


def test_what_was_handed_over_before_the_end_is_done_and_later_work_is_done_by_the_caller():
    threads = Threads(NAME)
    gate = threading.Event()
    answers = [threads.start(gate.wait, PATIENCE) for _ in range(3)]
    threads.close()
    with pytest.raises(RuntimeError, match="ended"):
        threads.start(int)
    assert threads.call(threading.get_ident) == threading.get_ident()
    gate.set()
    assert [answer.get() for answer in answers] == [True] * 3
    wait_for(lambda: not alive(), "the end of the threads")


def test_what_a_caller_has_open_is_known_until_it_leaves_the_block(pool):
    with suppress(ValueError), pool.lending(nullcontext("it")) as it:
        assert it == "it"
        assert pool.has_lent()
        assert pool.call(pool.has_lent)
        assert not outcome(pool.has_lent)
        raise ValueError
    assert not pool.has_lent()


def test_if_no_thread_can_be_started_the_caller_does_the_work(pool, monkeypatch):
    def start(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", start)
    assert pool.call(threading.get_ident) == threading.get_ident()
    assert pool.start_or_run(lambda: 1).get() == 1
    with pytest.raises(RuntimeError):
        pool.start(int)
