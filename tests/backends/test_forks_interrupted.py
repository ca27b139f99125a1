"""An interrupt at any step of the hooks of a fork: nothing stays held, and parent and child go on."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing

import pytest

from prefixstore.backends import forks, handle_lock, memory
from prefixstore.backends.forks import ForkLevel, ForkLock, register_at_fork
from prefixstore.backends.handle_lock import HandleLock
from prefixstore.backends.lmdb import environment
from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError, UnavailableError
from tests.support import PATIENCE, in_thread
from tests.support.interrupts import in_own_thread, interrupted, steps_of
from tests.support.places import MIB, fill, space

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


class Handle:
    """A participant with a lock."""

    def __init__(self):
        self.lock = HandleLock()
        self.renewed_in = 0
        register_at_fork(self, ForkLevel.HANDLE)

    def before_fork(self):
        self.lock.acquire_exclusive(self)

    def after_fork_in_parent(self):
        self.lock.release_exclusive(self)

    def after_fork_in_child(self):
        self.renewed_in = os.getpid()
        self.lock.renew()


def forked(work):
    """Fork; whether the child could do this, and ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.settrace(None)
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finishes(work):
    """Whether another thread can do this."""
    thread = in_thread(work)
    thread.join(PATIENCE)
    return not thread.is_alive()


@pytest.mark.parametrize("hook", ["before", "parent", "child"])
@in_own_thread
def test_after_an_interrupt_at_any_step_of_a_hook_everything_was_held_and_is_released(hook, monkeypatch):  # noqa: C901
    # the hooks are called here, and not by a fork: leave what other tests have opened alone
    monkeypatch.setattr(forks, "_levels", {})
    handle, lock = Handle(), ForkLock()
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_type))
    tried = {
        "before": [forks._before_fork],
        "parent": [forks._after_fork_in_parent],
        "child": [forks._after_fork_in_child],
    }

    def hooks(step):
        """What os.fork does, without the fork: each hook twice."""
        for name, calls in (("before", 2), (hook if hook != "before" else "parent", 2)):
            for call in range(calls):
                (run,) = tried[name]
                if name == hook and call == 0:
                    try:
                        interrupted(run, [forks, handle_lock], step)
                    except KeyboardInterrupt:
                        reported.append(KeyboardInterrupt)
                else:
                    run()
            if name == "before":
                assert handle.lock.is_exclusive(handle), step
                assert not finishes_at_once(lambda: lock.held.acquire(blocking=False) or None), step

    def finishes_at_once(take):
        got = []
        thread = in_thread(lambda: got.append(take()))
        thread.join(PATIENCE)
        return got[0]

    step, seen = 1, -1
    while len(reported) != seen and step < 5000:
        seen = len(reported)
        if hook == "child":
            monkeypatch.setattr(forks, "_child", None)
        hooks(step)
        for own in (forks._forking, forks._registering, handle.lock):
            assert (own._inside, own._alone, own._got) == ({}, {}, {}), step
        assert (forks._called, forks._held, forks._left) == ({}, {}, []), step

        def use():
            with handle.lock.shared(), lock.held:
                pass

        assert finishes(use), step
        step += 1
    assert step > 100


@pytest.mark.slow
@pytest.mark.parametrize("every", [67, 17])
@in_own_thread
def test_a_fork_that_was_interrupted_at_any_step_leaves_parent_and_child_with_a_store_that_works(
    tmp_path, monkeypatch, every
):
    monkeypatch.setattr(sys, "unraisablehook", lambda report: None)
    modules = [forks, handle_lock, environment, memory]
    with closing(open_pages(tmp_path / "kv", max_bytes=64 * MIB)) as backend:
        fill(backend, space(), [[1, 2, 3, 4]])

        def child():
            backend.after_fork()
            with closing(backend), backend.view() as view:
                return view.used.entries == 1

        codes = []
        steps = steps_of(lambda: codes.append(forked(child)), modules)
        assert codes == [0, 0]
        for step in range(1, steps + 1, every):
            interrupted(lambda: codes.append(forked(child)), modules, step)
            with backend.view() as view:
                assert view.used.entries == 1
            assert finishes(lambda: fill(backend, space(), [[1, 2, 3, 4]])), step
    assert set(codes) == {0}


def test_a_child_of_a_fork_that_did_not_wait_leaves_the_handle_of_its_parent_alone(tmp_path, monkeypatch):
    """Two interrupts, while another thread is in a transaction: the fork goes on without waiting."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    with closing(open_pages(tmp_path / "kv", max_bytes=64 * MIB)) as backend:
        (keys,) = fill(backend, space(), [[1, 2, 3, 4]])
        inside, leave = threading.Event(), threading.Event()
        payloads = []

        def read():
            with backend.view() as view:
                inside.set()
                leave.wait(PATIENCE)
                payloads.append(bytes(view.payload(keys[0])))

        reader = in_thread(read)
        assert inside.wait(PATIENCE)
        monkeypatch.setattr(
            environment.Environment, "before_fork", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
        )

        def child():
            # LMDB opens a file once in a process, and the handle of the parent cannot be closed here
            backend.after_fork()
            with pytest.raises(StorageError), backend.view():
                pass
            return True

        assert forked(child) == 0
        leave.set()
        reader.join(PATIENCE)
        assert len(payloads) == 1
        assert [report.exc_type for report in reported] == [KeyboardInterrupt] * 2
        with backend.view() as view:
            assert view.used.entries == 1


def test_a_failing_participant_is_reported_and_not_asked_again(monkeypatch):
    # its traceback keeps it alive; no other test shall meet it
    monkeypatch.setattr(forks, "_levels", {})

    class Failing(Handle):
        calls = 0

        def before_fork(self):
            self.calls += 1
            raise UnavailableError("cannot wait")

    failing, reported = Failing(), []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    assert forked(lambda: failing.renewed_in == os.getpid()) == 0
    assert failing.calls == 1
    assert [report.exc_type for report in reported] == [UnavailableError]
