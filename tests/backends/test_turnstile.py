"""The turnstile under which a handle is replaced, and the registry of what is held during a fork."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress

import pytest

from prefixstore.backends import turnstile
from prefixstore.backends.turnstile import ForkLevel, Turnstile, register_at_fork

PATIENCE = 20


def in_thread(work, *arguments):
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def is_free(gate):
    """Whether a thread can be alone."""

    def be_alone():
        with gate.alone():
            pass

    thread = in_thread(be_alone)
    thread.join(PATIENCE)
    return not thread.is_alive()


def exit_code_of_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            code = work()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- the turnstile -----------------------------------------------------------------------------------------------------


def test_a_thread_is_alone_when_all_others_have_left():
    gate, order = Turnstile(), []
    inside, leave = threading.Event(), threading.Event()

    def use():
        with gate.entered(), gate.entered():
            inside.set()
            leave.wait(PATIENCE)
            order.append("used")

    def replace():
        with gate.alone():
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


def test_a_thread_that_waits_to_be_alone_comes_before_those_that_arrive_later():
    gate, order = Turnstile(), []

    def use():
        with gate.entered():
            order.append("used")

    def replace():
        with gate.alone():
            order.append("replaced")

    with gate.entered():
        replacer = in_thread(replace)
        while not gate._n_waiting:
            time.sleep(0.001)
        user = in_thread(use)
        user.join(0.1)
        with gate.entered():  # a thread that is inside already goes on
            assert order == []
    replacer.join(PATIENCE)
    user.join(PATIENCE)
    assert order == ["replaced", "used"]


def test_a_thread_that_is_alone_may_enter_and_lock_again():
    gate = Turnstile()
    with gate.alone():
        assert gate.is_inside
        with gate.alone():
            pass
        with gate.entered():
            assert gate.is_inside
    assert not gate.is_inside
    assert is_free(gate)


def test_a_keyboard_interrupt_while_a_thread_waits_to_enter_leaves_no_count(monkeypatch):
    gate = Turnstile()

    def wait_for(predicate, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate._condition, "wait_for", wait_for)
        with pytest.raises(KeyboardInterrupt), gate.entered():
            raise AssertionError("it entered")
    assert gate._inside == {}
    assert is_free(gate)


def test_a_keyboard_interrupt_while_a_thread_waits_to_be_alone_lets_the_others_go_on(monkeypatch):
    gate = Turnstile()
    inside, leave = threading.Event(), threading.Event()

    def use():
        with gate.entered():
            inside.set()
            leave.wait(PATIENCE)

    user = in_thread(use)
    inside.wait(PATIENCE)

    def wait(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate._condition, "wait", wait)
        with pytest.raises(KeyboardInterrupt), gate.alone():
            raise AssertionError("it was alone")
    leave.set()
    user.join(PATIENCE)
    with gate.entered():
        pass
    assert is_free(gate)


def test_a_ctrl_c_at_any_moment_leaves_no_count(monkeypatch):
    gate, chance = Turnstile(), random.Random(1)
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
                    with gate.entered(), gate.entered():
                        pass
            except KeyboardInterrupt:
                armed = False
            assert gate._inside == {}
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert is_free(gate)


# -- the registry of what is held during a fork ------------------------------------------------------------------------


class Noting:
    """A participant that notes what is called."""

    def __init__(self, name, level, calls, *, before=None):
        self.name, self.calls, self.before = name, calls, before
        register_at_fork(self, level)

    def before_fork(self):
        self.calls.append(f"before {self.name}")
        if self.before is not None:
            self.before()

    def after_fork_in_parent(self):
        self.calls.append(f"parent {self.name}")

    def after_fork_in_child(self):
        self.calls.append(f"child {self.name}")


def test_handles_are_held_last_and_renewed_first():
    calls = []
    kept = [Noting(level.name, level, calls) for level in (ForkLevel.ENGINE, ForkLevel.HANDLE, ForkLevel.OPENING)]
    before = ["before ENGINE", "before OPENING", "before HANDLE"]
    in_child = [*before, "child HANDLE", "child OPENING", "child ENGINE"]
    assert exit_code_of_child(lambda: 7 if calls == in_child else 1) == 7
    assert calls == [*before, "parent HANDLE", "parent OPENING", "parent ENGINE"]
    assert len(kept) == 3


def test_the_registry_keeps_nothing_alive():
    calls = []
    forgotten = Noting("forgotten", ForkLevel.HANDLE, calls)
    del forgotten
    gc.collect()
    assert exit_code_of_child(lambda: 7) == 7
    assert calls == []


def test_a_participant_that_another_thread_adds_during_a_fork_is_held_as_a_whole():
    calls, kept = [], []

    def add():
        thread = in_thread(lambda: kept.append(Noting("second", ForkLevel.HANDLE, calls)))
        thread.join(PATIENCE)  # it does not wait for the fork
        assert not thread.is_alive()

    kept.append(Noting("first", ForkLevel.HANDLE, calls, before=add))
    assert exit_code_of_child(lambda: 7 if calls[-2:] == ["child second", "child first"] else 1) == 7
    assert calls == ["before first", "before second", "parent second", "parent first"]


def test_a_participant_that_fails_does_not_keep_the_others_from_their_turn(monkeypatch):
    calls = []

    def fail():
        failing.before = None
        raise KeyboardInterrupt

    failing = Noting("failing", ForkLevel.OPENING, calls, before=fail)
    kept = [
        Noting("sound", ForkLevel.ENGINE, calls),
        failing,
        Noting("later", ForkLevel.HANDLE, calls),
    ]
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    assert exit_code_of_child(lambda: 7 if calls[-2:] == ["child later", "child sound"] else 1) == 7
    assert [report.exc_type for report in reported] == [KeyboardInterrupt]
    assert calls == ["before sound", "before failing", "before later", "parent later", "parent sound"]
    assert len(kept) == 3


def test_a_fork_waits_for_the_thread_that_is_opening_a_handle():
    lock, calls = turnstile.ForkLock(), []
    opening = threading.Event()

    def open_handle():
        with lock:
            opening.set()
            time.sleep(0.1)
            calls.append("opened")

    thread = in_thread(open_handle)
    opening.wait(PATIENCE)

    def child():
        with lock:
            return 7 if calls == ["opened"] else 1

    assert exit_code_of_child(child) == 7
    thread.join(PATIENCE)
    with lock:
        pass
