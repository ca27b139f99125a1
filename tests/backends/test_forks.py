"""What is held while the process forks, and renewed in the child."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prefixstore.backends import forks
from prefixstore.backends.forks import ForkLevel, register_at_fork
from prefixstore.errors import UnavailableError
from prefixstore.testing.together import in_child
from tests.support import ROOT


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


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, UnavailableError])
def test_handles_are_held_last_and_renewed_first_and_one_that_fails_does_not_keep_the_others(monkeypatch, error):
    # the traceback keeps it alive; no other test shall meet it
    monkeypatch.setattr(forks, "_levels", {})
    calls, reported = [], []

    def fail():
        if error is not None:
            raise error

    levels = (ForkLevel.ENGINE, ForkLevel.OPENING, ForkLevel.HANDLE)
    kept = [Noting(level.name, level, calls, before=fail if level == ForkLevel.OPENING else None) for level in levels]
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    assert in_child(lambda: calls[-3:] == ["child HANDLE", "child OPENING", "child ENGINE"])
    assert [report.exc_type for report in reported] == [error] * (error is not None)
    before = ["before ENGINE", "before OPENING", "before HANDLE"]
    assert calls == [*before, "parent HANDLE", "parent OPENING", "parent ENGINE"]
    assert len(kept) == 3


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
