"""What is held while the process forks, and renewed in the child."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from weakref import WeakKeyDictionary

import pytest

from prefixstore.backends import forks, open_backend
from prefixstore.backends.forks import HandleLock, adding, is_quiet, register_at_fork
from prefixstore.errors import UnavailableError
from prefixstore.testing.together import in_child, together
from tests.support import ROOT, outcome


class Noting:
    """A participant that notes what is called."""

    def __init__(self, name, calls, lock=None, error=None):
        self.name, self.calls, self.lock, self.error = name, calls, lock, error
        register_at_fork(self, lock)

    def before_fork(self):
        self.calls.append(f"before {self.name}")
        if self.error is not None:
            raise self.error

    def after_fork(self):
        self.calls.append(f"child {self.name}{' quiet' * (self.lock is not None and is_quiet())}")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, UnavailableError])
def test_handles_are_held_and_renewed_first_and_one_that_fails_does_not_keep_the_others(monkeypatch, error):
    # the traceback keeps it alive; no other test shall meet it
    monkeypatch.setattr(forks, "_participants", WeakKeyDictionary())
    calls, reported = [], []
    locks = [HandleLock(), HandleLock()]
    kept = [Noting("engine", calls), Noting("one", calls, locks[0], error), Noting("two", calls, locks[1])]
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    after = ["child one quiet", "child two quiet", "child engine"]
    assert in_child(lambda: calls[2:] == after and is_free(*locks))
    assert [report.exc_type for report in reported] == [error] * (error is not None)
    assert calls == ["before one", "before two"]
    assert is_free(*locks)
    assert len(kept) == 3


def is_free(*locks):
    """Whether other threads may have all these, and add something."""

    def have():
        with adding():
            return not any(lock._inside or lock._alone for lock in locks)

    return outcome(have) is True


@pytest.mark.parametrize("kind", ["lmdb", "sqlite"])
def test_threads_that_open_one_store_in_a_view_of_another_wait_neither_for_who_closes_it_nor_for_a_fork(tmp_path, kind):
    paths = [f"{kind}:///{tmp_path}/{name}" for name in "ab"]
    done = threading.Event()

    def opened(path):
        return closing(open_backend(path, max_bytes=1 << 20))

    def use(mine, other):
        while not done.is_set():
            with opened(mine) as outer, outer.view(), opened(other) as inner, inner.view():
                time.sleep(0.001)

    def fork():
        try:
            for _ in range(10):
                assert in_child(lambda: True)
                for path in paths:
                    opened(path).thing.close()
        finally:
            done.set()

    with ExitStack() as kept:
        for path in paths:
            # so that the others need not create the files
            kept.enter_context(opened(path))
        together(lambda: use(*paths), lambda: use(*paths[::-1]), fork)


FORKS = """
import sys, threading, time
from contextlib import closing
from prefixstore.backends import open_backend
from prefixstore.testing.together import in_child, together

ready = threading.Barrier(3)

def view():
    with backend.view():
        ready.wait()
        time.sleep(0.3)  # both wait for it by then

def fork():
    ready.wait()
    assert in_child(lambda: True)

with closing(open_backend(sys.argv[1], max_bytes=1 << 20)) as backend:
    together(view, fork, fork)
"""


def test_threads_that_fork_at_one_time_wait_for_each_other_and_for_views(tmp_path):
    subprocess.run([sys.executable, "-c", FORKS, f"lmdb:///{tmp_path}/kv"], cwd=ROOT, check=True, timeout=60)


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
