"""The lock on a handle: shared by those that use it, exclusive to the one that replaces it."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time

import pytest

from prefixstore.backends.handle_lock import HandleLock
from prefixstore.errors import MisuseError
from tests.support import in_thread

PATIENCE = 20


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
        while not handle._n_waiting:
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


def test_a_keyboard_interrupt_while_a_thread_waits_to_enter_leaves_no_count(monkeypatch):
    handle = HandleLock()

    def wait_for(predicate, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(handle._condition, "wait_for", wait_for)
        with pytest.raises(KeyboardInterrupt), handle.shared():
            raise AssertionError("it entered")
    assert handle._inside == {}
    assert is_free(handle)


def test_a_keyboard_interrupt_while_a_thread_waits_to_hold_alone_lets_the_others_go_on(monkeypatch):
    handle = HandleLock()
    inside, leave = threading.Event(), threading.Event()

    def use():
        with handle.shared():
            inside.set()
            leave.wait(PATIENCE)

    user = in_thread(use)
    inside.wait(PATIENCE)

    def wait(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(handle._condition, "wait", wait)
        with pytest.raises(KeyboardInterrupt), handle.exclusive():
            raise AssertionError("it was alone")
    leave.set()
    user.join(PATIENCE)
    with handle.shared():
        pass
    assert is_free(handle)


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
            try:
                armed = True
                signal.setitimer(signal.ITIMER_VIRTUAL, chance.uniform(1e-5, 1e-3), 1e-3)
                while True:
                    with handle.shared(), handle.shared():
                        pass
            except KeyboardInterrupt:
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
        handle.acquire_exclusive()
    assert is_free(handle)
