"""Processes that are killed: ``python -m tests.attacks.killed_process`` forks a child for each order that it reads.

A child does what its order says, and reports to a file what it is about to commit, what is committed and what is
durable. It ends by SIGKILL at the point that its order names: before an operation of the backend, a statement of the
database, or a system call.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.attacks.kill_workload import TASKS, Points, Report
from tests.support import ROOT
from tests.support.sql_rows import before_statements

# beginnings of statements that change something
CHANGES = ("INSERT", "UPDATE", "DELETE", "CREATE", "ALTER", "DROP", "COMMIT", "VACUUM", "PRAGMA wal_", "BEGIN; SET")


# of a child, to its end
_patches = ExitStack()


def _points_at_statements(point: Points) -> None:
    """Before each statement that writes; Alembic's too."""

    def happens(statement: str) -> None:
        if statement.lstrip().startswith(CHANGES):
            point()

    connect = sqlite3.connect

    def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        driver = connect(*arguments, **options)
        # many rows are written by one call
        driver.set_trace_callback(happens)
        return driver

    sqlite3.connect = watched
    _patches.enter_context(before_statements(happens))


def _points_at_commands(point: Points) -> None:
    """Before and after each command that is sent to a Valkey server."""
    from prefixstore.backends.valkey.connections import Connections

    real = Connections._use

    def use(self: Any, connection: Any, work: Any) -> Any:
        point()
        answer = real(self, connection, work)
        point()
        return answer

    Connections._use = use


def _points_at_requests(point: Points) -> None:
    """Before and after each request to an object store."""
    from prefixstore.backends.objects.client import Client

    real = Client._asked

    def use(*arguments: Any) -> Any:
        point()
        answer = real(*arguments)
        point()
        return answer

    Client._asked = use


_POINTS_AT = {
    "statements": _points_at_statements,
    "commands": _points_at_commands,
    "requests": _points_at_requests,
}


def _obey(order: dict[str, Any]) -> None:
    """In a child of its own."""
    die_at, level = order.pop("die_at", 0), order.pop("level", "operations")
    # credentials of a server that was started after this process
    os.environ.update(order.pop("environment", {}))
    journal, below = order.pop("journal", None), order.pop("below", None)
    point = Points(0 if level == "calls" else die_at)
    if level in _POINTS_AT:
        _POINTS_AT[level](point)
    say = Report(order.pop("report"))
    if journal is not None:
        start = ctypes.CDLL(None).power_start
        start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long]
        start(below.encode(), journal.encode(), die_at if level == "calls" else 0)
    # where the point is elsewhere, the operations are none
    operation = point if level == "operations" else Points(0)
    TASKS[order.pop("task")](**order, say=say, point=operation)
    say("end", str(point.n_passed))


def _serve() -> None:
    """Read orders, one a line; fork a child for each, and report how it ended."""
    for module in ("lmdb.backend", "sql.sqlite", "sql.postgresql"):
        # once here, instead of in each child
        importlib.import_module(f"prefixstore.backends.{module}")
    for line in sys.stdin:
        order = json.loads(line)
        seconds, signal_file = order.pop("kill_after", None), order.pop("kill_when", None)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _obey(order)
                code = 0
            except BaseException:  # noqa: BLE001 - the child must not come back
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        done, status = 0, 0
        if seconds is not None:
            time.sleep(seconds)
        while signal_file is not None and not Path(signal_file).exists() and not done:
            time.sleep(0.01)
            done, status = os.waitpid(child, os.WNOHANG)
        if not done and (seconds, signal_file) != (None, None):
            os.kill(child, signal.SIGKILL)
        if not done:
            status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


class KillableProcess:
    """The process that forks the children, from the outside."""

    def __init__(self, directory: Path, *, shim: Path | None = None) -> None:
        self._errors = (directory / "errors").open("w+")
        self._environment = os.environ | ({"LD_PRELOAD": str(shim)} if shim is not None else {})
        self._start()

    def _start(self) -> None:
        self._is_busy = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.killed_process"],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # with its children it is a group, which can be killed as one
            start_new_session=True,
        )

    def _stop(self) -> None:
        """End the process, and a child that is still at work."""
        self._process.stdin.close()
        self._process.stdout.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def begin(self, task: str, **order: Any) -> None:
        """Have a child begin; `end` waits for it."""
        if self._is_busy:
            # a test has failed before it waited for its child
            self._stop()
            self._start()
        self._is_busy = True
        print(json.dumps({"task": task, **order}), file=self._process.stdin, flush=True)

    def end(self) -> bool:
        """Whether the child was killed. If it failed instead, the test does."""
        code = self._process.stdout.readline().strip()
        self._is_busy = False
        if code not in ("0", "-9"):
            raise AssertionError(f"exit code {code}: {self.errors()}")
        return code == "-9"

    def has_ended(self) -> bool:
        """Whether the child has ended by itself, which `end` will report."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def run(self, task: str, **order: Any) -> bool:
        self.begin(task, **order)
        return self.end()

    def close(self) -> None:
        self._stop()
        self._errors.close()


def allowed(report: Iterable[str], before: set[str]) -> set[str]:
    """The digests of the states that a store may be in, whose only writer died after this report; `before` it as well.

    Each transaction finds what the previous one left: all of it, or nothing if its commit was not reported.
    """
    possible = set(before)
    for line in report:
        word, *rest = line.split()
        if word == "found":
            assert rest[0] in possible, f"{line}: {possible}"
            possible = set(rest)
        elif word == "about":
            about = rest[0]
            possible.add(about)
        elif word == "committed":
            possible = {about}
    return possible


if __name__ == "__main__":
    _serve()
