"""Signals of child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def default_signals() -> None:
    """Run in a child before it starts: background jobs ignore SIGINT and nohup SIGHUP, and children, too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def ends_with_us() -> Callable[[], None]:
    """What a child runs before it starts, so that it has `default_signals` and does not outlive tests that are killed.

    Linux kills it when the thread that has started it ends. Elsewhere it goes on.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def prepare() -> None:
        default_signals()
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


def started(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """A program that ends with us, and whose output is at the end of a file."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=ends_with_us(),  # noqa: PLW1509 - it takes no lock
            **options,
        )


def suspend(process: subprocess.Popen[Any]) -> None:
    """Stop a child with ``SIGSTOP``, and wait until it has stopped: the signal alone lets it run on for a moment."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "the process has ended"
