"""Signals of child processes."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any


def default_signals() -> None:
    """Run in a child before it starts: background jobs ignore SIGINT and nohup SIGHUP, and children, too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def suspend(process: subprocess.Popen[Any]) -> None:
    """Stop a child with ``SIGSTOP``, and wait until it has stopped: the signal alone lets it run on for a moment."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "the process has ended"
