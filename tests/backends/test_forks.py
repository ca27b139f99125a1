"""What is held while the process forks, and renewed in the child."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from prefixstore.backends import forks
from prefixstore.backends.forks import opening, register_at_fork
from prefixstore.errors import UnavailableError
from tests.support import PATIENCE, ROOT, in_thread


def exit_code_of_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            code = work()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Noting:
    """A participant that notes what is called."""

    def __init__(self, name, calls, *, is_handle=False, before=None):
        self.name, self.calls, self.before = name, calls, before
        register_at_fork(self, is_handle=is_handle)

    def before_fork(self):
        self.calls.append(f"before {self.name}")
        if self.before is not None:
            self.before()

    def after_fork_in_parent(self):
        self.calls.append(f"parent {self.name}")

    def after_fork_in_child(self):
        self.calls.append(f"child {self.name}")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, UnavailableError])
def test_handles_are_renewed_first_and_one_that_fails_does_not_keep_the_others(monkeypatch, error):
    # the traceback keeps it alive; no other test shall meet it
    monkeypatch.setattr(forks, "_participants", {})
    calls, reported = [], []

    def fail():
        if error is not None:
            raise error

    engine = Noting("engine", calls)
    handles = [Noting("one", calls, is_handle=True, before=fail), Noting("two", calls, is_handle=True)]
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    in_child = ["child one", "child two", "child engine"]
    assert exit_code_of_child(lambda: 7 if calls[-3:] == in_child else 1) == 7
    assert [report.exc_type for report in reported] == [error] * (error is not None)
    assert sorted(calls[:3]) == ["before engine", "before one", "before two"]
    assert calls[3:] == ["parent one", "parent two", "parent engine"]
    assert (engine.name, len(handles)) == ("engine", 2)


def test_a_fork_waits_for_a_handle_that_is_being_opened_and_the_child_can_open_one():
    inside, leave = threading.Event(), threading.Event()

    def open_slowly():
        with opening():
            inside.set()
            leave.wait(PATIENCE)

    def open_in_child():
        with opening():
            return 7

    thread = in_thread(open_slowly)
    assert inside.wait(PATIENCE)
    threading.Timer(0.05, leave.set).start()
    assert exit_code_of_child(open_in_child) == 7
    assert leave.is_set()
    thread.join(PATIENCE)


def test_numpy_imports_nothing_while_other_threads_may_fork():
    # the lock of a module that a thread imports is never released in a child that is forked meanwhile
    code = (
        "import sys, numpy as np, prefixstore.backends.forks\n"
        "before = set(sys.modules)\n"
        "np.unique(np.array([2, 1])), np.isin(np.array([1, 2]), [1, 2, 3])\n"
        "sys.exit(', '.join(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""
