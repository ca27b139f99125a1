"""What is held while the process forks, and renewed in the child."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

from prefixstore.backends import forks, open_backend
from prefixstore.backends.forks import ForkLevel, register_at_fork
from tests.support import PATIENCE, ROOT
from tests.support.places import MIB


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


def test_two_threads_that_fork_at_once_both_get_a_child(tmp_path):
    with closing(open_backend(tmp_path, max_bytes=MIB)) as backend:
        started = threading.Barrier(3)
        codes = []

        def fork():
            started.wait()
            codes.append(exit_code_of_child(lambda: 7 if write(backend) else 1))

        threads = [threading.Thread(target=fork, daemon=True) for _ in range(2)]
        with backend.update():
            for thread in threads:
                thread.start()
            started.wait()  # both are about to fork, and have to wait for this transaction
            while forks._forking.acquire(blocking=False):
                forks._forking.release()
                time.sleep(0.001)
        for thread in threads:
            thread.join(PATIENCE)
        assert codes == [7, 7]
        assert write(backend)


def write(backend):
    """Whether something can be written, also in a forked child."""
    backend.after_fork()
    with backend.update() as draft:
        draft.put(b"key", b"value")
    return True


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
