"""The lock on a handle: shared by those that use it, exclusive to the one that replaces it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from prefixstore.backends import handle_lock
from prefixstore.backends.handle_lock import HandleLock
from prefixstore.errors import MisuseError
from tests.support import PATIENCE, in_thread
from tests.support.interrupts import in_own_thread, interrupted, steps_of


def is_free(handle):
    """Whether a thread can be alone."""

    def hold_alone():
        with handle.exclusive():
            pass

    thread = in_thread(hold_alone)
    thread.join(PATIENCE)
    return not thread.is_alive()


def test_a_thread_is_alone_when_all_others_have_left():
    handle, order = HandleLock(), []
    inside, leave = threading.Event(), threading.Event()

    def use():
        with handle.shared(), handle.shared():
            inside.set()
            leave.wait(PATIENCE)
            order.append("used")

    def replace():
        with handle.exclusive():
            order.append("replaced")

    user = in_thread(use)
    inside.wait(PATIENCE)
    replacer = in_thread(replace)
    replacer.join(0.1)
    assert order == []
    leave.set()
    user.join(PATIENCE)
    replacer.join(PATIENCE)
    assert order == ["used", "replaced"]


def test_a_thread_that_waits_to_hold_alone_comes_before_those_that_arrive_later():
    handle, order = HandleLock(), []

    def use():
        with handle.shared():
            order.append("used")

    def replace():
        with handle.exclusive():
            order.append("replaced")

    with handle.shared():
        replacer = in_thread(replace)
        while not handle._alone:
            time.sleep(0.001)
        user = in_thread(use)
        user.join(0.1)
        with handle.shared():  # a thread that is inside already goes on
            assert order == []
    replacer.join(PATIENCE)
    user.join(PATIENCE)
    assert order == ["replaced", "used"]


def test_a_thread_that_is_alone_may_enter_and_lock_again():
    handle = HandleLock()
    with handle.exclusive():
        assert handle.is_held
        with handle.exclusive():
            pass
        with handle.shared():
            assert handle.is_held
    assert not handle.is_held
    assert is_free(handle)


def once(handle):
    """Every use of it, one in the other."""
    with handle.shared(), handle.shared():
        pass
    with handle.exclusive(), handle.exclusive(), handle.shared():
        pass
    handle.acquire_exclusive("hold")
    handle.acquire_exclusive("hold")
    handle.release_exclusive("hold")


@in_own_thread
def test_an_interrupt_at_any_step_leaves_nothing_held():
    steps = steps_of(partial(once, HandleLock()), [handle_lock])
    assert steps > 300
    for step in range(1, steps + 1):
        handle = HandleLock()
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda handle=handle: once(handle), [handle_lock], step)
        handle.release_exclusive("hold")
        assert (handle._inside, handle._alone, handle._got) == ({}, {}, {}), step


@in_own_thread
def test_after_an_interrupt_at_any_step_also_of_the_with_statement_the_thread_can_close_the_handle():
    """As `with store: llm(...)` does: it closes the store while the exception is handled, which keeps its frames."""
    steps = steps_of(partial(once, HandleLock()), [handle_lock, contextlib])
    held = 0
    for step in range(1, steps + 1):
        handle = HandleLock()
        try:
            interrupted(lambda handle=handle: once(handle), [handle_lock, contextlib], step)
        except KeyboardInterrupt:
            handle.release_exclusive("hold")
            held += handle.is_held
            with handle.exclusive():
                pass
        assert (handle._inside, handle._alone, handle._got) == ({}, {}, {}), step
    assert held


@pytest.mark.slow
@in_own_thread
def test_what_the_traceback_of_an_interactive_session_keeps_is_released_for_other_threads(monkeypatch):
    handle = HandleLock()
    steps = steps_of(lambda: once(handle), [handle_lock, contextlib])
    for step in range(1, steps + 1):
        with suppress(KeyboardInterrupt):
            interrupted(lambda: once(handle), [handle_lock, contextlib], step)
        handle.release_exclusive("hold")
        assert not handle.is_held
        try:
            interrupted(lambda: once(handle), [handle_lock, contextlib], step)
        except KeyboardInterrupt as error:
            monkeypatch.setattr(sys, "last_value", error, raising=False)
        handle.release_exclusive("hold")
        if handle.is_held:
            assert is_free(handle)
            return
    raise AssertionError("nothing was kept")


def wait_at(handle, ready):
    """A thread that is inside until it is told to leave, and whether it was."""
    inside, leave = threading.Event(), threading.Event()

    def use():
        with ready():
            inside.set()
            assert leave.wait(PATIENCE)

    thread = in_thread(use)
    assert inside.wait(PATIENCE)
    return thread, leave


@pytest.mark.slow
@pytest.mark.parametrize("waiting", ["to enter", "to be alone"])
@in_own_thread
def test_an_interrupt_at_any_step_of_waiting_lets_the_others_go_on(waiting, monkeypatch):
    monkeypatch.setattr(handle_lock, "RECHECK_SECONDS", 0.001)
    handle = HandleLock()
    theirs, mine = (handle.exclusive, handle.shared) if waiting == "to enter" else (handle.shared, handle.exclusive)

    def use():
        with mine():
            raise AssertionError("it did not wait")

    thread, leave = wait_at(handle, theirs)
    try:
        for step in range(1, 400):
            with pytest.raises(KeyboardInterrupt):
                interrupted(use, [handle_lock], step)
            assert not handle.is_held
    finally:
        leave.set()
        thread.join(PATIENCE)
    assert (handle._inside, handle._alone, handle._got) == ({}, {}, {})
    assert is_free(handle)


def test_a_child_does_not_wait_for_threads_of_its_parent():
    handle = HandleLock()
    thread, leave = wait_at(handle, handle.shared)
    waiting = in_thread(lambda: handle.exclusive().__enter__())
    while not handle._alone:
        time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        handle.renew()
        with handle.exclusive(), handle.shared():
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    leave.set()
    thread.join(PATIENCE)
    waiting.join(PATIENCE)


@pytest.mark.attack
def test_a_ctrl_c_at_any_moment_leaves_no_count(monkeypatch):
    handle, chance = HandleLock(), random.Random(1)
    armed = False

    def interrupt(*_):
        if armed:
            raise KeyboardInterrupt

    # one that comes while a generator is collected is only reported: the next one ends the loop
    monkeypatch.setattr(sys, "unraisablehook", lambda report: None)
    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for _ in range(300):
            # a second one may come before the first is dealt with
            with suppress(KeyboardInterrupt):
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_VIRTUAL, chance.uniform(1e-5, 1e-3), 1e-3)
                    while True:
                        with handle.shared(), handle.shared():
                            pass
                except KeyboardInterrupt:
                    armed = False
            armed = False
            assert handle._inside == {}
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert is_free(handle)


def test_a_thread_that_uses_the_handle_cannot_wait_for_itself():
    handle = HandleLock()
    with handle.shared(), pytest.raises(MisuseError, match="leave it first"):
        handle.acquire_exclusive("hold")
    assert is_free(handle)
